"""R1 on one card: two unlike parts of it, two unlike tasks, every assignment of tasks to parts, measured.

    python benchmarks/gpu_affinity.py --shape 4b --shares 0.5 0.48 --json

Two embedded engines, each a process with its share of the multiprocessors (MPS), have the same model. A step's work is
`--prompts` trajectories of a prefill-heavy task (one turn: 4,096 tokens in, 32 out) and `--answers` of a decode-heavy
one (128 in, 512 out). An assignment is the share of each task that the first part has; the rest goes to the second.
What is measured is the time until both parts are done, in rounds in which the assignments take turns.

- prefill first, decode second (and the other way round), all on one part: whole tasks, fixed.
- even: half of each task on each part, what routing without affinity does. by size: as the shares are.
- auto: `rollart.policy.planning.best_plan`, which a job with `affinity: auto` uses, asked with what these engines were
  measured to do in a round before: prefill and decode rates of each part, with the other part busy. Beside each
  assignment stands what the same policy predicts for it.

`--shape small --device cpu` tries the script without a GPU and without shares: its figures mean nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

PROMPT = (4096, 32)
ANSWER = (128, 512)
"""Tokens in and out of one trajectory."""
MAX_BATCH = 128
ASSIGNMENTS = {
    "prefill first, decode second": (1.0, 0.0),
    "decode first, prefill second": (0.0, 1.0),
    "all on the first": (1.0, 1.0),
    "all on the second": (0.0, 0.0),
    "even": (0.5, 0.5),
    "by size": None,
}
"""Shares of the prefill-heavy and the decode-heavy task that the first part has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4b")
    parser.add_argument(
        "--shares", type=float, nargs=2, default=[0.5, 0.48], help="others may compute wrongly: docs/gpu.md"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no further round after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options)
        return
    report = compare(options)
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


# --- one part


def serve(options: argparse.Namespace) -> None:
    """An engine that plays the work it is told of, one line of JSON at a time."""
    from benchmarks.gpu_engine import Bench, drain, request

    bench = Bench(options.shape, options)
    lengths = (PROMPT, ANSWER) if options.device == "cuda" else ((64, 4), (8, 16))
    batch = MAX_BATCH if options.device == "cuda" else 8
    room = batch * (ANSWER[0] + ANSWER[1]) + 24 * sum(PROMPT)
    engine = bench.engine(batch, room if options.device == "cuda" else 4096)
    rng = np.random.default_rng(os.getpid())
    number = 0

    def play(counts: list[int]) -> None:
        nonlocal number
        for count, (tokens_in, tokens_out) in zip(counts, lengths, strict=True):
            for _ in range(count):
                number += 1
                prompt = rng.integers(1, engine._vocab_size, tokens_in)
                engine.add(request(prompt, str(number), 0, tokens_out, last=True))
        drain(engine)

    play([2, 2])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        time.sleep(max(0.0, told["begin"] - time.time()))
        began = time.perf_counter()
        play(told["counts"])
        print(json.dumps(time.perf_counter() - began), flush=True)


# --- both


class Parts:
    """The two processes."""

    def __init__(self, options: argparse.Namespace, environments: list[dict[str, str]]) -> None:
        command = [sys.executable, __file__, "--side", "--shape", options.shape, "--device", options.device]
        self._sides = [
            subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for environment in environments
        ]
        for side in self._sides:
            assert self._answer(side) == "ready"

    def play(self, first: list[int], second: list[int]) -> tuple[float, float]:
        """Seconds that each part takes for this many trajectories of each task, begun at the same time."""
        begin = time.time() + 0.05
        for side, counts in zip(self._sides, (first, second), strict=True):
            assert side.stdin is not None
            side.stdin.write(json.dumps({"begin": begin, "counts": counts}) + "\n")
        took = [self._answer(side) for side in self._sides]
        return float(took[0]), float(took[1])

    def close(self) -> None:
        for side in self._sides:
            side.kill()
            side.wait()

    @staticmethod
    def _answer(side: "subprocess.Popen[str]") -> Any:
        assert side.stdout is not None
        return json.loads(side.stdout.readline())


def compare(options: argparse.Namespace) -> dict[str, Any]:
    from rollart.cluster.mps import Mps

    on_card = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        mps = Mps(Path(folder)) if on_card else None
        try:
            environments = [{**os.environ, **(mps.environment(share) if mps else {})} for share in options.shares]
            parts = Parts(options, environments)
            try:
                return measure(parts, options)
            finally:
                parts.close()
        finally:
            if mps is not None:
                mps.close()


def measure(parts: Parts, options: argparse.Namespace) -> dict[str, Any]:
    work = (options.prompts, options.answers)
    began = time.monotonic()
    rates = profile(parts, work)
    print(f"rates: {rates}", file=sys.stderr, flush=True)
    predicted, chosen = auto(options, rates, work)
    shares = {name: both or (options.shares[0],) * 2 for name, both in ASSIGNMENTS.items()}
    shares["auto"] = chosen
    taken: dict[str, list[float]] = {name: [] for name in shares}
    for number in range(options.rounds):
        if number and time.monotonic() - began > options.seconds:
            break
        for name, both in shares.items():
            first = [round(count * share) for count, share in zip(work, both, strict=True)]
            second = [count - own for count, own in zip(work, first, strict=True)]
            taken[name].append(round(max(parts.play(first, second)), 3))
            print(f"round {number + 1}: {name}: {taken[name][-1]} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    fixed = {name: seconds for name, seconds in medians.items() if name not in ("auto", "even", "by size")}
    best = min(fixed, key=lambda name: fixed[name])
    return {
        "shape": options.shape,
        "shares": options.shares,
        "trajectories": {"prefill_heavy": work[0], "decode_heavy": work[1]},
        "rates": rates,
        "seconds": taken,
        "median_s": medians,
        "predicted_s": {name: round(predicted(both), 3) for name, both in shares.items()},
        "auto": {"first_part_has": chosen, "by_best_fixed": round(medians["auto"] / fixed[best], 3), "best": best},
        "affinity_off_by_on": {
            name: round(medians[name] / min(medians["auto"], fixed[best]), 3) for name in ("even", "by size")
        },
    }


def profile(parts: Parts, work: tuple[int, int]) -> list[dict[str, float]]:
    """Trajectories of each task that each part does in a second, while the other part does the other task."""
    prompts, answers = work
    one = parts.play([prompts // 2, 0], [0, answers])
    other = parts.play([0, answers], [prompts // 2, 0])
    return [
        {"prefill_heavy": prompts // 2 / one[0], "decode_heavy": answers / other[0]},
        {"prefill_heavy": prompts // 2 / other[1], "decode_heavy": answers / one[1]},
    ]


def auto(options: argparse.Namespace, rates: list[dict[str, float]], work: tuple[int, int]) -> tuple[Any, Any]:
    """The policy's prediction for any assignment, and the one it takes: asked with these rates."""
    from benchmarks.gpu_shapes import SHAPES, TIED
    from rollart.hardware import HARDWARE, RUNTIMES, ModelShape, engine_costs
    from rollart.policy.planning import Problem, best_plan
    from rollart.policy.prediction import PoolSpeed
    from rollart.policy.profile import TaskProfile

    sizes = SHAPES[options.shape]
    hidden, layers, width = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    body = layers * (2 * hidden * width * (heads + kv_heads) + 3 * hidden * sizes["intermediate_size"])
    head = sizes["vocab_size"] * hidden
    params = body + head * (1 if options.shape in TIED else 2)
    model = ModelShape(
        params=params,
        active_params=params,
        kv_bytes_per_token=4.0 * layers * kv_heads * width,
        layers=layers,
        hidden=hidden,
        attention_width=heads * width,
        kv_heads=kv_heads,
        head_params=head,
        lookup_params=params - body - head,
    )
    whole = HARDWARE["h200"]
    costs = engine_costs(model, whole, 1, RUNTIMES["embedded"])
    prefill_s = PROMPT[0] * costs.prefill_token_s(PROMPT[0] / 2)
    context = ANSWER[0] + ANSWER[1] / 2
    batch = min(MAX_BATCH, work[1])
    decode_s = ANSWER[1] * costs.step_s(batch, batch * context) / batch
    speeds = [
        PoolSpeed(
            name=name,
            hardware=replace(
                whole,
                tflops=whole.tflops * rate["prefill_heavy"] * prefill_s,
                bandwidth_gb_s=whole.bandwidth_gb_s * rate["decode_heavy"] * decode_s,
            ),
            model=model,
            engines=1,
            gpus=1,
            max_batch=MAX_BATCH,
            chunk_tokens=16_384,
        )
        for name, rate in zip(("first", "second"), rates, strict=True)
    ]
    profiles = {
        task: TaskProfile(
            prompt_tokens=tokens_in,
            new_tokens=tokens_in,
            cached_tokens=0.0,
            prefill_tokens=tokens_in,
            decode_tokens=tokens_out,
            decode_squares=float(tokens_out**2),
            turns=1.0,
            context_tokens=tokens_in + tokens_out / 2,
            elsewhere_s=0.0,
            trajectories=64,
        )
        for task, (tokens_in, tokens_out) in (("prefill", PROMPT), ("decode", ANSWER))
    }
    problem = Problem(
        profiles=profiles,
        demand={"prefill": float(work[0]), "decode": float(work[1])},
        members={"prefill": 1, "decode": 1},
        pools=speeds,
        fixed={},
        ahead=1.0,
    )

    def predicted(both: tuple[float, float]) -> float:
        plan = {
            task: {pool: part for pool, part in (("first", share), ("second", 1 - share)) if part}
            for task, share in zip(("prefill", "decode"), both, strict=True)
        }
        return max(problem.periods(plan).values())

    best = best_plan(problem)
    return predicted, (best["prefill"].get("first", 0.0), best["decode"].get("first", 0.0))


if __name__ == "__main__":
    main()
