"""An engine whose cache does not hold all sessions, for real and simulated. `python -m benchmarks.full_caches`.

Agents come back after each step of their environment, and find their cache, unless others needed the room in between.
Everything is real: one embedded engine, environments that take a moment, trainer, weights. The job is that of
`benchmarks.modes` in mode `sync+`, with long observations and short answers; only how many sessions there are differs,
and the engine's `kv_tokens` is room for `FIT` of them. The simulator is fitted on the runs with the fewest sessions,
whose caches all fit: of what happens beyond, it has seen nothing. `computed` are prompt tokens that the engine computed
for one session, against those that are new: 1 where every cache is found.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.command import main
from benchmarks.modes import JOB, SKIPPED_STEPS, make_model
from rollart.config.job import Job
from rollart.config.load import build_job, load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.simulation import simulate
from rollart.launch.training import train
from rollart.sim.fit import fit_runs

TURNS, SHOWN, ANSWER = 8, 190, 8
CONTEXT = 880
"""Tokens of a session at its end."""
FIT = 32
SESSIONS = (16, 32, 48, 96)
STEPS = 5


def job_of(sessions: int, seed: int) -> Job:
    changes = (
        *("mode=sync+", f"seed={seed}", f"train.steps={STEPS}", "checkpoint.every=1000"),
        *(f"tasks.0.args={{shown: {SHOWN}}}", f"tasks.0.max_turns={TURNS}", f"tasks.0.max_tokens={ANSWER}"),
        *("tasks.0.latency={kind: normal, mean: 0.3, sigma: 0.1}", "model.context_tokens=1024"),
        *(f"rollout.groups_per_step={sessions // 8}", f"pools.0.engines.kv_tokens={FIT * CONTEXT}"),
    )
    return load_job(JOB, changes)


def read(folder: Path) -> dict[str, float]:
    """Of a run: seconds of rollout in a step, and prompt tokens computed for each new one."""
    began_s, rollout_s, new, computed = 0.0, [], 0, 0
    prompts: dict[str, int] = {}
    for event in read_events(folder / "events.jsonl"):
        match event:
            case schema.SwapEnd() | schema.Started():
                began_s = event.t
            case schema.Batch():
                rollout_s.append(event.t - began_s)
            case schema.Send():
                session = event.id.rpartition("/")[0]
                new += event.prompt - prompts.get(session, 0)
                prompts[session] = event.prompt
            case schema.Said():
                computed += event.prefill
    return {"rollout_s": statistics.median(rollout_s[SKIPPED_STEPS:]), "computed": computed / new}


def real_run(sessions: int, number: int, folder: Path) -> dict[str, float]:
    result = train(job_of(sessions, number), folder)
    if result.summary.state != "finished" or result.violations:
        raise JobError(f"{folder}: {result.summary.reason} {result.violations}")
    found = read(folder)
    print(f"round {number + 1}, {sessions} sessions: {found}", file=sys.stderr, flush=True)
    return found


def simulated_run(sessions: int, number: int, profile: dict[str, Any], folder: Path) -> dict[str, float]:
    job = job_of(sessions, number)
    given = job.model_dump(mode="json", exclude_unset=True)
    given["sim"] = profile
    for task in given["tasks"]:
        task.pop("latency", None)
    simulate(build_job(given), folder)
    return read(folder)


def measure(rounds: int = 3, out: Path | None = None) -> dict[str, Any]:
    """Run directories are kept under `out`."""
    out = out or Path("runs") / f"bench-full-caches-{time.strftime('%Y%m%d-%H%M%S')}"
    make_model(Path(job_of(FIT, 0).model.path))
    real: dict[int, list[dict[str, float]]] = {sessions: [] for sessions in SESSIONS}
    for number in range(rounds):
        for sessions in SESSIONS if number % 2 == 0 else SESSIONS[::-1]:
            real[sessions].append(real_run(sessions, number, out / f"{sessions}-{number}"))
    fitted = min(SESSIONS)
    profile = fit_runs([out / f"{fitted}-{number}" for number in range(rounds)]).profile()
    simulated = {
        sessions: [
            simulated_run(sessions, number, profile, out / f"simulated-{sessions}-{number}") for number in range(rounds)
        ]
        for sessions in SESSIONS
    }
    return {
        "room_for_sessions": FIT,
        "fitted_on": fitted,
        "sessions": {
            sessions: {
                "rollout_s": _median(real[sessions], "rollout_s"),
                "rounds_s": [round(run["rollout_s"], 3) for run in real[sessions]],
                "simulated_s": _median(simulated[sessions], "rollout_s"),
                "computed": _median(real[sessions], "computed"),
                "simulated_computed": _median(simulated[sessions], "computed"),
            }
            for sessions in SESSIONS
        },
        "runs": str(out),
    }


def _median(runs: list[dict[str, float]], figure: str) -> float:
    return round(statistics.median(run[figure] for run in runs), 3)


if __name__ == "__main__":
    sys.exit(main(measure))
