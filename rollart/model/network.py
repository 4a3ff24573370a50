"""The policy network: a Hugging Face directory run by transformers' own model code with our attention hook.

One implementation serves two callers. The trainer packs several sequences into one flat row
(`packed_scores`); the engine mixes prefill chunks and decode tokens of many sessions in one flat row
(`forward_hidden` with its own plan; for dense models it has a faster one, `engines/embedded/dense.py`). Both give the
model tokens (1, T) without padding, and an `AttentionPlan` that says which token may see which keys; nothing but
attention knows where one sequence ends.

Shapes in names: T flat tokens, F those of them that are computed, S scored ones, V vocabulary, H hidden.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rollart.errors import JobError, WeightError
from rollart.model.adapters import (
    are_adapters,
    base_of,
    forget_base,
    has_adapters,
    merge_adapters_,
    read_adapters,
)
from rollart.model.agreement import EPSILONS, FLOOR, own_attention, prove, prove_architecture
from rollart.model.compiled import run_plainly
from rollart.model.packed import fold
from rollart.model.products import prove_products
from rollart.model.reduced import reduced_model
from rollart.model.scoring import score
from rollart.model.varlen import VarlenPlan, flash_runs, on_device
from rollart.types import Probe

ATTENTION = "rollart"
"""The name under which transformers knows our attention."""
PROBE_SEQUENCES, PROBE_LENGTH = 32, 64
"""Of the sequences by which two processes compare their weights: many tokens, as each has an error of its own; short
ones, since a server holds the logits of a whole prompt at once."""


class AttentionPlan(Protocol):
    """Who sees whom in one forward pass over T flat tokens."""

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """The attention output (T, query heads, head size). Keys and values are those of the T new tokens. `window`: of
        its own sequence, a token sees itself and those before it, so many in all."""


HARMLESS = frozenset({"position_ids", "cache_position", "output_attentions", "use_cache", "is_causal", "dropout"})
"""What layers hand to attention beside what we use, and which says nothing that a plan does not know."""
INSTEAD = "choose another model: docs/models.md lists the architectures that are right"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; query, key, value are (1, heads, T, head size).

    Whatever else a layer asks of its attention (a bias, a cap, sinks) we would leave out: it is refused.
    """
    asked = {name for name, value in others.items() if value is not None and name not in HARMLESS}
    asked |= {"attention_mask"} if attention_mask is not None else set()
    if asked:
        raise ValueError(f"its attention takes {', '.join(sorted(asked))}, which is not supported")
    if plan is None:
        raise ValueError("its code does not hand on to its layers what its caller says of attention")
    query_THD, key_THD, value_THD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(plan, VarlenPlan):
        out_THD = plan.attend_in_any_layer(query_THD, key_THD, value_THD, scaling)
    else:
        out_THD = plan.attend(cast(int, module.layer_idx), query_THD, key_THD, value_THD, scaling, sliding_window)
    return out_THD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


def window_of(config: PreTrainedConfig) -> int | None:
    """A model's sliding window, in tokens, where it has one."""
    try:
        window = getattr(config.get_text_config(), "sliding_window", None)
    except ValueError:  # of several texts
        return None
    return window if isinstance(window, int) else None


def device_named(name: str, number: int = 0) -> torch.device:
    """A job's `cpu`, `cuda` or `cuda:2`; or the one this many after it. Whoever has GPUs of its own sees no others."""
    kind, _, first = name.partition(":")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(first or 0) + number)


def stay_on(device: torch.device) -> None:
    """Let this thread work on a device. Events, graphs and our own kernels are of the thread's current device, wherever
    their tensors are; CUDA keeps one for each thread, and begins with the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a Hugging Face causal LM directory, in evaluation mode; where it holds adapters (peft), the model that they
    are of, with them merged into it. JobError for what we would compute wrongly."""
    path = Path(path)
    source = base_of(path) if has_adapters(path) else path
    prove_packed_architecture(AutoConfig.from_pretrained(str(source)))
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, attn_implementation=ATTENTION)
    nn.Module.to(model, device)
    adopted = adopt(model)
    if has_adapters(path):
        merge_adapters_(adopted, read_adapters(path)[1])
        forget_base(adopted)
    return adopted


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of ours without weights, float32 on the meta device, to be sharded layer by layer.

    JobError for what we would compute wrongly, and for one whose layers are not found.
    """
    prove_packed_architecture(config)
    if reduced_model(config) is None:
        raise JobError(
            f"{config.model_type}: no reduced model of it can be made to prove that it is computed rightly, and "
            f"sharded weights cannot; train it with train.type=single, or {INSTEAD}"
        )
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)
    if not hasattr(model.base_model, "layers"):
        raise JobError(
            f"{config.model_type}: its layers are not where train.type=fsdp2 looks for them (`layers` of its base "
            "model); train it with train.type=single, or choose another model"
        )
    prepare(model)
    return model


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model built elsewhere (by config, by a test) one of ours, or refuse it with the reason."""
    prove_packed_architecture(model.config)
    prove_products(model.parameters())
    prove_packed(model)
    return model


def prove_packed_architecture(config: PreTrainedConfig) -> None:
    """JobError where models of this kind come out wrong in a packed batch. Reads no weights, and takes a moment."""
    prove_architecture(config, "packed", prove_packed)


def prepare(model: PreTrainedModel) -> None:
    """Let a model run our attention, and nothing at random."""
    config: Any = model.config
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # type: ignore[assignment]  # nn.Module types its attributes as tensors
    model.set_attn_implementation(ATTENTION)
    model.train(False)


def prove_packed(model: PreTrainedModel) -> None:
    """A model's packed log-probabilities are those that transformers gives for each sequence alone, or JobError."""
    prepare(model)

    @torch.no_grad()
    def packed(sequences: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(sequence) for sequence in sequences]
        both = packed_logprobs(model, torch.cat(list(sequences)), lengths)
        return [own[1:] for own in torch.split(both, lengths)]

    prove(model, packed, what="in a packed batch", instead=INSTEAD, cause=known_cause(model))


@torch.no_grad()
def known_cause(model: PreTrainedModel) -> str:
    """What of this model is known to go wrong, in words; "" where nothing is."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(others)}, and only full and sliding attention are computed rightly"
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        return "it has no output embedding of its own"
    network: Any = model
    tokens = torch.ones((1, 3), dtype=torch.long, device=model.device)
    with own_attention(model, "eager"):
        try:
            hidden_TH = network.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            theirs = network(input_ids=tokens, use_cache=False).logits[0].float()
            near = max(FLOOR, EPSILONS * torch.finfo(model.dtype).eps)
            same = torch.allclose(theirs, project(model, hidden_TH), atol=near, rtol=near, equal_nan=True)
        except Exception:  # an architecture's own code; the proof says what is wrong
            return ""
    return "" if same else "its logits are not hidden state x output embedding: they are scaled, capped or transformed"


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
    """What these weights say of fixed sequences: an engine that loads them by other means must say the same.

    Computed in float32, by a copy where the model is of another type: its rounding would hide what a step moves.
    """
    exact = model if model.dtype == torch.float32 else run_plainly(deepcopy(model)).float()
    tokens_T = probe_tokens(model)
    logprobs_T = packed_logprobs(exact, tokens_T.to(model.device), [PROBE_LENGTH] * PROBE_SEQUENCES)
    return as_probe(tokens_T, logprobs_T)


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Of all sequences, end to end."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, PROBE_SEQUENCES * PROBE_LENGTH))


def as_probe(tokens_T: Tensor, logprobs_T: Tensor) -> Probe:
    given = logprobs_T.view(PROBE_SEQUENCES, PROBE_LENGTH)[:, 1:].reshape(-1)
    return Probe(tokens=tuple(tokens_T.tolist()), logprobs=tuple(given.tolist()), num_sequences=PROBE_SEQUENCES)


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

    `wanted_T` (bool) restricts the costly vocabulary projection to the tokens it marks. Both are best given on the CPU:
    then nothing waits for the device. What sequences have in common at their beginning is computed once.
    """
    device, head_size = model.device, _head_size(model)
    reaches = max(lengths) <= (window_of(model.config) or math.inf)  # that kernel knows no window
    folded = fold(tokens_T, lengths, device, varlen=reaches and flash_runs(device, model.dtype, head_size))
    hidden_FH = forward_hidden(model, folded.tokens_F, folded.plan.positions_T, folded.plan)
    scored_T = torch.ones(len(tokens_T), dtype=torch.bool) if wanted_T is None else wanted_T.cpu().clone()
    scored_T[folded.first_tokens] = False
    targets = scored_T.nonzero()[:, 0]
    zeros_T = torch.zeros(len(tokens_T), dtype=torch.float32, device=device)
    if not len(targets):
        return Scores(zeros_T, zeros_T)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    inverse_temperature = 1.0 / temperature if temperature > 0 else 1.0
    targets_S, tokens_T = on_device(targets, device), on_device(tokens_T, device)
    hidden_SH, chosen_S = hidden_FH.index_select(0, folded.place_T[targets_S - 1]), tokens_T.index_select(0, targets_S)
    logprobs_S, entropy_S = score(hidden_SH, head.weight, head.bias, chosen_S, inverse_temperature)
    return Scores(zeros_T.index_copy(0, targets_S, logprobs_S), zeros_T.index_copy(0, targets_S, entropy_S))


def _head_size(model: PreTrainedModel) -> int:
    """0 for a model without attention: the proof says what is wrong with it."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    return int(getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))


# --- weights --------------------------------------------------------------------------------------------------------


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight once, by its name in the live model. Of tied tensors only the source (the input embedding) is named.

    Mixture-of-experts models hold their experts fused, under the fused names; `save_pretrained` writes the usual ones.
    """
    tied = model.all_tied_weights_keys
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


@torch.no_grad()
def load_weights_(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the live model in place; or, where adapters are given, merge those into what it was loaded
    with. All or nothing: what does not fit is a WeightError before the first byte is written."""
    if are_adapters(weights):
        merge_adapters_(model, weights)
        return
    given = matched(model, weights)
    for name, tensor in named_weights(model).items():
        tensor.copy_(given[name])
    forget_base(model)


def matched(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of `named_weights`. A missing, unknown or misshapen tensor is a WeightError. A tied tensor
    may be given under either name, or both."""
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
    return given
