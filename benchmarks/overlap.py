"""Weights beside a step against weights between steps, in one run: `python -m benchmarks.overlap --json` (needs root).

A trainer takes a fixed time for each step, as one does whose GPU computes (it sleeps: the cores here are the hosts'),
and pushes a version of the model; engines, each a process of its own with a real embedded engine, answer requests all
the time (the rollout's load), stage what comes and swap. Blocks of steps alternate:
- `overlapped`: the version of the step before crosses while the next one is trained, and is swapped in after it;
- `blocking`: engines stand still from the push until they have swapped, then the next step is trained.
The network is a loopback device of its own (`unshare --net`), shaped by `tc tbf` so that the way over it takes
`PUSH_OF_PULL` times what an engine that stands still takes to bring a version from its host into use (`host_pull_s`,
measured first), as in the paper; a step of training takes `TRAIN_OF_PUSH` times that. `shm`, `files` cross no link;
Mooncake's memory is on the engines' side, in the process that keeps their copy. `exposed_s`: from suspend to
resume; in it the end of the step under way (one takes `engine_step_s`) and the exchange itself (`flip_s`). `pull_s`:
all that was spent to bring the version to the engine, hidden or not: over the link (`link_s`), checked and mapped, made
ready, put in; it includes waiting for a core that the engines compute on. `exposed_of_blocking_pull`: of the pull while
they stand still. `arrival_s`: from the begin of the push until all engines have the version on their host, and ready.
`memory`: the most that was seen beside the model, in models: of each process (`keeper`: the engines' host), and of the
store's files on the trainer's side (`here`), on the engines' (`there`) or for both (`store`).
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.weights import _free_port, change, mooncake_service, small_step_density
from rollart.config.settings import EngineSettings
from rollart.engines.embedded.backend import Ready
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.model.network import adopt, named_weights
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.host import read_ready
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.train.offload import HostCopy, HostMemory
from rollart.types import GenerateRequest, Sampling, SwapReport, WeightManifest, WeightVersion

STORES = ("shm", "files", "tcp", "delta", "mooncake")
PUSH_OF_PULL = 4.6
"""The paper: 32.4, 67.8, 127.3 s to push, 6.2, 16.3, 29.7 s to pull."""
TRAIN_OF_PUSH = 1.5
"""A step is longer than a push, as in the paper."""
LINKLESS = ("shm", "files")
LINKLESS_TRAIN_S = 8.0
"""No link is imitated there, so that a step need not be longer than this."""
BUCKET_BYTES = 32_000_000
BLOCKS, STEPS = 3, 3
"""Blocks of each kind, and steps in each; the first step of a block is not counted."""
WARM = 3
"""Versions before the first block, over a link without a limit: memory is touched for the first time. The last two say
what a pull takes."""
REQUESTS, PROMPT, ANSWER = 4, 16, 48
"""In each engine, all the time; tokens of each."""
INSIDE = "ROLLART_BENCH_OVERLAP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a store is; made anew in each process."""

    kind: str
    run: str
    root: Path
    address: str
    segment_bytes: int
    """Of Mooncake."""

    def open(self, *, engine: bool) -> BucketStore:
        there = self.root / "there" if engine else self.root / "here"
        match self.kind:
            case "shm":
                return ShmStore(self.run, bucket_bytes=BUCKET_BYTES, root=self.root)
            case "files":
                return FileStore(self.root / "weights", bucket_bytes=BUCKET_BYTES)
            case "mooncake":
                from rollart.store.mooncake import MooncakeStore
                from rollart.store.mooncake_client import MooncakeSetup

                setup = MooncakeSetup(master=self.address, run_id=self.run, segment_bytes=self.segment_bytes)
                return MooncakeStore(setup, bucket_bytes=BUCKET_BYTES, root=there)
        from rollart.store.tcp import TcpStore

        return TcpStore(
            self.run, self.address, "token", bucket_bytes=BUCKET_BYTES, root=there, deltas=self.kind == "delta"
        )


def network(num_bytes: int) -> PreTrainedModel:
    """A Qwen3 of about this size in bfloat16, with random weights."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        num_hidden_layers=1,
    )
    embedding_bytes, layer_bytes = 2 * 32_000 * 1024, 2 * 1024 * (3 * 3072 + 3 * 1024)
    config.num_hidden_layers = max(1, round((num_bytes - embedding_bytes) / layer_bytes))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return adopt(model)


def engine(place: Place, num_bytes: int, link: Connection) -> None:
    """Another process: an embedded engine with requests all the time, which stages and swaps."""
    torch.set_num_threads(1)
    asyncio.run(serve(place, num_bytes, link))


async def serve(place: Place, num_bytes: int, link: Connection) -> None:
    core = EmbeddedEngine(network(num_bytes), EngineSettings(kv_tokens=4096, draft_tokens=0), eos=frozenset())
    store = place.open(engine=True)
    store.appeared(0)  # who keeps the host's copy is there from now on
    ahead = FetchAhead(store)
    own = ThreadedEngine(core, fetch=ahead.fetch, stage=ahead.stage, pulled=ahead.pulled, adopt=store.in_memory)
    flips: list[float] = []
    put_in = core.put_in

    def timed(version: WeightVersion, ready: Ready) -> SwapReport:
        began_s = time.perf_counter()
        report = put_in(version, ready)
        flips.append(time.perf_counter() - began_s)
        return report

    core.put_in = timed  # type: ignore[method-assign]
    goes = asyncio.Event()
    goes.set()
    asked = 0

    async def load(session: int) -> None:
        nonlocal asked
        while True:
            await goes.wait()
            asked += 1
            request = GenerateRequest(
                id=f"{session}/{asked}",
                session=f"{session}/{asked}",
                domain="bench",
                turn=0,
                prompt=(np.arange(1, PROMPT + 1, dtype=np.int32),),
                prompt_tokens=PROMPT,
                sampling=Sampling(max_tokens=ANSWER),
                last=True,
            )
            running.add(request.id)
            await own.generate(request)
            running.discard(request.id)

    async def stage(version: WeightVersion) -> None:
        await own.stage(version)
        link.send(("staged", time.perf_counter()))

    running: set[str] = set()
    tasks = [asyncio.ensure_future(load(session)) for session in range(REQUESTS)]
    link.send("ready")
    while (message := await asyncio.to_thread(link.recv)) is not None:
        what, given = message
        if what == "stage":
            tasks.append(asyncio.ensure_future(stage(given)))
        elif what == "suspend":
            goes.clear()
            for name in sorted(running):
                await own.abort(name)
            while core.busy:  # noqa: ASYNC110 - the engine's thread tells nobody
                await asyncio.sleep(0.001)
            link.send(("suspended", core.stats.steps))
        else:
            began_s = time.perf_counter()
            report = await own.swap(given)
            exposed_s = time.perf_counter() - began_s
            goes.set()
            step_s = core.stats.step_s / max(core.stats.steps, 1)
            link.send(
                (
                    "swapped",
                    (exposed_s, report.pulled.seconds, store.pulled(given.version).seconds, flips.pop(), step_s),
                )
            )
    for task in tasks:
        task.cancel()
    await own.close()


class Engines:
    def __init__(self, place: Place, num_bytes: int, count: int) -> None:
        started = multiprocessing.get_context("spawn")
        self._links: list[Connection] = []
        self.processes = []
        for _ in range(count):
            own, other = started.Pipe()
            process = started.Process(target=engine, args=(place, num_bytes, other), daemon=True)
            process.start()
            self._links.append(own)
            self.processes.append(process)
        for link in self._links:
            assert link.recv() == "ready"

    def tell(self, what: str, given: Any = None) -> None:
        for link in self._links:
            link.send((what, given))

    def told(self, what: str) -> list[Any]:
        """What each answers to that."""
        found = []
        for link in self._links:
            while (answer := link.recv())[0] != what:
                pass
            found.append(answer[1])
        return found

    def close(self) -> None:
        for link, process in zip(self._links, self.processes, strict=True):
            link.send(None)
            process.join(10)
            process.kill()
            process.join()


class Peak:
    """The most memory that was seen, above what there was at the beginning."""

    def __init__(self, root: Path, pids: dict[str, int]) -> None:
        self._root, self._pids = root, pids
        self._first = {name: value if name in pids else 0 for name, value in self._now().items()}
        self.most = dict.fromkeys(self._first, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        found = {}
        for name, pid in self._pids.items():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[name] = int(status["RssAnon"].split()[0]) * 1000
        for name in ("here", "there", "."):
            taken = 0
            for folder, _, files in os.walk(self._root / name):  # what goes meanwhile is passed over
                for file in files:
                    with suppress(FileNotFoundError):
                        taken += os.stat(os.path.join(folder, file)).st_blocks * 512
            found["store" if name == "." else name] = taken
        found["store"] -= found["here"] + found["there"]
        return found

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for name, value in self._now().items():
                self.most[name] = max(self.most[name], value - self._first[name])

    def end(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        return self.most


@contextmanager
def opened(kind: str, num_bytes: int, disk: Path | None) -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(dir=disk if kind == "files" else "/dev/shm", prefix="rollart-bench-"))
    for name in ("here", "there"):
        (root / name).mkdir()
    run = f"overlap-{uuid.uuid4().hex[:8]}"
    try:
        if kind == "mooncake":
            with tempfile.TemporaryDirectory() as logs, mooncake_service(Path(logs), 0) as address:
                yield Place(kind=kind, run=run, root=root, address=address, segment_bytes=3 * num_bytes + (64 << 20))
        else:
            yield Place(kind=kind, run=run, root=root, address=f"127.0.0.1:{_free_port()}", segment_bytes=0)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def keeper_of(place: Place) -> int:
    """The process that keeps the engines' copy; 0 where there is none."""
    found = [read_ready(folder) for folder in (place.root / "there").glob("*")]
    return next((ready["pid"] for ready in found if "pid" in ready), 0)


def shape(gb_s: float | None) -> None:
    """Of the link; None for no limit."""
    if gb_s is None:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
        return
    rate = ["rate", f"{gb_s * 8000:.0f}mbit", "burst", "2m", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *rate], check=True)


def measure_store(kind: str, num_bytes: int, engines: int, disk: Path | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    shape(None)
    train_s = 0.0
    density = small_step_density() if kind == "delta" else 1.0
    model = {name: tensor.clone() for name, tensor in named_weights(network(num_bytes)).items()}
    num_bytes = sum(tensor.nbytes for tensor in model.values())
    rows: dict[str, list[dict[str, float]]] = {"overlapped": [], "blocking": []}
    with opened(kind, num_bytes, disk) as place:
        trainer = place.open(engine=False)
        if kind in ("tcp", "delta"):
            trainer.serve()  # type: ignore[attr-defined]
        both = Engines(place, num_bytes, engines)
        pids = {"trainer": os.getpid(), **{f"engine{n}": each.pid or 0 for n, each in enumerate(both.processes)}}
        version, memory = 0, HostMemory()

        def push() -> WeightManifest:
            """Of a copy on the host, as trainers take it: the model changes meanwhile."""
            return trainer.push(version, HostCopy.of(model, memory).whole())

        def swap(manifest: WeightManifest, row: dict[str, float]) -> None:
            both.tell("swap", manifest)
            answers = both.told("swapped")
            row["exposed_s"] = max(answer[0] for answer in answers)
            row["pull_s"] = max(answer[1] for answer in answers) + row["exposed_s"]
            row["link_s"] = max(answer[2] for answer in answers)
            row["flip_s"] = max(answer[3] for answer in answers)
            row["engine_step_s"] = max(answer[4] for answer in answers)
            asyncio.run(trainer.drop_before(manifest.version))

        def step(row: dict[str, float]) -> None:
            if kind == "delta":
                change(model, density, version)
            time.sleep(train_s)

        def blocking() -> dict[str, float]:
            nonlocal version
            row: dict[str, float] = {}
            began_s = time.perf_counter()
            version += 1
            step(row)
            both.tell("suspend")
            both.told("suspended")
            stands_s = time.perf_counter()
            manifest = push()
            row["push_s"] = time.perf_counter() - stands_s
            both.tell("stage", version)
            both.told("staged")
            swap(manifest, row)
            row["exposed_s"] = time.perf_counter() - stands_s
            row["step_s"] = time.perf_counter() - began_s
            return row

        def overlapped(count: int) -> list[dict[str, float]]:
            """The first of them has nothing to swap to."""
            nonlocal version
            found: list[dict[str, float]] = []
            under_way: threading.Thread | None = None
            push_began_s = 0.0
            pushed: list[WeightManifest] = []
            for _ in range(count + 1):
                row: dict[str, float] = {}
                began_s = time.perf_counter()
                if under_way is not None:
                    under_way.join()
                    row["arrival_s"] = max(both.told("staged")) - push_began_s
                    swap(pushed.pop(), row)
                version, push_began_s = version + 1, time.perf_counter()
                both.tell("stage", version)
                under_way = threading.Thread(target=lambda: pushed.append(push()))
                under_way.start()
                step(row)
                row["step_s"] = time.perf_counter() - began_s
                found.append(row)
            assert under_way is not None
            under_way.join()
            both.told("staged")
            swap(pushed.pop(), {})
            return found[1:]

        try:
            while kind == "mooncake" and not keeper_of(place):  # its memory is the store's
                time.sleep(0.1)
            warm = [blocking() for _ in range(WARM)]
            host_pull_s = statistics.median(row["pull_s"] - row["link_s"] for row in warm[-2:])
            shape(num_bytes / 1e9 / (PUSH_OF_PULL * host_pull_s))
            train_s = TRAIN_OF_PUSH * PUSH_OF_PULL * host_pull_s
            if kind in LINKLESS:
                train_s = min(train_s, LINKLESS_TRAIN_S)
            if keeper := keeper_of(place):
                pids["keeper"] = keeper
            peak = Peak(place.root, pids)
            for _ in range(BLOCKS):
                rows["overlapped"] += overlapped(STEPS)[1:]
                rows["blocking"] += [blocking() for _ in range(STEPS)][1:]
            most = peak.end()
        finally:
            both.close()
            if kind in ("tcp", "delta"):
                trainer.serving.stop()  # type: ignore[attr-defined]
            trainer.close()
    middle = {
        mode: {key: statistics.median(row[key] for row in found) for key in found[0]} for mode, found in rows.items()
    }
    each = {mode: [row["step_s"] for row in found] for mode, found in rows.items()}
    ratios = [
        statistics.median(each["blocking"][at : at + STEPS - 1])
        / statistics.median(each["overlapped"][at : at + STEPS - 1])
        for at in range(0, BLOCKS * (STEPS - 1), STEPS - 1)
    ]
    fast = middle["overlapped"]
    return {
        "store": kind,
        "gb": round(num_bytes / 1e9, 3),
        "engines": engines,
        "density": round(density, 4),
        "link_gb_s": round(num_bytes / 1e9 / (PUSH_OF_PULL * host_pull_s), 3) if kind not in LINKLESS else None,
        "host_pull_s": round(host_pull_s, 4),
        "train_s": round(train_s, 4),
        **{mode: {key: round(value, 4) for key, value in found.items()} for mode, found in middle.items()},
        "arrival_of_train": round(fast["arrival_s"] / train_s, 2),
        "exposed_of_pull": round(fast["exposed_s"] / fast["pull_s"], 3),
        "exposed_of_blocking_pull": round(fast["exposed_s"] / middle["blocking"]["pull_s"], 3),
        "exposed_of_host_pull": round(fast["exposed_s"] / host_pull_s, 3),
        "blocking_of_overlapped": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "memory": {name: round(value / num_bytes, 2) for name, value in most.items()},
        "rows": {mode: [{key: round(v, 4) for key, v in row.items()} for row in found] for mode, found in rows.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 1.0], help="sizes of the model")
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--engines", type=int, default=2, help="on one host (default: 2)")
    parser.add_argument("--folder", type=Path, help="the disk that `files` is measured on; default: that of /tmp")
    asked = parser.parse_args()
    if INSIDE not in os.environ:
        inside = f'ip link set lo up && exec {sys.executable} -m benchmarks.overlap "$@"'
        command = ["unshare", "--net", "sh", "-c", inside, "overlap", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    found = []
    for kind in asked.stores:
        for size in asked.gb:
            found.append(measure_store(kind, int(size * 1e9), asked.engines, asked.folder))
            shown = {key: value for key, value in found[-1].items() if key != "rows"}
            print(shown, file=sys.stderr, flush=True)
    if asked.json:
        figures = {"load": os.getloadavg(), "stores": found}
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
