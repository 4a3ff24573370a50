"""One attempt at a trajectory, under way: what it has said, where it is, and how it is stopped."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.config.settings import TaskSettings
from rollart.control.movement import Mover
from rollart.control.notes import Notes
from rollart.control.render import Prefix
from rollart.types import Completion, EngineView, Status, Task, Tokens, TrajectoryId, Turn, WeightVersion


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt under way. Its owner may `stop` it; everyone else only reads."""

    id: TrajectoryId
    task: Task
    settings: TaskSettings
    order: tuple[str, ...]
    """The pool this trajectory stays on, then its stand-ins."""
    cause: int = -1
    evaluation: bool = False
    key: str = field(init=False)
    born: WeightVersion | None = None
    """Set at the first send to the version it will be at least, and made exact by the first token."""
    min_version: WeightVersion = 0
    last_engine: EngineView | None = None
    prefix: Prefix = field(default_factory=Prefix)
    turns: list[Turn] = field(default_factory=list)
    said: tuple[Tokens, bool, Completion, float, float] | None = None
    """An answer the environment has not replied to yet, and how long it took and was waited for."""
    notes: Notes | None = None
    """Where attempts are kept for people to read."""
    mover: Mover = field(init=False)
    """When it moved last. Set as it begins."""
    started_s: float = 0.0
    stage: str = "agent"
    """What it is at: a call through a port, or else the agent. Where a call raises, it stays what it was."""
    stopped: tuple[Status, str] | None = None
    _task: "asyncio.Task[object] | None" = None
    _cancelled: bool = False

    def __post_init__(self) -> None:
        self.key = str(self.id)

    def settle(self, reward: float = 0.0, env_s: float = 0.0) -> None:
        """Book the last answer as a turn, with the reward that the environment gave for it."""
        if self.said is not None:
            context, fresh, completion, generate_s, waited_s = self.said
            self.said = None
            self.turns.append(
                Turn(
                    context=context,
                    fresh=fresh,
                    completion=completion,
                    reward=reward,
                    generate_s=generate_s,
                    env_s=env_s,
                )
            )
            if self.notes is not None and self.last_engine is not None:
                self.notes.turn(self.last_engine.pool, waited_s)

    def reorder(self, places: Sequence[int]) -> None:
        """Put the turns in this order."""
        self.turns = [self.turns[at] for at in places]
        if self.notes is not None:
            self.notes.reorder(places)

    def stop(self, status: Status, reason: str) -> None:
        """End it now: its request is aborted, its environment closed, its reward dropped."""
        if self.stopped is None:
            self.stopped = (status, reason)
            if self._task is not None:
                self._cancelled = self._task.cancel()

    def enter(self) -> None:
        """From here on `stop` cancels the task that runs it. One that was stopped before it began ends at once."""
        self._task = asyncio.current_task()
        if self.stopped is not None:
            raise asyncio.CancelledError

    def was_stopped(self) -> bool:
        """True when the cancellation that just arrived is our own `stop`, and no one else's as well."""
        if self.stopped is None or self._task is None:
            return False
        return not self._cancelled or self._task.uncancel() == 0

    def leave(self) -> None:
        """Nothing is left to stop."""
        self._task = None
