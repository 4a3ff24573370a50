"""Environments in workers elsewhere: the contract, and what happens when a worker is lost.

The worker here is the real one, built by `launch.worker.build`, in this process: what is remote is played by packing
every message. On real Ray actors the same host runs in `tests/cluster`.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.envs import remote
from rollart.envs.remote import RemoteEnvHost
from rollart.errors import BoundaryError, CannotHost, ClusterError, EnvError, JobStopped, NoRoom
from rollart.launch.worker import build
from rollart.ports import EnvHost
from rollart.types import Observation
from rollart.workers.handles import as_raised
from rollart.workers.sandbox import missing
from rollart.workers.wire import pack, unpack
from tests.contracts.user_envs import DOMAIN, ID, SOON_S, TASKS, UserEnvHostContract, closing, run, task, until
from tests.setups import JOB, worker_setup


class PackedWorker:
    def __init__(self, service: Any) -> None:
        self.service = service
        self.gone = False
        self.open: set[str] = set()
        self.lost = asyncio.get_running_loop().create_future()

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        if method in ("open", "close"):
            (self.open.add if method == "open" else self.open.discard)(arguments[0])
        work = asyncio.ensure_future(getattr(self.service, method)(*unpack(pack(list(arguments)))))
        await asyncio.wait([work, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            work.cancel()
            self.gone = True
            raise error("the machine is gone")
        try:
            return unpack(pack(work.result()))
        except Exception as raised:
            raise as_raised("worker", type(raised).__name__, str(raised), error) from None


class Machines:
    """Starts workers, as a cluster would."""

    def __init__(self, tmp_path: Path, slots: int, isolation: str = "process") -> None:
        pool = {"name": "rooms", "slots": 8, "slots_per_worker": slots, "isolation": isolation}
        job = {**JOB, "tasks": [{"name": DOMAIN, "use": TASKS}], "pools": [*JOB["pools"], pool]}
        on_ray = build_job({**job, "cluster": {"type": "ray"}})
        self.setup = worker_setup(on_ray, tmp_path).environments("rooms-env-0", "rooms")
        self.workers: list[PackedWorker] = []
        self.trouble: list[ClusterError] = []

    async def launch(self, number: int) -> PackedWorker:
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop(0)
        self.workers.append(PackedWorker(await build(self.setup)))
        return self.workers[-1]

    async def close(self) -> None:
        for worker in self.workers:
            await worker.service.shut()


class Whole(RemoteEnvHost):
    """A host that takes its machines with it."""

    def __init__(self, machines: Machines, slots: list[int]) -> None:
        super().__init__(machines.launch, slots=slots)
        self.machines = machines

    async def close(self) -> None:
        await super().close()
        await self.machines.close()


class TestProcessesInWorkers(UserEnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(Whole(Machines(tmp_path, slots), [slots]))


class TestThreadsInWorkers(UserEnvHostContract):
    runs_programs = False

    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(Whole(Machines(tmp_path, slots, "inline"), [slots]))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}")
class TestSandboxesInWorkers(UserEnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(Whole(Machines(tmp_path, slots, "sandbox"), [slots]))

    def test_close_under_a_running_step(self, tmp_path: Path) -> None:
        """The common one writes files that a sandbox cannot."""


def test_environments_are_spread_over_the_workers(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(Whole(Machines(tmp_path, 2, "inline"), [2, 2])) as host:
            first = await host.open(task("count"), ID)
            await until(lambda: len(host.machines.workers) == 2)
            others = [await host.open(task("count"), ID) for _ in range(3)]
            counts = [len(worker.open) for worker in host.machines.workers]
            assert counts == [2, 2]
            for env in (first, *others):
                await env.close()

    run(work)


def test_a_lost_worker_fails_its_environments_and_is_started_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(Whole(Machines(tmp_path, 2, "inline"), [2])) as host:
            env = await host.open(task("count"), ID)
            await env.reset()
            idle = await host.open(task("count"), ID)
            waiting = asyncio.ensure_future(host.open(task("count"), ID))
            await asyncio.sleep(0)  # it waits for a slot
            host.machines.trouble = [NoRoom("no machine")]
            host.machines.workers[0].lost.set_result(None)
            with pytest.raises(EnvError, match="the machine is gone"):
                await env.step("a")
            again = await waiting
            assert (await again.reset()).messages[0].content == "count "
            with pytest.raises(EnvError):
                await idle.close()
            await asyncio.gather(env.close(), return_exceptions=True)
            last = await host.open(task("count"), ID)
            assert len(host.machines.workers) == 2, "started again once, though two found it lost"
            for one in (again, last):
                await one.close()

    run(work)


def test_an_open_that_meets_a_lost_worker_goes_elsewhere(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(Whole(Machines(tmp_path, 1, "inline"), [1])) as host:
            await (await host.open(task("count"), ID)).close()
            host.machines.workers[0].lost.set_result(None)
            env = await host.open(task("count"), ID)
            assert (await env.reset()).messages
            await env.close()

    run(work)


def test_workers_that_cannot_start_are_an_error_and_not_a_silent_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.05)

    async def work() -> None:
        async with closing(Whole(Machines(tmp_path, 1, "inline"), [1])) as host:
            host.machines.trouble = [ClusterError("no such image")]
            with pytest.raises(EnvError, match="no such image"):
                await host.open(task("count"), ID)
            await (await host.open(task("count"), ID)).close()

    run(work)


class Counted:
    """A worker that counts what is open in it, and can be lost."""

    def __init__(self) -> None:
        self.gone = False
        self.open: dict[str, None] = {}
        self.most = 0

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        if self.gone:
            raise error("the machine is gone")
        if method == "open":
            self.open[arguments[0]] = None
            self.most = max(self.most, len(self.open))
        elif method == "close":
            del self.open[arguments[0]]
        return Observation()


@pytest.mark.parametrize("others", [0, 1])
def test_where_no_machine_will_ever_do_the_job_stops_and_says_why(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks something is no reason to stop while another has what is needed."""
    monkeypatch.setattr("rollart.envs.remote.RETRY_S", 0.01)

    async def launch(number: int) -> Counted:
        if number < others:
            return Counted()
        raise CannotHost(f"machine {number}: needs bwrap")

    async def work() -> None:
        host = RemoteEnvHost(launch, slots=[1, 1])
        if others:
            for _ in range(3):
                await (await host.open(task("count"), ID)).close()
        else:
            with pytest.raises(JobStopped, match="no machine can have environments: machine 1: needs bwrap"):
                await host.open(task("count"), ID)
        await host.close()

    run(work)


class Seats:
    """A host over such workers, of one slot each, and the workers in the order they were started."""

    def __init__(self) -> None:
        self.workers: list[Counted] = []
        self.host = RemoteEnvHost(self.launch, slots=[1])

    async def launch(self, number: int) -> Counted:
        self.workers.append(Counted())
        return self.workers[-1]

    async def settle(self) -> None:
        """Until all that can happen now has happened."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def room(self) -> int:
        """How many environments can be open at a time from now on."""
        envs: list[Any] = []
        while True:
            opening = asyncio.ensure_future(self.host.open(task("count"), ID))
            await self.settle()
            if not opening.done():
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                break
            envs.append(opening.result())
        for env in envs:
            await env.close()
        return len(envs)


def test_a_slot_of_a_lost_worker_is_no_slot_of_its_successor() -> None:
    async def work() -> None:
        places = Seats()
        env = await places.host.open(task("count"), ID)
        places.workers[0].gone = True
        with pytest.raises(EnvError):
            await env.step("a")
        await places.settle()
        assert len(places.workers) == 2
        with pytest.raises(EnvError):
            await env.close()
        assert await places.room() == 1
        assert places.workers[1].most == 1

    run(work)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_slot_handed_over_as_its_worker_is_lost_is_no_slot_of_the_successor(cancelled: bool) -> None:
    """Between the hand-over and the moment the one who waited goes on, the worker goes and another comes."""

    async def work() -> None:
        places = Seats()
        env = await places.host.open(task("count"), ID)
        waiting = asyncio.ensure_future(places.host.open(task("count"), ID))
        behind = asyncio.ensure_future(places.host.open(task("count"), ID))
        await places.settle()
        await env.close()  # hands its slot to the one who waits first
        places.workers[0].gone = True
        places.host.lost(env.slot)
        if cancelled:
            waiting.cancel()
        async with asyncio.timeout(SOON_S):
            for opening in (behind,) if cancelled else (behind, waiting):
                await (await opening).close()
        assert await places.room() == 1
        assert [worker.most for worker in places.workers] == [1, 1]

    run(work)


def test_a_slot_is_not_lost_with_a_waiter_that_is_cancelled_as_it_gets_it() -> None:
    async def work() -> None:
        places = Seats()
        env = await places.host.open(task("count"), ID)
        first = asyncio.ensure_future(places.host.open(task("count"), ID))
        second = asyncio.ensure_future(places.host.open(task("count"), ID))
        await places.settle()
        await env.close()
        first.cancel()  # its slot is there, and it has not gone on yet
        async with asyncio.timeout(SOON_S):
            await (await second).close()
        assert await places.room() == 1

    run(work)


def test_a_slot_is_not_lost_with_a_waiter_that_is_cancelled_before() -> None:
    async def work() -> None:
        places = Seats()
        env = await places.host.open(task("count"), ID)
        first = asyncio.ensure_future(places.host.open(task("count"), ID))
        second = asyncio.ensure_future(places.host.open(task("count"), ID))
        await places.settle()
        first.cancel()
        await env.close()
        async with asyncio.timeout(SOON_S):
            await (await second).close()
        assert await places.room() == 1

    run(work)


def test_a_slot_is_not_lost_with_an_open_that_is_cancelled_in_the_worker() -> None:
    async def work() -> None:
        places = Seats()
        await (await places.host.open(task("count"), ID)).close()
        hangs = asyncio.Event()
        plain = places.workers[0].call

        async def slow(error: type[BoundaryError], method: str, *arguments: Any) -> Any:
            answer = await plain(error, method, *arguments)
            if method == "open" and not hangs.is_set():
                hangs.set()
                await asyncio.get_running_loop().create_future()
            return answer

        places.workers[0].call = slow  # type: ignore[method-assign]
        opening = asyncio.ensure_future(places.host.open(task("count"), ID))
        await hangs.wait()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await places.settle()
        assert not places.workers[0].open, "it is closed there"
        assert await places.room() == 1

    run(work)
