"""Whether a model run our way says what transformers' own code says: shown by computing, when the model is loaded.

Our way leaves out what only some architectures need: a state that is carried from token to token, biases on
attention. A model that has one would train and play on wrong log-probabilities, and nothing would fail. So each is
run both ways over a few short sequences: by transformers with its own attention, one sequence at a time, and our way
(`ours`: packed for the trainer, in steps with a cache for the engine). What differs by more than rounding is refused.

The architecture is proven once, on a reduced model (`reduced.py`) in float32, where rounding is all but nothing;
the model itself is then run as well, in the type and on the device that it will be used with.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rollart.errors import JobError
from rollart.model.reduced import reduced_model

LENGTHS = (21, 34, 29, 17)
"""Of the sequences: longer than a reduced model's windows, and different, so that no mistake in positions hides."""
COMMON = 18
"""Tokens that the second and the third have in common at their beginning."""
FLOOR = 1e-3
"""Log-probabilities that differ by less are equal: float32 gives 1e-4 at most, another formula 0.01 and more."""
EPSILONS = 8
"""The same in units of the type's own precision, where that is coarser: 0.06 in bfloat16."""
NOISES = 4
"""How much more than transformers differs from itself we may differ from it."""
CAP = 4
"""The most that is ever taken for rounding, in floors. A model that differs from itself by more is not causal."""

BESIDE = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})
"""Keys of a config that say nothing of what is computed."""
_faults: dict[tuple[str, str], str] = {}
"""What is wrong with the architectures that were looked at, or "" where nothing is."""

Ours = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sequences of token ids to the log-probability of each token after the first, sequence by sequence."""


def prove(model: PreTrainedModel, ours: Ours, *, what: str, instead: str, cause: str = "") -> None:
    """JobError where `ours` differs from transformers. `what` is our way in words; `instead` is what a user can do;
    `cause` is what is known to be unsupported of this model: it is refused for that, whatever is computed."""
    kind = model.config.model_type
    because = f": {cause}" if cause else ""
    sequences = proof_sequences(model)
    try:
        theirs, tolerance = _reference(model, sequences)
    except Exception as error:  # an architecture's own code: anything may come out of it
        raise JobError(
            f"{kind}: transformers itself cannot run it on plain token ids ({_short(error)}){because}; {instead}"
        ) from error
    try:
        own = ours(sequences)
        alone = [ours([sequence])[0] for sequence in sequences]
    except Exception as error:
        raise JobError(f"{kind}: cannot be run {what} ({_short(error)}){because}; {instead}") from error
    coarse = _is_coarse(model)
    apart = _difference(own, theirs, coarse)
    if apart <= tolerance:
        if cause:
            raise JobError(f"{kind}: cannot be run {what}{because}; {instead}")
        return
    if not cause and _difference(alone, theirs, coarse) <= tolerance:
        cause = (
            "its tokens see other sequences, or lose their own, by something beside attention (a state, a convolution, "
            "positions that it counts itself)"
        )
    elif not cause:
        cause = "its attention is not plain causal attention (it has a bias or a state, or looks ahead)"
    raise JobError(
        f"{kind}: run {what}, its log-probabilities are off by {apart:.2g} from transformers' own (up to "
        f"{tolerance:.2g} is rounding): {cause}; {instead}"
    )


def prove_architecture(config: PreTrainedConfig, way: str, prove_one: Callable[[PreTrainedModel], None]) -> None:
    """`prove_one` on a reduced model of this architecture, once in a process for each `way`.

    An architecture that cannot be reduced is left to be proven by its own weights alone.
    """
    written = {key: value for key, value in config.to_dict().items() if key not in BESIDE}
    key = way, json.dumps(written, sort_keys=True, default=str)
    if key not in _faults:
        _faults[key] = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what an architecture says of a model that nobody asked for
            small = reduced_model(config)
            try:
                if small is not None:
                    prove_one(small)
            except JobError as error:
                _faults[key] = str(error)
    if _faults[key]:
        raise JobError(_faults[key])


def proof_sequences(model: PreTrainedModel) -> list[Tensor]:
    """Random tokens, always the same."""
    rng = np.random.default_rng(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    found = [torch.from_numpy(rng.integers(min(2, vocab_size - 1), vocab_size, length)) for length in LENGTHS]
    found[2][:COMMON] = found[1][:COMMON]
    return [sequence.to(model.device) for sequence in found]


def logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Of each token after the first, by the logits of the one before it."""
    return logits_TV[:-1].float().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


@torch.no_grad()
def _reference(model: PreTrainedModel, sequences: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """What transformers gives for each sequence alone, and what counts as rounding.

    That is found by letting transformers do it again in another order of sums: with its other attention, and with more
    tokens after the sequence, which a causal model does not see.
    """
    network: Any = model

    def run(sequence: Tensor, behind: Tensor) -> Tensor:
        logits = network(input_ids=torch.cat((sequence, behind))[None], use_cache=False).logits[0]
        return logprobs(logits[: len(sequence)], sequence)

    with own_attention(model, "eager"):
        theirs = [run(sequence, sequence[:0]) for sequence in sequences]
    with own_attention(model, "sdpa" if model._supports_sdpa else "eager"):
        again = [run(sequence, sequence[:5]) for sequence in sequences]
    floor = max(FLOOR, EPSILONS * torch.finfo(model.dtype).eps)
    noise = _difference(again, theirs, _is_coarse(model))
    return theirs, min(max(floor, NOISES * noise), CAP * floor)


@contextmanager
def own_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let transformers run the model with one of its own attentions for a moment."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _is_coarse(model: PreTrainedModel) -> bool:
    return torch.finfo(model.dtype).eps > torch.finfo(torch.float32).eps


def _difference(left: Sequence[Tensor], right: Sequence[Tensor], coarse: bool) -> float:
    """The largest; in a coarse type the median, since there a rounded router sends single tokens to other experts."""
    apart = torch.cat([(one.float() - other.float()).abs() for one, other in zip(left, right, strict=True)])
    return float(apart.median() if coarse else apart.max())


def _short(error: Exception) -> str:
    """The first line of an error, with its kind."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
