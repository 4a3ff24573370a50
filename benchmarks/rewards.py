"""Bursts of trajectories against functions from zero, and against a fixed pool: `python -m benchmarks.rewards --json`.

A burst is 512 trajectories that end within 2 s, as at the end of a rollout. The job's own scorer and client score them
(retries, back-off, `on_outage: wait`), over HTTP on loopback, by real function processes that
`benchmarks.function_platform` starts and ends. The function waits for about 1 s with a heavy tail (lognormal, sigma 1,
at most 10 s) and fails in 2 % of its calls; an instance loads for 0.8 s beside its own start, and takes 8 calls at a
time. Two bursts, 40 s apart (an instance that is idle for 4 s is ended):

- `functions`: from none to 8 instances; `hedged`: one burst with `hedge: 0.95`;
- `fixed`: as many instances as `functions` had in the mean, always there: the same cost;
- `killed`: one burst, in the middle of which the platform is killed with all instances, and comes back after 8 s;
- `shared` and `apart`: three jobs, whose bursts of 170 begin 6 s apart, on one platform of up to 9 instances, and on
  three of up to 3.

`rollout_s` is from the first end of a trajectory to the last score; `p50_s` and `p99_s` are of one score, retries and
cold starts included; `utilisation` is the seconds of calls by those of slots that were reserved. `lost` and `twice`
count the scores by the job's events: every trajectory must have one `reward`, with the value that is right.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np

from benchmarks.function_platform import a_port
from rollart.config.load import build_job
from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.movement import Movement
from rollart.control.scoring import Scorer
from rollart.control.world import World
from rollart.errors import RewardError
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.rewards.http import HttpRewards
from rollart.types import Completion, Finish, Span, Status, Task, Tokens, Trajectory, TrajectoryId, Turn

ROOT = Path(__file__).resolve().parents[1]
FUNCTION = f"{Path(__file__).with_name('verdicts.py')}:score"
BURST, SPREAD_S = 512, 2.0
MEAN_S, SIGMA, MOST_S, ERRORS = 1.0, 1.0, 10.0, 0.02
PAYLOAD = {"mu": math.log(MEAN_S) - SIGMA**2 / 2, "sigma": SIGMA, "most_s": MOST_S, "errors": ERRORS}
SLOTS, MOST, IDLE_S = 8, 8, 4.0
APART_S, BURSTS = 40.0, 2
JOBS, THIRD, OFFSET_S = 3, 170, 6.0
BACK_S = 8.0


class Service:
    """A platform in a process group of its own."""

    def __init__(self, *, fewest: int = 0, most: int = MOST) -> None:
        self.port = a_port()
        words = ["--fewest", fewest, "--most", most, "--slots", SLOTS, "--idle", IDLE_S]
        self._command = [sys.executable, "-m", "benchmarks.function_platform", str(self.port), FUNCTION]
        self._command += [str(word) for word in words]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=environment, start_new_session=True)

    def kill(self) -> None:
        """With everything that it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()

    def told(self) -> dict[str, Any]:
        return cast("dict[str, Any]", httpx.get(self.url, trust_env=False, timeout=20).json())

    def wait(self) -> None:
        until_s = time.monotonic() + 120
        while True:
            try:
                self.told()
                return
            except httpx.TransportError:
                assert time.monotonic() < until_s
                assert self._process.poll() is None
                time.sleep(0.1)


@contextmanager
def services(count: int = 1, **settings: int) -> Iterator[list[Service]]:
    made = [Service(**settings) for _ in range(count)]
    try:
        for one in made:
            one.wait()
        yield made
    finally:
        for one in made:
            one.stop()


def decode(tokens: Tokens) -> str:
    return "words" * len(tokens)


class Job:
    """The part of a job that scores: its scorer, its client, and its events."""

    def __init__(self, name: str, url: str, **rewards: Any) -> None:
        settings = {"type": "http", "url": url, "concurrency": BURST, "on_outage": "wait", "timeout_s": 60, **rewards}
        pools = [{"name": "p", "engines": {}, "slots": 1}]
        self.job = build_job({"name": name, "tasks": [{"name": "t"}], "pools": pools, "rewards": settings})
        self.name = name
        self.events: list[Event] = []
        log = EventLog(asyncio.get_running_loop().time)
        log.read_by(self._watch)
        self._client = HttpRewards(self.job.rewards, decode)
        self._movement = Movement()
        context = JobContext(self.job, LogHandle(log))
        ports = SimpleNamespace(rewards=self._client, task_rewards={}, stand_ins={}, dead_letters=None)
        self._scorer = Scorer(context, self._movement, cast(World, ports))
        self._enough, self._awaited = asyncio.Event(), 0
        self.seconds: list[float] = []
        self.asked: dict[str, int] = {}

    async def burst(self, name: str, size: int) -> float:
        """Returns the seconds from the first end to the last score."""
        dice = random.Random(f"{self.name}/{name}")
        began_s = time.monotonic()
        await asyncio.gather(*(self._one(name, number, dice.uniform(0, SPREAD_S)) for number in range(size)))
        return time.monotonic() - began_s

    async def _one(self, name: str, number: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        task = Task(id=f"t/{number}", domain="t", index=number, payload={**PAYLOAD, "number": number})
        trajectory_id = TrajectoryId(f"{self.name}-{name}-{number}", 0, 0)
        attempt = Attempt(trajectory_id, task, self.job.tasks[0], ("p",))
        attempt.mover = self._movement.begin(attempt.key, "t")
        self.asked[attempt.key] = number
        began_s = time.monotonic()
        try:
            await self._scorer.score(attempt, trajectory(trajectory_id, task))
        except RewardError as error:
            sys.stderr.write(f"{attempt.key}: {error}\n")
        self.seconds.append(time.monotonic() - began_s)

    async def scored(self, count: int) -> None:
        """Wait for so many."""
        self._awaited = count
        await self._enough.wait()

    def _watch(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, schema.Reward):
            self._awaited -= 1
            if self._awaited == 0:
                self._enough.set()

    def figures(self) -> dict[str, Any]:
        scored = [event for event in self.events if isinstance(event, schema.Reward)]
        times = Counter(event.id for event in scored)
        back = [event for event in self.events if isinstance(event, schema.RewardBack)]
        ordered = sorted(self.seconds)
        return {
            "trajectories": len(self.asked),
            "p50_s": round(statistics.median(ordered), 2),
            "p99_s": round(ordered[int(0.99 * len(ordered))], 2),
            "lost": sum(key not in times for key in self.asked),
            "twice": sum(count > 1 for count in times.values()),
            "wrong": sum(event.value != float(self.asked[event.id] % 7) for event in scored),
            "failed_calls": sum(isinstance(event, schema.RewardFailed) for event in self.events),
            "cold_starts_seen": sum(event.cold_s > 0 for event in scored),
            "outages": [round(event.s, 2) for event in back],
        }

    async def close(self) -> None:
        await self._client.close()


def trajectory(trajectory_id: TrajectoryId, task: Task) -> Trajectory:
    """Two turns of 200 tokens."""
    completion = Completion(
        tokens=np.zeros(200, dtype=np.int32),
        logprobs=np.zeros(200, dtype=np.float32),
        spans=(Span(0, 200),),
        finish=Finish.STOP,
        engine="e",
    )
    turn = Turn(context=np.zeros(50, dtype=np.int32), fresh=False, completion=completion, reward=0.0)
    return Trajectory(id=trajectory_id, task=task, turns=(turn, turn), status=Status.DONE, born=0, oldest=0)


def used(all_told: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of platforms, over so many seconds."""
    instance_s = sum(told["instance_s"] for told in all_told)
    starts = [start_s for told in all_told for start_s in told["start_s"]]
    return {
        "mean_instances": round(instance_s / seconds, 2),
        "instance_s": round(instance_s, 1),
        "utilisation": round(sum(told["busy_s"] for told in all_told) / (instance_s * SLOTS), 3),
        "calls": sum(told["calls"] for told in all_told),
        "starts": len(starts),
        "start_s": round(statistics.median(starts), 2) if starts else None,
    }


async def bursts(
    name: str, *, fewest: int = 0, most: int = MOST, count: int = BURSTS, **rewards: Any
) -> dict[str, Any]:
    with services(fewest=fewest, most=most) as [service]:
        before = service.told()
        job = Job(name, service.url, **rewards)
        began_s, took = time.monotonic(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, began_s + number * APART_S - time.monotonic()))
            took.append(await job.burst(str(number), BURST))
        await asyncio.sleep(max(0.0, began_s + count * APART_S - time.monotonic()))
        told = await asyncio.to_thread(service.told)
        told["instance_s"] -= before["instance_s"]
        found = {"rollout_s": [round(s, 2) for s in took], **job.figures(), **used([told], time.monotonic() - began_s)}
        await job.close()
    say(f"{name}: {found}")
    return found


async def killed() -> dict[str, Any]:
    with services() as [service]:
        job = Job("killed", service.url)

        async def kill() -> None:
            await job.scored(BURST // 4)
            await asyncio.to_thread(service.kill)
            await asyncio.sleep(BACK_S)
            service.start()

        kills = asyncio.create_task(kill())
        took = await job.burst("0", BURST)
        await kills
        found = {"rollout_s": [round(took, 2)], **job.figures()}
        await job.close()
    say(f"killed: {found}")
    return found


async def three(name: str, *, platforms: int) -> dict[str, Any]:
    with services(platforms, most=9 // platforms) as made:
        jobs = [Job(f"{name}-{number}", made[number % platforms].url) for number in range(JOBS)]
        began_s = time.monotonic()

        async def play(number: int) -> list[float]:
            took = []
            for burst in range(BURSTS):
                due_s = began_s + number * OFFSET_S + burst * 0.75 * APART_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                took.append(await jobs[number].burst(str(burst), THIRD))
            return took

        took = [s for one in await asyncio.gather(*(play(number) for number in range(JOBS))) for s in one]
        await asyncio.sleep(IDLE_S + 1.0)
        told = [await asyncio.to_thread(service.told) for service in made]
        each = [job.figures() for job in jobs]
        found = {
            "rollout_s": [round(s, 2) for s in took],
            "mean_rollout_s": round(statistics.fmean(took), 2),
            "p99_s": [one["p99_s"] for one in each],
            **{what: sum(one[what] for one in each) for what in ("trajectories", "lost", "twice", "wrong")},
            **used(told, time.monotonic() - began_s),
        }
        for job in jobs:
            await job.close()
    say(f"{name}: {found}")
    return found


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def measure(only: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"burst": BURST, "cores": os.cpu_count(), "load": os.getloadavg()}
    if not only or {"functions", "fixed"} & set(only):
        found["functions"] = await bursts("functions")
        fixed = max(1, round(found["functions"]["mean_instances"]))
        found["fixed"] = await bursts("fixed", fewest=fixed, most=fixed)
    if not only or "hedged" in only:
        found["hedged"] = await bursts("hedged", count=1, hedge=0.95)
    if not only or "killed" in only:
        found["killed"] = await killed()
    if not only or "three" in only:
        found["shared"] = await three("shared", platforms=1)
        found["apart"] = await three("apart", platforms=JOBS)
    found["load_after"] = os.getloadavg()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), choices=["functions", "fixed", "hedged", "killed", "three"])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    figures = asyncio.run(measure(given.only))
    print(json.dumps(figures, indent=2) if given.json else "\n".join(f"{k:>12}  {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
