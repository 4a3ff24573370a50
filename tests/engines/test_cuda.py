"""The same promises on a CUDA device; skipped where there is none."""

import numpy as np
import pytest
import torch

from rollart.config.settings import EngineSettings
from rollart.engines.embedded import drafts
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import named_weights, packed_logprobs
from rollart.model.packed import fold
from rollart.types import Completion
from tests.engines.reference import KINDS, check, drain, our_model, plain_model, random_tokens, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("rash", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu_across_turns_and_a_swap(kind: str, rash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rash:  # guess all the time, and wrongly
        monkeypatch.setattr(drafts, "SURE", 1)
        monkeypatch.setattr(drafts, "CONTEXT_TOKENS", 1)
    models = {version: plain_model(kind, seed=version) for version in range(2)}
    ours = our_model(models[0])
    torch.nn.Module.to(ours, "cuda")
    engine = EmbeddedEngine(
        ours, settings=EngineSettings(kv_tokens=1500, step_tokens=64, max_batch=64), eos=frozenset()
    )
    rng = np.random.default_rng(0)
    history = [random_tokens(rng, 5) for _ in range(6)]
    for turn in range(4):
        asked = []
        for session, past in enumerate(history):
            prompt = np.concatenate([past, random_tokens(rng, int(rng.integers(1, 50)))])
            name, limit = f"s{session}/{turn}", int(rng.integers(8, 30))
            asked.append(request(prompt, name, max_tokens=limit, temperature=session % 2))
            engine.add(asked[-1])
        done: dict[str, Completion] = {}
        if turn == 2:
            for _ in range(5):
                done |= dict(engine.step())
            engine.swap(1, named_weights(models[1]))
        done |= drain(engine)
        for session, call in enumerate(asked):
            check(call, done[call.id], models)
            history[session] = np.concatenate([call.tokens(), done[call.id].tokens])


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_logprobs_agree_with_the_cpu(dtype: torch.dtype, folded: bool) -> None:
    plain, lengths = plain_model("qwen3"), (40, 7, 90, 33)
    tokens = torch.randint(0, 61, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    if folded:
        tokens[137 : 137 + 30] = tokens[47 : 47 + 30]
        tokens[:30] = tokens[47 : 47 + 30]
        assert len(fold(tokens, lengths).tokens_F) == len(tokens) - 2 * 30
    expected = packed_logprobs(our_model(plain), tokens, lengths)
    ours = our_model(plain)
    torch.nn.Module.to(ours, "cuda", dtype)
    got = packed_logprobs(ours, tokens.cuda(), lengths)
    torch.autograd.backward(got.sum())
    error = (got.cpu() - expected).detach().abs()
    assert float(error.mean()) < (1e-5 if dtype == torch.float32 else 0.2)
