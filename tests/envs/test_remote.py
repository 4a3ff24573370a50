"""Environments in workers elsewhere: the contract, and what happens when a worker is lost.

The worker here is the real one, built by `rollart.worker.build`, in this process: what is remote is played by packing
every message. On real Ray actors the same host runs in `tests/cluster`.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rollart.cluster.handles import as_raised
from rollart.envs import remote
from rollart.envs.remote import RemoteEnvHost
from rollart.errors import BoundaryError, ClusterError, EnvError, NoRoom
from rollart.ports import EnvHost
from rollart.wire import pack, unpack
from rollart.worker import build
from tests.envs.contract import DOMAIN, ID, TASKS, EnvHostContract, closing, run, task, until


class PackedWorker:
    def __init__(self, service: Any) -> None:
        self.service = service
        self.gone = False
        self.lost = asyncio.get_running_loop().create_future()

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
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
        self.setup = {
            "role": "environments",
            "uses": {DOMAIN: TASKS},
            "seed": 0,
            "slots": slots,
            "isolation": isolation,
            "log_dir": str(tmp_path / "logs"),
        }
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


class TestProcessesInWorkers(EnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(Whole(Machines(tmp_path, slots), [slots]))


class TestThreadsInWorkers(EnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(Whole(Machines(tmp_path, slots, "inline"), [slots]))


def test_environments_are_spread_over_the_workers(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(Whole(Machines(tmp_path, 2, "inline"), [2, 2])) as host:
            first = await host.open(task("count"), ID)
            await until(lambda: sum(seat.free for seat in host._seats) == 3)  # both are up
            others = [await host.open(task("count"), ID) for _ in range(3)]
            counts = [len(worker.service._places) for worker in host.machines.workers]
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
            await until(lambda: len(host._waiters) == 1)
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
