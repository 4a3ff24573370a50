"""The embedded engine on one CUDA device, beside transformers' `generate` and its continuous batching.

    python benchmarks/gpu_engine.py --json

A Qwen3-0.6B shape with random weights in bfloat16; 256 requests of 256 prompt and 128 answer tokens, all at once.
Needs torch, transformers and numpy only: of RollArt it imports the engine, not the job file (which needs pydantic).
`--small` runs the same on a CPU with a tiny model: it shows that the script works, its figures mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import adopt, load_weights_, named_weights
from rollart.types import GenerateRequest, Sampling

ROUNDS = 3
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU: a trial of the script")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        sys.exit("no CUDA device; run this where there is one, or try the script with --small")
    figures = measure(small=arguments.small)
    print(json.dumps(figures, indent=2) if arguments.json else "\n".join(f"{k:>20}  {v}" for k, v in figures.items()))


def measure(*, small: bool) -> dict[str, Any]:
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    requests, prompt_tokens, answer_tokens = (6, 40, 12) if small else (256, 256, 128)
    shape = SMALL if small else QWEN3_06B
    prompts = np.random.default_rng(0).integers(1, shape["vocab_size"], (ROUNDS + 1, requests, prompt_tokens))
    plain = build(shape, device, dtype)
    ours = build(shape, device, dtype)
    load_weights_(ours, named_weights(plain))
    engine = EmbeddedEngine(
        adopt(ours),
        settings=EngineSettings(kv_tokens=2 * requests * 512, max_batch=requests, step_tokens=8_192),
        eos=frozenset(),
    )
    sides: dict[str, Callable[[np.ndarray], int]] = {
        "ours": lambda prompt: run_ours(engine, prompt, answer_tokens),
        "generate": lambda prompt: run_generate(plain, prompt, answer_tokens),
        "transformers_cb": lambda prompt: run_batching(plain, prompt, answer_tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            if name in failed:
                continue
            try:
                took = timed(side, prompts[number], requests * answer_tokens, device)
            except Exception as error:  # another library's failure must not cost us our own figure; it is reported
                failed[name] = f"{type(error).__name__}: {error}"[:500]
                continue
            if number:  # the first round warms up
                seconds[name].append(took)
                print(f"round {number}/{ROUNDS}: {name} {took:.2f} s", file=sys.stderr, flush=True)
    if "ours" in failed:
        raise RuntimeError(failed["ours"])
    median = {name: statistics.median(values) for name, values in seconds.items() if values}
    return {
        "tokens_per_s": {name: round(requests * answer_tokens / value) for name, value in median.items()},
        "vs_generate": ratio(median, "generate"),
        "vs_transformers_cb": ratio(median, "transformers_cb"),
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "failed": failed,
        "decode_step_ms": round(decode_step_ms(engine, prompts[0], device), 2),
        "requests": [requests, prompt_tokens, answer_tokens],
        "model": shape,
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu (a trial: not a figure)",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def build(shape: dict[str, int], device: str, dtype: torch.dtype) -> PreTrainedModel:
    config = Qwen3Config(
        **shape,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return model.to(dtype=dtype).eval()


def timed(side: Callable[[np.ndarray], int], prompts: np.ndarray, expected: int, device: str) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    sampled = side(prompts)
    synchronize(device)
    took_s = time.perf_counter() - began_s
    if sampled != expected:
        raise RuntimeError(f"{sampled} tokens instead of {expected}")
    return took_s


def run_ours(engine: EmbeddedEngine, prompts: np.ndarray, answer_tokens: int) -> int:
    add_all(engine, prompts, answer_tokens)
    sampled = 0
    while engine.busy:
        sampled += sum(len(completion.tokens) for _, completion in engine.step())
    return sampled


def add_all(engine: EmbeddedEngine, prompts: np.ndarray, answer_tokens: int) -> None:
    for number, prompt in enumerate(prompts):
        engine.add(
            GenerateRequest(
                id=f"{number}/0",
                session=str(number),
                domain="bench",
                turn=0,
                prompt=(prompt.astype(np.int32),),
                prompt_tokens=len(prompt),
                sampling=Sampling(max_tokens=answer_tokens, seed=0),
                last=True,
            )
        )


def decode_step_ms(engine: EmbeddedEngine, prompts: np.ndarray, device: str) -> float:
    """The median step in which all requests decode."""
    add_all(engine, prompts, 24)
    times = []
    while engine.busy:
        before = engine.stats.sampled_tokens, engine.stats.computed_tokens
        synchronize(device)
        began_s = time.perf_counter()
        engine.step()
        synchronize(device)
        if engine.stats.sampled_tokens - before[0] == len(prompts) == engine.stats.computed_tokens - before[1]:
            times.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(times)


@torch.inference_mode()
def run_generate(model: PreTrainedModel, prompts: np.ndarray, answer_tokens: int) -> int:
    tokens = torch.from_numpy(prompts).to(model.device)
    output = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=sampling(max_new_tokens=answer_tokens),
    )
    return int(output[:, tokens.shape[1] :].numel())


def run_batching(model: PreTrainedModel, prompts: np.ndarray, answer_tokens: int) -> int:
    results = model.generate_batch(
        inputs=prompts.tolist(),
        generation_config=sampling(max_new_tokens=answer_tokens, eos_token_id=-1),
        # Two pages of 256 tokens a request, and some; its mask is step x cache, so both are bounded.
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=max(32, 5 * len(prompts) // 2), max_batch_tokens=2_048
        ),
    )
    return sum(len(result.generated_tokens) for result in results.values())


def sampling(**more: int) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, **more)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(median: dict[str, float], name: str) -> float | None:
    return round(median[name] / median["ours"], 2) if name in median else None


if __name__ == "__main__":
    main()
