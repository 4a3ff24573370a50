"""What a generate call costs the coordinator over Ray actors and over local processes. `python -m benchmarks.cluster`.

The engines are stubs that answer at once, so what is measured is the way there and back: packing, transport, waking
up. Cost is the CPU time of the coordinator's process, all its threads; where few cores are shared by many workers, as
on a laptop, calls per second are those of the whole machine.
"""

import asyncio
import gc
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import main
from benchmarks.control import run_turns
from benchmarks.stub import ANSWER_TOKENS, StubEngine, start
from rollart.cluster.local import LocalCluster
from rollart.config.load import build_job
from rollart.launch.books import say
from rollart.types import EngineSpec, GenerateRequest, Needs, Sampling
from rollart.workers.handles import WorkerEngine
from rollart.workers.setup import StoreSetup, WorkerSetup
from rollart.workers.wire import pack, unpack

SIZES = (8, 16, 32, 64)
ROUNDS = 5
CALLS = 1_000
"""In one round."""
IN_FLIGHT = 64
"""Calls under way at a time, over all engines: the same at every size, so that only the number of engines grows."""
ALONE = 100
"""Calls one after the other, for the latency."""
PROMPT_TOKENS = 512
POOL = "stubs"


def measure() -> dict[str, Any]:
    """The figures of `python -m benchmarks.cluster`."""
    serialise_us = _serialise_us()
    control_us = 1e6 * run_turns(1_000).call_s
    over = {"local": asyncio.run(_over(_local)), "ray": asyncio.run(_over(_ray))}
    cost = {name: figures["engines"][str(SIZES[0])]["controller_us_per_call"] for name, figures in over.items()}
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "in_flight": IN_FLIGHT,
        "calls_per_round": CALLS,
        "rounds": ROUNDS,
        **over,
        "controller_us_per_call": {
            "control_plane": round(control_us, 1),
            "serialise": round(serialise_us, 1),
            **{f"transport_{name}": round(value - serialise_us, 1) for name, value in cost.items()},
        },
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


async def _over(make: Callable[[Path], tuple[Any, Callable[[], Sequence[int]]]]) -> dict[str, Any]:
    """All sizes over one kind of cluster, the engines added to those that are there."""
    with tempfile.TemporaryDirectory() as directory:
        cluster, pids = make(Path(directory))
        engines: list[WorkerEngine] = []
        figures: dict[str, Any] = {}
        try:
            for size in SIZES:
                while len(engines) < size:
                    batch = [_spec(len(engines) + number) for number in range(min(8, size - len(engines)))]
                    engines += await asyncio.gather(*(cluster.engine(spec) for spec in batch))
                figures[str(size)] = await _rounds(engines)
                say(f"{type(cluster).__name__}, {size} engines: {figures[str(size)]}")
            memory_mb = statistics.median(_memory_mb(pid) for pid in pids())
        finally:
            await cluster.close()
    return {"engines": figures, "worker_mb": round(memory_mb, 1)}


def _setup(directory: Path) -> WorkerSetup:
    pools = [{"name": POOL, "engines": {}, "slots": 1}]
    job = build_job({"name": "stubs", "tasks": [{"name": "a"}], "pools": pools})
    return WorkerSetup(job=job, out=directory, store=StoreSetup(weights=job.weights, run_id="stubs", model=""))


def _local(directory: Path) -> tuple[LocalCluster, Callable[[], Sequence[int]]]:
    cluster = LocalCluster("benchmarks.stub:start", _setup(directory))
    return cluster, lambda: [worker.pid or 0 for worker in cluster.workers.values()]


def _ray(directory: Path) -> tuple[Any, Callable[[], Sequence[int]]]:
    from rollart.cluster.ray import RayCluster

    nothing = Needs(cpus=0.0)
    cluster = RayCluster(start, _setup(directory), engine_needs={POOL: nothing}, trainer_needs=nothing, room=[nothing])
    return cluster, lambda: [worker.places[name].pid for name, worker in cluster.workers.items()]


async def _rounds(engines: Sequence[WorkerEngine]) -> dict[str, Any]:
    await _calls(engines, CALLS // 4)  # warm
    rates, costs = [], []
    for _ in range(ROUNDS):
        gc.collect()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await _calls(engines, CALLS)
        costs.append(1e6 * (time.process_time() - cpu_s) / CALLS)
        rates.append(CALLS / (time.perf_counter() - wall_s))
    alone_ms = []
    for number in range(ALONE):
        began_s = time.perf_counter()
        await engines[number % len(engines)].generate(_request(number))
        alone_ms.append(1e3 * (time.perf_counter() - began_s))
    return {
        "calls_per_s": round(statistics.median(rates)),
        "calls_per_s_rounds": [round(rate) for rate in rates],
        "controller_us_per_call": round(statistics.median(costs), 1),
        "controller_us_rounds": [round(cost, 1) for cost in costs],
        "latency_ms_p50": round(statistics.median(alone_ms), 2),
        "latency_ms_p99": round(statistics.quantiles(alone_ms, n=100)[98], 2),
    }


async def _calls(engines: Sequence[WorkerEngine], count: int) -> None:
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await engines[number % len(engines)].generate(_request(number))

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))


def _serialise_us() -> float:
    """Packing a request and unpacking its answer: the coordinator's half of the work, in CPU time."""
    request = _request(0)
    answer = pack(asyncio.run(StubEngine("x").generate(request)))
    rounds = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(CALLS):
            pack([request])
            unpack(answer)
        rounds.append(1e6 * (time.process_time() - began_s) / CALLS)
    return statistics.median(rounds)


def _request(number: int) -> GenerateRequest:
    return GenerateRequest(
        id=f"g{number}.0.0/0",
        session=f"g{number}.0.0",
        domain="a",
        turn=0,
        prompt=(np.arange(PROMPT_TOKENS, dtype=np.int32),),
        prompt_tokens=PROMPT_TOKENS,
        sampling=Sampling(max_tokens=ANSWER_TOKENS),
    )


def _spec(number: int) -> EngineSpec:
    return EngineSpec(id=f"{POOL}-{number}", pool=POOL, type="stub", hardware="cpu", gpus=1)


def _memory_mb(pid: int) -> float:
    """Of one worker, its share of pages that it has in common with others included."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    sys.exit(main(measure))
