"""Simulated jobs for `rollart bench affinity`, several at a time. What comes out does not depend on how many."""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import msgspec
import orjson

from benchmarks.affinity_mixes import CHEAP, DEAR, GROUP, STALENESS, Mix
from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate
from rollart.policy.profile import TaskProfile

COMPUTE, BANDWIDTH = "compute", "bandwidth"
KINDS = {COMPUTE: DEAR, BANDWIDTH: CHEAP}

Fleet = Mapping[str, int]
"""Pool -> engines of one GPU each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job to simulate."""

    mix: Mix
    affinity: Mapping[str, str]
    """Task -> pool, or "auto"."""
    fleet: Fleet
    steps: int

    @property
    def text(self) -> str:
        where = "auto" if set(self.affinity.values()) == {"auto"} else "/".join(self.affinity.values())
        return f"{self.mix.name} ({' '.join(self.mix.tasks)}), {fleet_text(self.fleet)}, {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one simulated job did."""

    ends_s: tuple[float, ...]
    """When each step ended."""
    plans: tuple[schema.Affinity, ...]
    """The looks at the assignment that changed it, and the first."""
    profiles: Mapping[str, TaskProfile]
    """As they were measured in the end."""

    @property
    def step_s(self) -> float:
        """Mean step time of the whole run, start-up included."""
        return self.ends_s[-1] / len(self.ends_s)

    def step_beyond_s(self, steps: int) -> float:
        """Mean time of the steps after this many."""
        return (self.ends_s[-1] - self.ends_s[steps - 1]) / (len(self.ends_s) - steps)

    def step_after_s(self, begin_s: float) -> float:
        """Mean time of the steps that ended after this."""
        before = [end_s for end_s in self.ends_s if end_s <= begin_s]
        since_s = before[-1] if before else 0.0
        return (self.ends_s[-1] - since_s) / (len(self.ends_s) - len(before))


def fleet_text(fleet: Fleet) -> str:
    return " + ".join(f"{count} {KINDS[pool].name}" for pool, count in fleet.items())


def auto(mix: Mix, fleet: Fleet, steps: int) -> Trial:
    return Trial(mix=mix, affinity=dict.fromkeys(mix.tasks, "auto"), fleet=fleet, steps=steps)


def play_all(trials: Sequence[Trial], workers: int) -> list[Run]:
    """The runs of the trials, in their order; one line on stderr for each that is done."""
    began_s = time.monotonic()
    runs: list[Run] = []
    if workers == 1:
        for trial in trials:
            runs.append(play(trial))
            _tell(trials, runs, began_s)
        return runs
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for run in pool.map(play, trials):
            runs.append(run)
            _tell(trials, runs, began_s)
    return runs


def _tell(trials: Sequence[Trial], runs: Sequence[Run], began_s: float) -> None:
    done, passed_s = len(runs), time.monotonic() - began_s
    text = f"{done}/{len(trials)}, {passed_s:.0f} s: {trials[done - 1].text}: {runs[-1].step_s:.1f} s a step"
    print(text, file=sys.stderr, flush=True)


def play(trial: Trial) -> Run:
    """One job, simulated. Training and weight links are too fast to matter."""
    mix, slots = trial.mix, 2 * (STALENESS + 1) * GROUP * trial.mix.groups_per_step
    job = build_job(
        {
            "name": "bench-affinity",
            "tasks": [
                {
                    "name": name,
                    "weight": mix.weights[name],
                    "group_size": GROUP,
                    "max_turns": 50,
                    "max_tokens": 8192,
                    "affinity": trial.affinity[name],
                }
                for name in mix.tasks
            ],
            "rollout": {
                "groups_per_step": mix.groups_per_step,
                "staleness": STALENESS,
                "zero_variance": "keep",
            },
            "pools": [
                *(
                    {"name": name, "hardware": KINDS[name].name, "engines": {"count": n}}
                    for name, n in trial.fleet.items()
                ),
                {"name": "environments", "slots": slots},
            ],
            "train": {"steps": trial.steps},
            "checkpoint": {"every": 10 * trial.steps},
            "sim": {
                "tasks": mix.tasks,
                "train": {"step_s": 1.0},
                "links": {"push_gb_s": 200, "pull_gb_s": 200},
                "engine": {"load_gb_s": 200},
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        summary = simulate(job, out, audit=False).summary
        assert summary.state == "finished", summary.reason
        rows = [orjson.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
        looks = [event for event in read_events(out / "events.jsonl") if isinstance(event, schema.Affinity)]
    return Run(
        ends_s=tuple(row["time_s"] for row in rows),
        plans=tuple(event for number, event in enumerate(looks) if number == 0 or event.moves),
        profiles={task: _profile(found) for task, found in looks[-1].profiles.items()},
    )


def _profile(found: schema.Profile) -> TaskProfile:
    """As it was written into the event."""
    values = msgspec.structs.asdict(found)
    spread = values.pop("decode_spread")
    return TaskProfile(**values, decode_squares=found.decode_tokens**2 * (1.0 + spread**2))
