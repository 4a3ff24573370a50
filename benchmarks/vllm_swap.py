"""A swap of a vLLM server: made ready while it serves, against vLLM's own reload from a directory.

    ROLLART_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.vllm_swap --mb 500 --rounds 5 --json

Starts one vLLM server (CPU build) on a Qwen3 model with random weights of that size, untied, since vLLM's own reload is
wrong for tied ones. In each round the same server swaps three times, with requests in flight: `staged` (weights of a
store in shared memory, loaded and packed by our worker extension beside the requests; requests are cut and sent again),
`kept` (the same, requests go on with their cache), and `reload` (`reload_weights` with the version's directory, as
before; its files are in the page cache). Every swap is proven by log-probabilities, the same for all. Seconds:

    stage     before the swap, while the server serves
    exposed   the swap, from suspend to resume: no new request is sent meanwhile
    still     the part of it in which the server computes nothing: what requests in flight stand still for
    proof     after `still`, until all of the probe is scored, beside the requests: until then no answer leaves
    off       the most that a log-probability of the probe differs from the trainer's
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rollart.config.settings import EngineSettings
from rollart.engines.launch import ServerSettings, launch
from rollart.engines.remote import RemoteEngine
from rollart.engines.staged import StagedFiles
from rollart.engines.vllm import VllmServer
from rollart.model.network import adopt, named_weights, probe
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.types import GenerateRequest, Sampling, WeightManifest
from rollart_recipes.tiny import tiny_tokenizer

CONTEXT_TOKENS = 512
LAYER_PARAMS = 768 * 768 * 4 + 3 * 768 * 2048
"""Of one layer of the model below."""
WAYS = ("staged", "kept", "reload")
SECONDS = ("stage", "exposed", "still", "proof")
ANSWER_TOKENS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=500, help="size of the model, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="in flight at each swap")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(asked, Path(folder)))
    if asked.json:
        print(json.dumps(found))
        return
    print(f"{found['mb']} MB, {asked.requests} requests in flight, median (least to most) of {asked.rounds} rounds")
    for way, row in found["ways"].items():
        seconds = "  ".join(
            f"{name} {row[name]['median']:.3f} s ({row[name]['least']:.3f} to {row[name]['most']:.3f})"
            for name in SECONDS
        )
        print(f"{way:8} {seconds}  off {row['off']:.1e}")
    for name, ratios in found["reload_over_staged"].items():
        print(f"reload / staged, {name}, by round: {', '.join(f'{ratio:.1f}' for ratio in ratios)}")


class Reloading(VllmServer):
    """Gives the server a directory, as vLLM documents it: all of it happens while it stands still."""

    folder = Path()

    async def stage(self, files: Sequence[Path], version: int) -> None:
        self.folder = files[0].parent

    async def load(self, version: int) -> None:
        await self._rpc("reload_weights", weights_path=str(self.folder))
        await self._http.post("/reset_prefix_cache")


async def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = save_model(asked.mb, folder / "model")
    files = FileStore(folder / "weights", model_path=folder / "model")
    memory = ShmStore(f"swap-{secrets.token_hex(4)}")
    settings = ServerSettings(
        engines=EngineSettings(type="vllm", max_batch=32),
        engine_id="swap",
        model=folder / "model",
        context_tokens=CONTEXT_TOKENS,
        log_dir=folder,
        cpu=True,
    )
    progress("starting vLLM")
    first = await launch(settings, memory, FetchAhead(memory))
    engines = {"staged": first}
    try:
        for way in ("kept", "reload"):
            engines[way] = beside(first, files if way == "reload" else memory, folder, way)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        version = 0
        for number in range(asked.rounds):
            for way in WAYS:
                version += 1
                move(model, version)
                store: BucketStore = files if way == "reload" else memory
                manifest = store.push(version, named_weights(model), probe(model))
                rows[way].append(await one_swap(engines[way], manifest, asked.requests))
                await store.drop_before(version)
                progress(f"round {number + 1}, {way}: {rows[way][-1]}")
    finally:
        await first.close()
        memory.close()
        files.close()
    return figures(asked, sum(tensor.nbytes for tensor in named_weights(model).values()), rows)


def beside(first: RemoteEngine, store: BucketStore, folder: Path, way: str) -> RemoteEngine:
    """Another engine over the same server."""
    server = first.server
    assert isinstance(server, VllmServer)
    return RemoteEngine(
        Reloading(server._http) if way == "reload" else server,
        replace(first._settings, keep_kv=way == "kept"),
        StagedFiles(way, folder / "model", store, FetchAhead(store)),
        stops=first.stops,
    )


async def one_swap(engine: RemoteEngine, manifest: WeightManifest, requests: int) -> dict[str, float]:
    """With requests in flight all the time."""
    over = asyncio.Event()
    clients = [asyncio.create_task(keep_asking(engine, manifest.version, number, over)) for number in range(requests)]
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await engine.stage(manifest.version)
    staged = time.perf_counter()
    still: list[float] = []
    with watched(engine.server, still):
        await engine.swap(manifest)
        swapped = time.perf_counter()
        await engine.proven()
    proven = time.perf_counter()
    over.set()
    for call in list(engine.calls):
        with contextlib.suppress(Exception):
            await engine.abort(call)
    await asyncio.gather(*clients)
    assert manifest.probe is not None
    parts = [await engine.server.score(tokens) for tokens in manifest.probe.sequences()]
    answer = [value for [part] in parts for value in part]
    return {
        "stage": staged - began,
        "exposed": swapped - staged,
        "still": still[1] - still[0],
        "proof": proven - still[1],
        "off": max(abs(a - b) for a, b in zip(answer, manifest.probe.logprobs, strict=True)),
    }


@contextlib.contextmanager
def watched(server: Any, times: list[float]) -> Iterator[None]:
    """Note when the server is told to stop, and when it goes on."""

    def noting(call: Callable[[], Awaitable[Any]], *, after: bool) -> Callable[[], Awaitable[Any]]:
        async def noted() -> Any:
            if not after:
                times.append(time.perf_counter())
            answer = await call()
            if after:
                times.append(time.perf_counter())
            return answer

        return noted

    calls = {name: getattr(server, name) for name in ("halt", "hold", "resume")}
    for name, call in calls.items():
        setattr(server, name, noting(call, after=name == "resume"))
    try:
        yield
    finally:
        for name in calls:
            delattr(server, name)


async def keep_asking(engine: RemoteEngine, version: int, number: int, over: asyncio.Event) -> None:
    turn = 0
    while not over.is_set():
        prompt = torch.randint(5, 90, (32,)).int().numpy()
        name = f"v{version}.{number}/{turn}"
        turn += 1
        await engine.generate(
            GenerateRequest(
                id=name,
                session=name,
                domain="",
                turn=0,
                prompt=(prompt,),
                prompt_tokens=len(prompt),
                sampling=Sampling(max_tokens=ANSWER_TOKENS),
            )
        )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def save_model(mb: int, path: Path) -> PreTrainedModel:
    """Heads of 64, vocabulary of the tiny tokenizer; as many layers as the size asks for."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=max(1, round(mb * 1e6 / 4 / LAYER_PARAMS)),
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = adopt(auto.from_config(config, dtype=torch.float32))
    model.save_pretrained(path)
    return model


@torch.no_grad()
def move(model: PreTrainedModel, seed: int) -> None:
    """Far enough that no two versions are alike."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=2e-3)


def figures(asked: argparse.Namespace, num_bytes: int, rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    for way, found in rows.items():
        ways[way] = {
            name: {
                "median": statistics.median(values),
                "least": min(values),
                "most": max(values),
            }
            for name in SECONDS
            if (values := [row[name] for row in found])
        } | {"off": max(row["off"] for row in found)}
    pairs = list(zip(rows["staged"], rows["reload"], strict=True))
    ratios = {name: [old[name] / new[name] for new, old in pairs] for name in ("exposed", "still")}
    return {
        "mb": round(num_bytes / 1e6),
        "requests": asked.requests,
        "rounds": asked.rounds,
        "ways": ways,
        "reload_over_staged": ratios,
    }


if __name__ == "__main__":
    main()
