"""Commands that look at a job before it runs, or at a run during or after. They start nothing."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import orjson

from rollart.cli.output import print_json, resume_command, warn
from rollart.config.load import load_job, warnings
from rollart.errors import JobError
from rollart.events.log import Fold, event_files, read_events
from rollart.launch.rundir import summary_again
from rollart.records.reader import Archive, ReadTrajectory, TrajectoryFilter, pick
from rollart.report.audit import Audit
from rollart.report.explain import Explain, words
from rollart.report.reading import show_listing, show_trajectory
from rollart.report.show import show_pools, show_summary


def check(arguments: argparse.Namespace) -> int:
    import yaml

    from rollart.launch.checks import for_the_simulator, problems
    from rollart.launch.hub import with_models_here
    from rollart.launch.pools import bindings

    job = load_job(arguments.job, arguments.overrides)
    bound = bindings(job)
    simulated = for_the_simulator(job)
    wrong = [] if simulated else problems(job, arguments.out)
    job = job if simulated or wrong else with_models_here(job)
    if arguments.json:
        rows = [binding._asdict() for binding in bound]
        found = {"job": job.model_dump(mode="json"), "bindings": rows, "simulator_only": simulated}
        print_json({**found, "problems": wrong, "warnings": warnings(job)})
        return 2 if wrong else 0
    if wrong:
        raise JobError("\n".join(wrong))
    print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False), end="")
    print("# roles")
    for b in bound:
        devices = f", {b.devices} devices" if b.devices else ""
        print(f"#   {b.role} on {b.pool} ({b.hardware}): {b.workers} workers{devices}")
    if simulated:
        print("# for the simulator alone: it names no model.path and no tasks.use, which `rollart train` needs")
    warn(job)
    return 0


def pools(arguments: argparse.Namespace) -> int:
    from rollart.launch.resources import report

    found = report(load_job(arguments.job, arguments.overrides))
    if arguments.json:
        print_json(found)
    else:
        show_pools(found)
    return 1 if found.missing else 0


def audit(arguments: argparse.Namespace) -> int:
    audit = Audit()
    _read(arguments.run_dir, audit)
    violations = audit.finish() if audit.over else audit.violations
    if arguments.json:
        print_json({"violations": violations, "over": audit.over, "faults": audit.faults})
    else:
        print("\n".join(violations) or "every promise that events can show was kept")
        if not audit.over:
            print("the run has not said how it ended: it is still going on, or was killed. To go on with a real one:")
            print(resume_command(arguments.run_dir))
    return 1 if violations else 0


def show(arguments: argparse.Namespace) -> int:
    asked = (arguments.task, arguments.status, arguments.reward, arguments.version, arguments.order, arguments.limit)
    listing = arguments.list or arguments.export is not None or any(value is not None for value in asked)
    if arguments.trajectory is None and not listing:
        return _show_again(arguments)
    _events_of(arguments.run_dir)
    archive = Archive(arguments.run_dir)
    wanted = TrajectoryFilter(
        task=arguments.task, status=arguments.status, reward=arguments.reward, version=arguments.version
    )
    heads = pick(archive, wanted, arguments.trajectory, arguments.order)
    if arguments.export is not None:
        return _export(arguments.export, archive.whole(heads[: arguments.limit]))
    if arguments.trajectory is not None and len(heads) == 1:
        [head] = heads
        if arguments.json:
            print_json(archive.one(head).to_json())
        else:
            show_trajectory(archive.one(head), full=arguments.full)
        return 0
    listed = heads[: arguments.limit or 20]
    if arguments.json:
        print_json([head.to_json() for head in listed])
    else:
        show_listing(listed, len(heads), dropped=archive.dropped, first_is_gone=archive.first_is_gone)
    return 0


def _show_again(arguments: argparse.Namespace) -> int:
    """A run's table as at its end, or as far as it went."""
    summary = summary_again(_events_of(arguments.run_dir).parent)
    if arguments.json:
        print_json(summary)
        return 0
    show_summary(summary, arguments.run_dir)
    if summary.state != "finished":
        print(f"{summary.state}: {summary.reason or 'it has not said how it ended'}")
    return 0


def _export(name: str, trajectories: Iterator[ReadTrajectory]) -> int:
    if name != "-" and Path(name).exists():
        raise JobError(f"--export: {name} exists; give a file that does not, or remove it")
    count = 0
    with nullcontext(sys.stdout.buffer) if name == "-" else open(name, "wb") as file:
        for trajectory in trajectories:
            file.write(orjson.dumps(trajectory.to_json(), option=orjson.OPT_APPEND_NEWLINE))
            count += 1
        file.flush()
    print(f"{count} trajectories written", file=sys.stderr)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    explain = Explain()
    _read(arguments.run_dir, explain)
    if arguments.json:
        print_json(explain.result)
    else:
        print(words(explain.result))
    return 0


def _read(run_dir: Path, fold: Fold) -> None:
    for event in read_events(_events_of(run_dir)):
        fold.read(event)


def _events_of(run_dir: Path) -> Path:
    path = run_dir / "events.jsonl"
    if not event_files(path):
        raise JobError(f"{path}: not there; give a run directory, such as runs/NAME-TIME")
    return path
