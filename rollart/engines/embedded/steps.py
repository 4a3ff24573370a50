"""What a model's layers keep of a token, and whether it says in steps, with that kept, what it says of the whole.

The embedded engine's cache holds the keys and values that layers hand to attention, and nothing else: an architecture
that keeps anything more is lost after the first step. See `rollart.model.agreement`; this is its engine's half.
"""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rollart.engines.embedded.backend import Backend
from rollart.engines.embedded.kv import KvShape
from rollart.engines.embedded.sequence import Sequence as Session
from rollart.engines.embedded.slabs import SlabBackend
from rollart.errors import JobError
from rollart.model.agreement import LENGTHS, logprobs, prove, prove_architecture
from rollart.model.network import forward_hidden, prepare, window_of
from rollart.model.packed import PackedPlan
from rollart.types import GenerateRequest, Sampling

TAKES = (5, 1, 1, 18, 1, 2)
"""Tokens that a sequence takes in one step after another: chunks of a prompt, and single tokens as when it answers."""
INSTEAD = "serve it with engines.type vllm or sglang where they know it, or choose another model (docs/models.md)"


class _Recorder:
    """An `AttentionPlan` that notes what each layer hands over."""

    def __init__(self, device: torch.device) -> None:
        self._plan = PackedPlan([2], device)
        self.positions_T = self._plan.positions_T
        self.calls: list[tuple[int, tuple[int, ...], int]] = []

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        self.calls.append((layer, tuple(key_THD.shape[1:]), value_THD.shape[2]))
        self.query_heads = query_THD.shape[1]
        return self._plan.attend(layer, query_THD, key_THD, value_THD, scaling, window)


@torch.no_grad()
def kept_by(model: PreTrainedModel) -> tuple[KvShape, int]:
    """What the cache holds of one token, and the number of query heads. JobError where our cache cannot hold it."""
    kind = model.config.model_type
    recorder = _Recorder(model.device)
    forward_hidden(model, torch.tensor([1, 1], device=model.device), recorder.positions_T, recorder)
    layers = [layer for layer, _, _ in recorder.calls]
    shapes = {(key, value) for _, key, value in recorder.calls}
    if not layers:
        raise JobError(
            f"{kind}: none of its layers uses transformers' attention interface, whose keys and values are all that "
            f"the embedded engine keeps; {INSTEAD}"
        )
    if sorted(layers) != list(range(len(layers))):
        raise JobError(
            f"{kind}: its attention is called for layers {layers}; the embedded engine keeps one set of keys and "
            f"values for each layer; {INSTEAD}"
        )
    if len(shapes) > 1 or any(key[1] != value for key, value in shapes):
        raise JobError(
            f"{kind}: its keys (heads, size) and values (size) are {sorted(shapes)}; the embedded engine keeps keys "
            f"and values of one size; {INSTEAD}"
        )
    ((heads, head_size), _) = shapes.pop()
    shape = KvShape(layers=len(layers), heads=heads, head_size=head_size, dtype=model.dtype, device=model.device)
    return shape, recorder.query_heads


def prove_steps(model: PreTrainedModel, backend: Backend) -> None:
    """A model's log-probabilities in steps, over a cache, are those that transformers gives at once, or JobError."""

    @torch.inference_mode()
    def in_steps(sequences: Sequence[Tensor]) -> list[Tensor]:
        trial = backend.trial(16 * max(LENGTHS), 2 * max(LENGTHS))
        sessions = [_session(f"proof/{place}", tokens_T.cpu().numpy()) for place, tokens_T in enumerate(sequences)]
        for session in sessions:
            assert trial.memory.place(session, session.total, len(sequences))
        hidden: dict[str, list[Tensor]] = {session.session: [] for session in sessions}
        takes = cycle(TAKES)
        while any(session.pending for session in sessions):
            for session in sessions:
                session.take = min(session.pending, next(takes))
            seqs, hidden_TH = trial.hidden(sessions)
            for session, own_TH in zip(seqs, torch.split(hidden_TH, [s.take for s in seqs]), strict=True):
                hidden[session.session].append(own_TH)
                session.length += session.take
        return [
            logprobs(trial.project(torch.cat(hidden[session.session])), tokens_T)
            for session, tokens_T in zip(sessions, sequences, strict=True)
        ]

    prove(model, in_steps, what="in steps, as the embedded engine does", instead=INSTEAD)


def refuse_windows(config: PreTrainedConfig, context_tokens: int) -> None:
    """JobError where a sequence may be longer than a window: the kernels for CUDA see all of it."""
    window = window_of(config)
    if window is not None and window < context_tokens:
        raise JobError(
            f"{config.model_type}: it has a sliding window of {window} tokens, which the embedded engine masks on a "
            f"CPU alone; set model.context_tokens to {window} or less, or {INSTEAD}"
        )


def prove_steps_architecture(config: PreTrainedConfig) -> None:
    """JobError where the embedded engine gets models of this kind wrong. Reads no weights, and takes a moment."""

    def prove_one(model: PreTrainedModel) -> None:
        prepare(model)
        try:
            shape, query_heads = kept_by(model)
        except JobError:
            raise
        except Exception as error:  # an architecture's own code: anything may come out of it
            raise JobError(f"{config.model_type}: cannot be run in steps ({error}); {INSTEAD}") from error
        prove_steps(model, SlabBackend(model, shape, query_heads, kv_tokens=1, max_context=1, fast=False))

    prove_architecture(config, "steps", prove_one)


def _session(name: str, tokens: np.ndarray) -> Session:
    request = GenerateRequest(
        id=f"{name}/0",
        session=name,
        domain="proof",
        turn=0,
        prompt=(tokens.astype(np.int32),),
        prompt_tokens=len(tokens),
        sampling=Sampling(max_tokens=1),
        last=True,
    )
    return Session(request, arrival=0, max_context=2 * len(tokens), version=0, seed=0)
