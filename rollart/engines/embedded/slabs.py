"""The CPU's back end: slabs, one flat forward pass a step, answers at once. Serves any device that torch knows."""

from collections.abc import Mapping
from collections.abc import Sequence as Row

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollart.engines.embedded.attention import StepPlan
from rollart.engines.embedded.backend import Launched, Ready, asked_of
from rollart.engines.embedded.dense import DenseForward, dense_forward
from rollart.engines.embedded.exchange import Exchange
from rollart.engines.embedded.kv import KvCache, KvShape
from rollart.engines.embedded.sampler import sample
from rollart.engines.embedded.sequence import Sequence
from rollart.model.agreement import LENGTHS
from rollart.model.network import forward_hidden, project


class SlabBackend:
    overlaps = False

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KvShape,
        query_heads: int,
        *,
        kv_tokens: int,
        max_context: int,
        dense: DenseForward | None = None,
        fast: bool = True,
    ) -> None:
        """`dense`: the fast forward, where one was made already; not `fast`: without one."""
        self._model, self._shape, self._query_heads = model, shape, query_heads
        self.max_context = min(kv_tokens, max_context)
        self.memory = KvCache(shape, kv_tokens, self.max_context)
        if dense is None and fast:
            dense = dense_forward(model, max(self.max_context, *LENGTHS))  # the proof's sequences fit in any case
        self._dense = dense
        """None where only transformers' own code will do."""

    def trial(self, kv_tokens: int, max_context: int) -> "SlabBackend":
        return SlabBackend(
            self._model,
            self._shape,
            self._query_heads,
            kv_tokens=kv_tokens,
            max_context=max_context,
            dense=self._dense,
            fast=False,
        )

    def launch(self, running: Row[Sequence], *, rested: bool = False) -> Launched:
        seqs, hidden_TH = self.hidden(running)
        asked, rows = asked_of(seqs)
        takes = [seq.take for seq in seqs]
        if not asked:
            return Launched(seqs, takes, asked, lambda: ([], []))
        if len(rows) < len(hidden_TH):
            hidden_TH = hidden_TH.index_select(0, torch.tensor(rows, device=hidden_TH.device))
        answer = sample(self.project(hidden_TH), asked)
        return Launched(seqs, takes, asked, lambda: answer)

    def hidden(self, running: Row[Sequence]) -> tuple[list[Sequence], Tensor]:
        plan = StepPlan(self.memory.slabs, self._shape, self._query_heads)
        if self._dense is not None:
            return plan.seqs, self._dense(plan.tokens_T, plan.positions_T, plan)
        return plan.seqs, forward_hidden(self._model, plan.tokens_T, plan.positions_T, plan)

    def project(self, hidden_TH: Tensor) -> Tensor:
        return project(self._model, hidden_TH) if self._dense is None else self._dense.project(hidden_TH)

    def prepare(self, weights: Mapping[str, Tensor], *, adopt: bool) -> Ready:
        return Exchange(self._model, self._dense, weights, adopt=adopt)
