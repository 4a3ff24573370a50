"""The same promises on a CUDA device; skipped where there is none."""

import numpy as np
import pytest
import torch

from rollart.engines.embedded.paged import ops
from rollart.engines.embedded.paged.ops import Cache, Draws, Rotation, Where
from rollart.model.network import named_weights, packed_logprobs
from rollart.model.packed import fold
from rollart.types import Completion
from tests.engines.reference import (
    KINDS,
    NO_EOS,
    check,
    drain,
    make_engine,
    our_model,
    plain_model,
    random_tokens,
    request,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu_across_turns_and_a_swap(kind: str, paged: bool) -> None:
    models = {version: plain_model(kind, seed=version) for version in range(2)}
    engine = make_engine(models[0], paged=paged, on="cuda", kv_tokens=1536, step_tokens=64, max_batch=64, eos=NO_EOS)
    rng = np.random.default_rng(0)
    history = [random_tokens(rng, 5) for _ in range(6)]
    for turn in range(4):
        asked = []
        for session, past in enumerate(history):
            prompt = np.concatenate([past, random_tokens(rng, int(rng.integers(1, 50)))])
            name, limit = f"s{session}/{turn}", int(rng.integers(8, 30))
            asked.append(request(prompt, name, max_tokens=limit, temperature=session % 2, top_k=session % 3))
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


def cache(heads: int, size: int, page: int) -> Cache:
    tables = torch.randperm(31)[:20].view(4, 5).int() + 1
    store = torch.randn(2, 32, heads, page, size)
    return Cache(keys_PHSD=store[0], values_PHSD=store[1], tables_LN=tables)


def on_card(value: Cache) -> Cache:
    return Cache(
        keys_PHSD=value.keys_PHSD.cuda(), values_PHSD=value.values_PHSD.cuda(), tables_LN=value.tables_LN.cuda()
    )


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "normed"), [(4, 2, 16, True), (9, 3, 64, False), (16, 8, 128, True)]
)
def test_kernels_compute_what_torch_computes(heads: int, kv_heads: int, size: int, normed: bool, splits: int) -> None:
    """Two single tokens and two chunks: one behind what is cached, one from the beginning."""
    torch.manual_seed(0)
    there = on_card(here := cache(kv_heads, size, 16))
    lanes = torch.tensor([0, 1] + [2] * 37 + [3] * 5, dtype=torch.int32)
    positions = torch.tensor([70, 5, *range(20, 57), *range(5)], dtype=torch.int32)
    blocks = torch.tensor([[39, 5, 0, 3], [2, 37, 20, 2]], dtype=torch.int32)
    norms = (torch.randn(size), torch.randn(size)) if normed else (None, None)
    rotation = Rotation(torch.randn(80, size), torch.randn(80, size), norms[0], norms[1], 1e-6)
    qkv = torch.randn(len(lanes), (heads + 2 * kv_heads) * size)
    expected = Where(lanes, positions, 2, splits, blocks)
    given = Where(lanes.cuda(), positions.cuda(), 2, splits, blocks.cuda())
    moved = [None if norm is None else norm.cuda() for norm in norms]
    turned = Rotation(rotation.cos_PD.cuda(), rotation.sin_PD.cuda(), moved[0], moved[1], 1e-6)
    query = ops.rotate_and_keep(qkv, here, expected, rotation, heads)
    rotated = ops.rotate_and_keep(qkv.cuda(), there, given, turned, heads)
    torch.testing.assert_close(rotated.cpu(), query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(there.keys_PHSD.cpu(), here.keys_PHSD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(there.values_PHSD.cpu(), here.values_PHSD)
    seen = ops.attend(query, here, expected, size**-0.5)
    torch.testing.assert_close(ops.attend(rotated, there, given, size**-0.5).cpu(), seen, atol=1e-4, rtol=1e-4)


def test_draws_follow_the_distribution_and_say_its_log_probabilities() -> None:
    torch.manual_seed(0)
    count, temperature = 100_000, 0.7
    logits = (2 * torch.randn(500)).cuda()
    seeds = torch.arange(count, device="cuda") * 2_654_435_761
    lanes = torch.arange(count, device="cuda", dtype=torch.int32)
    draws = Draws(torch.full((count,), temperature, device="cuda"), seeds, lanes)
    newest = torch.zeros(count, dtype=torch.int32, device="cuda")
    tokens, logprobs = ops.draw(logits.expand(count, -1).contiguous(), draws, newest)
    expected = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[tokens.long()], atol=1e-5, rtol=1e-5)
    assert torch.equal(newest, tokens)
    shares = torch.bincount(tokens.long(), minlength=500) / count
    chi_square = float(((shares - expected.exp()) ** 2 / expected.exp()).sum() * count)
    assert chi_square < 499 + 6 * (2 * 499) ** 0.5


def test_graphs_and_single_kernels_say_the_same() -> None:
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, int(length)) for length in rng.integers(20, 200, 5)]
    answers = []
    for graphs in (True, False):
        engine = make_engine(plain_model("qwen3"), paged=True, on="cuda", kv_tokens=8192, max_batch=8)
        if not graphs:
            engine.backend.graphs.clear()  # type: ignore[attr-defined]
        for number, prompt in enumerate(prompts):
            engine.add(request(prompt, f"{number}/0", max_tokens=40, temperature=number % 2, seed=3))
        answers.append({name: got.tokens.tolist() for name, got in drain(engine).items()})
    assert answers[0] == answers[1]


def test_what_is_drawn_does_not_depend_on_the_neighbours() -> None:
    rng = np.random.default_rng(2)
    alone = request(random_tokens(rng, 30), "s/0", max_tokens=30, temperature=1.0, seed=11)
    answers = []
    for neighbours in (0, 5):
        engine = make_engine(plain_model("qwen3"), paged=True, on="cuda", kv_tokens=8192, max_batch=8)
        for number in range(neighbours):
            engine.add(request(random_tokens(rng, 50), f"n{number}/0", max_tokens=30, temperature=1.0, top_k=number))
        engine.add(alone)
        answers.append(drain(engine)[alone.id].tokens.tolist())
    assert answers[0] == answers[1]
