"""Whether a GPU multiplies matrices right where a process may use only some of its multiprocessors (`share`).

Seen on an H200 with CUDA 13.0: under MPS cuBLAS computes wrongly, the same way each time, with most numbers of
multiprocessors (46 and 84 of 132, say), and rightly with others (34, 66). Nothing fails. So products of the shapes
that a model has, forwards and backwards, are compared with float32 when it is loaded; a share that fails is refused.
"""

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import linear

from rollart.errors import JobError

LIMIT_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ROWS = (1, 3, 7, 16, 33, 64, 100, 128, 200, 256, 512, 1000, 2048, 4096)
"""Tokens of a step: other kernels are chosen for each."""
MAX_VALUES = 1 << 28
"""Of one matrix: what is larger is left out, for the memory it would take."""
LOOKED_AT = 256
"""Columns of each product that are compared."""
TOLERANCE = 0.05
"""Of the largest value. Rounding in bfloat16 gives 0.01; what was wrong was wrong by 1 and more."""

Linear = Callable[[Tensor, Tensor], Tensor]


def prove_products(weights_NK: Iterable[Tensor]) -> None:
    """JobError where this process has a share of a GPU on which products with such weights come out wrong."""
    share = os.environ.get(LIMIT_VARIABLE)
    if share is None:
        return
    weights = list({one.shape: one.detach() for one in weights_NK if one.dim() == 2 and one.is_cuda}.values())
    if not weights:
        return
    wrong = wrong_product(weights)
    if wrong:
        device = weights[0].device
        count = torch.cuda.get_device_properties(device).multi_processor_count
        raise JobError(
            f"share: with {share} % of {device}'s multiprocessors ({count}) {wrong} comes out wrong, a fault of "
            "NVIDIA's libraries with some numbers of them; take another share (0.25 and 0.5 were right on an H200), "
            "or none"
        )


def wrong_product(weights: list[Tensor], multiply: Linear = linear) -> str:
    """The first product in bfloat16 that is not what float32 gives, in words, or ""."""
    generator = torch.Generator(weights[0].device).manual_seed(0)
    for weight_NK in (weight.bfloat16() for weight in weights):
        outputs, inputs = weight_NK.shape
        for rows in (rows for rows in ROWS if rows * max(inputs, outputs) <= MAX_VALUES):
            input_MK, gradient_MN = (
                torch.randn(rows, size, generator=generator, device=weight_NK.device, dtype=weight_NK.dtype)
                for size in (inputs, outputs)
            )
            for left, right in (
                (input_MK, weight_NK),
                (gradient_MN, weight_NK.t()),
                (gradient_MN.t(), input_MK.t()),
            ):
                if _differs(left, right, multiply):
                    return f"a product of {tuple(left.shape)} and {tuple(right.t().shape)}"
    return ""


def _differs(left_MK: Tensor, right_NK: Tensor, multiply: Linear) -> bool:
    found_MN = multiply(left_MK, right_NK)
    every = -(-len(right_NK) // LOOKED_AT)
    exact = linear(left_MK.float(), right_NK[::every].float())
    # Not `>`: a NaN is larger than nothing.
    return not bool((found_MN[:, ::every].float() - exact).abs().amax() <= TOLERANCE * exact.abs().amax())
