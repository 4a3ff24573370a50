"""The embedded engine on one CUDA device, beside what the device could do at most, and beside transformers.

    python benchmarks/gpu_engine.py decode prefill --shape 0.6b 8b --batch 256 --context 1024 --json
    python benchmarks/gpu_engine.py rollout compare --shape 0.6b --json

Qwen3 shapes with random weights in bfloat16. The cases:

- decode: `--batch` requests whose contexts have `--context` tokens; steps of the whole engine, host included. The limit
  is reading all weights and all live keys and values once, at 4.3 TB/s. Caches are filled with noise, not by prefill.
- prefill: prompts of `--context` tokens packed into steps of 16,384; the limit is 790 TFLOP/s.
- rollout: `--batch` sessions in flight, observations of 256 to 1,024 tokens and answers of 128 to 512, eight turns
  each, a new one for each that ends, for `--seconds`; beside what its decode and prefill take at their own rates.
- short: the same with observations of 24 to 96 tokens and answers of 2 to 8, as games in words have them, in rounds
  with and without graphs of steps that have prompts in them.
- group: eight requests with one prompt.
- same: greedy answers with and without graphs, and the trainer's log-probabilities of sampled answers.
- compare: the same requests through `generate` and continuous batching of transformers.

A case that fails is reported, and the others go on. `--shape small --device cpu` tries the script without a GPU.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_shapes import COPY_BYTES_S, MATRIX_FLOPS, SHAPES, active_parameters, build
from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import adopt, packed_logprobs
from rollart.types import Completion, GenerateRequest, Sampling

STEP_TOKENS = 16_384
WARM_STEPS, TIMED_STEPS = 8, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["0.6b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[256])
    parser.add_argument("--context", nargs="+", type=int, default=[1024], help="one for each batch, or one for all")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a rollout")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device; run this where there is one, or try the script with --shape small --device cpu")
    found: list[dict[str, Any]] = []
    for shape in options.shape:
        bench = Bench(shape, options)
        for case in options.cases:
            for batch, context in bench.loads(case):
                figures = bench.run(case, batch, context)
                found.append({"case": case, "shape": shape, "batch": batch, "context": context, **figures})
                print(json.dumps(found[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
        bench.close()
    if options.json:
        print(json.dumps({"figures": found, "device": _device_name(options.device), "torch": torch.__version__}))


class Bench:
    """One model, and the cases on it."""

    def __init__(self, shape: str, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        self.model = adopt(build(shape, options.device, self.dtype))

    def loads(self, case: str) -> list[tuple[int, int]]:
        contexts = self.options.context
        batches = self.options.batch if case in ("decode", "rollout", "short") else self.options.batch[:1]
        return [(batch, contexts[min(at, len(contexts) - 1)]) for at, batch in enumerate(batches)]

    def run(self, case: str, batch: int, context: int) -> dict[str, Any]:
        try:
            return CASES[case](self, batch, context)
        except Exception as error:  # one case that fails must not cost the figures of the others; it is reported
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"[:500]}
        finally:
            self.free()

    def engine(self, batch: int, kv_tokens: int | None, **more: Any) -> EmbeddedEngine:
        step_tokens = max(STEP_TOKENS, batch)
        settings = EngineSettings(
            device=self.options.device, kv_tokens=kv_tokens, max_batch=batch, step_tokens=step_tokens, **more
        )
        return EmbeddedEngine(self.model, settings, eos=frozenset(), paged=True)

    def free(self) -> None:
        gc.collect()  # engines refer to themselves
        if self.options.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def close(self) -> None:
        del self.model
        self.free()

    @property
    def kv_token_bytes(self) -> int:
        config = self.model.config
        per = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return per * torch.finfo(self.dtype).bits // 8


# --- cases


def decode(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    began = time.perf_counter()
    engine = bench.engine(batch, (batch + 2) * (context + 256))
    start_s = time.perf_counter() - began
    rounds = [decode_round(engine, batch, context, bench.options.device) for _ in range(bench.options.rounds)]
    steps = [step for times in rounds for step in times]
    means = [statistics.fmean(times) for times in rounds]
    step_s = statistics.median(means)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in bench.model.parameters())
    live = batch * (context + (WARM_STEPS + TIMED_STEPS) // 2) * bench.kv_token_bytes
    limit_s = (weights + live) / COPY_BYTES_S
    return {
        "step_ms": round(1e3 * step_s, 3),
        "rounds_ms": [round(1e3 * mean, 3) for mean in means],
        "tokens_per_s": round(batch / step_s),
        "limit_ms": round(1e3 * limit_s, 3),
        "of_limit": round(limit_s / step_s, 3),
        "slowest_by_median": round(max(steps) / statistics.median(steps), 2),
        "start_s": round(start_s, 1),
    }


def decode_round(engine: EmbeddedEngine, batch: int, context: int, device: str) -> list[float]:
    """Seconds of each timed step."""
    total = WARM_STEPS + TIMED_STEPS + 4
    rng = np.random.default_rng(0)
    vocab = engine._vocab_size
    for number in range(batch):
        engine.add(request(rng.integers(1, vocab, context), f"{number}", 0, total, last=True))
    engine.scheduler._admit()
    for seq in engine.scheduler.running:  # as if computed: what the cache holds is noise
        seq.length = seq.total - 1
    times = []
    for step in range(total):
        began = time.perf_counter()
        engine.step()
        if WARM_STEPS <= step < WARM_STEPS + TIMED_STEPS:
            times.append(time.perf_counter() - began)
    drain(engine)
    synchronize(device)
    return times


def prefill(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    return prefill_rates(bench, context, 0)


def prefill_rates(bench: Bench, new: int, cached: int) -> dict[str, Any]:
    """Steps of prompts with `new` tokens to compute behind `cached` ones, which are noise."""
    count = max(1, STEP_TOKENS // new)
    engine = bench.engine(max(count, 8), (count + 8) * (new + cached + 64))
    rng = np.random.default_rng(1)
    times = []
    for number in range(bench.options.rounds + 1):
        for prompt in range(count):
            tokens = rng.integers(1, engine._vocab_size, cached + new)
            engine.add(request(tokens, f"{number}.{prompt}", 0, 1, last=True))
        engine.scheduler._admit()
        for seq in engine.scheduler.running:
            seq.length = cached
        synchronize(bench.options.device)
        began = time.perf_counter()
        drain(engine)
        synchronize(bench.options.device)
        times.append(time.perf_counter() - began)
    seconds, tokens_done = statistics.median(times[1:]), count * new
    config = bench.model.config
    layers = active_parameters(bench.model) - config.vocab_size * config.hidden_size
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (cached + new / 2)
    flops = tokens_done * (2 * layers + attention)
    return {
        "tokens": tokens_done,
        "seconds": [round(one, 4) for one in times[1:]],
        "tokens_per_s": round(tokens_done / seconds),
        "of_limit": round(flops / seconds / MATRIX_FLOPS, 3),
    }


def group(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    engine = bench.engine(8, 16 * (context + 64))
    prompt = np.random.default_rng(2).integers(1, engine._vocab_size, context)
    seconds: list[tuple[int, float, int]] = []
    for size in (1, 8, 1, 8):
        before = engine.stats.computed_tokens
        for member in range(size):
            engine.add(request(prompt + len(seconds), f"{len(seconds)}.{member}", 0, 1, last=True))
        synchronize(bench.options.device)
        began = time.perf_counter()
        drain(engine)
        seconds.append((size, round(time.perf_counter() - began, 4), engine.stats.computed_tokens - before))
    return {"size_seconds_computed": seconds}


def rollout(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    played = next(play(bench, playing(bench, batch), batch, PAGES))
    bench.free()
    alone = decode(bench, batch, played["mean_context"])
    bench.free()
    # A turn's observation comes behind what its session has in the cache.
    chunk = prefill_rates(bench, 640, played["mean_context"])
    ideal = played["sampled"] / alone["tokens_per_s"] + played["prefilled"] / chunk["tokens_per_s"]
    return played | {
        "decode_alone_per_s": alone["tokens_per_s"],
        "prefill_alone_per_s": chunk["tokens_per_s"],
        "time_by_own_rates": round(played["seconds"] / ideal, 3),
    }


def short(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    """Each of the rounds has `--seconds` for both."""
    found: dict[str, list[dict[str, Any]]] = {"graphs": [], "kernels": []}
    engine = playing(bench, batch)
    played = play(bench, engine, batch, WORDS)
    for _ in range(bench.options.rounds):
        for name, own in found.items():
            engine.backend.captures = name == "graphs"
            own.append(next(played))
    turns = {name: [round(one["turns"] / one["seconds"]) for one in own] for name, own in found.items()}
    return {
        "turns_per_s": turns,
        "times_as_fast": [round(ours / other, 2) for ours, other in zip(*turns.values(), strict=True)],
        "step_ms": {
            name: [round(1e3 * one["seconds"] / one["steps"], 2) for one in own] for name, own in found.items()
        },
        "host_ms": {name: [round(1e3 * one["host_s"] / one["steps"], 2) for one in own] for name, own in found.items()},
        "mean_context": found["graphs"][-1]["mean_context"],
    }


class Lengths(NamedTuple):
    """Least and most tokens."""

    observation: tuple[int, int]
    answer: tuple[int, int]


PAGES = Lengths((256, 1024), (128, 512))
WORDS = Lengths((24, 96), (2, 8))


def playing(bench: Bench, batch: int) -> EmbeddedEngine:
    memory = {"memory": 0.9} if bench.options.device == "cuda" else {}
    return bench.engine(batch, None, **memory)


def play(bench: Bench, engine: EmbeddedEngine, batch: int, lengths: Lengths) -> Iterator[dict[str, Any]]:
    """Sessions that come and go, for some seconds each time, after every one of the first had a turn."""
    rng = np.random.default_rng(3)
    sessions = {str(number): Session(rng, lengths, bench.options.turns, number) for number in range(batch)}
    for name, session in sessions.items():
        engine.add(session.ask(name, engine._vocab_size))

    def step() -> int:
        ended = engine.step()
        for name, completion in ended:
            own = name.split("/")[0]
            sessions[own].take(completion)
            if sessions[own].over:
                del sessions[own]
                own = f"{own}'"
                sessions[own] = Session(rng, lengths, bench.options.turns, 0)
            engine.add(sessions[own].ask(own, engine._vocab_size))
        return len(ended)

    turns = 0
    while turns < batch:  # until those who began together are spread out
        turns += step()
    while True:
        stats = engine.stats
        live: list[int] = []
        computed, sampled, steps = stats.computed_tokens, stats.sampled_tokens, stats.steps
        turns, began, host = 0, time.perf_counter(), time.thread_time()
        while (took := time.perf_counter() - began) < bench.options.seconds:
            turns += step()
            live.append(
                sum(seq.length for seq in engine.scheduler.running) if stats.steps % 8 == 0 or not live else live[-1]
            )
        sampled = stats.sampled_tokens - sampled
        yield {
            "seconds": round(took, 2),
            "steps": stats.steps - steps,
            "turns": turns,
            "sampled": sampled,
            "prefilled": stats.computed_tokens - computed - sampled,
            "mean_context": round(statistics.fmean(live) / batch),
            "preempted": engine.num_preempted,
            "host_s": time.thread_time() - host,
        }


class Session:
    """A trajectory that is always ready for its next turn. The first ones begin in the middle, each elsewhere."""

    def __init__(self, rng: np.random.Generator, lengths: Lengths, turns: int, number: int) -> None:
        self._rng, self._turns, self._lengths = rng, turns, lengths
        self._turn = number % turns
        self._history = rng.integers(1, 400, self._turn * (sum(lengths.observation) + sum(lengths.answer)) // 2)

    @property
    def over(self) -> bool:
        return self._turn >= self._turns

    def ask(self, name: str, vocab: int) -> GenerateRequest:
        seen = self._rng.integers(1, vocab, self._between(self._lengths.observation))
        self._history = np.concatenate([self._history, seen])
        last = self._turn + 1 == self._turns
        return request(self._history, name, self._turn, self._between(self._lengths.answer), last)

    def _between(self, ends: tuple[int, int]) -> int:
        return int(self._rng.integers(ends[0], ends[1] + 1))

    def take(self, completion: Completion) -> None:
        self._history = np.concatenate([self._history, completion.tokens])
        self._turn += 1


def same(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, 400, int(length)) for length in rng.integers(64, 400, 24)]
    answers: dict[str, list[list[int]]] = {}
    for name in ("graphs", "kernels"):
        engine = bench.engine(24, 24 * 1024)
        if name == "kernels":
            engine.backend.graphs.clear()  # type: ignore[attr-defined]
        for number, prompt in enumerate(prompts):
            engine.add(request(prompt, str(number), 0, 96, last=True, temperature=0.0))
        done = drain(engine)
        answers[name] = [done[f"{number}/0"].tokens.tolist() for number in range(len(prompts))]
    engine = bench.engine(24, 24 * 1024)
    for number, prompt in enumerate(prompts):
        engine.add(request(prompt, str(number), 0, 256, last=True))
    done = drain(engine)
    ours, theirs = [], []
    for number, prompt in enumerate(prompts):
        completion = done[f"{number}/0"]
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64)).to(bench.options.device)
        with torch.no_grad():
            theirs.append(packed_logprobs(bench.model, tokens, [len(tokens)])[len(prompt) :].float().cpu())
        ours.append(torch.from_numpy(completion.logprobs))
    ratio = torch.cat(theirs) - torch.cat(ours)
    # k3: the usual low-variance estimate of KL(engine || trainer) on the engine's own samples
    return {
        "greedy_equal": sum(one == other for one, other in zip(answers["graphs"], answers["kernels"], strict=True)),
        "greedy_requests": len(prompts),
        "mismatch_kl": float((ratio.exp() - 1 - ratio).mean()),
        "mean_difference": float(ratio.abs().mean()),
        "tokens": len(ratio),
    }


def compare(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    requests, prompt_tokens, answer_tokens = (batch, 256, 128) if bench.options.device == "cuda" else (6, 40, 12)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, bench.model.config.vocab_size, (bench.options.rounds + 1, requests, prompt_tokens))
    plain = build(bench.shape, bench.options.device, bench.dtype)
    engine = bench.engine(requests, 2 * requests * (prompt_tokens + answer_tokens))
    sides: dict[str, Callable[[np.ndarray], int]] = {
        "ours": lambda prompt: run_ours(engine, prompt, answer_tokens),
        "generate": lambda prompt: run_generate(plain, prompt, answer_tokens),
        "continuous_batching": lambda prompt: run_batching(plain, prompt, answer_tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(bench.options.rounds + 1):
        for name, side in sides.items():
            try:
                if name not in failed:
                    took = timed(side, prompts[number], requests * answer_tokens, bench.options.device)
                    seconds[name] += [took] if number else []  # the first round warms up
            except Exception as error:  # another library's failure must not cost us our own figure; it is reported
                failed[name] = f"{type(error).__name__}: {error}"[:300]
    median = {name: statistics.median(values) for name, values in seconds.items() if values}
    return {
        "tokens_per_s": {name: round(requests * answer_tokens / value) for name, value in median.items()},
        "times_as_fast": {name: round(value / median["ours"], 2) for name, value in median.items() if name != "ours"},
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "failed": failed,
    }


CASES: dict[str, Callable[[Bench, int, int], dict[str, Any]]] = {
    "compare": compare,
    "decode": decode,
    "group": group,
    "prefill": prefill,
    "rollout": rollout,
    "same": same,
    "short": short,
}


# --- requests


def request(
    prompt: np.ndarray, session: str, turn: int, max_tokens: int, last: bool = False, temperature: float = 1.0
) -> GenerateRequest:
    return GenerateRequest(
        id=f"{session}/{turn}",
        session=session,
        domain="bench",
        turn=turn,
        prompt=(prompt.astype(np.int32),),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=0),
        last=last,
    )


def drain(engine: EmbeddedEngine) -> dict[str, Completion]:
    return dict(_ended(engine))


def _ended(engine: EmbeddedEngine) -> Iterator[tuple[str, Completion]]:
    while engine.busy:
        yield from engine.step()


def run_ours(engine: EmbeddedEngine, prompts: np.ndarray, answer_tokens: int) -> int:
    for number, prompt in enumerate(prompts):
        engine.add(request(prompt, str(number), 0, answer_tokens, last=True))
    return sum(len(completion.tokens) for completion in drain(engine).values())


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


def timed(side: Callable[[np.ndarray], int], prompts: np.ndarray, expected: int, device: str) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    sampled = side(prompts)
    synchronize(device)
    took_s = time.perf_counter() - began_s
    if sampled != expected:
        raise RuntimeError(f"{sampled} tokens instead of {expected}")
    return took_s


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu (a trial: not a figure)"


if __name__ == "__main__":
    main()
