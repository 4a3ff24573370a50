"""Every architecture is computed as transformers computes it, or refused with the reason; docs/models.md says which."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.engine import EmbeddedEngine, make_backend
from rollart.engines.embedded.steps import kept_by, prove_steps, prove_steps_architecture, refuse_windows
from rollart.errors import JobError
from rollart.model.agreement import prove
from rollart.model.network import (
    adopt,
    known_cause,
    load_model,
    packed_logprobs,
    prove_packed,
    prove_packed_architecture,
)
from rollart.model.packed import PackedPlan
from rollart.model.reduced import VOCAB, WINDOW, reduced
from scripts.model_table import KINDS, PAGE, VERSION, Row, default_config, examine, render
from tests.engines.reference import drain, our_model, plain_model, request

GATE = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gemma", "glm4", "phi3"),  # right
    *("mistral", "gemma3_text"),  # right, with their windows
    *("deepseek_v3", "diffllama"),  # right in the trainer only
    *("gemma2", "cohere", "gpt_oss", "bloom", "mamba", "lfm2", "llama4_text", "qwen3_next"),  # refused
    *("bert", "bert-generation"),  # refused: they look ahead
)
"""The families that are looked at in every run of the tests; the slow ones look at all."""
LENGTHS = [45, 9, 70, 30]
TOLERANCE = 1e-3


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Other weights than those that the proof is made on, as transformers runs them."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model: PreTrainedModel = auto.from_config(reduced(config), dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.train(False)
    return model


def cast_to(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    torch.nn.Module.to(model, dtype)
    return model


@torch.no_grad()
def alone(plain: PreTrainedModel, tokens_T: torch.Tensor) -> torch.Tensor:
    """What transformers says of one sequence."""
    logits: torch.Tensor = plain(input_ids=tokens_T[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


def check_row(row: Row) -> None:
    """What is said to be right is right, by another computation than the proof's own."""
    if row.trainer is None or row.trainer:
        return
    config = default_config(row.kind)
    assert config is not None
    plain, ours = random_model(config), adopt(random_model(config))
    rng = np.random.default_rng(3)
    sequences = [torch.from_numpy(rng.integers(2, VOCAB, length)) for length in LENGTHS]
    with torch.no_grad():
        packed = torch.split(packed_logprobs(ours, torch.cat(sequences), LENGTHS), LENGTHS)
    for tokens_T, own in zip(sequences, packed, strict=True):
        torch.testing.assert_close(own[1:], alone(plain, tokens_T), atol=TOLERANCE, rtol=0)
    if row.engine:
        return
    engine = EmbeddedEngine(ours, eos=frozenset())
    asked = [
        request(tokens_T.numpy(), f"s{place}/0", max_tokens=12, seed=place) for place, tokens_T in enumerate(sequences)
    ]
    for one in asked:
        engine.add(one)
    for name, got in drain(engine).items():
        prompt = sequences[int(name[1])]
        whole = torch.cat((prompt, torch.from_numpy(got.tokens.astype(np.int64))))
        expected = alone(plain, whole)[len(prompt) - 1 :]
        np.testing.assert_allclose(got.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)


def check_page(page: str, rows: Sequence[Row]) -> None:
    """The page says of these architectures what was found; where it was made with another version of transformers,
    which may know others and fail in other words, it gives the same verdicts on those that it has."""
    lines = {line.split("|")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for row in rows:
        line = lines.get(row.line().split("|")[1])
        if f"with {VERSION};" in page:
            assert line == row.line(), "run python -m scripts.model_table"
        elif line is not None:
            assert line.split("|")[:4] == row.line().split("|")[:4], "run python -m scripts.model_table"


@pytest.mark.parametrize("kind", GATE)
def test_an_architecture_is_right_or_refused_with_the_reason(kind: str) -> None:
    row = examine(kind)
    check_page(PAGE.read_text(), [row])
    check_row(row)


def test_a_page_of_another_transformers_is_held_to_its_verdicts_alone() -> None:
    rows = [Row(kind="llama", trainer="", engine=""), Row(kind="mamba", trainer="a state", engine="a state")]
    reworded = [rows[0], replace(rows[1], trainer="it has a state", engine="it has a state")]
    unknown, otherwise = Row(kind="new", trainer="", engine=""), replace(rows[0], engine="no cache")
    same = render(rows)
    other = same.replace(VERSION, "transformers 0.0.0")
    check_page(same, rows)
    check_page(other, [*reworded, unknown])
    for wrong in (reworded[1], unknown, otherwise):
        with pytest.raises(AssertionError, match="model_table"):
            check_page(same, [wrong])
    with pytest.raises(AssertionError, match="model_table"):
        check_page(other, [otherwise])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # each architecture has its own
def test_none_of_all_architectures_is_silently_wrong() -> None:
    rows = []
    for kind in KINDS:
        rows.append(examine(kind))
        check_row(rows[-1])
    assert sum(row.trainer is not None for row in rows) >= 150
    page = PAGE.read_text()
    check_page(page, rows)
    assert page == render(rows) or f"with {VERSION};" not in page, "run python -m scripts.model_table"


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "bloom", "lfm2"])
def test_a_state_is_found_by_computing_and_the_error_says_how_far_off_it_is(kind: str) -> None:
    config = default_config(kind)
    assert config is not None
    with pytest.raises(
        JobError, match=rf"^{kind}: run in a packed batch, its log-probabilities are off by \d.*docs/models"
    ):
        adopt(random_model(config))


@pytest.mark.parametrize("window", [4096, 100_000])
def test_a_window_is_looked_at_however_far_it_reaches(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real sizes no short sequence would show that one is left out."""
    config = default_config("mistral")
    assert config is not None
    config.sliding_window = window
    assert reduced(config).sliding_window == WINDOW
    prove_packed(random_model(config))
    masked = PackedPlan.mask
    monkeypatch.setattr(PackedPlan, "mask", lambda plan, call, _: masked(plan, call, None))
    with pytest.raises(JobError, match="mistral: run in a packed batch, its log-probabilities are off by"):
        prove_packed(random_model(config))


def test_kernels_that_know_no_window_are_given_none_that_is_shorter_than_a_sequence() -> None:
    config = default_config("mistral")
    assert config is not None
    config.sliding_window = 4096
    refuse_windows(config, 4096)
    with pytest.raises(JobError, match=r"window of 4096 tokens.*set model\.context_tokens to 4096 or less"):
        refuse_windows(config, 4097)
    refuse_windows(LlamaConfig(), 1 << 30)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "olmo3"])
def test_windows_are_masked_in_steps_whichever_way_keys_are_kept(kind: str, paged: bool) -> None:
    config = default_config(kind)
    assert config is not None
    model = adopt(random_model(config))
    assert model.config.sliding_window == WINDOW
    prove_steps(model, make_backend(model, EngineSettings(), 256, paged))


def test_positions_that_depend_on_the_longest_sequence_are_refused() -> None:
    factors = [1.0 + place / 8 for place in range(48)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": factors}
    config = Phi3Config(rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131_072)
    with pytest.raises(JobError, match="phi3: run in a packed batch"):
        prove_packed_architecture(config)


def test_a_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen3NextConfig().save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"qwen3_next: .*linear_attention"):
        load_model(tmp_path)
    with pytest.raises(JobError, match="qwen3_next"):
        EmbeddedEngine.from_directory(str(tmp_path))


def test_a_gpt2_directory_is_loaded_and_serves(tmp_path: Path) -> None:
    random_model(GPT2Config()).save_pretrained(tmp_path)
    engine = EmbeddedEngine(load_model(tmp_path), eos=frozenset())
    engine.add(request([5, 6, 7], max_tokens=4))
    (completion,) = drain(engine).values()
    assert len(completion.tokens) == 4


def test_the_engine_refuses_what_its_cache_cannot_hold() -> None:
    config = default_config("deepseek_v3")
    assert config is not None
    with pytest.raises(JobError, match=r"deepseek_v3: its keys .* one size; serve it with engines.type vllm"):
        prove_steps_architecture(config)


def test_the_engine_refuses_layers_with_different_numbers_of_key_heads() -> None:
    model = adopt(plain_model("llama"))
    network: Any = model
    attention = network.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(32, 4 * attention.head_dim, bias=False))
    attention.num_key_value_groups = 1
    with pytest.raises(JobError, match=r"llama: its keys .*\(2, 8\).*\(4, 8\).* one size"):
        kept_by(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_refuse(dtype: torch.dtype) -> None:
    for kind in ("qwen3", "qwen3-moe"):
        model = adopt(cast_to(plain_model(kind, num_hidden_layers=4, initializer_range=0.05), dtype))
        for paged in (False, True):
            prove_steps(model, make_backend(model, EngineSettings(), None, paged))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_passes_that_round_differently_are_no_cause(dtype: torch.dtype) -> None:
    """Kernels may add up in another order the second time; logits of another formula differ by far more."""
    model = cast_to(plain_model("llama", initializer_range=0.1), dtype)
    network: Any = model
    factors: list[float] = []
    network.get_output_embeddings().register_forward_hook(lambda _module, _given, logits: logits * factors.pop(0))
    factors[:] = [1 + 2 * torch.finfo(dtype).eps, 1.0]
    assert known_cause(model) == ""
    factors[:] = [2.0, 1.0]
    assert "scaled" in known_cause(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_differs_by_more_than_rounding_is_refused(dtype: torch.dtype) -> None:
    """Also on the model's own weights, where no reduced model could be made."""
    model = cast_to(our_model(plain_model("llama", initializer_range=0.1)), dtype)

    @torch.no_grad()
    def leaking(sequences: Any) -> list[torch.Tensor]:
        """As if all were one sequence."""
        lengths = [len(sequence) for sequence in sequences]
        both = packed_logprobs(model, torch.cat(list(sequences)), [sum(lengths)])
        return [own[1:] for own in torch.split(both, lengths)]

    with pytest.raises(JobError, match=r"llama: run leaking, .* off by .* see other sequences.*; do this"):
        prove(model, leaking, what="leaking", instead="do this")


@pytest.mark.parametrize("by", [0.05, float("nan")])
def test_one_wrong_token_is_enough(by: float) -> None:
    model = our_model(plain_model("llama"))

    @torch.no_grad()
    def nearly(sequences: Any) -> list[torch.Tensor]:
        lengths = [len(sequence) for sequence in sequences]
        found = list(torch.split(packed_logprobs(model, torch.cat(list(sequences)), lengths), lengths))
        found[-1][5] += by
        return [own[1:] for own in found]

    with pytest.raises(JobError, match="off by"):
        prove(model, nearly, what="nearly right", instead="do this")


def test_a_reduced_model_has_a_layer_of_every_kind() -> None:
    kinds = ["full_attention"] * 20 + ["sliding_attention"] + ["full_attention"] * 5
    assert reduced(Gemma2Config(layer_types=kinds)).layer_types == ["full_attention", "sliding_attention"]


def test_grouped_heads_and_tied_weights_survive_the_reduction() -> None:
    for heads, kv_heads, kept in ((32, 32, 4), (32, 8, 2), (32, 1, 1)):
        small = reduced(LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads))
        assert (small.num_attention_heads, small.num_key_value_heads) == (4, kept)
    small = reduced(Qwen3Config(tie_word_embeddings=True, num_hidden_layers=36, attention_bias=True))
    assert (small.tie_word_embeddings, small.attention_bias, small.num_hidden_layers) == (True, True, 2)
