"""What the engine asks of whatever computes: memory, and one step at a time.

Two back ends: `slabs.py`, for CPUs, answers at once; `paged/runner.py`, for GPUs, answers when asked for the result, so
that the host can plan the next step while the device computes this one.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row
from typing import NamedTuple, Protocol

from torch import Tensor

from rollart.engines.embedded.memory import Memory
from rollart.engines.embedded.sequence import Sequence


class Launched(NamedTuple):
    """A step that is computed, or under way."""

    seqs: list[Sequence]
    """Who takes part, in the order of the flat tokens."""
    takes: list[int]
    """Tokens of each."""
    asked: list[tuple[Sequence, int]]
    """Whose tokens are sampled: a sequence's next one (0), or the one this many guesses later."""
    result: Callable[[], tuple[list[int], list[float]]]
    """Token and log-probability of each that was asked for. Waits for the device."""
    taken_s: Callable[[], float] | None = None
    """Seconds from the end of the step before, by the device's clock, once the result is there. None: what the host
    waited for is what the step took."""


class Ready(Protocol):
    """Weights that are ready to be put in."""

    def put_in(self) -> None:
        """Between two steps, in place of those in use. Raises WeightError, with the old ones still in place."""

    def let_go(self) -> None:
        """Of what is not in use: these, or those that they replaced."""


class Backend(Protocol):
    @property
    def memory(self) -> Memory: ...

    @property
    def max_context(self) -> int:
        """Prompt and answer together."""

    @property
    def overlaps(self) -> bool:
        """Whether a step may be planned before the one before it is done; then no guessed tokens are computed."""

    def launch(self, running: Row[Sequence], *, rested: bool = False) -> Launched:
        """Compute `take` tokens of each of these. Does not change them. `rested`: no step is under way, so that this
        one's time begins now."""

    def hidden(self, running: Row[Sequence]) -> tuple[list[Sequence], Tensor]:
        """The hidden states of a step's flat tokens, and whose they are."""

    def project(self, hidden_TH: Tensor) -> Tensor:
        """Logits (T, V) in float32."""

    def prepare(self, weights: Mapping[str, Tensor], *, adopt: bool) -> Ready:
        """Make weights ready, or adapters, in any one thread beside the steps. `adopt`: they may be served from where
        they are. Raises WeightError."""

    def trial(self, kv_tokens: int, max_context: int) -> "Backend":
        """The same computation with a small cache of its own."""


def asked_of(seqs: Row[Sequence]) -> tuple[list[tuple[Sequence, int]], list[int]]:
    """Who samples in a step, guesses included, and the flat rows to sample from."""
    asked: list[tuple[Sequence, int]] = []
    rows: list[int] = []
    end = 0
    for seq in seqs:
        end += seq.take
        if seq.length + seq.take - seq.draft == seq.total:
            asked += [(seq, ahead) for ahead in range(seq.draft + 1)]
            rows += range(end - seq.draft - 1, end)
    return asked, rows
