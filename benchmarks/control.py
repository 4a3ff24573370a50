"""What the control plane itself costs. `python -m benchmarks.control`.

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
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.world import RolloutWorld, World
from rollart.events.log import EventLog, LogHandle
from rollart.launch.driver import facts, rare_collections
from rollart.launch.simulation import simulated_world
from rollart.ports import Cluster, Trainer
from rollart.records.format import FOLDER, files_of
from rollart.records.recorder import FileRecorder
from rollart.report.fold import SummaryFold
from rollart.sim.clock import VirtualLoop
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink
from rollart.sim.trainer import SimJournal
from rollart.types import (
    Completion,
    Endpoint,
    EngineSpec,
    Finish,
    GenerateRequest,
    Message,
    Observation,
    Program,
    Span,
    SwapReport,
    Task,
    Tokens,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)

ENGINES = 256
LIVE = 10_000
TURNS = 10
GROUP = 8
ANSWER_TOKENS = 32
ROUNDS = 3
CALLS = 100_000
"""Generate calls measured in one run, at the least."""
_RNG = np.random.default_rng(0)
TOKENS = _RNG.integers(0, 150_000, 1 << 14, dtype=np.int32)
LOGPROBS = -_RNG.exponential(1.0, 1 << 14).astype(np.float32)
"""Real arrays that nothing compresses well."""
ANSWER = " ".join(str(token) for token in TOKENS[:20])
"""What 32 tokens are as text, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one run."""

    calls: int
    seconds: float
    """CPU seconds of this process, the recorder's thread included."""
    trajectories: int = 0
    """Recorded."""
    dropped: int = 0
    disk_bytes: int = 0

    @property
    def call_s(self) -> float:
        return self.seconds / self.calls


def measure() -> dict[str, Any]:
    """The figures of `python -m benchmarks.control`."""
    sizes = (1_000, LIVE, 50_000)
    weight = _bytes_per_trajectory()  # first: later, memory that was freed would be used again
    cost_s: dict[int, list[float]] = {size: [] for size in sizes}
    recorded: list[Cost] = []
    for number in range(ROUNDS):
        for size in sizes:
            plain, recording = _in_turn(size, first=number % 2) if size == LIVE else (run_turns(size), None)
            cost_s[size].append(plain.call_s)
            recorded += [recording] if recording else []
            print(
                f"round {number + 1}/{ROUNDS}: {size} live, {1 / plain.call_s:,.0f} calls/s",
                file=sys.stderr,
                flush=True,
            )
    median = {size: statistics.median(values) for size, values in cost_s.items()}
    return {
        "calls_per_s": round(1 / median[LIVE]),
        "calls_per_s_rounds": [round(1 / value) for value in cost_s[LIVE]],
        "us_per_call": {str(size): round(value * 1e6, 1) for size, value in median.items()},
        "us_per_call_rounds": {str(size): [round(v * 1e6, 1) for v in values] for size, values in cost_s.items()},
        "growth_1k_to_50k": round(median[50_000] / median[1_000], 3),
        "bytes_per_trajectory": weight,
        "recording": recording_figures(cost_s[LIVE], recorded),
        "engines": ENGINES,
        "live": LIVE,
        "clock": "CPU seconds of one core; the waits are on the virtual clock",
        "python": platform.python_version(),
    }


def recording_figures(plain_s: list[float], recorded: list[Cost]) -> dict[str, Any]:
    """What keeping every trajectory costs: CPU seconds of a call with it, by those of one without, in each round."""
    ratios = [cost.call_s / without_s for without_s, cost in zip(plain_s, recorded, strict=True)]
    return {
        "cost_ratio": round(statistics.median(ratios), 4),
        "cost_ratio_rounds": [round(ratio, 4) for ratio in ratios],
        "calls_per_s": round(1 / statistics.median(cost.call_s for cost in recorded)),
        "trajectories": recorded[-1].trajectories,
        "dropped": sum(cost.dropped for cost in recorded),
        "disk_bytes_per_trajectory": round(recorded[-1].disk_bytes / max(1, recorded[-1].trajectories)),
    }


def _in_turn(live: int, *, first: int) -> tuple[Cost, Cost]:
    """One run without recording and one with it, in this order or the other."""
    if first:
        recorded = run_turns(live, record=True)
        return run_turns(live), recorded
    return run_turns(live), run_turns(live, record=True)


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


def run_turns(live: int, *, record: bool = False) -> Cost:
    """One run with this many live trajectories."""
    steps = max(2, CALLS // (live // 2 * TURNS))
    gc.collect()
    with (
        tempfile.TemporaryDirectory() as folder,
        rare_collections(),
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        return runner.run(_measure(_job(live, steps), Path(folder), record=record))


async def _measure(job: Job, folder: Path, *, record: bool) -> Cost:
    loop = asyncio.get_running_loop()
    log = EventLog(loop.time, folder / "events.jsonl")
    summary = SummaryFold()
    log.read_by(summary.read)
    log.emit(facts(job, clock="virtual"))
    recorder = FileRecorder(folder / FOLDER) if record else None
    coordinator = Coordinator(job, _world(job, log, ANSWER_TOKENS, _Host(), recorder), LogHandle(log))
    began_s = time.process_time()
    await coordinator.run()
    log.close()
    if recorder is not None:
        recorder.close()
    seconds = time.process_time() - began_s
    result = summary.result()
    files = files_of(folder / FOLDER)
    return Cost(
        calls=sum(pool.requests for pool in result.pools.values()),
        seconds=seconds,
        trajectories=sum(result.trajectories.values()) if record else 0,
        dropped=recorder.dropped if recorder is not None else 0,
        disk_bytes=sum(path.stat().st_size for path in files),
    )


def _bytes_per_trajectory(count: int = 2_000, history_tokens: int = 4_096) -> int:
    """Resident memory of one live trajectory with a history of this many tokens, all in real arrays."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_weigh(count, history_tokens))


async def _weigh(count: int, history_tokens: int) -> int:
    job = _job(count, 1)
    loop = asyncio.get_running_loop()
    log = EventLog(loop.time)
    stop_at = TURNS - 1
    host = _Host()
    world = _world(job, log, history_tokens // stop_at // 2, host)
    host.stop_at = stop_at
    host.context_tokens = history_tokens // stop_at // 2
    coordinator = Coordinator(job, world, LogHandle(log))
    gc.collect()
    before = _resident_bytes()
    running = loop.create_task(coordinator.run())
    while host.stopped < count // 2 // GROUP * 2 * GROUP:  # noqa: ASYNC110 - on the virtual clock
        await asyncio.sleep(10.0)
    used = _resident_bytes() - before
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return used // host.stopped


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _world(job: Job, log: EventLog, answer_tokens: int, host: "_Host", recorder: FileRecorder | None = None) -> World:
    world = simulated_world(job, log, Faults((), log), SimJournal(), SimLink(1e12), SimLink(1e12))
    assert isinstance(world.rollout, RolloutWorld)
    cluster = _Cluster(world.cluster, answer_tokens)
    rollout = replace(world.rollout, cluster=cluster, host=host, tokenizer=_Tokenizer(host), recorder=recorder)
    return replace(world, cluster=cluster, rollout=rollout, recorder=recorder)


class _Tokenizer:
    def __init__(self, host: "_Host") -> None:
        self._host = host

    def render(self, messages: object, *, fresh: bool, after: Tokens | None = None, tools: object = ()) -> Tokens:
        return TOKENS[: self._host.context_tokens].copy()

    def decode(self, tokens: Tokens) -> str:
        return ANSWER

    def parse(self, tokens: Tokens) -> Message:
        return Message(role="assistant", content=ANSWER)


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
        self._first = zlib.crc32(name.encode())
        """No two answers are alike."""
        self._count = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self._count += 1
        await asyncio.sleep(1.0 + (self._count * 7919 % 1000) / 1000)
        first = (self._first + self._count * 7919) % (len(TOKENS) - self._answer_tokens)
        return Completion(
            tokens=TOKENS[first : first + self._answer_tokens].copy(),
            logprobs=LOGPROBS[first : first + self._answer_tokens].copy(),
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


_SEEN = Observation(messages=(Message(role="user", content=ANSWER),))
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

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        raise AssertionError("no program plays here")

    async def close(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main(measure))
