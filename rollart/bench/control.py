"""What the control plane itself costs. `rollart bench control`.

Whole EnvManager turns, with events written and every check on, against engines and environments that do nothing but
wait and return real arrays; on the virtual clock, so that what is measured is Python, not waiting.
"""

import asyncio
import gc
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator, World
from rollart.events import EventLog, LogHandle
from rollart.ports import Cluster, Trainer
from rollart.run import facts, rare_collections
from rollart.sim.clock import VirtualLoop
from rollart.sim.faults import Faults
from rollart.sim.links import Link
from rollart.sim.trainer import SimJournal
from rollart.summary import Summary
from rollart.types import (
    Completion,
    EngineSpec,
    Finish,
    GenerateRequest,
    Message,
    Observation,
    Span,
    SwapReport,
    Task,
    Tokens,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)
from rollart.worlds import simulated_world

ENGINES = 256
TURNS = 10
GROUP = 8
ANSWER_TOKENS = 32
ROUNDS = 3
CALLS = 100_000
"""Generate calls measured in one run, at the least."""


def measure() -> dict[str, Any]:
    """The figures of `rollart bench control`."""
    sizes = (1_000, 10_000, 50_000)
    weight = _bytes_per_trajectory()  # first: later, memory that was freed would be used again
    cost_s: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(ROUNDS):
        for size in sizes:
            calls, seconds = run_turns(size)
            cost_s[size].append(seconds / calls)
            print(
                f"round {number + 1}/{ROUNDS}: {size} live, {calls / seconds:,.0f} calls/s", file=sys.stderr, flush=True
            )
    median = {size: statistics.median(values) for size, values in cost_s.items()}
    return {
        "calls_per_s": round(1 / median[10_000]),
        "calls_per_s_rounds": [round(1 / value) for value in cost_s[10_000]],
        "us_per_call": {str(size): round(value * 1e6, 1) for size, value in median.items()},
        "us_per_call_rounds": {str(size): [round(v * 1e6, 1) for v in values] for size, values in cost_s.items()},
        "growth_1k_to_50k": round(median[50_000] / median[1_000], 3),
        "bytes_per_trajectory": weight,
        "engines": ENGINES,
        "live": 10_000,
        "clock": "CPU seconds of one core; the waits are on the virtual clock",
        "python": platform.python_version(),
    }


def _job(live: int, steps: int) -> Job:
    return build_job(
        {
            "name": "bench-control",
            "tasks": [{"name": "turns", "group_size": GROUP, "max_turns": TURNS, "max_tokens": 4096}],
            "rollout": {"groups_per_step": max(1, live // GROUP // 2), "staleness": 1},
            "pools": [
                {"name": "one", "hardware": "h800", "engines": {"count": ENGINES // 2}},
                {"name": "two", "hardware": "h20", "engines": {"count": ENGINES - ENGINES // 2}},
                {"name": "environments", "slots": live},
            ],
            "train": {"steps": steps},
            "checkpoint": {"every": 1000},
            "sim": {"model": "qwen3-0.6b", "train": {"step_s": 1.0}},
        }
    )


def run_turns(live: int) -> tuple[int, float]:
    """(generate calls, CPU seconds) of one run with so many live trajectories."""
    steps = max(2, CALLS // (live // 2 * TURNS))
    gc.collect()
    with (
        tempfile.TemporaryDirectory() as folder,
        rare_collections(),
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        return runner.run(_measure(_job(live, steps), Path(folder) / "events.jsonl"))


async def _measure(job: Job, path: Path) -> tuple[int, float]:
    loop = asyncio.get_running_loop()
    log = EventLog(loop.time, path)
    summary = Summary()
    log.read_by(summary.read)
    log.emit("run", facts(job, clock="virtual"))
    world = _world(job, log, ANSWER_TOKENS)
    coordinator = Coordinator(job, world, LogHandle(log))
    began_s = time.process_time()
    await coordinator.run()
    log.close()
    seconds = time.process_time() - began_s
    pools = summary.result()["pools"]
    return sum(pool["requests"] for pool in pools.values()), seconds


def _bytes_per_trajectory(count: int = 2_000, history_tokens: int = 4_096) -> int:
    """Resident memory of one live trajectory with a history of so many tokens, all in real arrays."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_weigh(count, history_tokens))


async def _weigh(count: int, history_tokens: int) -> int:
    job = _job(count, 1)
    loop = asyncio.get_running_loop()
    log = EventLog(loop.time)
    stop_at = TURNS - 1
    world = _world(job, log, history_tokens // stop_at // 2)
    assert isinstance(world.host, _Host)
    world.host.stop_at = stop_at
    world.host.context_tokens = history_tokens // stop_at // 2
    coordinator = Coordinator(job, world, LogHandle(log))
    gc.collect()
    before = _resident_bytes()
    running = loop.create_task(coordinator.run())
    while world.host.stopped < count // 2 // GROUP * 2 * GROUP:  # noqa: ASYNC110 - on the virtual clock
        await asyncio.sleep(10.0)
    used = _resident_bytes() - before
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return used // world.host.stopped


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _world(job: Job, log: EventLog, answer_tokens: int) -> World:
    world = simulated_world(job, log, Faults((), log), SimJournal(), Link(1e12), Link(1e12))
    host = _Host()
    return replace(world, cluster=_Cluster(world.cluster, answer_tokens), host=host, tokenizer=_Tokenizer(host))


class _Tokenizer:
    def __init__(self, host: "_Host") -> None:
        self._host = host

    def render(self, messages: object, *, fresh: bool, after: Tokens | None = None) -> Tokens:
        return np.ones(self._host.context_tokens, dtype=np.int32)

    def decode(self, tokens: Tokens) -> str:
        return ""


class _Cluster:
    """Stub engines; the simulated trainer."""

    def __init__(self, cluster: Cluster, answer_tokens: int) -> None:
        self._cluster = cluster
        self._answer_tokens = answer_tokens

    async def engine(self, spec: EngineSpec) -> "_Engine":
        return _Engine(spec.id, self._answer_tokens)

    async def trainer(self) -> Trainer:
        return await self._cluster.trainer()

    async def close(self) -> None:
        await self._cluster.close()


class _Engine:
    def __init__(self, name: str, answer_tokens: int) -> None:
        self._name = name
        self._answer_tokens = answer_tokens
        self._version: WeightVersion = 0
        self._count = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self._count += 1
        await asyncio.sleep(1.0 + (self._count * 7919 % 1000) / 1000)
        return Completion(
            tokens=np.ones(self._answer_tokens, dtype=np.int32),
            logprobs=np.zeros(self._answer_tokens, dtype=np.float32),
            spans=(Span(self._version, self._answer_tokens),),
            finish=Finish.STOP,
            engine=self._name,
            prefill_tokens=32,
            busy_s=0.01,
        )

    async def abort(self, request_id: str) -> int:
        return self._count

    async def stage(self, version: WeightVersion) -> None:
        pass

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        self._version = manifest.version
        return SwapReport(version=manifest.version)


class _Host:
    def __init__(self) -> None:
        self.context_tokens = 32
        self.stop_at = -1
        self.stopped = 0

    async def open(self, task: Task, trajectory: TrajectoryId) -> "_Env":
        return _Env(self)


_SEEN = Observation(messages=(Message(role="user", content=""),))
_DONE = Observation(done=True)


class _Env:
    def __init__(self, host: _Host) -> None:
        self._host = host
        self._turn = 0

    async def reset(self) -> Observation:
        await asyncio.sleep(0.5)
        return _SEEN

    async def step(self, action: str) -> Observation:
        self._turn += 1
        await asyncio.sleep(0.5)
        if self._turn == self._host.stop_at:
            self._host.stopped += 1
            await asyncio.get_running_loop().create_future()
        return _DONE if self._turn >= TURNS else _SEEN

    async def close(self) -> None:
        pass
