"""Tiny random models, and the plain transformers forward that the engine's answers are held against."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.model.network import adopt, load_weights_, named_weights
from rollart.types import Completion, GenerateRequest, Sampling, Tokens

VOCAB = 61
EOS = 7
KINDS = ("llama", "qwen3", "qwen3-tied", "qwen3-moe")
CLEAR_LEAD = 1e-4
"""Greedy choices are compared where the best logit leads by more than this."""
TOLERANCE = 1e-4


def config(kind: str, **more: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "tie_word_embeddings": kind == "qwen3-tied",
        "bos_token_id": None,
        "eos_token_id": None,
    } | more
    match kind:
        case "llama":
            return LlamaConfig(**sizes)
        case "qwen3" | "qwen3-tied":
            return Qwen3Config(**sizes)
        case "qwen3-moe":
            return Qwen3MoeConfig(
                **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
            )
    raise AssertionError(kind)


def build(of: PreTrainedConfig) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(of, attn_implementation="sdpa")
    return model


def plain_model(kind: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model as transformers itself runs it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config(kind, **more))
    model.train(False)
    return model


def our_model(plain: PreTrainedModel) -> PreTrainedModel:
    """The same weights, run our way. The plain model is left as it is."""
    ours = adopt(build(deepcopy(plain.config)))
    load_weights_(ours, named_weights(plain))
    return ours


NO_EOS: frozenset[int] = frozenset()
"""Answers end by length, so that long ones are long."""


def make_engine(
    plain: PreTrainedModel,
    *,
    eos: frozenset[int] = frozenset({EOS}),
    paged: bool = False,
    on: str = "cpu",
    lends: bool = False,
    **settings: Any,
) -> EmbeddedEngine:
    max_batch = min(256, settings.get("step_tokens", 256))
    model = our_model(plain)
    torch.nn.Module.to(model, on)
    return EmbeddedEngine(
        model,
        EngineSettings(**{"max_batch": max_batch, **settings}),
        eos=eos,
        decode=lambda tokens: "".join(chr(ord("A") + token) for token in tokens),
        paged=paged,
        lends=lends,
    )


def request(
    prompt: Tokens | list[int], name: str = "s/0", *, last: bool = False, min_version: int = 0, **sampling: Any
) -> GenerateRequest:
    tokens = np.array(prompt, dtype=np.int32)
    session, turn = name.rsplit("/", 1)
    return GenerateRequest(
        id=name,
        session=session,
        domain="test",
        turn=int(turn),
        prompt=(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]),
        prompt_tokens=len(tokens),
        sampling=Sampling(**sampling),
        min_version=min_version,
        last=last,
    )


def drain(engine: EmbeddedEngine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.busy:
        for name, completion in engine.step():
            assert name not in done
            done[name] = completion
    return done


def random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(EOS + 1, VOCAB, count).astype(np.int32)


def check(asked: GenerateRequest, got: Completion, models: Mapping[int, PreTrainedModel]) -> None:
    """Every token of every span agrees with a plain forward, over the same tokens, of that span's model."""
    prompt = asked.tokens()
    assert len(got.tokens) == len(got.logprobs) == sum(count for _, count in got.spans)
    assert [version for version, _ in got.spans] == sorted({version for version, _ in got.spans})
    sequence = torch.from_numpy(np.concatenate([prompt, got.tokens]).astype(np.int64))
    first = len(prompt)
    temperature = asked.sampling.temperature
    for version, count in got.spans:
        with torch.no_grad():
            logits = models[version](input_ids=sequence[None]).logits[0, first - 1 : first - 1 + count]
        chosen = sequence[first : first + count, None]
        scaled = logits / temperature if temperature else logits
        expected = scaled.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        begin = first - len(prompt)
        np.testing.assert_allclose(got.logprobs[begin : begin + count], expected, atol=TOLERANCE, rtol=0)
        if temperature == 0:
            best = logits.topk(2).values
            clear = (best[:, 0] - best[:, 1] > CLEAR_LEAD).numpy()
            assert (logits.argmax(-1) == chosen[:, 0]).numpy()[clear].all()
        first += count


def check_kept(asked: GenerateRequest, got: Completion, models: Mapping[int, PreTrainedModel]) -> None:
    """As `check`, of an engine that kept its cache: each span's model goes on over keys and values of those before."""
    sequence = torch.from_numpy(np.concatenate([asked.tokens(), got.tokens]).astype(np.int64))
    cache, done, expected = DynamicCache(), 0, []
    end = asked.prompt_tokens - 1
    for version, count in got.spans:
        end += count
        with torch.no_grad():
            logits = models[version](input_ids=sequence[None, done:end], past_key_values=cache, use_cache=True).logits
        chosen = sequence[end - count + 1 : end + 1, None]
        expected.append(logits[0, -count:].log_softmax(-1).gather(1, chosen)[:, 0].numpy())
        done = end
    np.testing.assert_allclose(got.logprobs, np.concatenate(expected), atol=TOLERANCE, rtol=0)
