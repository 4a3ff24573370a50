"""The five modes on one real job, and what the simulator says of them. `python -m benchmarks.modes`.

Everything is real: processes, model, environments, rewards, trainer, weights. `jobs/modes.yaml` fixes the job; the mode
is the only thing that changes. Engine and trainer have one core each; the coordinator, with the environments and the
reward worker, is on the trainer's core, so that generation is the same in all modes. Rounds are interleaved, each
with a seed of its own, and the modes of a round meet the same environment latencies.
Afterwards `rollart sim fit` on the `sync+` runs alone, and the coordinator's CPU time per call in these where it shares
the trainer's core, give the profile with which all five modes are simulated. `--job jobs/gpu_modes.yaml` is the same on
one GPU, engine and trainer side by side. `--bounds 2 3` runs `rollart` with these bounds too, in the same rounds. The
first steps of each run, in which nothing overlaps yet and kernels are compiled, are left out of what is measured and of
what is fitted alike (`--skip`). `--steps sync=8 rollart=24` gives these modes other numbers of steps than the job does,
real and simulated: the fast ones, whose steps differ more, can so be measured for as long as the slow ones. Runs that
`--out` has already are read, not run again: so rounds can be added to, and with `--read` nothing is run: the simulator
can be asked on another machine than the one that was measured, of the modes that are there.
"""

import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command import main
from benchmarks.endless import endless_tokenizer
from rollart.config.job import Job
from rollart.config.load import build_job, load_job
from rollart.config.settings import MODES
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.launch.simulation import simulate
from rollart.launch.training import train
from rollart.report.summary import Summary
from rollart.sim.fit import fit_runs
from rollart.types import JsonObject

JOB = Path(__file__).resolve().parents[1] / "jobs" / "modes.yaml"
ROUNDS = 5
FITTED = "sync+"
"""The mode whose runs the simulator is fitted on."""
Runs = dict[str, list[dict[str, Any]]]
"""Of each side: the figures of its runs."""
FIGURES = "figures.json"
"""In a run directory: what this benchmark found in it."""
SKIPPED_STEPS = 2
"""Steps at the start of each run that are not counted: nothing overlaps yet. With a bound above 1 as many more, and as
many more are run: all groups that the bound allows begin at once, and fill the first steps."""
SIMULATED_ROUNDS = 5
"""At least so many seeds are simulated: that costs little, and their mean is steadier."""


def measure(
    rounds: int = ROUNDS,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    job: Path = JOB,
    bounds: Sequence[int] = (),
    skip: int = SKIPPED_STEPS,
    only: Sequence[str] = (),
    read: bool = False,
    steps: Sequence[str] = (),
) -> dict[str, Any]:
    """Real rounds, then the fit, then the simulated ones. Run directories are kept under `out`, and read from there."""
    if unknown := [mode for mode in only if mode not in MODES]:
        raise JobError(f"--only: {', '.join(unknown)} is no mode; choose among {', '.join(MODES)}")
    if read and out is None:
        raise JobError("--read: name the directory of the runs with --out")
    longer = _steps_of(steps)
    sides = {mode: [*overrides, f"mode={mode}", *longer.get(mode, ())] for mode in only or MODES}
    given = load_job(job, overrides)
    for bound in bounds:
        own = _so_many(given.train.steps + max(0, bound - 1))
        sides[f"rollart-bound-{bound}"] = [*overrides, "mode=rollart", f"rollout.staleness={bound}", *own]
    numbers = {side: load_job(job, own).train.steps for side, own in sides.items()}
    if min(numbers.values()) < skip + 2:
        fewest = min(numbers.values())
        raise JobError(f"train.steps: {fewest} leaves no step to measure; give {skip + 2} or more")
    out = out or Path("runs") / f"bench-modes-{time.strftime('%Y%m%d-%H%M%S')}"
    if (
        job == JOB
        and not read
        and not all((out / f"{side}-{number}" / FIGURES).exists() for side in sides for number in range(rounds))
    ):
        make_model(Path(given.model.path))
    began_s = time.monotonic()
    bench = Bench(job, sides, rounds, out, skip)
    real, failed = bench.real(read)
    simulated, profile, residuals = bench.simulated(FITTED, list(real))
    return {
        **compared(real, simulated),
        "max_steps": {mode: max(run["max_steps"] for run in runs) for mode, runs in real.items()},
        "max_age": {mode: max(run["max_age"] for run in runs) for mode, runs in real.items()},
        "train_s": {mode: round(statistics.fmean(run["train_s"] for run in runs), 4) for mode, runs in real.items()},
        "engine_busy": {mode: round(statistics.fmean(run["busy"] for run in runs), 3) for mode, runs in real.items()},
        "coordinator_cpu_ms_per_call": _cpu_per_call(real),
        "settings": _settings(given, rounds, skip) | {"steps": numbers},
        "profile": profile,
        "residuals": residuals,
        **({"failed": failed} if failed else {}),
        "runs": str(out),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _steps_of(given: Sequence[str]) -> dict[str, list[str]]:
    """By mode, what its job says otherwise."""
    found: dict[str, list[str]] = {}
    for one in given:
        mode, _, number = one.partition("=")
        if mode not in MODES or not number.isdigit():
            raise JobError(f"--steps: {one} is no mode=number; the modes are {', '.join(MODES)}")
        found[mode] = _so_many(int(number))
    return found


def _so_many(steps: int) -> list[str]:
    """One checkpoint at the end, as the job has it."""
    return [f"train.steps={steps}", f"checkpoint.every={steps}"]


class Bench:
    """Variants of one job, by name: run in interleaved rounds, each round with a seed of its own, and simulated."""

    def __init__(self, job: Path, sides: Mapping[str, Sequence[str]], rounds: int, out: Path, skip: int) -> None:
        """`sides`: what each overrides. `skip`: steps at the start of each run that are left out."""
        self._job = job
        self._sides = sides
        self._rounds = rounds
        self._out = out
        self._skip = skip
        self._given = load_job(job, next(iter(sides.values())))

    def folders(self, side: str) -> list[Path]:
        """Of its runs that ended well."""
        folders = [self._out / f"{side}-{number}" for number in range(self._rounds)]
        return [folder for folder in folders if (folder / FIGURES).exists()]

    def real(self, read: bool, seconds: float = math.inf) -> tuple[Runs, dict[str, str]]:
        """What the runs of each side show, and why those failed that did. `read`: run nothing. `seconds`: begin no
        further run after this long."""
        began_s = time.monotonic()
        real: Runs = {side: [] for side in self._sides}
        failed: dict[str, str] = {}
        with _on_cores(self._given.train.cores):
            for number in range(self._rounds):
                for side in _rotated(list(self._sides), number):
                    known = (self._out / f"{side}-{number}" / FIGURES).exists()
                    if not known and (read or time.monotonic() - began_s > seconds):
                        continue
                    try:
                        run = _real_run(self._seeded(side, number), side, number, self._out, self._skip)
                    except JobError as error:  # what the others show is not lost for it
                        failed[f"{side}-{number}"] = str(error)
                        _tell(f"round {number + 1}, {side}: failed: {error}")
                    else:
                        real[side].append(run)
        return {side: runs for side, runs in real.items() if runs}, failed

    def simulated(self, fitted: str, sides: Sequence[str]) -> tuple[Runs, dict[str, Any], JsonObject]:
        """These sides with the profile that is fitted to the runs of one of them; the profile; and how well that
        explains these runs. Nothing, where there are none."""
        folders = self.folders(fitted)
        if not folders:
            return {}, {}, {}
        fit = fit_runs(folders, self._skip)
        profile: dict[str, Any] = fit.profile()
        call_s = _cpu_per_call({fitted: [_known(folder / FIGURES) for folder in folders]})[fitted] / 1000
        if self._given.train.cores:  # which are the coordinator's as well
            profile["train"]["call_s"] = call_s
        else:
            profile["control"] = {"call_s": call_s}
            profile["engine"]["call_s"] = max(0.0, profile["engine"]["call_s"] - call_s)  # it is in the calls as well
        numbers = range(max(self._rounds, SIMULATED_ROUNDS))
        found = {
            side: [_simulated_run(self._seeded(side, number), profile, self._skip) for number in numbers]
            for side in sides
        }
        return found, profile, fit.quality()

    def _seeded(self, side: str, number: int) -> Job:
        return load_job(self._job, [*self._sides[side], f"seed={self._given.seed + number}"])


def compared(real: Runs, simulated: Runs) -> dict[str, Any]:
    """Seconds a step of each side: measured, simulated, and how far they differ from run to run."""
    means = {side: _mean(runs) for side, runs in real.items()}
    predicted = {side: _mean(runs) for side, runs in simulated.items()}
    return {
        "real": means,
        "simulated": predicted,
        "simulated_over_real": {side: round(predicted[side] / means[side], 3) for side in predicted if side in means},
        "rounds": {side: [run["step_s"] for run in runs] for side, runs in real.items()},
        "spread": {side: _spread(runs) for side, runs in real.items()},
        "simulated_spread": {side: _spread(runs) for side, runs in simulated.items()},
        "waste": {side: _waste(runs) for side, runs in real.items()},
    }


def make_model(path: Path) -> None:
    """The tiny network with random weights and no end token: every answer has as many tokens as it may."""
    if (path / "config.json").exists():
        return
    import torch

    from rollart_recipes.tiny import tiny_model

    tokenizer = endless_tokenizer()
    torch.manual_seed(0)
    model: Any = tiny_model(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer.save_pretrained(path)
    model.eval().save_pretrained(path)


def _real_run(job: Job, mode: str, number: int, out: Path, skip: int) -> dict[str, Any]:
    folder = out / f"{mode}-{number}"
    if (folder / FIGURES).exists():
        return {**_known(folder / FIGURES), **_step_times(job, folder, skip)}
    marks: dict[type[Event], float] = {}
    began_s = time.monotonic()
    last_s, ended_s = [0.0], [began_s]

    def read(event: Event) -> None:
        marks[type(event)] = time.process_time()
        if isinstance(event, schema.Started):
            _tell(f"round {number + 1}, {mode}: started after {time.monotonic() - began_s:.1f} s")
        if isinstance(event, schema.StepEnd):
            took_s, last_s[0], ended_s[0] = event.t - last_s[0], event.t, time.monotonic()
            _tell(f"round {number + 1}, {mode}: step {event.step}: {took_s:.2f} s, training {event.train_s:.2f} s")

    result = train(job, folder, watch=lambda summary, waits: read)
    _tell(f"round {number + 1}, {mode}: over {time.monotonic() - ended_s[0]:.1f} s after its last step")
    if result.summary.state != "finished" or result.violations:
        raise JobError(f"{folder}: {result.summary.reason} {result.violations}")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes, of which nothing is read any more
    run = {**_figures(job, result.summary, folder, skip), "cpu_s": marks[schema.StepEnd] - marks[schema.Started]}
    (folder / FIGURES).write_bytes(msgspec.json.encode(run))
    _tell(f"round {number + 1}, {mode}: {run['step_s']} s a step; {time.monotonic() - began_s:.1f} s in all")
    return run


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _known(figures: Path) -> dict[str, Any]:
    known: dict[str, Any] = msgspec.json.decode(figures.read_bytes())
    return known


def _simulated_run(job: Job, profile: dict[str, Any], skip: int) -> dict[str, Any]:
    import tempfile

    raw = job.model_dump(mode="json")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        return _figures(job, simulate(build_job({**raw, "sim": profile}), path).summary, path, skip)


def _step_times(job: Job, folder: Path, skip: int) -> dict[str, Any]:
    """Of the steps that count."""
    ends = [event for event in read_events(folder / "events.jsonl") if isinstance(event, schema.StepEnd)]
    skipped = skip + max(0, job.rollout.staleness - 1)
    return {
        "step_s": round((ends[-1].t - ends[skipped - 1].t) / (len(ends) - skipped), 4),
        "train_s": statistics.fmean(event.train_s for event in ends[skipped:]),
    }


def _figures(job: Job, summary: Summary, folder: Path, skip: int) -> dict[str, Any]:
    return {
        **_step_times(job, folder, skip),
        "max_steps": summary.staleness.max_steps,
        "max_age": summary.staleness.max,
        "waste": msgspec.to_builtins(summary.waste),
        "trajectories": sum(summary.trajectories.values()),
        "calls": sum(pool.requests for pool in summary.pools.values()),
        "busy": max(pool.utilisation for pool in summary.pools.values()),
    }


def _mean(runs: Sequence[dict[str, Any]]) -> float:
    return round(statistics.fmean(run["step_s"] for run in runs), 4)


def _spread(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = [run["step_s"] for run in runs]
    return {"min": min(values), "max": max(values)}


def _waste(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all rounds: trajectories played, and those thrown away, by why."""
    reasons = {how: sum(run["waste"][how]["trajectories"] for run in runs) for how in runs[0]["waste"]}
    played = sum(run["trajectories"] for run in runs)
    return {
        "trajectories": played,
        "wasted": {how: count for how, count in reasons.items() if count},
        "share": round(sum(reasons.values()) / played, 4),
    }


def _cpu_per_call(real: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    return {
        mode: round(1000 * statistics.fmean(run["cpu_s"] / run["calls"] for run in runs), 3)
        for mode, runs in real.items()
    }


def _settings(job: Job, rounds: int, skip: int) -> dict[str, Any]:
    task = job.tasks[0]
    assert task.latency is not None
    return {
        "job": job.name,
        "rounds": rounds,
        "skipped_steps": skip,
        "groups_per_step": job.rollout.groups_per_step,
        "group_size": task.group_size,
        "turns": task.max_turns,
        "answer_tokens": task.max_tokens,
        "latency_s": task.latency.model_dump(exclude_defaults=True),
        "cores": {
            "engine": list(job.engine_pools[0].engines.cores if job.engine_pools[0].engines else ()),
            "trainer": list(job.train.cores),
            "coordinator": list(job.train.cores),
        },
        "fitted_on": FITTED,
    }


def _rotated(modes: list[str], by: int) -> list[str]:
    """Each round begins with another mode, so that a slow drift of the machine falls on all alike."""
    by %= len(modes)
    return modes[by:] + modes[:by]


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This process, which is the coordinator's, keeps to these cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    sys.exit(main(measure))
