"""Prefill and decode apart on two parts of one card, beside two whole engines on the same parts.

    python benchmarks/gpu_pair.py --shape 4b --shares 0.5 0.48 --json

The work is mixed: `--prompts` requests that are mostly prompt (4,096 tokens in, 32 out) and `--answers` that are mostly
answer (128 in, 512 out), in one order for all, asked at once. Each process has its share of the multiprocessors (MPS).

- pair: the first part prefills, the second decodes; the cache of a prompt is copied within the card.
- halves: an engine on each part, which serves half of each kind from prompt to end.

They take turns in rounds; what is measured is the time until the last answer. Then some sessions of two turns are
played greedily, one at a time, by the pair and by the first of the whole engines, and held against each other.

`--shape small --device cpu` tries the script without a GPU and without shares: its figures mean nothing.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PROMPT, ANSWER = (4096, 32), (128, 512)
SMALL_PROMPT, SMALL_ANSWER = (64, 4), (8, 16)
"""Tokens in and out of one request; on a CPU these."""
KV_TOKENS = {"prefill": 64_000, "decode": 140_000, "whole": 100_000}
"""So that all of them fit on one card beside each other."""
SESSIONS, TURNS, SAID = 6, 2, 32
"""Of the greedy comparison."""
DRAWN = 1_000_003
"""Weights are these so often: a prime, so that no two rows are alike."""
TARGET = "benchmarks.gpu_pair:start"
LIMIT_S = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4b")
    parser.add_argument(
        "--shares", type=float, nargs=2, default=[0.5, 0.48], help="others may compute wrongly: docs/gpu.md"
    )
    parser.add_argument("--turns", action="store_true", help="no shares: processes take turns on the card")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="begin no further round after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="on one line")
    options = parser.parse_args()
    report = asyncio.run(compare(options))
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


# --- one process


async def start(body: str) -> Any:
    """A prefill side; or a side that plays: a whole engine, or one that decodes and has a prefill side."""
    from benchmarks.gpu_shapes import build
    from rollart.cluster.mps import share_of
    from rollart.config.settings import EngineSettings
    from rollart.engines.embedded.engine import EmbeddedEngine
    from rollart.engines.embedded.handover import PrefillSide
    from rollart.engines.embedded.pair import PairedEngine
    from rollart.engines.embedded.threaded import ThreadedEngine
    from rollart.errors import ClusterError
    from rollart.model.network import adopt
    from rollart.workers.launch import Process

    told = json.loads(body)
    role, on_card = told["role"], told["device"] == "cuda"

    def threaded() -> ThreadedEngine:
        import torch

        torch.set_num_threads(1)
        model = build(told["shape"], told["device"], torch.bfloat16 if on_card else torch.float32)
        fill_alike(model.parameters())
        model = adopt(model)
        settings = EngineSettings(
            device=told["device"],
            kv_tokens=KV_TOKENS[role] if on_card else 4096,
            max_batch=told["max_batch"],
            step_tokens=max(told["step_tokens"], told["max_batch"]),
        )
        core = EmbeddedEngine(model, settings, eos=frozenset(), paged=True, lends=role == "prefill")
        return ThreadedEngine(core, fetch=lambda manifest: {})

    if role == "prefill":
        return PrefillSide(threaded())
    if role == "whole":
        return Side(threaded())
    environment = {**os.environ, **(share_of(told["prefill_share"]) if told["prefill_share"] else {})}
    prefill = Process("prefill", TARGET, Path(told["log_dir"]), environment)
    starting = asyncio.ensure_future(prefill.start(json.dumps({**told, "role": "prefill"})))
    await asyncio.sleep(0.1)  # it loads while this one does
    engine = threaded()
    await starting
    memory = await prefill.call(ClusterError, "place")
    return Side(PairedEngine(engine, prefill, memory, max_batch=told["max_batch"]))


def fill_alike(parameters: "Iterable[Tensor]") -> None:
    """The same weights in all processes: what a device draws depends on how many multiprocessors it has."""
    import torch

    drawn = 0.02 * torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))
    for number, one in enumerate(one for one in parameters if one.dim() > 1):
        some = drawn.roll(number).to(one.device, one.dtype)
        one.data.view(-1).copy_(some.repeat(-(-one.numel() // DRAWN))[: one.numel()])


class Side:
    """An engine that plays the work it is told of."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0
        core = engine.engine.core if hasattr(engine, "engine") else engine.core
        self._vocab = int(core.model.config.vocab_size)

    async def play(self, lengths: list[list[int]], begin: float) -> dict[str, Any]:
        """Requests of these lengths, asked at once; seconds from `begin` until the last is answered."""
        rng = np.random.default_rng(self._count)
        asked = []
        for tokens_in, tokens_out in lengths:
            self._count += 1
            prompt = rng.integers(1, self._vocab, tokens_in).astype(np.int32)
            asked.append(self._ask(prompt, f"{self._count}", 0, tokens_out, last=True, temperature=1.0))
        await asyncio.sleep(max(0.0, begin - time.time()))
        began = time.perf_counter()
        done = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "sampled": sum(len(one.tokens) for one in done)}

    async def handed(self) -> dict[str, Any]:
        return asdict(self._engine.handed)

    async def greedy(self) -> list[list[Any]]:
        """Tokens and log-probabilities of sessions, turn by turn, and how much of each prompt was cached."""
        rng = np.random.default_rng(7)
        found: list[list[Any]] = []
        for session in range(SESSIONS):
            prompt = rng.integers(1, self._vocab, 40 + 90 * session).astype(np.int32)
            for turn in range(TURNS):
                more = rng.integers(1, self._vocab, 50).astype(np.int32)
                got = await self._ask(prompt, f"greedy{session}", turn, SAID, last=turn == TURNS - 1, temperature=0.0)
                found.append([got.tokens.tolist(), got.logprobs.tolist(), got.cached_tokens])
                prompt = np.concatenate([prompt, got.tokens, more])
        return found

    def _ask(
        self, prompt: "np.ndarray[Any, Any]", session: str, turn: int, most: int, *, last: bool, temperature: float
    ) -> Awaitable[Any]:
        from benchmarks.gpu_engine import request

        answer: Awaitable[Any] = self._engine.generate(request(prompt, session, turn, most, last, temperature))
        return answer


# --- all of them


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    from rollart.cluster.mps import Mps
    from rollart.workers.launch import Process

    on_card = options.device == "cuda" and not options.turns
    with tempfile.TemporaryDirectory() as folder:
        mps = Mps(Path(folder)) if on_card else None
        sides: dict[str, Process] = {}
        try:
            shares = {"pair": options.shares[1], "first": options.shares[0], "second": options.shares[1]}
            for name, share in shares.items():
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **(mps.environment(share) if mps else {})}
                sides[name] = Process(name, TARGET, Path(folder), environment)
            told = {
                "shape": options.shape,
                "device": options.device,
                "max_batch": options.prompts + options.answers,
                "step_tokens": options.step_tokens,
                "prefill_share": options.shares[0] if on_card else None,
                "log_dir": folder,
            }
            async with asyncio.timeout(LIMIT_S):
                began = time.monotonic()
                roles = {"pair": "decode", "first": "whole", "second": "whole"}
                await asyncio.gather(
                    *(side.start(json.dumps({**told, "role": roles[name]})) for name, side in sides.items())
                )
                start_s = time.monotonic() - began
                print(f"started in {start_s:.1f} s", file=sys.stderr, flush=True)
                return {"start_s": round(start_s, 1), **await measure(sides, options)}
        finally:
            for side in sides.values():
                await side.stop()
            if mps is not None:
                await asyncio.sleep(0.5)  # a prefill side ends with the one that it prefills for
                await asyncio.to_thread(mps.close)


async def measure(sides: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    prompt, answer = (PROMPT, ANSWER) if options.device == "cuda" else (SMALL_PROMPT, SMALL_ANSWER)
    work = [prompt] * options.prompts + [answer] * options.answers
    work = [work[at] for at in np.random.default_rng(0).permutation(len(work))]
    whole: dict[tuple[int, int], int] = {}
    halves: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for one in work:  # in turn, each kind by itself
        whole[one] = whole.get(one, -1) + 1
        halves[whole[one] % 2].append(one)
    plays: dict[str, dict[str, list[tuple[int, int]]]] = {
        "pair": {"pair": work},
        "halves": {"first": halves[0], "second": halves[1]},
    }
    began = time.monotonic()
    for shares in plays.values():  # kernels are compiled
        few = {name: [(one[0], min(one[1], 16)) for one in lengths[::3]] for name, lengths in shares.items()}
        await play(sides, few)
    seconds: dict[str, list[float]] = {name: [] for name in plays}
    before = await ask(sides["pair"], "handed")
    sampled = 0
    for number in range(options.rounds):
        if number and time.monotonic() - began > options.seconds:
            break
        for name, shares in plays.items():
            took, sampled = await play(sides, shares)
            seconds[name].append(round(took, 3))
            print(f"round {number + 1}: {name}: {took:.3f} s", file=sys.stderr, flush=True)
    after = await ask(sides["pair"], "handed")
    handed = {key: after[key] - before[key] for key in after}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    tokens = sum(sum(one) for one in work)
    greedy = await asyncio.gather(ask(sides["pair"], "greedy"), ask(sides["first"], "greedy"))
    return {
        "shape": options.shape,
        "shares": None if options.turns else {"prefill": options.shares[0], "decode": options.shares[1]},
        "work": {"prompt_heavy": options.prompts, "answer_heavy": options.answers, "lengths": [prompt, answer]},
        "seconds": seconds,
        "median_s": medians,
        "sampled_per_s": {name: round(sampled / median) for name, median in medians.items()},
        "tokens_per_s": {name: round(tokens / median) for name, median in medians.items()},
        "halves_by_pair": round(medians["halves"] / medians["pair"], 3),
        "handed": handed
        | {
            "copy_s": round(handed["copy_s"], 4),
            "GB_per_s": round(handed["copied_bytes"] / handed["copy_s"] / 1e9, 1) if handed["copy_s"] else None,
        },
        "greedy": beside(*greedy),
    }


async def play(sides: dict[str, Any], shares: dict[str, list[tuple[int, int]]]) -> tuple[float, int]:
    """Seconds until all are done, and the tokens that they sampled."""
    begin = time.time() + 0.2
    done = await asyncio.gather(
        *(ask(sides[name], "play", [list(one) for one in lengths], begin) for name, lengths in shares.items())
    )
    return max(one["seconds"] for one in done), sum(one["sampled"] for one in done)


async def ask(side: Any, method: str, *arguments: Any) -> Any:
    from rollart.errors import EngineError

    return await side.call(EngineError, method, *arguments)


def beside(ours: list[list[Any]], theirs: list[list[Any]]) -> dict[str, Any]:
    """The pair's greedy turns beside one engine's. After a token that differs, the rest of a session does."""
    equal, off = 0, 0.0
    for (tokens, logprobs, _), (others, expected, _) in zip(ours, theirs, strict=True):
        same = next((at for at, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), len(tokens))
        equal += same == len(tokens)
        off = max([off, *(abs(one - other) for one, other in zip(logprobs[:same], expected[:same], strict=True))])
    return {
        "turns": len(ours),
        "equal": equal,
        "largest_logprob_difference": round(off, 5),
        "cached_tokens": [sum(one[2] for one in side) for side in (ours, theirs)],
    }


if __name__ == "__main__":
    main()
