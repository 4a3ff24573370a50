"""The policy network: a Hugging Face directory run by transformers' own model code with our attention hook.

One implementation serves two callers. The trainer packs several sequences into one flat row
(`packed_scores`); the engine mixes prefill chunks and decode tokens of many sessions in one flat row
(`forward_hidden` with its own plan; for dense models it has a faster one, `rollart.engines.dense`). Both give the
model tokens (1, T) without padding, and an `AttentionPlan` that says which token may see which keys; nothing but
attention knows where one sequence ends.

Shapes in names: T flat tokens, F those of them that are computed, S scored ones, V vocabulary, H hidden.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from rollart.errors import WeightError
from rollart.packed import PackedPlan, fold
from rollart.types import Probe

ATTENTION = "rollart"
"""The name under which transformers knows our attention."""
LOGITS_PER_CHUNK = 1 << 22
"""Elements of one (rows, V) block of logits: bounds what scoring a packed batch holds in memory at once."""
PROBE_SEQUENCES, PROBE_LENGTH = 32, 64
"""Of the sequences by which two processes compare their weights: many tokens, as each has an error of its own; short
ones, since a server holds the logits of a whole prompt at once."""


class AttentionPlan(Protocol):
    """Who sees whom in one forward pass over T flat tokens."""

    def attend(self, layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float) -> Tensor:
        """The attention output (T, query heads, head size). Keys and values are those of the T new tokens."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; query, key, value are (1, heads, T, head size)."""
    assert attention_mask is None
    assert sliding_window is None
    assert dropout == 0.0
    query_THD, key_THD, value_THD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THD = plan.attend(cast(int, module.layer_idx), query_THD, key_THD, value_THD, scaling)
    return out_THD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a Hugging Face causal LM directory, in evaluation mode. ValueError for what we would compute wrongly."""
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation=ATTENTION)
    nn.Module.to(model, device)
    return adopt(model)


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model built elsewhere (by config, by a test) one of ours, or refuse it with the reason."""
    config: Any = model.config
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    ):
        raise ValueError(f"{config.model_type}: sliding-window attention is not supported; use a full-attention model")
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # type: ignore[assignment]  # nn.Module types its attributes as tensors
    model.set_attn_implementation(ATTENTION)
    model.train(False)
    _check_projection(model)
    return model


@torch.no_grad()
def _check_projection(model: PreTrainedModel) -> None:
    """Some models scale or cap their logits after the head, which `project` would miss: refuse those."""
    tokens_T = torch.tensor([1, 2, 3, 1], device=model.device)
    plan = PackedPlan([4], model.device)
    theirs = model(input_ids=tokens_T[None], position_ids=plan.positions_T[None], use_cache=False, plan=plan).logits[0]
    ours = project(model, forward_hidden(model, tokens_T, plan.positions_T, plan))
    if not torch.allclose(theirs.float(), ours, atol=1e-3, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"{model.config.model_type}: its logits are not hidden state x output embedding; not supported"
        )


def forward_hidden(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
    """The final hidden states (T, H) of T flat tokens under `plan`."""
    output = model.base_model(
        input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, plan=plan
    )
    return cast(Tensor, output.last_hidden_state[0])


def project(model: PreTrainedModel, hidden_TH: Tensor) -> Tensor:
    """Logits (T, V) in float32."""
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    return cast(Tensor, head(hidden_TH)).float()


# --- packed training forward ----------------------------------------------------------------------------------------


def packed_logprobs(
    model: PreTrainedModel, tokens_T: Tensor, lengths: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probability (T,) of each token given those before it in its own sequence; 0 at each first token."""
    return packed_scores(model, tokens_T, lengths, temperature).logprobs_T


@torch.no_grad()
def probe(model: PreTrainedModel) -> Probe:
    """What these weights say of fixed sequences: an engine that loads them by other means must say the same."""
    tokens_T = probe_tokens(model)
    logprobs_T = packed_logprobs(model, tokens_T.to(model.device), [PROBE_LENGTH] * PROBE_SEQUENCES)
    return as_probe(tokens_T, logprobs_T, exact=model.dtype == torch.float32)


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Of all sequences, end to end."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, PROBE_SEQUENCES * PROBE_LENGTH))


def as_probe(tokens_T: Tensor, logprobs_T: Tensor, *, exact: bool) -> Probe:
    given = logprobs_T.view(PROBE_SEQUENCES, PROBE_LENGTH)[:, 1:].reshape(-1)
    return Probe(
        tokens=tuple(tokens_T.tolist()),
        logprobs=tuple(given.tolist()),
        num_sequences=PROBE_SEQUENCES,
        exact=exact,
    )


class Scores(NamedTuple):
    """What a packed batch gives each token; 0 where nothing precedes it, or where it was not asked for."""

    logprobs_T: Tensor
    entropy_T: Tensor
    """Of the distribution the token was drawn from."""


def packed_scores(
    model: PreTrainedModel,
    tokens_T: Tensor,
    lengths: Sequence[int],
    temperature: float = 1.0,
    wanted_T: Tensor | None = None,
) -> Scores:
    """Log-probabilities and entropies under the temperature-scaled full distribution (0 counts as 1: see the sampler).

    `wanted_T` (bool) restricts the costly vocabulary projection to the tokens it marks. Logits exist only one chunk
    of rows at a time, in the backward pass too. What sequences have in common at their beginning is computed once.
    """
    folded = fold(tokens_T, lengths)
    hidden_FH = forward_hidden(model, folded.tokens_F, folded.plan.positions_T, folded.plan)
    scored_T = torch.ones_like(tokens_T, dtype=torch.bool) if wanted_T is None else wanted_T.clone()
    scored_T[folded.first_tokens] = False
    targets_S = scored_T.nonzero()[:, 0]
    inverse_temperature = 1.0 / temperature if temperature > 0 else 1.0

    def score(hidden_SH: Tensor, chosen_S: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_SV = F.log_softmax(project(model, hidden_SH) * inverse_temperature, dim=-1)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return logprobs_SV.gather(1, chosen_S[:, None])[:, 0], entropy_S

    rows_per_chunk = max(1, LOGITS_PER_CHUNK // int(model.config.vocab_size))
    pieces: list[tuple[Tensor, Tensor]] = []
    for rows_S in torch.split(targets_S, rows_per_chunk):
        arguments = hidden_FH.index_select(0, folded.place_T[rows_S - 1]), tokens_T.index_select(0, rows_S)
        if torch.is_grad_enabled() and len(targets_S) > rows_per_chunk:
            pieces.append(checkpoint(score, *arguments, use_reentrant=False))
        else:
            pieces.append(score(*arguments))
    zeros_T = torch.zeros(len(tokens_T), dtype=torch.float32, device=tokens_T.device)
    if not pieces:
        return Scores(zeros_T, zeros_T)
    logprobs_S, entropy_S = (torch.cat(column) for column in zip(*pieces, strict=True))
    return Scores(zeros_T.index_copy(0, targets_S, logprobs_S), zeros_T.index_copy(0, targets_S, entropy_S))


# --- weights --------------------------------------------------------------------------------------------------------


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight once, by its name in the live model. Of tied tensors only the source (the input embedding) is named.

    Mixture-of-experts models hold their experts fused, under the fused names; `save_pretrained` writes the usual ones.
    """
    tied = model.all_tied_weights_keys
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


@torch.no_grad()
def load_weights_(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the live model in place. All or nothing: a missing, unknown or misshapen tensor is a
    WeightError before the first byte is written. A tied tensor may be given under either name, or both."""
    own = named_weights(model)
    tied = model.all_tied_weights_keys
    given = {name: tensor for name, tensor in weights.items() if name not in tied}
    for target, source in tied.items():
        if target in weights:
            given.setdefault(source, weights[target])
    if missing := sorted(own.keys() - given.keys()):
        raise WeightError(f"{len(missing)} tensors are missing from the weights, the first is {missing[0]}")
    if unknown := sorted(given.keys() - own.keys()):
        raise WeightError(f"{len(unknown)} tensors are not of this model, the first is {unknown[0]}")
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise WeightError(f"{name} has shape {tuple(given[name].shape)}, the model needs {tuple(tensor.shape)}")
    for name, tensor in own.items():
        tensor.copy_(given[name])
