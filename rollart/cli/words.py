"""The command line's grammar: commands, their words and options. Names what each command runs, and imports nothing."""

import argparse
import re
from pathlib import Path
from typing import Any

from rollart.errors import JobError

OVERRIDE = re.compile(r"[\w.+-]*=")
"""How an override begins. A file with `=` in its name is given with a slash before it."""

NEWEST = Path("")
"""What `--resume` holds where no run is given."""


class _Command(argparse.ArgumentParser):
    """A command whose words and options may be mixed; argparse alone wants the words together."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._mixing:  # `parse_known_intermixed_args` comes back here
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollart",
        description="Train LLM agents by reinforcement learning, over many tasks at once.",
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
    sim.add_argument(
        "--sweep",
        action="append",
        metavar="KEY=A,B,C",
        help="simulate the job with each of these values; given several times, with every combination",
    )
    sim.add_argument("--plot", type=Path, metavar="FILE", help="with --sweep: draw the step times, as SVG")
    sim.add_argument(
        "--skip",
        type=_count,
        metavar="N",
        help="with fit: leave out the times of the first N train steps of each run, in which kernels are compiled",
    )
    sim.add_argument("--workers", type=_count, help="with --chaos or --sweep: processes (default: one per core)")
    sim.set_defaults(run="runs.sim")

    plan = commands.add_parser(
        "plan",
        help="find out how to split GPUs between training and rollout",
        description="Predict the step time of every split of the GPUs between the trainer and the job's engine pools, "
        "and simulate the best few; then try the bound, spares, bucket size, prefill workers and where tasks run on "
        "the best of them. For jobs of mode rollart or areal. All figures are simulated; the job's sim section says "
        "what the tasks are like.",
        epilog='Examples: rollart plan jobs/sim_32b.yaml --pools "h800=32..96,h20=0..64" --goal cost --out best.yaml; '
        'rollart plan jobs/sim_32b.yaml --pools "h800=96,h20=32" --goal time-to-score --score 0.6',
    )
    _job_arguments(plan)
    plan.add_argument(
        "--pools",
        required=True,
        metavar="KIND=LOW..HIGH,...",
        help="GPUs of each kind of hardware, the trainer's included",
    )
    plan.add_argument("--budget", type=float, metavar="PRICE", help="most that an hour of all of them may cost")
    plan.add_argument(
        "--goal",
        choices=["step-time", "cost", "time-to-score"],
        default="step-time",
        help="time or cost of a step, or time until the tasks' mean success is --score (default: step-time)",
    )
    plan.add_argument("--score", type=float, metavar="MEAN", help="with --goal time-to-score: mean success to reach")
    plan.add_argument("--best", type=_count, default=4, metavar="N", help="splits that are simulated (default: 4)")
    plan.add_argument("--seeds", type=_count, default=2, metavar="N", help="runs of each (default: 2)")
    plan.add_argument(
        "--try",
        dest="settings",
        metavar="NAMES",
        default="bound,affinity,prefill,spares,bucket,split",
        help="what else to try on the best split, with commas between, or none (default: %(default)s; split: one "
        "engine more or less)",
    )
    plan.add_argument("--workers", type=_count, help="processes (default: one per core)")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the best one's job file here")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run="runs.plan")

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
    train.set_defaults(run="runs.train")

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
    evaluate.set_defaults(run="runs.evaluate")

    model = commands.add_parser(
        "model",
        help="make a model directory",
        description="tiny: a small Qwen3 with its tokenizer, warmed up here. smollm2: the real SmolLM2-135M-Instruct.",
        epilog="Examples: rollart model tiny models/tiny; rollart model tiny models/mine --task my_task.py",
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
    model.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="tiny: warm it up on this task instead of the quick start's: JOB.yaml (all its tasks), JOB.yaml:NAME, or "
        "what `use` takes; may be given several times",
    )
    model.add_argument("--head-size", type=_count, help="tiny: vLLM on a CPU needs 32; default 24")
    model.set_defaults(run="makes.model")

    task = commands.add_parser(
        "task",
        help="check a task file",
        description="Play a task with a random and a scripted agent, show one episode, and say what is wrong with it.",
        epilog="Examples: rollart task check my_task.py; rollart task check my_task.py size=4 where it has arguments",
    )
    task.add_argument("what", choices=["check"])
    task.add_argument("use", help="what `use` takes in a job: file.py, module or library:name; or JOB.yaml:NAME")
    _task_arguments(task)
    task.add_argument("--json", action="store_true")
    task.add_argument("--note", type=Path, help=argparse.SUPPRESS)  # given to the child that plays it
    task.set_defaults(run="makes.task", extra="tasks")

    play = commands.add_parser(
        "play",
        help="play a task in the terminal, by hand or with a model",
        description="Play one episode: what the environment says is shown, and you answer, a line at a time, or a "
        "model does. The end of the input ends it. Then the task's reward is said.",
        epilog="Examples: rollart play rollart.tasks.frozen_lake; rollart play reasoning_gym:chain_sum min_terms=2; "
        "rollart play jobs/quickstart.yaml:maths --model models/tiny",
    )
    play.add_argument("use", metavar="TASK", help="what `use` takes in a job, or JOB.yaml:NAME for a job's task")
    _task_arguments(play)
    play.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory that answers")
    play.add_argument("--seed", type=int, default=0, help="of the task set")
    play.add_argument("--index", type=int, default=0, metavar="N", help="which of its tasks")
    play.add_argument("--held-out", action="store_true", help="of the held-out ones")
    play.add_argument("--max-turns", type=_count, help="default: the task's own, or 32")
    play.add_argument("--max-tokens", type=_count, help="with --model: of one answer; default: the task's own, or 1024")
    play.add_argument("--json", action="store_true", help="print the episode as JSON; what is shown goes to stderr")
    play.set_defaults(run="makes.play", extra="tasks")

    envs = commands.add_parser(
        "envs",
        help="list the environments of installed libraries",
        description="What `use` can name of gymnasium, reasoning-gym, gem, textarena and verifiers, as installed here.",
        epilog="Example: rollart envs --python venvs/gem/bin/python",
    )
    envs.add_argument("--python", metavar="PROGRAM", help="another interpreter, which has the libraries")
    envs.add_argument("--json", action="store_true")
    envs.set_defaults(run="makes.envs", extra="tasks")

    reward = commands.add_parser(
        "reward",
        help="serve reward functions here, make a folder that deploys them, or ask again what failed",
        description="Reward functions as a service: here, or on a platform of functions. `replay` asks again for the "
        "rewards that a run could not have, and says what they would have been; the run is not changed.",
        epilog="Examples: rollart reward serve rollart.tasks.frozen_lake:score --port 8080; "
        "rollart reward build lambda my_task.py:score --out reward-lambda; rollart reward replay RUN --local",
    )
    reward.add_argument("what", choices=["serve", "build", "replay"])
    reward.add_argument(
        "words",
        nargs="+",
        metavar="[TARGET] MODULE:FUNCTION | RUN",
        help="or domain=module:function,...; for build a target before it: container (Knative), lambda (AWS) or fc "
        "(Alibaba Function Compute); for replay a run directory",
    )
    reward.add_argument("--host", default="127.0.0.1", help="serve: other than loopback needs ROLLART_REWARD_TOKEN")
    reward.add_argument("--port", type=int, default=8080, help="serve")
    reward.add_argument("--out", type=Path, help="build: the folder to make")
    reward.add_argument("--python", default="", metavar="VERSION", help="build: the platform's (default: as here)")
    reward.add_argument("--no-install", action="store_true", help="build lambda, fc: do not fetch packages into it")
    reward.add_argument("--url", help="replay: ask the function, or the judge, at this address")
    reward.add_argument("--local", action="store_true", help="replay: run the reward functions here")
    reward.add_argument("--json", action="store_true", help="replay")
    reward.set_defaults(run="makes.reward", extra="rewards")

    check = commands.add_parser(
        "check",
        help="validate a job and print it resolved",
        description="Validate a job, look at its model, tasks, rewards, devices and disks (unless it is for the "
        "simulator alone), print it with all defaults and its roles placed, and warn of what can't work.",
        epilog="Example: rollart check jobs/rollart.yaml train.steps=5",
    )
    _job_arguments(check)
    check.add_argument("--out", type=Path, help="run directory to look at, and at its disk (default: none)")
    check.add_argument("--json", action="store_true", help="print the resolved job, its bindings and warnings as JSON")
    check.set_defaults(run="looks.check")

    pools = commands.add_parser(
        "pools",
        help="show where a job's workers would run, and what is missing",
        description="Show a job's pools, what is bound to them, what the cluster has, and what would stand in.",
        epilog="Example: rollart pools jobs/quickstart.yaml cluster.type=ray cluster.address=auto",
    )
    _job_arguments(pools)
    pools.add_argument("--json", action="store_true")
    pools.set_defaults(run="looks.pools")

    audit = commands.add_parser(
        "audit",
        help="check the promises of a run by its events",
        description="Read a run directory's events and say which promise was broken, if any.",
        epilog="Example: rollart audit runs/rollart-20261115-120000",
    )
    audit.add_argument("run_dir", type=Path, metavar="RUN")
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(run="looks.audit")

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
    show.set_defaults(run="looks.show")

    explain = commands.add_parser(
        "explain",
        help="say why each task ran where it did, and how weights got there",
        description=(
            "Read a run directory's events: each task's profile, pools, predictions, changes and fallbacks; and for "
            "each version of the weights push, arrival, bytes, and what each engine pulled and exposed."
        ),
        epilog="Example: rollart explain runs/rollart-20261115-120000",
    )
    explain.add_argument("run_dir", type=Path, metavar="RUN")
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run="looks.explain")
    return parser


def _task_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "args", nargs="*", metavar="NAME=VALUE", help="what it is made with, as in a job's tasks.N.args"
    )


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="job file (YAML)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="in any position, such as rollout.staleness=2 or tasks.0.group_size=4",
    )


def sort_words(arguments: argparse.Namespace) -> None:
    """The job is the first word that is not an override. Only `train --resume RUN` needs none."""
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
