"""The engine contract, and more, on a real vLLM server: one for the whole module, as it takes a minute to start.

The model has tied embeddings, which vLLM's own reload leaves half as they were.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rollart.config.settings import EngineSettings, LoraSettings
from rollart.engines.launch import TOKEN_VARIABLE, ServerSettings, launch
from rollart.engines.process import ServerProcess, free_port
from rollart.engines.remote import RemoteEngine
from rollart.engines.vllm import command, environment
from rollart.errors import EngineError, RequestError, WeightError
from rollart.store.prefetch import FetchAhead
from rollart.types import Finish, WeightManifest
from tests.contracts.engine import EngineBench, EngineContract
from tests.contracts.remote import play_on
from tests.engines.reference import check_kept
from tests.engines.reference import request as prompt
from tests.engines.remote import CONTEXT_TOKENS, LORA, Versions
from tests.vllm_python import PYTHON, needs_vllm

KEY = "the-key"
SHOWN = {"Authorization": f"Bearer {KEY}"}
UNLISTED = ("/openapi.json", "/docs", "/metrics", "/nothing/here")
START_S = 600.0

pytestmark = [pytest.mark.slow, needs_vllm]


class Running:
    """A vLLM server, and how engines are attached to it."""

    def __init__(self, folder: Path, *, gpus: int = 1, **versions: Any) -> None:
        self.versions = Versions(folder, **versions)
        lora = self.versions.lora
        self.lora = None if lora is None else LoraSettings(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        line = command(
            PYTHON,
            str(self.versions.path),
            port=port,
            dtype="float32",
            max_batch=4,
            max_context=CONTEXT_TOKENS,
            gpus=gpus,
            cpu=True,
            lora=self.lora,
        )
        variables = environment(KEY, 1, cpu=True, adapters=self.lora is not None)
        self.process = ServerProcess(line, variables | {"VLLM_CPU_KVCACHE_SPACE": "1"}, folder / "vllm.log")
        asyncio.run(self.process.ready(self.url + "/health", START_S, KEY))

    async def engine(self, *, keep_kv: bool = False) -> RemoteEngine:
        """Fresh, with the initial weights."""
        settings = ServerSettings(
            engines=EngineSettings(type="vllm", url=self.url, keep_kv=keep_kv),
            engine_id="e0",
            model=self.versions.path,
            context_tokens=CONTEXT_TOKENS,
            log_dir=self.versions.path.parent,
            lora=self.lora,
        )
        store = self.versions.store
        engine = await launch(settings, store, FetchAhead(store))
        await engine.server.stage(engine.files.initial(), 0)
        await engine.server.load(0)
        await engine.server.resume()
        return engine

    def play(self, work: Callable[[RemoteEngine], Awaitable[None]], *, keep_kv: bool = False) -> None:
        async def awaited() -> None:
            engine = await self.engine(keep_kv=keep_kv)
            try:
                await work(engine)
            finally:
                await engine.close()

        asyncio.run(asyncio.wait_for(awaited(), 120))


def serving(tmp_path_factory: pytest.TempPathFactory, **versions: Any) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("vllm"), **versions)
    yield running
    asyncio.run(running.process.stop())
    running.versions.store.close()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serving(tmp_path_factory, tied=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serving(tmp_path_factory, experts=True, in_memory=True)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Over two processes, each with its part of every tensor."""
    yield from serving(tmp_path_factory, gpus=2, tied=True, in_memory=True)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serving(tmp_path_factory, lora=LORA, in_memory=True)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, KEY)


class TestVllmEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _server(self, vllm: Running) -> None:
        self.vllm = vllm

    def play(self, work: Callable[[EngineBench], Awaitable[None]]) -> None:
        async def awaited() -> None:
            await play_on(await self.vllm.engine(), self.vllm.versions, 4, work)

        asyncio.run(asyncio.wait_for(awaited(), 120))


async def started(engine: RemoteEngine) -> None:
    """Until some request in flight has tokens of the segment under way."""
    async with asyncio.timeout(60):
        while not any(call.unspanned for call in engine.calls.values()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)


def test_every_token_is_of_the_version_its_span_says(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        manifests = [vllm.versions.put(version) for version in (1, 2)]
        # Four run at a time: enough of them that a quick server is not done before the second swap.
        asked = [prompt([5 + n % 90, 6, 7], f"s{n}/0", max_tokens=200, seed=n) for n in range(160)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        for manifest in manifests:
            await started(engine)
            await engine.swap(manifest)
        seen = set()
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            vllm.versions.check(one, got)
            seen |= {span.version for span in got.spans}
            assert got.finish is Finish.STOP or len(got.tokens) == 200
        assert seen >= {0, 2}

    vllm.play(work)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_log_probabilities_are_of_the_scaled_distribution(vllm: Running, temperature: float) -> None:
    async def work(engine: RemoteEngine) -> None:
        asked = prompt([5, 6, 7], max_tokens=40, seed=1, temperature=temperature)
        vllm.versions.check(asked, await engine.generate(asked))

    vllm.play(work)


def test_greedy_and_sampled_requests_in_one_batch_keep_their_temperatures(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        asked = [prompt([5, 6, 7], f"s{n}/0", max_tokens=40, seed=n, temperature=n / 2) for n in range(4)]
        for one, got in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
            vllm.versions.check(one, got)

    vllm.play(work)


def test_truncated_sampling_is_refused_and_not_given_with_other_log_probabilities(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(RequestError, match="top_p or top_k"):
            await engine.generate(prompt([5, 6, 7], top_p=0.5))

    vllm.play(work)


def test_the_cache_of_a_session_is_used_and_never_that_of_older_weights(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        long = [5 + n % 90 for n in range(150)]
        first = await engine.generate(prompt(long, "a/0", max_tokens=4))
        again = await engine.generate(prompt(long, "a/1", max_tokens=4))
        assert first.cached_tokens == 0
        assert again.cached_tokens >= 64
        await engine.swap(vllm.versions.put(1))
        asked = prompt(long, "a/2", max_tokens=4)
        after = await engine.generate(asked)
        assert after.cached_tokens == 0
        vllm.versions.check(asked, after)

    vllm.play(work)


def test_weights_that_are_not_what_the_trainer_says_are_found_out(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        wrong = vllm.versions.put(3).probe
        with pytest.raises(WeightError, match=r"loaded version 1, but its log-probabilities are"):
            await engine.swap(replace(vllm.versions.put(1), probe=wrong))
        assert engine.version == 0
        asked = prompt([5, 6, 7], max_tokens=10)
        vllm.versions.check(asked, await engine.generate(asked))

    vllm.play(work)


async def off(engine: RemoteEngine, manifest: WeightManifest) -> float:
    """The most that any log-probability of the probe differs from the trainer's."""
    assert manifest.probe is not None
    parts = [await engine.server.score(tokens) for tokens in manifest.probe.sequences()]
    answer = [value for [part] in parts for value in part]
    return max(abs(a - b) for a, b in zip(answer, manifest.probe.logprobs, strict=True))


@pytest.mark.parametrize("kind", ["vllm", "mixture", "adapted", "split"])
def test_log_probabilities_are_the_trainers_after_each_of_many_swaps(kind: str, request: pytest.FixtureRequest) -> None:
    """Of tied embeddings, of experts, and of adapters against weights that they were merged into. So closely that the
    tolerance of a swap is not what hides a mistake."""
    running: Running = request.getfixturevalue(kind)

    async def work(engine: RemoteEngine) -> None:
        for version in (1, 2, 3, 4):
            manifest = running.versions.put(version)
            await engine.stage(version)
            await engine.swap(manifest)
            assert await off(engine, manifest) < 1e-4
            asked = prompt([5, 6, 7], f"s{version}/0", max_tokens=30, seed=1)
            running.versions.check(asked, await engine.generate(asked))

    running.play(work)


def test_only_the_adapters_of_the_version_that_is_served_stay(adapted: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        for version in (1, 2, 3):
            await engine.swap(adapted.versions.put(version))
        async with httpx.AsyncClient(trust_env=False, base_url=adapted.url, headers=SHOWN) as client:
            models = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert models == ["policy", "policy-v2", "policy-v3"], "the one before goes when the next is staged"
        sizes = [path.stat().st_size for path in (adapted.versions.store.directory / "for-e0").rglob("*.safetensors")]
        whole = sum(path.stat().st_size for path in adapted.versions.path.glob("*.safetensors"))
        assert len(sizes) == 1
        assert sizes[0] < whole / 2

    adapted.play(work)


@pytest.mark.parametrize("kind", ["vllm", "mixture", "adapted"])
def test_every_token_is_of_the_version_its_span_says_whatever_the_weights(
    kind: str, request: pytest.FixtureRequest
) -> None:
    running: Running = request.getfixturevalue(kind)

    async def work(engine: RemoteEngine) -> None:
        manifest = running.versions.put(1)
        await engine.stage(1)
        asked = [prompt([5 + n, 6, 7], f"s{n}/0", max_tokens=200, seed=n) for n in range(16)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await started(engine)
        await engine.swap(manifest)
        for one, task in zip(asked, tasks, strict=True):
            running.versions.check(one, await task)

    running.play(work)


def test_with_keep_kv_requests_go_on_with_the_cache_they_have(vllm: Running) -> None:
    """Each token is that of its span's model over keys and values of the models before it: token by token."""

    async def work(engine: RemoteEngine) -> None:
        seen: set[tuple[int, ...]] = set()
        for round_ in range(20):
            manifest = vllm.versions.put(round_ + 1)
            await engine.stage(round_ + 1)
            asked = [prompt([5 + n, 6, 7], f"s{round_}.{n}/0", max_tokens=200, seed=n) for n in range(4)]
            tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
            await started(engine)
            report = await engine.swap(manifest)
            assert report.rebuilt_tokens == 0
            for one, task in zip(asked, tasks, strict=True):
                got = await task
                check_kept(one, got, vllm.versions.plain)
                if len(got.spans) > 1:  # one that was not begun at the swap may be sent again
                    assert got.prefill_tokens == one.prompt_tokens, "nothing was computed again"
                seen.add(tuple(span.version - round_ for span in got.spans))
            if (0, 1) in seen:
                return
        raise AssertionError(f"no request was in flight over a swap: {seen}")

    vllm.play(work, keep_kv=True)


def test_with_keep_kv_what_was_sampled_under_weights_that_are_wrong_is_taken_back(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        wrong = vllm.versions.put(3).probe
        manifest = replace(vllm.versions.put(1), probe=wrong)
        asked = [prompt([5 + n, 6, 7], f"s{n}/0", max_tokens=200, seed=n) for n in range(8)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await started(engine)
        with pytest.raises(WeightError, match=r"loaded version 1, but its log-probabilities are"):
            await engine.swap(manifest)
        for one, task in zip(asked, tasks, strict=True):
            got = await task
            assert {span.version for span in got.spans} == {0}
            vllm.versions.check(one, got)

    vllm.play(work, keep_kv=True)


def test_weights_that_lack_a_tensor_change_nothing(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        whole = vllm.versions.put(1)
        tensors = vllm.versions.store.fetch(whole)
        del tensors["model.norm.weight"]
        with pytest.raises(WeightError, match=r"1 weights are not in the files, the first is model.norm.weight"):
            await engine.swap(vllm.versions.store.push(2, tensors, whole.probe))
        asked = prompt([5, 6, 7], max_tokens=10)
        vllm.versions.check(asked, await engine.generate(asked))

    vllm.play(work)


def test_an_abort_frees_the_server(vllm: Running) -> None:
    async def work(engine: RemoteEngine) -> None:
        asked = [prompt([5, 6, 7], f"s{n}/0", max_tokens=200, seed=n) for n in range(6)]
        wholes = [len((await engine.generate(one)).tokens) for one in asked]
        longest = asked[wholes.index(max(wholes))]
        for turn in range(1, 10):  # a quick server may have said all by the time that its first token is seen
            again = msgspec.structs.replace(longest, id=f"{longest.session}/{turn}", turn=turn)
            task = asyncio.ensure_future(engine.generate(again))
            await started(engine)
            await engine.abort(again.id)
            got = await task
            assert got.finish is Finish.ABORT
            if len(got.tokens) < max(wholes):
                break
        assert len(got.tokens) < max(wholes)
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(vllm.url + "/metrics", headers=SHOWN)).text
        running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        assert [float(line.split()[-1]) for line in running] == [0.0]

    vllm.play(work)


@pytest.mark.parametrize("kind", ["vllm", "adapted"])
def test_nobody_is_served_without_the_token(kind: str, request: pytest.FixtureRequest) -> None:
    """Whatever the path: each that the server lists, and some that it does not."""
    vllm: Running = request.getfixturevalue(kind)

    async def work(engine: RemoteEngine) -> None:
        # A connection for each: on a busy machine the server closes one that is kept just as it is used again.
        fresh = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, base_url=vllm.url, timeout=60.0, limits=fresh) as client:
            listed = (await client.get("/openapi.json", headers=SHOWN)).json()["paths"]
            routes = [(method, path) for path, methods in listed.items() for method in methods]
            assert {("post", "/pause"), ("post", "/collective_rpc"), ("post", "/v1/completions")} <= set(routes)
            assert (("post", "/v1/load_lora_adapter") in routes) is (kind == "adapted")
            wrong: list[dict[str, str]] = [{}, {"Authorization": "Bearer another"}, {"Authorization": KEY}]
            for method, path in [*routes, *(("get", path) for path in UNLISTED)]:
                for headers in wrong:
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path)
            for path in ("/health", "/version", "/metrics", "/v1/models", "/server_info?config_format=json"):
                assert (await client.get(path, headers=SHOWN)).status_code == 200, path
            for method, path in routes:  # a body that no call can use: refused for that, and not for the token
                if method == "post" and "requestBody" in listed[path][method]:
                    answer = await client.post(path, headers=SHOWN, content=b"{")
                    assert answer.status_code != 401, path
        asked = prompt([5, 6, 7], max_tokens=10)
        vllm.versions.check(asked, await engine.generate(asked))
        await engine.swap(vllm.versions.put(1))
        assert KEY not in (vllm.versions.path.parent / "vllm.log").read_text()
        assert KEY.encode() not in b"".join(path.read_bytes() for path in command_lines())

    vllm.play(work)


def command_lines() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]


def test_a_server_started_otherwise_is_refused(vllm: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: RemoteEngine) -> None:
        monkeypatch.setattr("rollart.engines.vllm.LOGPROBS", "raw_logprobs")
        with pytest.raises(EngineError, match="start it with --logprobs-mode raw_logprobs"):
            await vllm.engine()
        monkeypatch.undo()
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        with pytest.raises(EngineError, match="answered 401"):
            await vllm.engine()

    vllm.play(work)
