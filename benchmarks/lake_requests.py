"""What a request costs who plays the lake in words. `python -m benchmarks.lake_requests MODEL --coordinators 2`.

`benchmarks/trl_chat.yaml` with 256 walks a step: real environments, rendering, rewards, journal and processes. Engines
and trainer compute nothing: an answer is a word, or eight tokens of nonsense, and comes after as many ticks as it has
tokens. So what is measured is Python: CPU time of the process that plays, of it and its shards where there are several.
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rollart.launch.worker as worker
from rollart.config.load import load_job
from rollart.events import schema
from rollart.events.schema import Event
from rollart.launch.training import train
from rollart.model.tokenizer import ChatTokenizer
from rollart.types import (
    Batch,
    Completion,
    Finish,
    GenerateRequest,
    Span,
    StepResult,
    SwapReport,
    Tokens,
    WeightManifest,
    WeightVersion,
)
from rollart.workers.setup import WorkerSetup

JOB = Path(__file__).with_name("trl_chat.yaml")
START = "benchmarks.lake_requests:start"
TICK_S = 0.003
WORDS = (*["left"] * 5, *["up"] * 5, "Up", "Left.", "right", "down", "Right")
"""A walk that mostly meets walls has about ten turns, as one of a model that has learnt nothing."""
NONSENSE = 6
"""Other answers, beside these."""
SKIPPED_STEPS = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TickingEngine:
    """Answers by chance."""

    def __init__(self, name: str, answers: Sequence[Tokens]) -> None:
        self._name, self._answers = name, answers
        self._rng = random.Random(name)
        self._version = self._ticks = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """When each is answered."""
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._ticks += 1
            due = [future for at, future in self._waiting if at <= self._ticks]
            self._waiting = [entry for entry in self._waiting if entry[0] > self._ticks]
            for future in due:
                if not future.done():
                    future.set_result(None)

    async def generate(self, request: GenerateRequest) -> Completion:
        tokens = self._rng.choice(self._answers)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._ticks + len(tokens), answered))
        await answered
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            spans=(Span(self._version, len(tokens)),),
            finish=Finish.STOP if len(tokens) < request.sampling.max_tokens else Finish.LENGTH,
            engine=self._name,
        )

    async def abort(self, request_id: str) -> int:
        return self._ticks

    async def stage(self, version: WeightVersion) -> None:
        return None

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        self._version = manifest.version
        return SwapReport(version=manifest.version)


class IdleTrainer:
    async def train_step(self, batch: Batch) -> StepResult:
        return StepResult(version=batch.step + 1)

    async def publish(self, version: WeightVersion) -> WeightManifest:
        return WeightManifest(version=version, buckets=())

    async def save(self) -> str:
        return "nothing"

    async def restore(self, reference: str) -> WeightVersion:
        return 0


async def start(body: str, ranks: Sequence[object] = ()) -> Any:
    """In a worker's process, from its set-up."""
    setup = WorkerSetup.model_validate_json(body)
    if setup.role == "shard":
        worker.START = START
        return await worker.build(setup)
    if setup.role == "trainer":
        return IdleTrainer()
    tokenizer = ChatTokenizer(setup.job.model.path)
    rng = np.random.default_rng(0)
    words = [np.append(tokenizer.encode(word), np.int32(tokenizer.end_of_turn)) for word in WORDS]
    nonsense = [rng.integers(100, 40_000, 8, dtype=np.int32) for _ in range(NONSENSE)]
    return TickingEngine(setup.name, [*words, *nonsense])


def measure(model: Path, steps: int, coordinators: int) -> dict[str, Any]:
    worker.START = START
    pools = [
        {"name": "gpu", "hardware": "cpu", "engines": {"count": 4, "max_batch": 128, "kv_tokens": 65536}},
        {"name": "environments", "slots": 1024, "isolation": "inline"},
    ]
    changed = {
        "model.path": str(model.resolve()),
        "rollout.groups_per_step": 16,
        "tasks.0.group_size": 16,
        "cluster.coordinators": coordinators,
        "pools": pools,
        "train": {"pool": "gpu", "steps": steps},
    }
    job = load_job(JOB, [f"{key}={json.dumps(value)}" for key, value in changed.items()])
    answered, marks = [0], list[tuple[float, int, dict[str, float]]]()

    def read(event: Event) -> None:
        if isinstance(event, schema.Said):
            answered[0] += 1
        if isinstance(event, schema.StepEnd) and event.step in (SKIPPED_STEPS, steps - 1):
            marks.append((event.t, answered[0], _cpu_s()))

    with tempfile.TemporaryDirectory() as folder:
        summary = train(job, Path(folder) / "run", watch=lambda summary, waits: read).summary
    (began_s, before, cpu_before), (ended_s, after, cpu_after) = marks
    calls = after - before
    return {
        "state": summary.state,
        "requests": calls,
        "requests_per_s": round(calls / (ended_s - began_s)),
        "cpu_us_per_request": {
            name: round(1e6 * (cpu_s - cpu_before[name]) / calls, 1) for name, cpu_s in cpu_after.items()
        },
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_s() -> dict[str, float]:
    """Of this process, and of the shards that it started."""
    found = {"coordinator": time.process_time()}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            log = os.readlink(entry / "fd" / "2") if int(fields[1]) == os.getpid() else ""
        except OSError:
            continue  # it ended meanwhile
        if shard := re.search(r"(shard-\d+)\.log", log):
            found[shard.group(1)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory with SmolLM2's tokenizer")
    parser.add_argument("--coordinators", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.steps, options.coordinators)))


if __name__ == "__main__":
    main()
