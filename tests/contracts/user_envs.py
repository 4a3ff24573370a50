"""What every EnvHost that runs users' code must do, beside what every EnvHost must: one suite for all of them."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import EnvError
from rollart.ports import EnvHost
from rollart.types import Endpoint, Program, Task, TrajectoryId
from tests.contracts.envs import EnvBench, EnvHostContract

TASKS = str(Path(__file__).parents[1] / "envs" / "strange_tasks.py")
DOMAIN = "strange"
SOON_S = 20.0
"""Generous: the machine may be busy."""


def task(kind: str, **payload: Any) -> Task:
    return Task(id=f"{DOMAIN}/{kind}", domain=DOMAIN, index=0, payload={"kind": kind, **payload})


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that another process, or a thread, makes true."""
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110 - nobody here could set an event
            await asyncio.sleep(0.001)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(6 * SOON_S):
            await work()

    asyncio.run(limited())


ID = TrajectoryId("g0", 0, 0)
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "secret")


class UserEnvHostContract(EnvHostContract):
    """Subclasses say how to make a host with so many slots."""

    kind = "count"
    """The environment that the common suite plays."""
    slots = 2
    runs_programs = True
    """Of agents."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @abstractmethod
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]: ...

    def play(self, work: Callable[[EnvBench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.host(self.folder, self.slots) as host:
                await work(EnvBench(host=host, slots=self.slots, task=task(self.kind)))

        run(main)

    async def plays(self, host: EnvHost, kind: str = "count") -> None:
        """An ordinary episode goes through."""
        async with asyncio.timeout(SOON_S):
            env = await host.open(task(kind), ID)
            first = await env.reset()
            assert first.messages[0].content == "count "
            assert (first.messages[0].role, first.reward, first.done) == ("user", 0.0, False)
            second = await env.step("a")
            assert (second.messages[0].content, second.reward, second.done) == ("a 1", 0.5, False)
            third = await env.step("b")
            assert (third.messages[0].content, third.reward, third.done) == ("b 2", 0.5, True)
            await env.close()

    def test_episodes_plain_and_async(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                await self.plays(host)
                await self.plays(host, "async")
                await self.plays(host, "print")

        run(work)

    def test_a_program_may_step_by_itself(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                for name, said, over in (("play_through", "count  1 2", True), ("play_once", "one 1", False)):
                    env = await host.open(task("count"), ID)
                    await env.reset()
                    last = await env.play(Program(function=f"{TASKS}:{name}"), ENDPOINT)
                    assert (last.messages[0].content, last.done, last.truncated) == (said, over, not over)
                    assert last.reward == (1.0 if over else 0.5), "of all its steps"
                    await env.close()

        if self.runs_programs:
            run(work)

    def test_a_program_answers_in_the_place_of_the_model(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                env = await host.open(task("count"), ID)
                await env.reset()
                if not self.runs_programs:
                    with pytest.raises(EnvError, match="not run in this process"):
                        await env.play(Program(function=f"{TASKS}:shout"), ENDPOINT)
                    return
                first = await env.play(Program(function=f"{TASKS}:shout"), ENDPOINT)
                assert first.messages[0].content == "COUNT  secret 1", "it was given what the environment said"
                last = await env.play(
                    Program(command=("sh", "-c", 'echo "$(cat) $OPENAI_BASE_URL$PYTHONPATH"')), ENDPOINT
                )
                assert (last.messages[0].content, last.done) == (f"COUNT  secret 1 {ENDPOINT.url} 2", True)
                await env.close()

        run(work)

    @pytest.mark.parametrize(
        ("program", "text"),
        [
            (Program(function=f"{TASKS}:mumble"), "mumble returned int; return its answer, a string"),
            (Program(function=f"{TASKS}:leave"), "leave returned None, and made no step"),
            (Program(function=f"{TASKS}:nobody"), "has no nobody"),
            (Program(command=("sh", "-c", "exit 3")), "sh exited with status 3"),
            (Program(command=("sh", "-c", "kill -9 $$")), "sh was ended by SIGKILL"),
            (Program(command=("yes",)), "yes printed more than 1,000,000 bytes"),
        ],
    )
    def test_a_program_that_fails_is_an_error(self, tmp_path: Path, program: Program, text: str) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                env = await host.open(task("count"), ID)
                await env.reset()
                with pytest.raises(EnvError, match=text if self.runs_programs else "not run in this process"):
                    await env.play(program, ENDPOINT)
                await env.close()
                await self.plays(host)

        run(work)

    @pytest.mark.parametrize(
        ("kind", "text"),
        [
            ("raise", "lost my keys"),
            ("leave", "3"),
            ("nothing", "returned NoneType"),
            ("not a number", "finite number"),
            ("no message", "tuple of Message"),
        ],
    )
    def test_a_bad_step_is_an_error_of_its_own_only(self, tmp_path: Path, kind: str, text: str) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 2) as host:
                good = await host.open(task("count"), ID)
                bad = await host.open(task(kind), ID)
                await good.reset()
                await bad.reset()
                with pytest.raises(EnvError, match=text):
                    await bad.step("a")
                await bad.close()
                assert (await good.step("a")).messages[0].content == "a 1"
                await good.close()
                await self.plays(host)

        run(work)

    def test_errors_in_open_and_close(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                with pytest.raises(EnvError, match="no such problem"):
                    await host.open(task("raise in open"), ID)
                with pytest.raises(EnvError, match="elsewhere"):
                    await host.open(Task(id="x", domain="elsewhere", index=0), ID)
                env = await host.open(task("raise in close"), ID)
                with pytest.raises(EnvError, match="stuck door"):
                    await env.close()
                await self.plays(host)

        run(work)

    def test_a_slot_is_waited_for_and_given_back(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                first = await host.open(task("count"), ID)
                second = asyncio.ensure_future(host.open(task("count"), ID))
                given_up = asyncio.ensure_future(host.open(task("count"), ID))
                await first.reset()  # all that takes a while here; the others could have begun meanwhile
                assert not second.done()
                given_up.cancel()
                await first.close()
                await first.close()
                env = await second
                with pytest.raises(EnvError):
                    await first.step("a")
                await env.close()
                await self.plays(host)

        run(work)

    @pytest.mark.parametrize("kind", ["hang", "hang in reset", "hang in open"])
    def test_a_hung_one_frees_its_slot(self, tmp_path: Path, kind: str) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                await self.plays(host)  # so that what hangs below is not the start of the host

                async def hang() -> None:
                    env = await host.open(task(kind), ID)
                    try:
                        await env.reset()
                        await env.step("a")
                    finally:
                        await env.close()

                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(hang(), 0.3)
                await self.plays(host)

        run(work)

    def test_close_under_a_running_step(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.host(tmp_path, 1) as host:
                begun, go = tmp_path / "begun", tmp_path / "go"
                env = await host.open(task("wait", begun=str(begun), go=str(go)), ID)
                await env.reset()
                step = asyncio.ensure_future(env.step("a"))
                await until(begun.exists)
                close = asyncio.ensure_future(env.close())
                await asyncio.sleep(0)
                go.touch()
                await asyncio.wait_for(close, SOON_S)
                await asyncio.wait([step], timeout=SOON_S)
                assert step.done()
                step.exception()
                await self.plays(host)

        run(work)


@asynccontextmanager
async def closing(host: Any) -> AsyncIterator[Any]:
    try:
        yield host
    finally:
        await host.close()
