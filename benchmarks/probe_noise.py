"""How far a real vLLM server is from the trainer's log-probabilities, and what the proof of a swap makes of it.

    python benchmarks/probe_noise.py models/tiny32 --dtype bfloat16 --swaps 200 --json

Starts vLLM (ROLLART_VLLM_PYTHON) on the model, moves its weights at random so that log-probabilities of the probe move
by `--move` (root mean square) a step, has the server load each version as a swap does, and scores the probe. Says:
the noise (server against trainer, of a version and of a change), how often `engines/proof.py` was alarmed, and after
how many swaps it would have caught a server that had kept the weights it had, begun at each of the swaps in turn.
`--trainer bfloat16`: the trainer publishes rounded weights.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rollart.config.settings import EngineSettings
from rollart.engines.launch import AnyServer, ServerSettings, launch
from rollart.engines.proof import PRECISIONS, Proven, judge
from rollart.model.network import load_model, named_weights, probe
from rollart.store.files import FileStore
from rollart.store.prefetch import FetchAhead
from rollart.types import Probe

CONTEXT_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, heads of 32 or more")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(PRECISIONS), help="the server's")
    parser.add_argument("--trainer", default="float32", choices=sorted(PRECISIONS))
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--move", type=float, default=0.005)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(asked, Path(folder)))
    print(json.dumps(found) if asked.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


async def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = load_model(asked.model)
    store = FileStore(folder / "weights", model_path=Path(asked.model))
    settings = ServerSettings(
        engines=EngineSettings(type="vllm", dtype=asked.dtype, max_batch=32),
        engine_id="noise",
        model=Path(asked.model),
        context_tokens=CONTEXT_TOKENS,
        log_dir=folder,
        cpu=not torch.cuda.is_available(),
    )
    engine = await launch(settings, store, FetchAhead(store))
    expected: list[Probe] = []
    answers: list[list[float]] = []
    try:
        server = engine.server
        for version in range(1, asked.swaps + 2):
            move(model, asked.move, version)
            weights, said = published(model, asked.trainer)
            await server.stage(engine.files.of(store.push(version, weights)), version)
            await server.halt()
            await server.load(version)
            await server.resume()
            expected.append(said)
            answers.append(await answer_of(server, expected[-1]))
            shutil.rmtree(store.folder(version))
        repeated = await answer_of(server, expected[-1])
    finally:
        await engine.close()
    return figures(asked, expected, answers, repeated)


def published(model: PreTrainedModel, dtype: str) -> tuple[dict[str, torch.Tensor], Probe]:
    """What a trainer of this number format publishes: weights, and its answer."""
    held = deepcopy(model)
    for tensor in held.parameters():  # and no buffer, as where a model is loaded so
        tensor.data = tensor.data.to(getattr(torch, dtype))
    return named_weights(held), probe(held)


async def answer_of(server: AnyServer, asked: Probe) -> list[float]:
    parts = await asyncio.gather(*(server.score(tokens) for tokens in asked.sequences()))
    return [value for part in parts for value in part[0]]


@torch.no_grad()
def move(model: PreTrainedModel, wanted: float, seed: int) -> None:
    """In a random direction, so far that the probe's log-probabilities change by `wanted`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    steps = {
        name: torch.randn(tensor.shape, generator=generator) * (tensor.std() if tensor.numel() > 1 else 1.0)
        for name, tensor in weights.items()
    }
    before = np.array(probe(model).logprobs)
    size = 1e-4
    for _ in range(3):
        for name, tensor in model.named_parameters():
            tensor.copy_(weights[name] + size * steps[name])
        size *= wanted / rms(np.array(probe(model).logprobs) - before)


def figures(
    asked: argparse.Namespace, expected: list[Probe], answers: list[list[float]], repeated: list[float]
) -> dict[str, Any]:
    trainer, server = np.array([one.logprobs for one in expected]), np.array(answers)
    should, moved = np.diff(trainer, axis=0), np.diff(server, axis=0)
    followed = (moved * should).sum(1) / (should * should).sum(1)
    return {
        "model": asked.model,
        "server": asked.dtype,
        "trainer": asked.trainer,
        "swaps": asked.swaps,
        "tokens": trainer.shape[1],
        "move": rms(should),
        "noise": rms(server - trainer),
        "noise_largest_version": max(rms(row) for row in server - trainer),
        "noise_one_token": float(np.abs(server - trainer).max()),
        "noise_of_change": rms(moved - should),
        "same_weights_again": float(np.abs(np.array(repeated) - server[-1]).max()),
        "followed_mean": float(followed.mean()),
        "followed_deviation": float(followed.std()),
        "alarms_honest": alarms(asked.dtype, expected, answers),
        "caught_after_at_most": max(caught(asked.dtype, expected, answers, at) for at in range(len(answers) - 3)),
    }


def alarms(dtype: str, expected: list[Probe], answers: list[list[float]]) -> int:
    """With the server as it was."""
    state: Proven | None = None
    count = 0
    for version, (one, answer) in enumerate(zip(expected, answers, strict=True)):
        verdict = judge(version, answer, one.logprobs, state, PRECISIONS[dtype])
        count += verdict.wrong or verdict.stuck
        state = verdict.state
    return count


def caught(dtype: str, expected: list[Probe], answers: list[list[float]], stuck_at: int) -> int:
    """Swaps until a server is caught that kept the weights it had after swap `stuck_at`."""
    state: Proven | None = None
    for version, one in enumerate(expected):
        answer = answers[min(version, stuck_at)]
        verdict = judge(version, answer, one.logprobs, state, PRECISIONS[dtype])
        if verdict.wrong or verdict.stuck:
            return version - stuck_at
        state = verdict.state
    return len(expected)


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


if __name__ == "__main__":
    main()
