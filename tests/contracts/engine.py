"""What every Engine must do: one suite, run against each adapter.

A subclass says in `play` how to make an `EngineBench` and run a coroutine on it, on whatever clock. Nothing here
knows an adapter: only what `rollart.ports.Engine` and the types promise.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from rollart.errors import RequestError, WeightError
from rollart.ports import Engine
from rollart.types import Completion, Finish, GenerateRequest, Sampling, WeightManifest, WeightVersion


@dataclass
class EngineBench:
    engine: Engine
    """Fresh, with the initial weights; works on `max_batch` requests at a time."""
    max_batch: int
    domain: str
    put: Callable[[WeightVersion], Awaitable[WeightManifest]]
    """Makes a version complete in the store."""
    lose: Callable[[WeightManifest], Awaitable[None]]
    """Takes a bucket of it away."""
    too_long: int
    """A prompt of so many tokens cannot be served."""
    long_answer: int = 64
    """Answers of up to so many tokens take a while."""

    def ask(
        self, name: str, prompt: list[int] | None = None, *, max_tokens: int = 16, turn: int = 0, pieces: int = 1
    ) -> GenerateRequest:
        tokens = np.array(prompt or [5, 6, 7, 8], dtype=np.int32)
        return GenerateRequest(
            id=f"{name}/{turn}",
            session=name,
            domain=self.domain,
            turn=turn,
            prompt=tuple(np.array_split(tokens, pieces)),
            prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, seed=1),
        )


def adds_up(completion: Completion, max_tokens: int) -> None:
    count = len(completion.tokens)
    assert 1 <= count <= max_tokens
    assert completion.tokens.dtype == np.int32
    assert len(completion.logprobs) == count
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert sum(span.length for span in completion.spans) == count
    assert all(span.length > 0 for span in completion.spans)
    versions = [span.version for span in completion.spans]
    assert versions == sorted(set(versions)), "versions never fall, and neighbours differ"
    assert completion.engine
    if completion.finish is Finish.LENGTH:
        assert count == max_tokens


async def given_up(bench: EngineBench, task: "asyncio.Task[Completion]", request_id: str) -> None:
    """As the proxy does it: whoever waits is cancelled, and the engine is told."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bench.engine.abort(request_id)


class EngineContract(ABC):
    @abstractmethod
    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None: ...

    def test_an_answer_adds_up(self) -> None:
        async def work(bench: EngineBench) -> None:
            for max_tokens in (1, 16):
                adds_up(await bench.engine.generate(bench.ask(f"x{max_tokens}", max_tokens=max_tokens)), max_tokens)

        self.play(work)

    def test_more_requests_than_fit_are_all_answered(self) -> None:
        async def work(bench: EngineBench) -> None:
            asked = [bench.ask(f"x{number}", [number + 1, 2, 3]) for number in range(3 * bench.max_batch)]
            for completion in await asyncio.gather(*(bench.engine.generate(request) for request in asked)):
                adds_up(completion, 16)

        self.play(work)

    def test_seed_and_id_decide_what_is_sampled_whatever_else_is_in_the_batch(self) -> None:
        async def work(bench: EngineBench) -> None:
            alone = await bench.engine.generate(bench.ask("x", [3, 4, 5, 6, 7, 8], pieces=1))
            together = await asyncio.gather(
                bench.engine.generate(bench.ask("x", [3, 4, 5, 6, 7, 8], pieces=3)),
                bench.engine.generate(bench.ask("y", [9, 10])),
            )
            assert together[0].tokens.tolist() == alone.tokens.tolist()

        self.play(work)

    def test_a_session_grows_turn_by_turn(self) -> None:
        async def work(bench: EngineBench) -> None:
            prompt = [4, 5, 6, 7]
            for turn in range(3):
                completion = await bench.engine.generate(bench.ask("x", prompt, turn=turn))
                adds_up(completion, 16)
                assert completion.cached_tokens + completion.prefill_tokens >= len(prompt)
                prompt = [*prompt, *completion.tokens.tolist(), 9, 9]

        self.play(work)

    def test_an_abort_frees_its_place(self) -> None:
        async def work(bench: EngineBench) -> None:
            for _ in range(2):
                names = [f"held{number}" for number in range(2 * bench.max_batch)]
                held = [
                    asyncio.ensure_future(bench.engine.generate(bench.ask(name, max_tokens=bench.long_answer)))
                    for name in names
                ]
                await asyncio.sleep(0)
                for task, name in zip(held, names, strict=True):
                    await given_up(bench, task, f"{name}/0")
                adds_up(await bench.engine.generate(bench.ask("after")), 16)

        self.play(work)

    def test_an_abort_of_what_is_unknown_or_over_is_ignored(self) -> None:
        async def work(bench: EngineBench) -> None:
            await bench.engine.abort("nobody/0")
            await bench.engine.generate(bench.ask("x"))
            await bench.engine.abort("x/0")
            adds_up(await bench.engine.generate(bench.ask("x", turn=1)), 16)

        self.play(work)

    def test_an_abort_says_how_far_the_engine_has_come(self) -> None:
        async def work(bench: EngineBench) -> None:
            came = [await bench.engine.abort("")]
            for number in range(2):
                await bench.engine.generate(bench.ask(f"x{number}"))
                came.append(await bench.engine.abort(""))
            assert came[0] < came[1] < came[2], "it grows while the engine computes"
            assert await bench.engine.abort("") == came[2], "and stands still with it"

        self.play(work)

    def test_a_prompt_that_cannot_be_served_is_refused_and_the_engine_goes_on(self) -> None:
        async def work(bench: EngineBench) -> None:
            with pytest.raises(RequestError):
                await bench.engine.generate(bench.ask("x", [5] * bench.too_long))
            adds_up(await bench.engine.generate(bench.ask("y")), 16)

        self.play(work)

    def test_staging_a_version_that_is_not_there_yet_ends_when_it_is_and_disturbs_nothing(self) -> None:
        async def work(bench: EngineBench) -> None:
            staged = [asyncio.ensure_future(bench.engine.stage(1)) for _ in range(2)]
            assert (await bench.engine.generate(bench.ask("x"))).spans[-1].version == 0
            await bench.put(1)
            async with asyncio.timeout(30.0):
                await asyncio.gather(*staged)
            assert (await bench.engine.generate(bench.ask("y"))).spans[-1].version == 0

        self.play(work)

    def test_staging_another_version_ends_the_wait_for_the_one_before(self) -> None:
        async def work(bench: EngineBench) -> None:
            before = asyncio.ensure_future(bench.engine.stage(1))
            await asyncio.sleep(0.05)
            after = asyncio.ensure_future(bench.engine.stage(2))
            await bench.put(2)
            async with asyncio.timeout(30.0):
                await asyncio.gather(before, after)

        self.play(work)

    @pytest.mark.parametrize("staged", [False, True])
    def test_after_a_swap_the_new_weights_serve(self, staged: bool) -> None:
        async def work(bench: EngineBench) -> None:
            for version in (1, 2):
                staging = asyncio.ensure_future(bench.engine.stage(version)) if staged else None
                manifest = await bench.put(version)
                if staging is not None:
                    await staging
                report = await bench.engine.swap(manifest)
                assert report.version == version
                completion = await bench.engine.generate(bench.ask(f"x{version}"))
                assert [span.version for span in completion.spans] == [version]

        self.play(work)

    def test_work_in_flight_goes_on_over_a_swap_and_loses_no_token(self) -> None:
        async def work(bench: EngineBench) -> None:
            manifest = await bench.put(1)
            tasks = [
                asyncio.ensure_future(
                    bench.engine.generate(bench.ask(f"x{number}", max_tokens=bench.long_answer, prompt=[number + 1, 2]))
                )
                for number in range(2 * bench.max_batch)
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            report = await bench.engine.swap(manifest)
            assert report.version == 1
            done = await asyncio.gather(*tasks)
            for completion in done:
                adds_up(completion, bench.long_answer)
                assert {span.version for span in completion.spans} <= {0, 1}
            assert any(completion.spans[-1].version == 1 for completion in done)

        self.play(work)

    def test_a_swap_that_fails_leaves_the_old_weights_serving(self) -> None:
        async def work(bench: EngineBench) -> None:
            await bench.engine.swap(await bench.put(1))
            manifest = await bench.put(2)
            await bench.lose(manifest)
            with pytest.raises(WeightError):
                await bench.engine.swap(manifest)
            assert [span.version for span in (await bench.engine.generate(bench.ask("x"))).spans] == [1]
            again = await bench.put(2)
            assert (await bench.engine.swap(again)).version == 2

        self.play(work)
