"""Train steps of the single-device trainer on one CUDA device: time, model FLOP utilisation, memory.

    python benchmarks/gpu_train.py 0.6b 4b 8b:moments=bfloat16 8b:lora=32 --json
    python benchmarks/gpu_train.py check

Each case is a Qwen3 shape with random weights, and options after a colon: `tokens` (of the step, 16384), `longest` (of
a sample, 4096), `even` (1: all samples are as long as the longest), `folded` (share of each that is common to eight),
`recompute`, `layers` (recomputed, exactly), `depth` (layers of the model: 1 compiles what the whole shape needs, and
fills torch's cache), `compile`, `moments`, `master`, `offload`, `lora` (rank), `shapes` (dynamic, static: of the
compiled layers). All samples of a step are one micro-batch of mixed lengths, and every token
but the first of a sample is trained on, by the trainer's own code: `Updater.updates`, one optimizer update. `check`
compares what the device computes with a CPU in float32.

MFU is (6 N + attention) / seconds / 790 TFLOP/s, the card's measured matrix rate. N counts the head and not the lookup
of embeddings; attention counts the half that causal attention needs, forward and twice backward. What is recomputed
does not count. With LoRA it is 4 N, since no gradient of the base weights is computed.

`--small` runs the same on a CPU with tiny models: it shows that the script works, its figures mean nothing.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rollart.config.load import build_job
from rollart.config.settings import LoraSettings
from rollart.model import packed
from rollart.model.adapters import Lora, add_adapters
from rollart.model.compiled import compiled_on_cuda, run_layers
from rollart.model.network import adopt, packed_scores
from rollart.train.adamw import adamw_, factors
from rollart.train.losses import Totals
from rollart.train.memory import compiles, recomputed_layers
from rollart.train.optimizer import MasterAdamW
from rollart.train.settings import TrainerSettings
from rollart.train.step import RankWork
from rollart.train.updater import Updater
from rollart.types import Sample, TrajectoryId

PEAK_FLOPS = 790e12
ROUNDS = 6
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    tokens: int = 16_384
    longest: int = 4096
    even: int = 0
    folded: float = 0.0
    recompute: str = ""
    layers: int = -1
    """Recompute exactly this many."""
    depth: int = 0
    compile: str = "auto"
    moments: str = "float32"
    master: str = "float32"
    offload: str = "none"
    lora: int = 0
    shapes: str = "dynamic"
    seed: int = 0

    @classmethod
    def read(cls, text: str) -> "Case":
        shape, _, options = text.partition(":")
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        given = dict(option.split("=", 1) for option in options.split(",") if option)
        return cls(shape=shape, **{key: kinds[key](value) for key, value in given.items()})

    def train(self, device: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "device": device,
            "lr": 1e-6,
            "compile": self.compile,
            "moments": self.moments,
            "microbatch_tokens": self.tokens,
        }
        if device != "cpu":
            settings |= {"master": self.master, "offload": self.offload}
        if self.recompute:
            settings["recompute"] = self.recompute
        if self.lora:
            settings["lora"] = {"rank": self.lora}
        return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="0.6b, 4b:recompute=none, ..., or check")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no further case or round after this long")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end as well")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU: a trial of the script")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        sys.exit("no CUDA device; run this where there is one, or try the script with --small")
    device = torch.device("cpu" if arguments.small else "cuda")
    until = time.perf_counter() + arguments.seconds
    results: dict[str, Any] = {}
    for text in arguments.cases:
        if time.perf_counter() > until:
            results[text] = {"failed": "no time was left"}
            say(f"{text}: no time was left")
            continue
        try:
            results[text] = check(device) if text == "check" else measure(Case.read(text), device, until, arguments)
        except Exception as error:  # one case must not cost the others; it is reported
            short = traceback.format_exc(limit=-6)[-1800:]
            results[text] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            say(f"{text}: FAILED\n{short}")
        release()
    if arguments.json:
        facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu (a trial: not a figure)",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        print(json.dumps({"cases": results, **facts}, indent=1), flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def release() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(shape: dict[str, Any], device: torch.device, *, tied: bool, positions: int) -> PreTrainedModel:
    config = Qwen3Config(
        **shape,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def lengths_of(case: Case) -> list[int]:
    """Of mixed samples: as many tokens as the case has, none longer than it says."""
    rng = np.random.default_rng(case.seed)
    found: list[int] = []
    while (left := case.tokens - sum(found)) > 0:
        length = int(np.clip(rng.lognormal(np.log(case.longest / 3), 0.7), 32, case.longest))
        found.append(left if left < length + 32 and left <= case.longest else min(length, left))
    return found


def samples_of(case: Case, vocab_size: int) -> list[Sample]:
    rng = np.random.default_rng(case.seed)
    lengths = lengths_of(case)
    if case.folded or case.even:
        lengths = [case.longest] * (case.tokens // case.longest)
    beginnings = rng.integers(0, vocab_size, (len(lengths) // 8 + 1, case.longest))
    samples = []
    for number, length in enumerate(lengths):
        tokens = rng.integers(0, vocab_size, length)
        common = int(case.folded * length)
        tokens[:common] = beginnings[number // 8, :common]
        mask = np.arange(length) > 0
        samples.append(
            Sample(
                trajectory=TrajectoryId(f"g{number:04d}", 0, 0),
                domain="bench",
                tokens=tokens.astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            )
        )
    return samples


def settings_of(case: Case, device: torch.device) -> TrainerSettings:
    job = build_job(
        {
            "name": "bench",
            "model": {"path": "."},
            "tasks": [{"name": "bench"}],
            "pools": [{"name": "here", "engines": {}, "slots": 1}],
            "train": case.train(device.type),
        }
    )
    return TrainerSettings(job=job, out=Path(tempfile.gettempdir()))


def flops(case: Case, model: PreTrainedModel, samples: list[Sample]) -> tuple[float, float]:
    """(of the weights, of attention) in a step."""
    config: Any = model.config
    size = sum(param.numel() for name, param in model.named_parameters() if "lora_" not in name)
    if not config.tie_word_embeddings:
        size -= config.vocab_size * config.hidden_size
    tokens = sum(len(sample.tokens) for sample in samples)
    squares = sum(len(sample.tokens) ** 2 for sample in samples)
    heads = config.num_attention_heads * config.head_dim
    return (4.0 if case.lora else 6.0) * size * tokens, 6.0 * config.num_hidden_layers * heads * squares


def measure(case: Case, device: torch.device, until: float, arguments: argparse.Namespace) -> dict[str, Any]:
    small = device.type == "cpu"
    if small:
        case = replace(case, tokens=min(case.tokens, 512), longest=min(case.longest, 128))
    began = time.perf_counter()
    settings = settings_of(case, device)
    train = settings.job.train
    shape = SMALL if small else SHAPES[case.shape] | COMMON
    if case.depth:
        shape = shape | {"num_hidden_layers": case.depth}
    model = adopt(build(shape, device, tied=case.shape != "8b", positions=max(4096, case.longest)))
    if case.lora:
        add_adapters(model, Lora(rank=case.lora, alpha=2.0 * case.lora, targets=LoraSettings().targets))
    recompute, compiled = recomputed_layers(train, model), compiles(train, model)
    recompute = case.layers if case.layers >= 0 else recompute
    run_layers(model, recompute=recompute, compile_=compiled, dynamic=case.shapes == "dynamic")
    optimizer = MasterAdamW(model, train)
    learner = Updater(settings, partial(packed_scores, model), None, optimizer, device)
    samples = samples_of(case, shape["vocab_size"])
    totals = Totals(tokens=sum(int(sample.mask.sum()) for sample in samples), sequences=len(samples))
    work = [RankWork(totals, (tuple(samples),))]
    synchronize(device)
    lengths = [len(sample.tokens) for sample in samples]
    say(
        f"{case.shape}: built in {time.perf_counter() - began:.1f} s; {len(samples)} samples of {min(lengths)} to "
        f"{max(lengths)} tokens; {recompute} layers recomputed, compiled {compiled}"
    )
    seconds: list[float] = []
    report = None
    for number in range(arguments.rounds + 1):
        began = time.perf_counter()
        (report,) = learner.updates(0, work, train.lr, begin=True)
        synchronize(device)
        took = time.perf_counter() - began
        if report.failed:
            raise RuntimeError(report.failed[0].reason)
        say(f"{case.shape}: step {number} took {took:.3f} s" + (" (with compiling)" if number == 0 else ""))
        if number:
            seconds.append(took)
        elif device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if time.perf_counter() > until and number >= 2:
            break
    median = statistics.median(seconds)
    weights, attention = flops(case, model, samples)
    found: dict[str, Any] = {
        "seconds": round(median, 4),
        "spread": [round(min(seconds), 4), round(max(seconds), 4)],
        "tokens_per_s": round(case.tokens / median),
        "mfu": round((weights + attention) / median / PEAK_FLOPS, 4),
        "mfu_without_attention": round(weights / median / PEAK_FLOPS, 4),
        "phases": phases(learner, optimizer, samples, totals, train.lr, device),
        "recompute": recompute,
        "compiled": compiled,
        "grad_norm": round(report.grad_norm, 4) if report else None,
        "samples": len(samples),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }
    if device.type == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        found["reserved_gb"] = round(torch.cuda.memory_reserved() / 1e9, 1)
    say(f"{case.shape}: {json.dumps(found)}")
    return found


def phases(
    learner: Updater,
    optimizer: MasterAdamW,
    samples: list[Sample],
    totals: Totals,
    lr: float,
    device: torch.device,
) -> dict[str, float]:
    """Seconds of each part of a step, waiting for the device between them: together a little more than a step."""
    times = [time.perf_counter()]

    def passed() -> None:
        synchronize(device)
        times.append(time.perf_counter())

    loss, _ = learner._loss(learner._micro_batch(samples), totals)
    passed()
    torch.autograd.backward(loss)
    passed()
    optimizer.clip()
    passed()
    optimizer.update(lr)
    passed()
    names = ("forward", "backward", "norm", "update")
    return {name: round(after - before, 4) for name, before, after in zip(names, times, times[1:], strict=False)}


# --- is it right? ---------------------------------------------------------------------------------------------------


def check(device: torch.device) -> dict[str, Any]:
    """A small model on this device in bfloat16, each way it can be run, beside the same on a CPU in float32."""
    shape = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    exact = adopt(build(shape, torch.device("cpu"), tied=True, positions=4096))
    rng = np.random.default_rng(0)
    lengths = [300, 300, 300, 40, 77]
    tokens = torch.from_numpy(rng.integers(0, shape["vocab_size"], sum(lengths)))
    for first in (300, 600):
        tokens[first : first + 200] = tokens[:200]
    expected = gradients(exact, tokens, lengths)
    found: dict[str, Any] = {}
    for name, folded, options in (
        ("plain", False, {}),
        ("folded", True, {}),
        ("recomputed", True, {"recompute": 4}),
        ("compiled", True, {"compile_": True}),
        ("compiled, not folded", False, {"compile_": True, "recompute": 2}),
    ):
        try:
            model = adopt(build(shape, device, tied=True, positions=4096))
            model.load_state_dict(exact.state_dict())
            run_layers(model, **options)
            found[name] = apart(gradients(model, tokens, lengths, fold=folded), expected)
        except Exception as error:  # each way by itself
            found[name] = f"FAILED {type(error).__name__}: {error}"[:400]
            say(traceback.format_exc(limit=-6)[-1800:])
        say(f"check {name}: {found[name]}")
    found["adamw"] = adamw_apart(device)
    say(f"check adamw: {found['adamw']}")
    return found


def gradients(
    model: PreTrainedModel, tokens: Tensor, lengths: list[int], *, fold: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and gradients of a sum of them and of entropies."""
    saved = packed.MIN_SAVED
    packed.MIN_SAVED = saved if fold else 2.0
    model.zero_grad()
    try:
        scores = packed_scores(model, tokens, lengths, 0.9)
        weights = torch.linspace(0, 1, len(tokens), device=scores.logprobs_T.device)
        torch.autograd.backward((scores.logprobs_T * weights).sum() + scores.entropy_T.sum())
    finally:
        packed.MIN_SAVED = saved
    grads = {name: param.grad.float().cpu() for name, param in model.named_parameters() if param.grad is not None}
    return scores.logprobs_T.detach().cpu(), grads


def apart(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
    """Mean difference of log-probabilities; the worst relative difference of a tensor's gradients, and whose."""
    worst = {
        name: float((grad - found[1][name]).norm() / grad.norm().clamp(min=1e-9)) for name, grad in expected[1].items()
    }
    name = max(worst, key=lambda each: worst[each])
    return {
        "logprobs": round(float((found[0] - expected[0]).abs().mean()), 5),
        "worst_gradient": round(worst[name], 4),
        "of": name,
    }


def adamw_apart(device: torch.device) -> dict[str, Any]:
    """Our AdamW on this device beside the same on a CPU, after some steps: they round by the same coins."""
    differences: dict[str, Any] = {}
    for masters in (True, False):
        ends = []
        for place in (torch.device("cpu"), device):
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(100_003, generator=generator).to(place, torch.bfloat16)
            low = torch.zeros(len(weight), dtype=torch.int16, device=place) if masters else None
            first, second = (torch.zeros(len(weight), dtype=torch.bfloat16, device=place) for _ in range(2))
            step = compiled_on_cuda(adamw_, place)
            for number in range(1, 6):
                grad = torch.randn(len(weight), generator=generator).to(place)
                shared = factors(number, lr=1e-3, weight_decay=0.1, eps=1e-8, clip=0.5).to(place)
                seed = torch.full((), number, dtype=torch.int32, device=place)
                step(weight, low, first, second, grad, shared, seed)
            ends.append((weight.float().cpu(), first.float().cpu(), second.float().cpu()))
        differences["float32 masters" if masters else "stochastic"] = [
            round(float(((one - other).abs() > 1e-6).float().mean()), 6) for one, other in zip(*ends, strict=True)
        ]
    return differences


if __name__ == "__main__":
    main()
