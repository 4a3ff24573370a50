"""R1 on one card: two unlike parts of it, two unlike tasks, every assignment of tasks to parts, measured and predicted.

    python benchmarks/gpu_affinity.py --shape 4b --multiprocessors 48 --json
    python benchmarks/gpu_affinity.py --shape 4b --shares 0.5 0.25 --json

Two embedded engines, each a process with its part of the multiprocessors, have the same model. Parts are green contexts
under MPS (`--multiprocessors`: of the first part; the second has the rest; see `gpu_parts.py`) or shares of MPS. A
step's work is `--prompts` trajectories of a prefill-heavy task (one turn: 4,096 tokens in, 32 out) and `--answers` of
a decode-heavy one (256 in, 512 out). An assignment is the share of each task that the first part has; the rest goes to
the second. What is measured is the time until both parts are done, in rounds in which the assignments take turns.

- prefill first, decode second (and the other way round), all on one part: whole tasks, fixed.
- even: half of each task on each part, what routing without affinity does. by size: as the parts are.
- auto: `rollart.policy.planning.best_plan`, which a job with `affinity: auto` uses, asked with what steps of each part
  cost while the other did the other task. What it chooses with two factors to the tables for each part (prefill,
  decode), which is how a job knows its engines, is told as well, and measured where it is something else.

Before that, and not counted: everything once, to warm up; then a calibration with other lengths, each part alone and
each kind of work beside each other kind. Beside each assignment stands what the simulator's engines take for the same
work, with costs fitted to the calibration (`gpu_beside.py`), and what the policy predicts.

`--shape small --device cpu` tries the script without a GPU and without parts: its figures mean nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import orjson

from benchmarks.gpu_beside import (
    Step,
    Work,
    as_a_job,
    chosen,
    costs_beside,
    is_short,
    kept_apart,
    measured,
    play,
    policy_s,
    problem_of,
)
from rollart.types import StepSums

PROMPT = (4096, 32)
ANSWER = (256, 512)
"""Tokens in and out of one trajectory."""
WHOLE = 132
"""Multiprocessors of the card."""
ASSIGNMENTS: dict[str, tuple[float, float] | None] = {
    "prefill first, decode second": (1.0, 0.0),
    "decode first, prefill second": (0.0, 1.0),
    "all on the first": (1.0, 1.0),
    "all on the second": (0.0, 0.0),
    "even": (0.5, 0.5),
    "by size": None,
}
"""Shares of the prefill-heavy and the decode-heavy task that the first part has."""
LONG = [(4096, 8)] * 16
OTHERS = [(1024 if number % 4 == 0 else 256, 96 + 37 * number % 64 * 4) for number in range(64)]
"""The calibration: prompts, and answers whose batch shrinks while contexts grow."""
WARM_UP = (LONG[:8] + OTHERS, LONG[:8] + OTHERS)


class Play(Protocol):
    """Lets both parts work, each so many seconds late: the steps that they took."""

    def __call__(
        self, first: Work, second: Work, first_late_s: float, second_late_s: float, /
    ) -> Sequence[list[Step]]: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4b")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--multiprocessors", type=int, default=48, help="of the first part; the second has the rest")
    parts.add_argument("--shares", type=float, nargs=2, help="by MPS; most compute wrongly: docs/gpu.md")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no further round after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", type=Path, help="a file for the steps of the calibration")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options)
        return
    report = compare(options)
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


def part_sizes(options: argparse.Namespace) -> list[float]:
    """Of the card, those of both parts."""
    given: list[float] | None = options.shares
    return given or [options.multiprocessors / WHOLE, 1 - options.multiprocessors / WHOLE]


def kv_tokens(options: argparse.Namespace) -> int:
    """Room for all of the work at once, in pages of 64, and for the calibration; and some to spare."""
    work = [PROMPT] * options.prompts + [ANSWER] * options.answers
    return 4096 + max(sum(sum(one) + 64 for one in works) for works in (work, LONG + OTHERS))


# --- one part


def serve(options: argparse.Namespace) -> None:
    """An engine that plays the work it is told of, one line of JSON at a time."""
    import torch

    from benchmarks.gpu_engine import Bench, request
    from benchmarks.gpu_parts import take_part
    from benchmarks.gpu_share import tracer
    from rollart.model.products import prove_products

    part = take_part()
    bench = Bench(options.shape, options)
    prove_products(bench.model.parameters())
    engine = bench.engine(max(options.prompts + options.answers, len(LONG + OTHERS)), kv_tokens(options))
    rng = np.random.default_rng(os.getpid())
    number = 0

    def play(work: list[list[int]]) -> list[list[float]]:
        """Every step: when it ended, and what it had in it."""
        nonlocal number
        for tokens_in, tokens_out in work:
            number += 1
            prompt = rng.integers(1, engine._vocab_size, tokens_in)
            engine.add(request(prompt, str(number), 0, tokens_out, last=True))
        steps = []
        before = done()
        while engine.busy:
            engine.step()
            now = done()
            if now[0] > before[0]:
                steps.append([time.time(), *(b - a for a, b in zip(before, now, strict=True))])
            before = now
        return steps

    def done() -> list[float]:
        """What the engine has done so far: `StepSums` over all kinds of steps."""
        meter = engine._work
        return [sum(kinds) for kinds in zip(meter._decode, meter._mixed, meter._prefill, strict=True)]

    # What kernels in a graph really have, as the engine's decoding is one.
    seen = len(tracer(torch.device("cuda"))(True)["multiprocessors"]) if options.device == "cuda" else 0
    print(json.dumps({"multiprocessors": seen, "asked": part}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        time.sleep(max(0.0, told["begin"] - time.time()))
        began = time.perf_counter()
        steps = play(told["work"])
        print(json.dumps({"seconds": time.perf_counter() - began, "steps": steps}), flush=True)


# --- both


class Parts:
    """The two processes."""

    def __init__(self, options: argparse.Namespace, environments: list[dict[str, str]]) -> None:
        command = [sys.executable, __file__, "--side", "--shape", options.shape, "--device", options.device]
        command += ["--prompts", str(options.prompts), "--answers", str(options.answers)]
        self._sides = [
            subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for environment in environments
        ]
        self.sizes = (1, 1) if options.device == "cuda" else (64, 16)
        """By which the lengths in the table are divided: in and out."""
        self.multiprocessors = [self._answer(side)["multiprocessors"] for side in self._sides]

    def play(self, *works: Work, late_s: tuple[float, float] = (0.0, 0.0)) -> list[dict[str, Any]]:
        """What each part says of its work, begun at the same time, or so much later."""
        now = time.time() + 0.05
        for side, work, late in zip(self._sides, works, late_s, strict=True):
            assert side.stdin is not None
            side.stdin.write(json.dumps({"begin": now + late, "work": self.sized(work)}) + "\n")
        return [self._answer(side) for side in self._sides]

    def steps(self, first: Work, second: Work, first_late_s: float, second_late_s: float) -> list[list[Step]]:
        """Those that each part takes for its work."""
        found = self.play(first, second, late_s=(first_late_s, second_late_s))
        tell(f"calibration: {[round(one['seconds'], 2) for one in found]} s")
        return [[Step(end_s, StepSums(*has)) for end_s, *has in one["steps"]] for one in found]

    def sized(self, work: Work) -> list[tuple[int, int]]:
        return [(-(-prompt // self.sizes[0]), -(-answer // self.sizes[1])) for prompt, answer in work]

    def close(self) -> None:
        for side in self._sides:
            side.kill()
            side.wait()

    @staticmethod
    def _answer(side: "subprocess.Popen[str]") -> Any:
        assert side.stdout is not None
        line = side.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a part ended with {side.wait()}; what it said stands above")
        return json.loads(line)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.gpu_parts import part_environment
    from rollart.cluster.mps import Mps

    on_card = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        mps = Mps(Path(folder)) if on_card else None
        try:
            environments = []
            for side in range(2):
                more = mps.environment(options.shares[side] if options.shares else 1.0) if mps else {}
                if mps and not options.shares:
                    more |= part_environment(options.multiprocessors, side)
                environments.append({**os.environ, **more})
            parts = Parts(options, environments)
            try:
                return measure(parts, options)
            finally:
                parts.close()
        finally:
            if mps is not None:
                mps.close()


def measure(parts: Parts, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    tell(f"both parts are up, with multiprocessors: {parts.multiprocessors}")
    if sum(parts.multiprocessors) > WHOLE:
        raise SystemExit("the parts have multiprocessors in common: nothing that is measured would be of parts")
    sizes, demand = part_sizes(options), {"prefill": options.prompts, "decode": options.answers}
    tell(f"warmed up: {[round(one['seconds'], 2) for one in parts.play(*WARM_UP)]} s")
    steps = calibrate(parts.steps)
    if options.keep:
        options.keep.write_bytes(orjson.dumps(steps, default=tuple))
    room = kv_tokens(options)
    both = [steps[at][0] + steps[at][1] for at in range(2)]
    costs = [costs_beside(both[0], both[1]), costs_beside(both[1], both[0])]
    tasks = {"prefill": PROMPT, "decode": ANSWER}
    unknown = problem_of(options.shape, sizes, tasks, demand, room)
    problem = measured(unknown, [kept_apart(own) for own in costs])
    job = as_a_job(unknown, [beside for _, beside in steps])
    by_size = sizes[0] / sum(sizes)
    shares: dict[str, tuple[float, ...]] = {name: given or (by_size, by_size) for name, given in ASSIGNMENTS.items()}
    shares["auto"] = chosen(problem)
    if chosen(job) != shares["auto"]:
        shares["auto, by two factors"] = chosen(job)
    works = {name: work_of(given, demand) for name, given in shares.items()}
    simulated = {
        name: max(play(options.shape, costs, [parts.sized(own) for own in work], room)) for name, work in works.items()
    }
    tell(f"calibrated after {time.monotonic() - began:.0f} s; auto: {shares['auto']}; simulated: {simulated}")
    taken: dict[str, list[float]] = {name: [] for name in shares}
    for number in range(options.rounds):
        if number and time.monotonic() - began > options.seconds:
            break
        for name, work in works.items():
            taken[name].append(round(max(one["seconds"] for one in parts.play(*work)), 3))
            tell(f"round {number + 1}: {name}: {taken[name][-1]} s, simulated {simulated[name]:.3f}")
    policy = {name: policy_s(problem, given) for name, given in shares.items()}
    return {
        "shape": options.shape,
        "shares": options.shares,
        "multiprocessors": parts.multiprocessors,
        "trajectories": demand,
        **summary(taken, simulated, policy),
        "auto_gives_the_first": shares["auto"],
        "as_a_job": {"gives_the_first": chosen(job), "factors": {pool.name: repr(pool.learnt) for pool in job.pools}},
        "costs": [{state: one.model_dump() for state, one in own.items()} for own in costs],
    }


def summary(taken: dict[str, list[float]], simulated: dict[str, float], policy: dict[str, float]) -> dict[str, Any]:
    """By assignment: seconds and predictions; and what the goals ask of them."""
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min(
        (name for name, given in ASSIGNMENTS.items() if given not in (None, (0.5, 0.5))), key=medians.__getitem__
    )
    rows = {
        name: {
            "median_s": medians[name],
            "rounds_s": seconds,
            "simulated_s": round(simulated[name], 3),
            "simulated_by_measured": round(simulated[name] / medians[name], 3),
            "policy_s": round(policy[name], 3),
        }
        for name, seconds in taken.items()
    }
    off_by_on = {
        name: [round(off / on, 3) for off, on in zip(taken[name], taken["auto"], strict=True)]
        for name in ("even", "by size")
    }
    return {
        "assignments": rows,
        "best_fixed": best,
        "auto_by_best_fixed": round(medians["auto"] / medians[best], 3),
        "furthest_simulated": max(abs(row["simulated_by_measured"] - 1) for row in rows.values()),  # type: ignore[operator]
        "affinity_off_by_on": {
            name: {"median": statistics.median(all_), "rounds": all_} for name, all_ in off_by_on.items()
        },
    }


def calibrate(play: Play) -> list[tuple[list[Step], list[Step]]]:
    """Of each part: the steps it took while the other had nothing to do, and the others."""
    alone = [play(LONG + OTHERS, [], 0.0, 0.0)[0], play([], LONG + OTHERS, 0.0, 0.0)[1]]
    # Long prompts begin when the other part has computed its own short ones: beside decoding is what is wanted.
    first_s, second_s = (1.1 * sum(step.has.seconds for step in own if is_short(step)) for own in alone)
    found = [
        play(LONG, OTHERS, second_s, 0.0),
        play(OTHERS, LONG, 0.0, first_s),
        play(OTHERS, OTHERS, 0.0, 0.0),
        play(LONG, LONG, 0.0, 0.0),
    ]
    return [(alone[at], [step for steps in found for step in steps[at]]) for at in range(2)]


def work_of(shares: tuple[float, ...], demand: dict[str, int]) -> list[list[tuple[int, int]]]:
    """The trajectories of both parts."""
    first = [round(count * share) for count, share in zip(demand.values(), shares, strict=True)]
    second = [count - own for count, own in zip(demand.values(), first, strict=True)]
    return [[PROMPT] * prompts + [ANSWER] * answers for prompts, answers in (first, second)]


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
