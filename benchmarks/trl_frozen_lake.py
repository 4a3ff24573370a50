"""`python -m benchmarks.trl_frozen_lake`: RollArt and TRL learn FrozenLake from the same weights, on the same cores.

Both sides train on the same number of trajectories, in batches of the same size, one after the other, and keep their
weights every so many trajectories: TRL's are written off its clock, RollArt's are copied from its weight store by this
process. Then the same held-out play (`lake_player.py`) finds each side's first weights that reach the target. So
neither evaluations nor weights written for them are on a clock; RollArt writes one checkpoint, after its last step.
Prints one JSON object.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.lake_player import FORMS, held_out_success
from rollart.errors import WeightError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.real import STORES
from rollart.model.directory import copy_other_files
from rollart.model.tokenizer import ChatTokenizer
from rollart.store.shm import ShmStore
from rollart.workers.setup import StoreSetup

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.1
"""RollArt drops a version soon after the next one is served; wanted ones are looked for this often."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One side's run."""

    startup_s: float
    """From the start of the process to the start of training."""
    batch: int
    """Trajectories of each step."""
    ends_s: list[float]
    """Seconds from the start of training to the end of each step."""
    models: dict[int, Path]
    """Step -> its weights, for the steps that are judged."""
    ends_cpu_s: list[float]
    """The same in CPU seconds of all its processes: what other work on the machine hardly changes."""
    load: float
    """The machine's load average over the minute before the run ended."""
    parts: dict[str, float]
    """Where the time went, as far as the side says."""


def main() -> None:
    args = arguments()
    work = Path(tempfile.mkdtemp(prefix="trl-frozen-lake-", dir=args.work))
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        seed = args.seed + number
        sides = [side for side in (("rollart", train_rollart), ("trl", train_trl)) if args.only in (None, side[0])]
        result: dict[str, Any] = {"seed": seed}
        for name, side in sides if number % 2 == 0 or args.cap_times else reversed(sides):
            folder = work / f"{name}-{seed}"
            folder.mkdir()
            say(f"round {number + 1}: {name} trains, seed {seed}, in {folder}")
            trained = side(args, folder, seed)
            result[name] = figures(args, trained, seed)
            say(f"round {number + 1}: {name} {json.dumps(result[name])}")
            if args.cap_times and name == "rollart" and result[name]["time_to_success_s"]:
                args.cap_s = args.cap_times * result[name]["time_to_success_s"]
        rounds.append(result)
    print(json.dumps(rounds if args.only else summary(args, rounds), indent=2))
    if not args.keep:
        shutil.rmtree(work)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=tuple(FORMS), default="tools", help="how the model answers (docs/trl.md)")
    parser.add_argument("--model", type=Path, help="default: models/lake-tools, tiny, smollm2 by form")
    parser.add_argument("--trl-python", default=os.environ.get("ROLLART_TRL_PYTHON"), help="TRL's python")
    parser.add_argument("--groups", type=int, default=2, help="in each step")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories of one task instance")
    parser.add_argument("--trajectories", type=int, default=3072, help="that each side learns from")
    parser.add_argument("--judged-every", type=int, default=256, help="trajectories between two evaluations")
    parser.add_argument("--target", type=float, default=0.75, help="held-out success that counts as learnt")
    parser.add_argument("--episodes", type=int, default=400, help="held-out episodes played with each step's weights")
    parser.add_argument("--rounds", type=int, default=1, help="each with the next seed; the order alternates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap-s", type=float, default=480.0, help="TRL stops after this long")
    parser.add_argument("--microbatch", type=int, default=192, help="TRL's per-device batch")
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="TRL's and the judge's")
    parser.add_argument("--cap-times", type=float, help="TRL stops after this many times RollArt's time to success")
    parser.add_argument(
        "--work", type=Path, help="both sides write below this, such as /dev/shm (default: where $TMPDIR is)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    parser.add_argument("--rollart", nargs="*", default=[], metavar="KEY=VALUE", help="of RollArt's job")
    parser.add_argument("--only", choices=("rollart", "trl"), help="one side alone, without a ratio")
    args = parser.parse_args()
    if not args.trl_python:
        parser.error("say where TRL is: --trl-python, or ROLLART_TRL_PYTHON (docs/trl.md says how to make it)")
    folder, command = {
        "tools": ("lake-tools", "python -m benchmarks.tool_lake"),
        "words": ("tiny", "rollart model tiny"),
        "chat": ("smollm2", "rollart model smollm2"),
    }[args.form]
    args.model = args.model or ROOT / "models" / folder
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model}; make it: {command} {args.model}")
    return args


def job_of(form: str) -> Path:
    return ROOT / "benchmarks" / f"trl_{form}.yaml"


# --- the two sides ----------------------------------------------------------------------------------------------


def train_rollart(args: argparse.Namespace, folder: Path, seed: int) -> Trained:
    run = folder / "run"
    command = [sys.executable, "-m", "rollart.cli", "train", str(job_of(args.form))]
    overrides = [
        f"model.path={args.model.resolve()}",
        f"seed={seed}",
        f"rollout.groups_per_step={args.groups}",
        f"tasks.0.group_size={args.group_size}",
        f"train.steps={_steps(args.trajectories, _batch(args))}",
        f"checkpoint.every={_steps(args.trajectories, _batch(args))}",
        *args.rollart,
    ]
    steps = _steps(args.trajectories, _batch(args))
    every = _steps(args.judged_every, _batch(args))
    wanted = set(range(every, steps, every))
    began_s = time.monotonic()
    cpu: list[tuple[float, float]] = []
    """(seconds since the first event, CPU seconds so far)"""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *overrides, "--out", str(run)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        first_event_s: float | None = None
        models: dict[int, Path] = {}
        while True:
            over = process.poll() is not None
            if first_event_s is None and (run / "events.jsonl").exists():
                first_event_s = time.monotonic() - began_s
            _copy_versions(run, folder / "models", wanted, models, args.model)
            if first_event_s is not None and not over:
                cpu.append((time.monotonic() - began_s - first_event_s, _tree_cpu_s(process.pid)))
            if over:
                break
            time.sleep(POLL_S)
    if process.returncode:
        sys.exit(f"rollart train failed:\n{(folder / 'log').read_text()[-2000:]}")
    if missed := wanted - set(models):
        sys.exit(
            f"versions {sorted(missed)} were dropped before they were copied; the machine is too busy to measure on"
        )
    if steps % every == 0:
        models[steps] = run / "checkpoints" / f"step-{steps:08d}" / "model"
    events = [
        event for event in read_events(run / "events.jsonl") if isinstance(event, schema.Started | schema.StepEnd)
    ]
    started_s = next(event.t for event in events if isinstance(event, schema.Started))
    ended = [event for event in events if isinstance(event, schema.StepEnd)]
    assert first_event_s is not None
    return Trained(
        startup_s=first_event_s + started_s,
        batch=_batch(args),
        ends_s=[event.t - started_s for event in ended],
        models=models,
        ends_cpu_s=[_at(cpu, event.t) - _at(cpu, started_s) for event in ended],
        load=os.getloadavg()[0],
        parts={"train_s": sum(event.train_s for event in ended)},
    )


def train_trl(args: argparse.Namespace, folder: Path, seed: int) -> Trained:
    options = {
        "--form": args.form,
        "--model": args.model.resolve(),
        "--out": folder,
        "--groups": args.groups,
        "--group-size": args.group_size,
        "--steps": _steps(args.trajectories, _batch(args)),
        "--every": _steps(args.judged_every, _batch(args)),
        "--cap-s": args.cap_s,
        "--microbatch": args.microbatch,
        "--seed": seed,
        "--threads": args.trl_threads,
        "--device": args.device,
    }
    began_s = time.monotonic()
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            [*_trl_side(args), *(str(part) for option in options.items() for part in option)],
            env=_trl_environment(args),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"TRL failed:\n{(folder / 'log').read_text()[-2000:]}")
    result = json.loads((folder / "result.json").read_text())
    return Trained(
        startup_s=result["began_s"] - began_s,
        batch=_batch(args),
        ends_s=result["ends_s"],
        models={int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")},
        ends_cpu_s=result["ends_cpu_s"],
        load=os.getloadavg()[0],
        parts={},
    )


def _batch(args: argparse.Namespace) -> int:
    return int(args.groups * args.group_size)


def _steps(trajectories: int, batch: int) -> int:
    return max(1, trajectories // batch)


def _copy_versions(run: Path, target: Path, wanted: set[int], known: dict[int, Path], model: Path) -> None:
    """Copy the wanted versions that are in the run's store now, as directories that a model is loaded from."""
    if not (run / STORES).exists():
        return
    setup = StoreSetup.model_validate_json((run / STORES).read_text().splitlines()[-1])
    store = ShmStore(setup.run_id)
    for version in sorted(wanted - set(known)):
        try:
            if (manifest := store.manifest(version)) is None:
                continue
            tensors = store.fetch(manifest)
        except WeightError:
            continue  # dropped meanwhile; if for good, the end says so
        known[version] = target / f"step-{version:08d}"
        known[version].mkdir(parents=True)
        copy_other_files(model, known[version])
        save_file(tensors, known[version] / "model.safetensors")


def _tree_cpu_s(root: int) -> float:
    """CPU seconds so far of a process and all below it."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = int(fields[11]) + int(fields[12])
    total, front = 0, [root]
    while front:
        total += sum(ticks.get(pid, 0) for pid in front)
        front = [pid for pid, parent in parents.items() if parent in front]
    return total / TICKS_PER_S


def _at(series: list[tuple[float, float]], time_s: float) -> float:
    """The last value taken by then."""
    return max((value for when_s, value in series if when_s <= time_s), default=0.0)


# --- what came of it --------------------------------------------------------------------------------------------


def figures(args: argparse.Namespace, trained: Trained, seed: int) -> dict[str, Any]:
    steps = len(trained.ends_s)
    judged = sorted(trained.models)
    every = _steps(args.judged_every, trained.batch)
    assert judged == list(range(every, steps + 1, every)), f"weights of steps {judged} of {steps}, one in {every}"
    curve = held_out(args, [trained.models[step] for step in judged], seed)
    reached = judged[len(curve) - 1] if curve[-1] >= args.target else None
    time_s = trained.ends_s[reached - 1] if reached else None
    return {
        "steps_to_success": reached,
        "time_to_success_s": _round(time_s),
        "time_to_success_with_startup_s": _round(time_s + trained.startup_s) if time_s is not None else None,
        "trajectories_to_success": reached and reached * trained.batch,
        "trajectories_per_s": _round(steps * trained.batch / trained.ends_s[-1]),
        "steps": steps,
        "time_s": _round(trained.ends_s[-1]),
        "startup_s": _round(trained.startup_s),
        "cpu_to_success_s": _round(trained.ends_cpu_s[reached - 1]) if reached else None,
        "cpu_s": _round(trained.ends_cpu_s[-1]),
        "load": _round(trained.load),
        "held_out": [round(success, 3) for success in curve],
        "parts": {name: _round(value) for name, value in trained.parts.items()},
    }


def held_out(args: argparse.Namespace, models: list[Path], seed: int) -> list[float]:
    """Success of each of these weights, up to the first that reaches the target."""
    torch.set_num_threads(args.trl_threads)
    tokenizer = ChatTokenizer(args.model)
    curve: list[float] = []
    for model in models:
        curve.append(
            held_out_success(FORMS[args.form], tokenizer, model, episodes=args.episodes, seed=seed, device=args.device)
        )
        if curve[-1] >= args.target:
            break
    return curve


def summary(args: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds. Where TRL did not get there its whole time stands in, and the ratio is a lower bound;
    where RollArt did not, its time is without end."""
    bound = not all(result["trl"]["steps_to_success"] for result in rounds)
    ours_s = [result["rollart"]["time_to_success_s"] or math.inf for result in rounds]
    theirs_s = [result["trl"]["time_to_success_s"] or result["trl"]["time_s"] for result in rounds]
    ours, theirs = _median(ours_s), _median(theirs_s)
    cpu = {
        side: _median(result[side]["cpu_to_success_s"] or result[side]["cpu_s"] for result in rounds)
        for side in ("rollart", "trl")
    }
    rates = {side: _median(result[side]["trajectories_per_s"] for result in rounds) for side in ("rollart", "trl")}
    return {
        "form": args.form,
        "target": args.target,
        "groups": args.groups,
        "group_size": args.group_size,
        "microbatch": args.microbatch,
        "episodes": args.episodes,
        "trajectories_per_s": rates,
        "time_to_success_s": {"rollart": None if math.isinf(ours) else ours, "trl": theirs},
        "cpu_to_success_s": cpu,
        "ratio": _round(theirs / ours),
        "ratios": [_round(theirs / ours) for ours, theirs in zip(ours_s, theirs_s, strict=True)],
        "cpu_ratio": _round(cpu["trl"] / cpu["rollart"]),
        "ratio_is_lower_bound": bound,
        "trajectories_ratio": _round(rates["rollart"] / rates["trl"]),
        "trl_threads": args.trl_threads,
        "versions": _versions(args),
        "rounds": rounds,
    }


def _trl_side(args: argparse.Namespace) -> list[str]:
    return [args.trl_python, "-m", "benchmarks.trl_side"]


def _trl_environment(args: argparse.Namespace) -> dict[str, str]:
    threads = str(args.trl_threads)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}


def _versions(args: argparse.Namespace) -> dict[str, str]:
    names = "torch, transformers, trl"
    code = f"import json, {names}; print(json.dumps({{m.__name__: m.__version__ for m in ({names})}}))"
    done = subprocess.run([args.trl_python, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def say(text: str) -> None:
    """Progress, where results do not go."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
