"""The asyncio face of the engine: calls meet between steps, errors reach whoever waits."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.errors import EngineError, WeightError
from rollart.model.network import named_weights
from rollart.ports import Engine
from rollart.types import Finish, WeightManifest
from tests.engines.reference import NO_EOS, check, make_engine, plain_model, request

MODELS = {version: plain_model("qwen3", seed=version) for version in range(2)}


def fetch(manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
    if manifest.version not in MODELS:
        raise WeightError(f"bucket 0 of version {manifest.version} is damaged")
    return named_weights(MODELS[manifest.version])


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, buckets=())


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def endless(**settings: Any) -> EmbeddedEngine:
    core = make_engine(MODELS[0], **settings, eos=NO_EOS)
    return core


def test_whoever_computes_on_another_gpu_than_the_first_says_so_in_its_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or events and graphs would be of the first one: nobody would wait for the step."""
    told: list[tuple[str, torch.device]] = []
    second = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append((current_thread().name, device)))
    with pytest.raises(OSError, match="nowhere"):
        EmbeddedEngine.from_directory(str(tmp_path / "nowhere"), EngineSettings(device="cuda:1"))
    monkeypatch.setattr(EmbeddedEngine, "device", second)

    async def main() -> None:
        engine = ThreadedEngine(endless(), fetch=fetch)
        await engine.generate(request([5, 6], "s/0", max_tokens=2))
        await engine.close()

    asyncio.run(main())
    assert told == [("MainThread", second), ("rollart-engine", second)]


def test_many_calls_at_once_a_swap_and_an_abort() -> None:
    async def main() -> None:
        staged: list[int] = []

        def stage(version: int) -> Future[WeightManifest | None]:
            staged.append(version)
            here: Future[WeightManifest | None] = Future()
            here.set_result(manifest(version))
            return here

        engine = ThreadedEngine(endless(), fetch=fetch, stage=stage)
        port: Engine = engine
        asked = [request([10, 11, 12 + i], f"s{i}/0", max_tokens=60, temperature=i % 2) for i in range(8)]
        stuck = request([20, 21], "stuck/0", max_tokens=900)
        calls = [asyncio.create_task(port.generate(call)) for call in [*asked, stuck]]
        await asyncio.sleep(0.02)
        await port.stage(1)
        report = await port.swap(manifest(1))
        assert staged == [report.version] == [1]
        with pytest.raises(WeightError, match="bucket 0 of version 9 is damaged"):
            await port.swap(manifest(9))
        await port.abort(stuck.id)
        await port.abort("unknown")
        done = await asyncio.gather(*calls)
        for call, got in zip([*asked, stuck], done, strict=True):
            check(call, got, MODELS)
        assert done[-1].finish is Finish.ABORT
        assert {got.finish for got in done[:-1]} == {Finish.LENGTH}
        after = await port.generate(request([30, 31], "after/0", max_tokens=3, min_version=1))
        assert after.spans == ((1, 3),)
        with pytest.raises(EngineError, match="version 7"):
            await port.generate(request([30, 31], "late/0", min_version=7))
        await engine.close()

    asyncio.run(main())


def test_a_cancelled_call_is_not_computed_further() -> None:
    async def main() -> None:
        core = endless()
        engine = ThreadedEngine(core, fetch=fetch)
        call = asyncio.create_task(engine.generate(request([10, 11], max_tokens=900)))
        await eventually(lambda: core.num_running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually(lambda: not core.busy)
        assert core.stats.sampled_tokens < 900
        await engine.close()

    asyncio.run(main())


def test_the_death_of_the_thread_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        core = endless()
        engine = ThreadedEngine(core, fetch=fetch)
        calls = [asyncio.create_task(engine.generate(request([10, 11], f"s{i}/0", max_tokens=900))) for i in range(3)]
        await asyncio.sleep(0.02)
        monkeypatch.setattr(core, "step", lambda: 1 / 0)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "ZeroDivisionError" in str(outcome)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await engine.generate(request([10, 11]))
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await engine.swap(manifest(1))
        await engine.close()

    asyncio.run(main())


def test_a_fetch_that_breaks_is_a_weight_error_and_close_ends_all() -> None:
    async def main() -> None:
        def broken(_: WeightManifest) -> Mapping[str, torch.Tensor]:
            raise OSError("no such segment")

        engine = ThreadedEngine(endless(), fetch=broken)
        await engine.stage(1)
        call = asyncio.create_task(engine.generate(request([10, 11], max_tokens=900)))
        with pytest.raises(WeightError, match="no such segment"):
            await engine.swap(manifest(1))
        with pytest.raises(EngineError, match="already in flight"):
            await engine.generate(request([10, 11]))
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await call
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request([10, 11]))

    asyncio.run(main())


def test_an_engine_from_a_directory_with_its_tokenizer(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(59)] + ["<end>", "stop."]
    tokenizer: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(str(tmp_path))
    MODELS[0].save_pretrained(str(tmp_path))
    core = EmbeddedEngine.from_directory(str(tmp_path), engine_id="e0", settings=EngineSettings(kv_tokens=20_000))
    asked = [request([i], f"s{i}/0", max_tokens=200, temperature=2.0, stop=("stop.",)) for i in range(20)]
    for call in asked:
        core.add(call)
    ends = set()
    while core.busy:
        for name, got in core.step():
            check(next(call for call in asked if call.id == name), got, MODELS)
            assert not {59, 60} & set(got.tokens[:-1].tolist())
            ends.add(got.tokens[-1])
            assert got.engine == "e0"
    assert ends == {59, 60}
