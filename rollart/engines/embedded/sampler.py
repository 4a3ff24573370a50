"""From logits to tokens: temperature, top-k, top-p, one exact log-probability each.

A token is drawn by inverting the cumulative distribution at one uniform number that the request brings along, so what
a seeded request draws does not depend on its neighbours in the batch (beyond the last bit of the logits). The
log-probability is always that of the temperature-scaled full distribution, top-k and top-p or not; at temperature 0
(greedy) it is that of the distribution as it stands, temperature 1.
"""

from collections.abc import Sequence as Row

import numpy as np
import torch
from torch import Tensor

from rollart.engines.embedded.sequence import Sequence

BELOW_ONE = 1.0 - 2.0**-22
"""Largest uniform used: the product with the total must stay below the total in float32."""


def sample(logits_NV: Tensor, rows: Row[tuple[Sequence, int]]) -> tuple[list[int], list[float]]:
    """As `draw`, on the host."""
    chosen_N, logprobs_N = draw(logits_NV, rows)
    return chosen_N.tolist(), logprobs_N.tolist()


def draw(logits_NV: Tensor, rows: Row[tuple[Sequence, int]]) -> tuple[Tensor, Tensor]:
    """One token and its log-probability for each row of float32 logits (overwritten).

    A row is for a sequence's next token (0), or for the one this many tokens later.
    """
    samplings = [seq.sampling for seq, _ in rows]
    temperatures = [sampling.temperature for sampling in samplings]
    if any(temperature != 1.0 and temperature > 0.0 for temperature in temperatures):
        scale = np.array([1.0 / t if t > 0.0 else 1.0 for t in temperatures], dtype=np.float32)
        logits_NV.mul_(torch.from_numpy(scale).to(logits_NV.device)[:, None])
    peak_N = logits_NV.amax(dim=-1)  # on a CPU ten times as fast as `max`, which also says where
    weights_NV = logits_NV.sub(peak_N[:, None]).exp_()
    total_N = weights_NV.sum(-1)
    if not any(temperatures):
        chosen_N = logits_NV.argmax(dim=-1)
    else:
        for row, sampling in enumerate(samplings):
            if sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0):
                _truncate_(weights_NV[row], sampling.top_k, sampling.top_p)
        cumulative_NV = weights_NV.cumsum(-1)
        uniforms = np.array([min(seq.uniform(ahead), BELOW_ONE) for seq, ahead in rows], dtype=np.float32)
        point_N1 = torch.from_numpy(uniforms).to(logits_NV.device)[:, None] * cumulative_NV[:, -1:]
        chosen_N = torch.searchsorted(cumulative_NV, point_N1, right=True)[:, 0]
        chosen_N.clamp_(max=logits_NV.shape[1] - 1)
        if not all(temperatures):
            greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits_NV.device)
            chosen_N = torch.where(greedy, logits_NV.argmax(dim=-1), chosen_N)
    logprobs_N = logits_NV.gather(1, chosen_N[:, None])[:, 0] - peak_N - total_N.log()
    return chosen_N, logprobs_N


def _truncate_(weights_V: Tensor, top_k: int, top_p: float) -> None:
    """Set to 0 what top-k, then top-p of what remains, leave out. The most likely token always stays."""
    ranked_V, order_V = weights_V.sort(descending=True, stable=True)
    if 0 < top_k < len(ranked_V):
        ranked_V[top_k:] = 0.0
    if top_p < 1.0:
        # A token stays if those before it do not yet reach top_p.
        before_V = ranked_V.cumsum(0) - ranked_V
        outside_V = before_V >= top_p * ranked_V.sum()
        outside_V[0] = False
        ranked_V[outside_V] = 0.0
    weights_V[order_V] = ranked_V
