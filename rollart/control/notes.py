"""What is noted of one attempt under way for those who read it later. Nothing here decides anything.

A turn is noted where it is booked (`Run.settle`): by then the environment was given the answer, or never will be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.types import Message, Played, Trajectory, TurnNote


@dataclass(slots=True)
class Notes:
    open_s: float = 0.0
    reset_s: float = 0.0
    queue_s: float = 0.0
    reward_s: float = 0.0
    shown: tuple[Message, ...] = ()
    """What the environment said since the last answer."""
    text: str = ""
    """The last answer, as the environment was given it."""
    _turns: list[TurnNote] = field(default_factory=list)

    def turn(self, pool: str, waited_s: float) -> None:
        """An answer from an engine of this pool, to what was shown, is booked as a turn."""
        self._turns.append(TurnNote(pool, waited_s, self.shown, self.text))
        self.shown = ()
        self.text = ""

    def reorder(self, places: Sequence[int]) -> None:
        """Put the turns in this order."""
        self._turns = [self._turns[at] for at in places]

    def scoring(self, asked_s: float, spent_s: float, ended_s: float) -> None:
        """A reward call is over, good or bad: one of `spent_s` in all, asked for since `asked_s`. Of several rewards
        at a time the longest counts."""
        self.reward_s = max(self.reward_s, spent_s)
        self.queue_s = ended_s - asked_s - self.reward_s

    def played(self, trajectory: Trajectory, *, evaluation: bool) -> Played:
        return Played(
            trajectory=trajectory,
            notes=tuple(self._turns),
            left=self.shown,
            evaluation=evaluation,
            open_s=self.open_s,
            reset_s=self.reset_s,
            queue_s=self.queue_s,
            reward_s=self.reward_s,
        )
