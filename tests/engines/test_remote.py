"""Engines behind a server: true spans over swaps, exact log-probabilities, proof of the weights served.

The server is the fake that speaks SGLang's protocol; `test_vllm.py` says the same of a real vLLM.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.segments import RequestProgress
from rollart.engines.http import Http
from rollart.engines.launch import TOKEN_VARIABLE, ServerSettings, launch
from rollart.engines.remote import AT_ONCE, RemoteEngine
from rollart.errors import AnswerError, EngineError, RequestError, StoreFull, WeightError
from rollart.store.prefetch import FetchAhead
from rollart.types import Completion, Finish, GenerateRequest, WeightManifest
from tests.engines.fake_sglang import KEY, FakeSglang
from tests.engines.reference import request
from tests.engines.remote import CONTEXT_TOKENS, Versions


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versions:
    monkeypatch.setenv(TOKEN_VARIABLE, KEY)
    return Versions(tmp_path)


def settings(versions: Versions, url: str, **more: Any) -> ServerSettings:
    return ServerSettings(
        engines=EngineSettings(type="sglang", url=url, **more),
        engine_id="e0",
        model=versions.path,
        context_tokens=CONTEXT_TOKENS,
        log_dir=versions.path.parent,
    )


def play(
    versions: Versions,
    work: Callable[[RemoteEngine, FakeSglang], Awaitable[None]],
    *,
    dtype: str = "float32",
    **fake: Any,
) -> None:
    async def awaited() -> None:
        core = EmbeddedEngine.from_directory(
            str(versions.path), EngineSettings(max_batch=8), max_context=CONTEXT_TOKENS
        )
        async with FakeSglang(core, **fake).serving() as server:
            store = versions.store
            engine = await launch(settings(versions, server.url, dtype=dtype), store, FetchAhead(store))
            try:
                await work(engine, server)
            finally:
                await engine.close()

    asyncio.run(asyncio.wait_for(awaited(), 60))


def stopping_at(asked: GenerateRequest, stop: str) -> GenerateRequest:
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, stop=(stop,)))


async def started(engine: RemoteEngine, *names: str, tokens: int = 1) -> None:
    """Until each of these requests has so many tokens."""
    await until(lambda: all(name in engine.calls for name in names))
    await until(lambda: all(name not in engine.calls or len(engine.calls[name].tokens) >= tokens for name in names))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("incremental", [False, True])
def test_every_token_is_of_the_version_its_span_says(versions: Versions, incremental: bool) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = [request([5 + n, 6, 7], f"s{n}/0", max_tokens=150, seed=n) for n in range(4)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await started(engine, *(one.id for one in asked))
        for version in (1, 2):
            await until(lambda: all(len(call.tokens) >= 20 * version for call in engine.calls.values()))  # noqa: B023
            report = await engine.swap(versions.put(version))
            assert report.rebuilt_tokens >= 20 * version * sum(not task.done() for task in tasks)
        spans = set()
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            versions.check(one, got)
            spans.add(tuple(span.version for span in got.spans))
            assert got.finish is Finish.STOP or len(got.tokens) == 150
            assert got.prefill_tokens + got.cached_tokens >= one.prompt_tokens * len(got.spans)
        assert (0, 1, 2) in spans

    play(versions, work, incremental=incremental)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 5, "temperature": 1.3}]
)
def test_log_probabilities_are_of_the_whole_scaled_distribution(versions: Versions, sampling: dict[str, Any]) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = request([5, 6, 7], max_tokens=40, seed=1, **sampling)
        versions.check(asked, await engine.generate(asked))

    play(versions, work)


def test_a_stop_string_is_found_wherever_it_lies(versions: Versions) -> None:
    """The stop string's first token is sampled before a swap, its last one after it."""

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = request([5, 6, 7], max_tokens=100, seed=3)
        whole = await engine.generate(asked)
        call = engine.calls
        assert not call
        decode = engine.stops.decode  # type: ignore[union-attr]
        stop = decode(whole.tokens[7:9].tolist())
        first = next(n for n in range(1, 101) if stop in decode(whole.tokens[:n].tolist()))
        got = await engine.generate(stopping_at(asked, stop))
        assert got.finish is Finish.STOP
        assert got.tokens.tolist() == whole.tokens[:first].tolist()

    play(versions, work)


def test_a_stop_string_may_begin_before_a_swap_and_end_after_it(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        decode = engine.stops.decode  # type: ignore[union-attr]
        asked = request([5, 6, 7], "a/0", max_tokens=150, seed=1)
        first = asyncio.ensure_future(engine.generate(asked))
        await started(engine, "a/0", tokens=8)
        await engine.swap(versions.put(1))
        whole = await first
        cut = whole.spans[0].length
        assert len(whole.spans) == 2
        stop = decode(whole.tokens[cut - 1 : cut + 1].tolist())
        assert stop not in decode(whole.tokens[:cut].tolist())
        # The same tokens again, one by one: all of the call's are looked at, and not those of a segment alone.
        call = RequestProgress(
            request=stopping_at(asked, stop),
            prompt=[5, 6, 7],
        )
        ends = []
        for token in whole.tokens[: cut + 1].tolist():
            call.tokens.append(token)
            ends.append(engine.stopped(call))
        assert ends == [False] * cut + [True]

    play(versions, work)


def test_looking_for_a_stop_string_copies_nothing(versions: Versions) -> None:
    """An answer of 16,000 tokens would be copied 16,000 times, on the event loop."""

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        seen: list[object] = []

        class Finder:
            def ends(self, sampled: object, stops: tuple[str, ...]) -> bool:
                seen.append(sampled)
                return False

        engine.stops = Finder()  # type: ignore[assignment]
        asked = request([5, 6, 7], max_tokens=8, seed=3)
        await engine.generate(stopping_at(asked, "x"))
        assert len(seen) > 1
        assert len({id(one) for one in seen}) == 1
        assert isinstance(seen[0], list)

    play(versions, work)


def test_an_aborted_request_gives_what_it_has(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = request([5, 6, 7], "a/0", max_tokens=200, seed=1)
        task = asyncio.ensure_future(engine.generate(asked))
        await started(engine, "a/0", tokens=8)
        await engine.abort("a/0")
        got = await task
        assert got.finish is Finish.ABORT
        versions.check(asked, got)
        await until(lambda: not server.core.live)

    play(versions, work)


def test_who_stops_waiting_stops_the_server_too(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = request([5, 6, 7], "a/0", max_tokens=200, seed=1)
        whole = len((await engine.generate(asked)).tokens)
        assert whole > 100
        task = asyncio.ensure_future(engine.generate(asked))
        await started(engine, "a/0", tokens=8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not server.core.live)
        assert server.core.stats.sampled_tokens < 1.5 * whole

    play(versions, work)


def test_a_server_that_does_not_load_what_it_says_is_found_out(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        server.lose_updates = True
        with pytest.raises(WeightError, match=r"loaded version 1, but its log-probabilities are .* from the trainer"):
            await engine.swap(versions.put(1))
        assert engine.version == 0
        assert server.loads[-1] == str(versions.path), "it went back to what it served"
        asked = request([5, 6, 7], max_tokens=10)
        versions.check(asked, await engine.generate(asked))
        server.lose_updates = False
        assert (await engine.swap(versions.put(2))).version == 2

    play(versions, work)


def test_answers_wait_for_the_proof_and_what_was_sampled_before_it_failed_is_taken_back(versions: Versions) -> None:
    """The server computes with new weights while it proves that it does; they are not those of the manifest."""

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        wrong = versions.put(3).probe
        manifest = replace(versions.put(1), probe=wrong)
        asked = [request([5 + n, 6, 7], f"s{n}/0", max_tokens=150, seed=n) for n in range(4)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await started(engine, *(one.id for one in asked), tokens=8)
        score, asking = engine.server.score, asyncio.Event()

        async def slowly(tokens: list[int]) -> list[list[float]]:
            asking.set()
            if engine.version == 1:
                over = [task.done() for task in tasks]  # before the swap
                await until(lambda: all(call.task is None for call in engine.calls.values()))
                assert [task.done() for task in tasks] == over, "no answer leaves"
            return await score(tokens)

        engine.server.score = slowly  # type: ignore[method-assign]
        with pytest.raises(WeightError, match=r"loaded version 1, but its log-probabilities are"):
            await engine.swap(manifest)
        assert asking.is_set()
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            assert {span.version for span in got.spans} == {0}
            versions.check(one, got)

    play(versions, work)


@pytest.mark.parametrize("right", [True, False])
def test_most_of_the_probe_is_scored_after_the_swap_and_no_answer_leaves_before(
    versions: Versions, right: bool
) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        manifest = versions.put(1)
        assert manifest.probe is not None
        score, go_on, scored = engine.server.score, asyncio.Event(), 0

        async def slowly(tokens: list[int]) -> list[list[float]]:
            nonlocal scored
            scored += 1
            if scored <= AT_ONCE:
                return await score(tokens)
            await go_on.wait()
            return [[value - (0.0 if right else 1.0) for value in row] for row in await score(tokens)]

        engine.server.score = slowly  # type: ignore[method-assign]
        await engine.swap(manifest)
        assert scored >= AT_ONCE
        asked = request([5, 6, 7], "a/0", max_tokens=20)
        answer = asyncio.ensure_future(engine.generate(asked))
        await until(lambda: "a/0" in engine.calls and bool(engine.calls["a/0"].spans))
        await asyncio.sleep(0.05)
        assert not answer.done()
        go_on.set()
        if right:
            versions.check(asked, await answer)
            await engine.proven()
        else:
            with pytest.raises(EngineError, match="loaded version 1, but its log-probabilities are"):
                await answer
            with pytest.raises(EngineError, match="loaded version 1, but its log-probabilities are"):
                await engine.swap(versions.put(2))

    play(versions, work)


def test_weights_in_shared_memory_are_loaded_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, KEY)
    versions = Versions(tmp_path, in_memory=True)

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        await engine.swap(versions.put(1))
        assert server.loads == [str(versions.store.folder(1))]
        assert versions.store.folder(1).is_relative_to("/dev/shm")
        asked = request([5, 6, 7], max_tokens=10)
        versions.check(asked, await engine.generate(asked))

    try:
        play(versions, work)
    finally:
        versions.store.close()


def test_a_host_without_room_is_told_and_the_version_staged_when_it_is_asked_for_again(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        manifest, of = versions.put(1), engine.files.of
        full = iter([True])

        def files(wanted: WeightManifest) -> list[Path]:
            if next(full, False):
                raise StoreFull("no space left on device")
            return of(wanted)

        engine.files.of = files  # type: ignore[method-assign,assignment]
        with pytest.raises(StoreFull, match="no space left"):
            await engine.stage(1)
        await engine.stage(1)
        await engine.swap(manifest)
        assert engine.version == 1

    play(versions, work)


def test_a_version_is_staged_in_the_server_before_its_swap(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        calls: list[str] = []
        stage, halt = engine.server.stage, engine.server.halt

        async def staging(files: Any, version: int) -> None:
            calls.append(f"stage {version}")
            await stage(files, version)

        async def halting() -> None:
            calls.append("halt")
            await halt()

        engine.server.stage, engine.server.halt = staging, halting  # type: ignore[method-assign]
        staged = asyncio.ensure_future(engine.stage(1))
        await asyncio.sleep(0.05)
        assert calls == [], "it is not whole yet"
        manifest = versions.put(1)
        await staged
        assert (calls, engine.version) == (["stage 1"], 0)
        await engine.swap(manifest)
        assert calls == ["stage 1", "halt"]
        first = versions.put(2)
        await engine.stage(2)
        again = versions.store.push(2, versions.store.fetch(versions.put(5)), versions.put(5).probe)
        assert again != first
        await engine.swap(again)
        assert calls[2:] == ["stage 2", "stage 2", "halt"], "pushed again with other bytes: staged again"
        versions.plain[2] = versions.plain[5]
        asked = request([5, 6, 7], max_tokens=10)
        versions.check(asked, await engine.generate(asked))

    play(versions, work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_that_ignores_reloads_is_caught_within_three_swaps(versions: Versions, dtype: str) -> None:
    """Each version moves log-probabilities by 0.005, far less than bfloat16 rounds; the server keeps what it has."""

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        rng = np.random.default_rng(0)
        first = versions.put(1)
        probe = first.probe
        assert probe is not None
        await engine.swap(first)
        server.lose_updates = True
        waiting = asyncio.ensure_future(engine.generate(request([5, 6, 7], "a/0", max_tokens=200)))
        await started(engine, "a/0", tokens=4)

        async def swaps() -> None:
            said = probe
            for version in (2, 3, 4):
                moved = np.array(said.logprobs) + 0.005 * rng.normal(size=len(said.logprobs))
                said = said._replace(logprobs=tuple(moved.tolist()))
                await engine.swap(versions.store.push(version, versions.store.fetch(first), said))
            await engine.proven()

        with pytest.raises(EngineError, match=r"it does not follow: since version 1 its log-probabilities have not"):
            await swaps()
        with pytest.raises(EngineError, match="it does not follow"):
            await waiting

    play(versions, work, dtype=dtype)


def test_a_step_that_changes_nothing_is_no_reason_for_doubt(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        first = versions.put(1)
        await engine.swap(first)
        for version in range(2, 6):
            await engine.swap(versions.store.push(version, versions.store.fetch(first), first.probe))
        assert engine.version == 5

    play(versions, work)


def test_a_version_without_a_probe_is_refused(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        with pytest.raises(WeightError, match="came without a probe"):
            await engine.swap(replace(versions.put(1), probe=None))
        assert not server.loads

    play(versions, work)


def test_weights_that_fit_neither_way_lose_the_engine(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        waiting = asyncio.ensure_future(engine.generate(request([5, 6, 7], "a/0", max_tokens=200)))
        await started(engine, "a/0", tokens=4)
        server.lose_updates = True
        manifest = versions.put(1)
        original = engine.server.load

        async def load(version: int) -> None:
            if version == 0:
                raise WeightError("no such folder")
            await original(version)

        engine.server.load = load  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"neither new weights .* nor those of version 0 could be loaded"):
            await engine.swap(manifest)
        with pytest.raises(EngineError, match="neither new weights"):
            await waiting
        with pytest.raises(EngineError, match="neither new weights"):
            await engine.generate(request([5, 6, 7], "b/0"))

    play(versions, work)


def test_what_cannot_be_served_is_refused(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        for bad in (
            request([1_000_000], "a/0"),
            request([5], "a/0", max_tokens=0),
            request([5] * CONTEXT_TOKENS, "a/0"),
        ):
            with pytest.raises(RequestError):
                await engine.generate(bad)
        with pytest.raises(EngineError, match="needs weights of version 3"):
            await engine.generate(request([5], "a/0", min_version=3))
        got = await engine.generate(request([5] * (CONTEXT_TOKENS - 3), "a/0", max_tokens=50, temperature=0.0))
        assert len(got.tokens) <= 3

    play(versions, work)


def test_a_wrong_key_and_a_server_that_is_not_there_are_named(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        store = versions.store
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        with pytest.raises(EngineError, match=r"answered 401"):
            await launch(settings(versions, server.url), store, FetchAhead(store))
        with pytest.raises(EngineError, match=r"http://127.0.0.1:9/get_server_info: ConnectError"):
            await launch(settings(versions, "http://127.0.0.1:9"), store, FetchAhead(store))

    play(versions, work)


def test_a_server_that_holds_less_than_a_trajectory_may_have_is_refused(versions: Versions) -> None:
    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        asked = replace(settings(versions, server.url), context_tokens=CONTEXT_TOKENS + 1)
        with pytest.raises(EngineError, match=f"holds {CONTEXT_TOKENS} tokens, less than model.context_tokens"):
            await launch(asked, versions.store, FetchAhead(versions.store))

    play(versions, work)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda logprob, token: (None, token), "a log-probability of None"),
        (lambda logprob, token: (0.5, token), "a log-probability of 0.5"),
        (lambda logprob, token: ("high", token), "a log-probability of 'high'"),
        (lambda logprob, token: (logprob, 10**6), "token 1000000, where the model knows 0 to"),
        (lambda logprob, token: (logprob, -1), "token -1"),
    ],
)
def test_an_answer_that_cannot_be_ends_its_request_and_the_engine_goes_on(
    versions: Versions, spoil: Callable[[Any, int], tuple[Any, Any]], said: str
) -> None:
    """JSON has no NaN: a server that computed one sends null."""

    async def work(engine: RemoteEngine, server: FakeSglang) -> None:
        server.spoil = spoil
        with pytest.raises(AnswerError, match=said):
            await engine.generate(request([5, 6, 7], "a/0", max_tokens=20))
        server.spoil = None
        asked = request([5, 6, 7], "b/0", max_tokens=20)
        versions.check(asked, await engine.generate(asked))

    play(versions, work)


def test_a_server_that_dies_loses_its_requests(versions: Versions) -> None:
    async def awaited() -> None:
        core = EmbeddedEngine.from_directory(str(versions.path), max_context=CONTEXT_TOKENS)
        async with FakeSglang(core).serving() as server:
            store = versions.store
            engine = await launch(settings(versions, server.url), store, FetchAhead(store))
            task: asyncio.Future[Completion] = asyncio.ensure_future(
                engine.generate(request([5, 6, 7], "a/0", max_tokens=200))
            )
            await started(engine, "a/0", tokens=4)
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.swap(versions.put(1))
        await engine.close()

    asyncio.run(asyncio.wait_for(awaited(), 60))


def test_a_connection_that_the_server_closed_while_idle_is_no_loss() -> None:
    """It answers one request on each connection, and closes it when the next one comes, as at the end of keep-alive."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        for _ in range(3):
            assert await http.get("/") == {}
        server.close()
        with pytest.raises(EngineError, match="ConnectError"):
            await http.get("/")
        await http.close()

    asyncio.run(asyncio.wait_for(work(), 30))
