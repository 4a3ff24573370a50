"""What every RewardBackend that calls users' functions must do, beside what every RewardBackend must."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollart.errors import RewardError
from rollart.ports import RewardBackend
from rollart.types import Completion, Finish, Span, Status, Task, Tokens, Trajectory, TrajectoryId, Turn
from tests.contracts.rewards import RewardBench, RewardContract

FUNCTION = f"{Path(__file__).parents[1] / 'rewards' / 'functions.py'}:score"
DOMAIN = "strange"


def decode(tokens: Tokens) -> str:
    """0 -> a, 1 -> b, 9 -> x."""
    return "".join({0: "a", 1: "b"}.get(int(token), "x") for token in tokens)


def tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int32)


def trajectory(kind: str, domain: str = DOMAIN, **payload: Any) -> Trajectory:
    def turn(context: Tokens, said: int, reward: float) -> Turn:
        completion = Completion(
            tokens=tokens(said),
            logprobs=np.zeros(1, dtype=np.float32),
            spans=(Span(0, 1),),
            finish=Finish.STOP,
            engine="e",
        )
        return Turn(context=context, fresh=False, completion=completion, reward=reward)

    return Trajectory(
        id=TrajectoryId("g1", 2, 3),
        task=Task(id=f"{domain}/1", domain=domain, index=1, payload={"kind": kind, **payload}, seed=7),
        turns=(turn(tokens(9), 0, 0.25), turn(tokens(9, 9), 1, 0.5)),
        status=Status.DONE,
        born=0,
        oldest=0,
    )


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def numbered(number: int) -> Trajectory:
    """The same function for all; what it pays depends on the number."""
    whole = trajectory("sum")
    turn = msgspec.structs.replace(whole.turns[0], reward=float(number % 3))
    return replace(whole, id=TrajectoryId(f"g{number}", 0, 0), turns=(turn,))


@asynccontextmanager
async def closing(backend: Any) -> AsyncIterator[Any]:
    try:
        yield backend
    finally:
        await backend.close()


class RewardFunctionContract(RewardContract):
    """Subclasses say how to make a backend with this time limit, for two calls at a time."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @abstractmethod
    def backend(self, tmp_path: Path, timeout_s: float) -> AbstractAsyncContextManager[RewardBackend]: ...

    def play(self, work: Callable[[RewardBench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.backend(self.folder, 30.0) as backend:
                await work(RewardBench(backend=backend, trajectory=numbered, places=2))

        run(main)

    def test_scores_and_errors(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.backend(tmp_path, 20.0) as backend:
                assert (await backend.score(trajectory("sum"))).value == 0.75
                parts = await backend.score(trajectory("parts"))
                assert (parts.value, dict(parts.parts)) == (1.25, {"right": 1.0, "short": 0.25})
                assert (await backend.score(trajectory("seen"))).value == 1.0
                with pytest.raises(RewardError, match=r"no reference answer.*functions.py") as raised:
                    await backend.score(trajectory("raise"))
                assert raised.value.retryable
                for kind in ("not a number", "text"):
                    with pytest.raises(RewardError, match="finite number") as raised:
                        await backend.score(trajectory(kind))
                    assert not raised.value.retryable
                many = await asyncio.gather(*(backend.score(trajectory("sum")) for _ in range(50)))
                assert [score.value for score in many] == [0.75] * 50

        run(work)

    def test_a_stuck_function_harms_nobody_else(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.backend(tmp_path, 2.0) as backend:
                await backend.score(trajectory("sum"))
                began_s = time.monotonic()
                stuck = asyncio.ensure_future(backend.score(trajectory("hang")))
                await asyncio.sleep(0.05)
                assert (await backend.score(trajectory("sum"))).value == 0.75
                assert not stuck.done()
                with pytest.raises(RewardError, match=r"2 s") as raised:
                    await stuck
                assert raised.value.retryable
                assert time.monotonic() - began_s < 15

        run(work)

    def test_a_cancelled_call_frees_its_place(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with self.backend(tmp_path, 20.0) as backend:
                for _ in range(3):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(backend.score(trajectory("hang")), 0.2)
                assert (await backend.score(trajectory("sum"))).value == 0.75

        run(work)
