"""Commands that run a job: `sim`, `plan`, `train`, `eval`."""

import argparse
import os
import sys
from pathlib import Path

from rollart.cli.output import print_json, resume_command, run_dir, warn
from rollart.cli.words import NEWEST, OVERRIDE
from rollart.config.load import load_job
from rollart.errors import JobError
from rollart.launch.books import RunResult, say
from rollart.launch.resume import Resumption, resumption
from rollart.launch.rundir import add_control, newest_run
from rollart.records.reader import Archive, TrajectoryFilter
from rollart.report.reading import show_trajectory
from rollart.report.show import (
    LiveView,
    show_chaos,
    show_eval,
    show_failed,
    show_plays,
    show_summary,
)


def sim(arguments: argparse.Namespace) -> int:
    if str(arguments.job) == "fit":
        return _fit(arguments)
    if arguments.skip is not None:
        raise JobError("--skip: has an effect with fit only; write rollart sim fit RUN --skip N, or remove it")
    job = load_job(arguments.job, arguments.overrides)
    if arguments.sweep and (arguments.chaos is not None or arguments.first is not None):
        raise JobError("--sweep: draws no faults; leave out --chaos and --first, or give sim.faults in the job")
    if arguments.chaos is not None:
        return _chaos(arguments)
    if arguments.sweep:
        return _sweep(arguments)
    if arguments.first is not None or arguments.workers is not None or arguments.plot is not None:
        raise JobError(
            "--first, --workers and --plot: have an effect with --chaos (--workers, --plot: --sweep) only; add it, or "
            "remove them"
        )
    from rollart.launch.simulation import simulate

    out = run_dir(arguments.out, job)
    warn(job)
    return _told(arguments, simulate(job, out, progress=say, beside=True), out)


def _fit(arguments: argparse.Namespace) -> int:
    if not arguments.overrides:
        raise JobError("sim fit: no run is named; give run directories, such as rollart sim fit runs/NAME-TIME")
    if arguments.out is not None and arguments.out.exists():
        raise JobError(f"--out: {arguments.out} exists; give a file that does not, or remove it")
    from rollart.sim.fit import as_yaml, fit_runs, residual_lines

    fit = fit_runs([Path(run) for run in arguments.overrides], arguments.skip or 0)
    text = as_yaml(fit, arguments.overrides)
    if arguments.out is not None:
        arguments.out.write_text(text)
    if arguments.json:
        print_json({"profile": fit.profile(), "quality": fit.quality()})
    elif arguments.out is None:
        print(text, end="")
    else:
        print(arguments.out, *residual_lines(fit), sep="\n")
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from rollart.launch.chaos import run_plans

    if arguments.out is not None and arguments.out.exists():
        raise JobError(f"--out: {arguments.out} exists; give a directory that does not, or remove it")
    report = run_plans(
        arguments.job,
        tuple(arguments.overrides),
        arguments.chaos,
        first=arguments.first or 0,
        workers=arguments.workers or os.cpu_count() or 1,
        out=arguments.out,
        progress=say,
    )
    if arguments.json:
        print_json(report)
    else:
        show_chaos(report)
    return 1 if report.violations or report.deadlocks else 0


def _sweep(arguments: argparse.Namespace) -> int:
    from rollart.launch.sweep import run_sweep
    from rollart.report.charts import bars
    from rollart.report.show_plan import show_sweep

    if arguments.out is not None:
        raise JobError("--out: a sweep keeps no run directories; leave it out, or --json > FILE")
    if arguments.plot is not None:
        _may_be_written(arguments.plot, "--plot")
    report = run_sweep(
        arguments.job,
        tuple(arguments.overrides),
        arguments.sweep,
        workers=arguments.workers or os.cpu_count() or 1,
        progress=say,
    )
    if arguments.plot is not None:
        labels = [" ".join(row.changes) for row in report.rows]
        title = f"{arguments.job.name}: seconds a step (simulated)"
        arguments.plot.write_text(bars(title, labels, {"mean": [row.step_s for row in report.rows]}, " s"))
    if arguments.json:
        print_json(report)
    else:
        show_sweep(report)
    return 0 if all(row.state == "finished" for row in report.rows) else 1


def plan(arguments: argparse.Namespace) -> int:
    from rollart.launch.plan import make_plan
    from rollart.report.show_plan import show_plan

    if arguments.out is not None:
        if arguments.out.exists():
            raise JobError(f"--out: {arguments.out} exists; give a file that does not, or remove it")
        _may_be_written(arguments.out, "--out")
    report = make_plan(
        load_job(arguments.job, arguments.overrides),
        arguments.pools,
        budget=arguments.budget,
        goal=arguments.goal,
        best=arguments.best,
        seeds=arguments.seeds,
        workers=arguments.workers or os.cpu_count() or 1,
        progress=say,
        score=arguments.score,
        settings=() if arguments.settings == "none" else arguments.settings.split(","),
    )
    if arguments.out is not None:
        import yaml

        head = f"# Made by `rollart plan {arguments.job}`; simulated.\n"
        arguments.out.write_text(head + yaml.safe_dump(report.job, sort_keys=False))
    if arguments.json:
        print_json(report)
    else:
        show_plan(report)
    return 0


def _may_be_written(path: Path, option: str) -> None:
    """Asked before long work. Raises JobError."""
    if not path.parent.is_dir():
        raise JobError(f"{option}: {path.parent} is not a directory; make it, or give another file")
    if path.is_dir():
        raise JobError(f"{option}: {path} is a directory; give a file in it")


def train(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        resume = _resumption(arguments)
        job, out = resume.job, resume.out
    else:
        resume = None
        job = load_job(arguments.job, arguments.overrides)
        out = run_dir(arguments.out, job)
    from rollart.launch.training import train

    warn(job)
    with LiveView(job.train.steps) as view:
        return _told(arguments, train(job, out, resume=resume, watch=view.watch), out)


def _told(arguments: argparse.Namespace, result: RunResult, out: Path) -> int:
    """What a run came to, and its exit code."""
    if arguments.json:
        print_json(result.summary)
    else:
        show_summary(result.summary, out)
    for violation in result.violations:
        print(f"rollart: broken {violation}", file=sys.stderr)
    state = result.summary.state
    if state != "finished":
        how = "the job stopped" if state == "stopped" else state
        print(f"rollart: {how}: {result.summary.reason}", file=sys.stderr)
        if (out / "journal" / "checkpoint").exists():
            print(f"rollart: to go on: {resume_command(out)}", file=sys.stderr)
    if state == "interrupted":
        return 130
    return 0 if state == "finished" and not result.violations else 1


def _resumption(arguments: argparse.Namespace) -> Resumption:
    """What `--resume` was given: a run, or the newest of a job; and what is to change."""
    out, overrides = arguments.resume, list(arguments.overrides)
    if OVERRIDE.match(str(out)):  # `JOB --resume key=value`
        out, overrides = NEWEST, [str(out), *overrides]
    if arguments.out is not None:
        raise JobError(f"--out: a resumed run goes on in its own directory; leave it out, or --resume {out}")
    if out == NEWEST:
        if arguments.job is None:
            raise JobError("--resume: no run is named; give JOB --resume, or --resume RUN, such as runs/NAME-TIME")
        out = newest_run(load_job(arguments.job, overrides).name)
    resume = resumption(out, arguments.job, overrides)
    for change in resume.changes:
        print(f"rollart: changed {change}, {change.acts(resume.step)}", file=sys.stderr)
    return resume


def evaluate(arguments: argparse.Namespace) -> int:
    from rollart.launch.training import evaluate

    path = [f"model.path={arguments.model}"] if arguments.model is not None else []
    job = load_job(arguments.job, [*arguments.overrides, *path])
    out = run_dir(arguments.out, job, "-eval")
    with LiveView(0) as view:
        result = evaluate(job, out, watch=view.watch)
    plays = result.summary.evaluations.get("eval0", {})
    if result.summary.state != "finished":
        print(f"rollart: the evaluation stopped: {result.summary.reason}", file=sys.stderr)
        return 130 if result.summary.state == "interrupted" else 1
    beside = add_control(arguments.control_of, plays) if arguments.control_of is not None else None
    if arguments.json:
        print_json({"model": job.model.path, "tasks": plays})
    elif beside is not None:
        show_eval(beside)
    else:
        show_plays(plays, job.model.path)
    if not arguments.json:
        show_failed(plays)
        if job.trajectories.keep:
            _show_worst(out)
    return 0 if all(row.scored for rows in plays.values() for row in rows.values()) else 1


def _show_worst(out: Path) -> None:
    """The worst of the episodes just played, since it teaches most; a failed one where none was scored."""
    try:
        archive = Archive(out)
    except JobError as error:  # a full disk, which was warned about
        print(f"rollart: {error}", file=sys.stderr)
        return
    for head in archive.find(TrajectoryFilter(), "worst", 1) or archive.find(TrajectoryFilter(), "failed", 1):
        show_trajectory(archive.one(head))
    print(f"all of them: rollart show {out} --list")
