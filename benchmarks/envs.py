"""What sick environments cost the healthy, and what a warm pool saves: `python -m benchmarks.envs --json`.

64 places of a host each play one environment after another through the port, as trajectories do: 4 steps of 1 s, which
the environment sleeps through, so that a busy machine matters little. Of the places, 5 % have environments that hang
(each is given up after 2.5 s) and 10 % such that end their process in their first step, for the whole round; each
failure is tried again after a back-off, as in a job (1 s, then 2 s, then a new group). The figure is healthy episodes a
second and place. Many short rounds with and without the sick take turns, each after a moment in which all processes
start; `ratio` is the median of the pairs' ratios: 1 where the sick cost the healthy nothing. `interval` is where that
median lies in 95 % of draws of as many pairs from these (the bootstrap). `load` is the machine's, at the end of each
round. Then, in sandboxes, the seconds from the opening of an environment to its first observation, one after
another, with and without others started ahead.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollart.config.load import build_job
from rollart.config.settings import LimitSettings
from rollart.errors import EnvError
from rollart.launch.worker import env_host
from rollart.policy.redundancy import backoff_s
from rollart.ports import EnvHost
from rollart.types import Task, TrajectoryId
from rollart.workers.sandbox import missing

TASKS = str(Path(__file__).with_name("sick_tasks.py"))
PLACES = 64
HANGING, CRASHING = 0.05, 0.10
DRAWS = 4000
LIMIT_S = 2.5
STEPS, STEP_S = 4, 1.0
WARM = 4


def host_for(isolation: str, slots: int, folder: Path, warm: int = 0) -> Any:
    task = {"name": "sick", "use": TASKS, "isolation": isolation, **({"warm": warm} if warm else {})}
    job = build_job({"name": "envs", "tasks": [task], "pools": [{"name": "cpu", "engines": {}, "slots": slots}]})
    return env_host(job, {"sick": job.isolation(job.tasks[0])}, {}, slots=slots, log_dir=folder)


def problem(kind: str) -> Task:
    payload = {"kind": kind, "steps": STEPS, "step_s": STEP_S}
    return Task(id=f"sick/{kind}", domain="sick", index=0, payload=payload)


async def episode(host: EnvHost, kind: str, place: int) -> bool:
    """Whether it came to its end."""
    env = await host.open(problem(kind), TrajectoryId(f"g{place}", 0, 0))
    try:
        async with asyncio.timeout(LIMIT_S * STEPS):
            await env.reset()
        done = False
        while not done:
            async with asyncio.timeout(LIMIT_S):
                done = (await env.step("on")).done
        return True
    except (EnvError, TimeoutError):
        return False
    finally:
        await env.close()


async def round_of(host: EnvHost, sick: bool, seconds: float) -> tuple[float, dict[str, int]]:
    """Healthy episodes a second and place, and the failures by kind."""
    hanging, crashing = (round(PLACES * share) if sick else 0 for share in (HANGING, CRASHING))
    kinds = ["hang"] * hanging + ["crash"] * crashing
    kinds += ["well"] * (PLACES - len(kinds))
    until_s = time.monotonic() + seconds
    ended: dict[str, int] = {"well": 0, "hang": 0, "crash": 0, "well, failed": 0}

    healthy_s: list[float] = []
    """When each healthy place ended its last episode: who waits for a hung one after that is no loss of theirs."""

    async def place(number: int, kind: str) -> None:
        tries = 0
        while time.monotonic() < until_s:
            finished = await episode(host, kind, number)
            ended[kind if finished or kind != "well" else "well, failed"] += 1
            if not finished:
                tries = tries % (LimitSettings().attempts - 1) + 1
                await asyncio.sleep(backoff_s(LimitSettings().backoff_s, tries))
        if kind == "well":
            healthy_s.append(time.monotonic() - began_s)

    began_s = time.monotonic()
    await asyncio.gather(*(place(number, kind) for number, kind in enumerate(kinds)))
    return ended["well"] / sum(healthy_s), ended


async def sickness(isolation: str, rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    rates: dict[bool, list[float]] = {True: [], False: []}
    counted: dict[str, int] = {}
    load: list[float] = []
    host = host_for(isolation, PLACES, folder)
    try:
        for number in range(rounds):
            for sick in (True, False) if number % 2 else (False, True):
                await round_of(host, False, 0.5)  # processes start; those of the sick were ended
                rate, ended = await round_of(host, sick, seconds)
                rates[sick].append(rate)
                load.append(round(os.getloadavg()[0], 1))
                for kind, count in ended.items():
                    counted[kind] = counted.get(kind, 0) + count
                say(f"{isolation}, round {number + 1}/{rounds}, {'sick' if sick else 'healthy'}: {rate:.3f}")
    finally:
        await host.close()
    ratios = [sick / well for sick, well in zip(rates[True], rates[False], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "interval": interval_of(ratios),
        "rounds": [round(ratio, 4) for ratio in ratios],
        "episodes_per_s_and_place": {"with_sick": rates[True], "without": rates[False]},
        "episodes": counted,
        "load": load,
    }


def interval_of(ratios: list[float]) -> list[float]:
    """In which the median lies in 95 % of draws."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return [round(medians[DRAWS // 40], 4), round(medians[-DRAWS // 40], 4)]


async def resets(count: int, folder: Path) -> dict[str, Any]:
    """Seconds from `open` to the first observation, with a pause between two, as a model's answers make it."""
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    hosts = {"cold": host_for("sandbox", 1, folder / "cold"), "warm": host_for("sandbox", 1, folder / "warm", WARM)}
    try:
        for host in hosts.values():
            await episode(host, "well", 0)
        for _ in range(count):
            for name, host in hosts.items():
                began_s = time.monotonic()
                env = await host.open(problem("well"), TrajectoryId("g0", 0, 0))
                await env.reset()
                found[name].append(time.monotonic() - began_s)
                await env.close()
                await asyncio.sleep(1.0)
    finally:
        for host in hosts.values():
            await host.close()
    return {
        name: {"p50_s": round(statistics.median(s), 4), "max_s": round(max(s), 4), "all_s": [round(x, 4) for x in s]}
        for name, s in found.items()
    }


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def measure(rounds: int, seconds: float, count: int, isolations: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollart-envs-") as folder:
        figures: dict[str, Any] = {
            "places": PLACES,
            "hanging": round(PLACES * HANGING),
            "crashing": round(PLACES * CRASHING),
            **{name: await sickness(name, rounds, seconds, Path(folder) / name) for name in isolations},
        }
        if count:
            figures["first_observation"] = missing() or await resets(count, Path(folder))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pairs (default: 20)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round (default: 4)")
    parser.add_argument("--resets", type=int, default=10, help="environments opened of each kind (default: 10)")
    parser.add_argument("--isolation", nargs="*", default=["process"], help="process, sandbox (default: process)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.rounds, args.seconds, args.resets, args.isolation))
    print(json.dumps(figures, indent=2) if args.json else "\n".join(f"{k:>18}  {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
