"""How much is learnt in the same number of steps, by sides that differ in a few settings: several seeds of each.

    python -m benchmarks.equal_steps --job jobs/gpu_smollm2.yaml --side sync mode=sync --side rollart mode=rollart \\
        --seeds 0 1 2 --at-once 6 --set train.steps=100 --json

One run of a small model says little: two runs of one job and one seed end far apart. So each side is run with each
seed, and what counts is the mean over seeds. Up to `--at-once` runs go on beside each other: what they learn depends on
that only by the age of their data, which is reported; how long their steps take is what it is under that load. On a GPU
all processes are under one MPS daemon, so that they compute at the same time; `--set` takes the job's shares out, and
gives each run its part of the memory (docs/gpu.md has a command).

Reported of each side and task: held-out success at the end (`evaluation`), the mean reward of all steps and of the last
tenth, each as the mean over seeds with its standard error; ages; tokens clipped. With `--read` the runs of `--out` are
read again, and nothing is run.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.cluster.mps import Mps
from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.5
TELL_EVERY_S = 20.0
FIRST_STEPS = 3
"""In which nothing overlaps yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What one run says."""

    held_out: dict[str, float]
    """By task: sampled success of the last evaluation."""
    rewards: dict[str, list[tuple[float, float]]]
    """By task, of every step: the mean reward of those that were scored in it, and how many these were."""
    age_steps: float
    clipped: float
    """Share of the tokens."""
    thrown_away: int
    """Trajectories, as stale."""
    step_s: float
    """Median, without the first steps."""


def main() -> None:
    options = arguments()
    sides = [Side(name=words[0], overrides=tuple(words[1:])) for words in options.side]
    out = options.out or ROOT / "runs" / f"equal-steps-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = {(side.name, seed): out / f"{side.name}-{seed}" for seed in options.seeds for side in sides}
    if not options.read:
        play(options, sides, runs)
    found = {key: learnt(folder) for key, folder in runs.items() if is_finished(folder)}
    missing = [str(folder) for key, folder in runs.items() if key not in found]
    report = {
        "job": options.job.name,
        "overrides": options.set,
        "seeds": options.seeds,
        "at_once": options.at_once,
        "sides": {
            side.name: {
                "overrides": side.overrides,
                **summed([one for (name, _), one in found.items() if name == side.name]),
            }
            for side in sides
        },
        **({"missing": missing} if missing else {}),
        "runs": str(out),
    }
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "gpu_smollm2.yaml")
    parser.add_argument(
        *("--side", "-s"), nargs="+", action="append", required=True, metavar=("NAME", "KEY=VALUE"), help="one side"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all sides")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="a run that takes longer is stopped, and not counted"
    )
    parser.add_argument("--out", type=Path, help="where run directories are kept (default: below runs/)")
    parser.add_argument("--read", action="store_true", help="run nothing: take what --out has")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.read and options.out is None:
        parser.error("--read: name the directory of the runs with --out")
    return options


# --- the runs


def play(options: argparse.Namespace, sides: Sequence[Side], runs: dict[tuple[str, int], Path]) -> None:
    """All runs that are not there yet, seed by seed."""
    overrides = {side.name: [*options.set, *side.overrides] for side in sides}
    try:
        jobs = {name: load_job(options.job, given) for name, given in overrides.items()}
    except JobError as error:
        sys.exit(str(error))
    on_card = any(engines.device != "cpu" for job in jobs.values() for _, engines in job.engines)
    waiting = [key for key, folder in runs.items() if not is_finished(folder)]
    playing: dict[tuple[str, int], tuple[subprocess.Popen[bytes], float]] = {}
    told_s = began_s = time.monotonic()
    with ExitStack() as stack:
        environment = dict(os.environ)
        if on_card and options.at_once > 1:
            mps = Mps(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(mps.close)
            environment |= mps.variables
        try:
            while waiting or playing:
                while waiting and len(playing) < options.at_once:
                    key = waiting.pop(0)
                    playing[key] = (
                        begin(options.job, [*overrides[key[0]], f"seed={key[1]}"], runs[key], environment),
                        time.monotonic(),
                    )
                    tell(f"{key[0]}, seed {key[1]}: begun")
                time.sleep(POLL_S)
                for key, (process, since_s) in list(playing.items()):
                    if process.poll() is None and time.monotonic() - since_s > options.seconds:
                        process.terminate()
                        process.wait()
                    if process.poll() is not None:
                        del playing[key]
                        took_s = time.monotonic() - since_s
                        tell(f"{runs[key].name}: ended with {process.returncode} after {took_s:.0f} s: {runs[key]}.log")
                if time.monotonic() - told_s > TELL_EVERY_S:
                    told_s = time.monotonic()
                    steps = {f"{name}-{seed}": steps_of(runs[name, seed]) for name, seed in playing}
                    tell(f"{told_s - began_s:.0f} s: steps {steps}")
        finally:  # nobody goes on by itself where this process is interrupted
            for process, _ in playing.values():
                process.terminate()
                process.wait()


def begin(job: Path, overrides: Sequence[str], folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rollart.cli", "train", str(job), *overrides, "--out", str(folder)]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def is_finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and bool(json.loads(summary.read_text())["state"] == "finished")


def steps_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


# --- what they say


def learnt(folder: Path) -> Learnt:
    held_out: dict[str, float] = {}
    for event in read_events(folder / "events.jsonl"):
        if isinstance(event, schema.Eval) and event.play == "sampled" and event.reward is not None:
            held_out[event.task] = event.reward
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for key in row:
            if key.endswith("/reward/mean"):
                task = key.removesuffix("/reward/mean")
                rewards.setdefault(task, []).append((row[key], row[f"{task}/reward/scored"]))
    summary = json.loads((folder / "summary.json").read_text())
    return Learnt(
        held_out=held_out,
        rewards=rewards,
        age_steps=statistics.fmean(row.get("actor/age_mean", math.nan) for row in rows),
        clipped=statistics.fmean(row.get("actor/clipfrac", math.nan) for row in rows),
        thrown_away=summary["waste"]["stale"]["trajectories"],
        step_s=statistics.median(row["timing_s/step"] for row in rows[FIRST_STEPS:] or rows),
    )


def summed(runs: Sequence[Learnt]) -> dict[str, Any]:
    if not runs:
        return {"runs": 0}
    tasks = sorted(runs[0].rewards)
    return {
        "runs": len(runs),
        "held_out": {task: over_seeds([run.held_out.get(task, math.nan) for run in runs]) for task in tasks},
        "reward": {task: over_seeds([mean(run.rewards[task]) for run in runs]) for task in tasks},
        "reward_of_the_last_tenth": {
            task: over_seeds([mean(run.rewards[task][-(-9 * len(run.rewards[task]) // 10) :]) for run in runs])
            for task in tasks
        },
        "all_tasks_held_out": over_seeds(
            [statistics.fmean(run.held_out.values()) if run.held_out else math.nan for run in runs]
        ),
        "age_steps": over_seeds([run.age_steps for run in runs]),
        "clipped": over_seeds([run.clipped for run in runs]),
        "thrown_away": [run.thrown_away for run in runs],
        "step_s": over_seeds([run.step_s for run in runs]),
    }


def mean(rewards: Sequence[tuple[float, float]]) -> float:
    """Over trajectories, not over steps: where steps overlap rollout, the few that end in a short one are often short
    walks that went well."""
    count = sum(scored for _, scored in rewards)
    return sum(reward * scored for reward, scored in rewards) / count if count else math.nan


def over_seeds(found: Sequence[float]) -> dict[str, Any]:
    """Of those that are there: a run without an evaluation has no held-out success."""
    values = [value for value in found if not math.isnan(value)]
    if not values:
        return {"mean": None, "standard_error": None, "each": []}
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {
        "mean": round(statistics.fmean(values), 4),
        "standard_error": None if error is None else round(error, 4),
        "each": [round(value, 4) for value in values],
    }


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
