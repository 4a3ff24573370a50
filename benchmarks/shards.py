"""What the first of several coordinators does for each generate call in another. `python -m benchmarks.shards`.

A simulated job is played by two shards. What they say is kept as it would cross to another process, and then read again
under the clock: unpacked, numbered, written, and folded into summary and audit, as the first coordinator of a real job
does. What it does for each batch and each swap is not in it: that does not grow with calls.
"""

import asyncio
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.command import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.world import Sharding
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle, Renumbering, packed, unpacked
from rollart.events.schema import Event
from rollart.launch.driver import facts, rare_collections
from rollart.launch.simulation import simulated_world
from rollart.ports import Events, Shard, ShardMessage
from rollart.report.audit import Audit
from rollart.report.fold import SummaryFold
from rollart.sim.clock import VirtualLoop
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink
from rollart.sim.trainer import SimJournal
from rollart.workers.wire import pack, unpack

SHARDS = 2
TURNS = 10
STEPS = 8
ROUNDS = 3


@dataclass
class Tape:
    """What the first coordinator writes, and what it hears, in order."""

    entries: list[tuple[int, bytes] | Event] = field(default_factory=list)
    """Of a shard, its number and what it said; else an event of the first coordinator's own."""
    heard: dict[int, Event] = field(default_factory=dict)
    calls: int = 0
    packing_s: float = 0.0
    """CPU seconds of the shards."""

    def said(self, number: int, messages: Sequence[ShardMessage]) -> None:
        for message in messages:
            if isinstance(message, Events):
                self.heard.update((id(event), event) for event in message.events)
                self.calls += sum(isinstance(event, schema.Said) for event in message.events)
        began_s = time.process_time()
        body = pack([packed(one.events) if isinstance(one, Events) else one for one in messages])
        self.packing_s += time.process_time() - began_s
        self.entries.append((number, body))

    def read(self, event: Event) -> None:
        if id(event) not in self.heard:
            self.entries.append(event)


class Taped:
    def __init__(self, shard: Shard, number: int, tape: Tape) -> None:
        self._shard = shard
        self._number = number
        self._tape = tape

    async def tell(self, messages: Sequence[ShardMessage]) -> None:
        await self._shard.tell(messages)

    async def news(self) -> Sequence[ShardMessage]:
        messages = await self._shard.news()
        self._tape.said(self._number, messages)
        return messages


def job() -> Job:
    spread = {"kind": "lognormal", "mean": 100, "sigma": 0.5}
    return build_job(
        {
            "name": "bench-shards",
            "tasks": [{"name": "turns", "group_size": 8, "max_turns": TURNS, "max_tokens": 4096}],
            "rollout": {"groups_per_step": 64, "staleness": 1},
            "pools": [
                {"name": "one", "hardware": "h800", "engines": {"count": 16}},
                {"name": "environments", "slots": 4096},
            ],
            "train": {"steps": STEPS},
            "checkpoint": {"every": 1000},
            "cluster": {"coordinators": SHARDS},
            "sim": {
                "model": "qwen3-0.6b",
                "train": {"step_s": 1.0},
                "tasks": {"turns": {"turns": TURNS, "prompt_tokens": 200, "answer_tokens": spread}},
            },
        }
    )


async def record(job: Job) -> Tape:
    """Play the job once."""
    tape = Tape()
    log = EventLog(asyncio.get_running_loop().time)
    log.read_by(tape.read)
    log.emit(facts(job, clock="virtual"))
    world = simulated_world(job, log, Faults((), log), SimJournal(), SimLink(1e12), SimLink(1e12))
    sharding = world.rollout
    assert isinstance(sharding, Sharding)

    async def start(number: int) -> Shard:
        return Taped(await sharding.start(number), number, tape)

    await Coordinator(job, replace(world, rollout=replace(sharding, start=start)), LogHandle(log)).run()
    await world.cluster.close()
    return tape


def listen(tape: Tape, folder: Path) -> float:
    """CPU seconds of hearing and writing all of it."""
    log = EventLog(time.monotonic, folder / "events.jsonl")
    log.read_by(SummaryFold().read)
    log.read_by(Audit().read)
    renumberings = [Renumbering() for _ in range(SHARDS)]
    began_s = time.process_time()
    for entry in tape.entries:
        if isinstance(entry, tuple):
            number, body = entry
            for message in unpack(body):
                if isinstance(message, bytes):
                    log.adopt(unpacked(message), renumberings[number])
        else:
            log.append(entry)
    log.close()
    return time.process_time() - began_s


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """The figures of `python -m benchmarks.shards`."""
    head_us: list[float] = []
    packing_us: list[float] = []
    calls = num_bytes = 0
    for number in range(rounds):
        with rare_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
            tape = runner.run(record(job()))
        with tempfile.TemporaryDirectory() as folder, rare_collections():
            head_us.append(1e6 * listen(tape, Path(folder)) / tape.calls)
        packing_us.append(1e6 * tape.packing_s / tape.calls)
        calls = tape.calls
        num_bytes = sum(len(entry[1]) for entry in tape.entries if isinstance(entry, tuple))
        print(f"round {number + 1}/{rounds}: {head_us[-1]:.1f} us a call", file=sys.stderr, flush=True)
    return {
        "head_us_per_call": round(statistics.median(head_us), 1),
        "head_us_per_call_rounds": [round(value, 1) for value in head_us],
        "packing_us_per_call": round(statistics.median(packing_us), 1),
        "packing_us_per_call_rounds": [round(value, 1) for value in packing_us],
        "bytes_per_call": round(num_bytes / calls),
        "calls": calls,
        "shards": SHARDS,
        "clock": "CPU seconds of one core",
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main(measure))
