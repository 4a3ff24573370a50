"""One attempt at a trajectory, under way: what it has said, where it is, and how it is stopped."""

import asyncio

from rollart.config.settings import TaskSettings
from rollart.control.movement import Mover
from rollart.control.notes import Notes
from rollart.control.render import Prefix
from rollart.types import Completion, EngineView, Status, Task, Tokens, TrajectoryId, Turn, WeightVersion


class Run:
    """One attempt under way. Its owner may `stop` it; everyone else only reads."""

    __slots__ = (
        "_cancelled",
        "_task",
        "born",
        "cause",
        "evaluation",
        "id",
        "key",
        "last_engine",
        "min_version",
        "mover",
        "notes",
        "order",
        "prefix",
        "said",
        "settings",
        "started_s",
        "stopped",
        "task",
        "turns",
    )

    def __init__(
        self,
        id: TrajectoryId,
        task: Task,
        settings: TaskSettings,
        order: tuple[str, ...],
        *,
        cause: int = -1,
        evaluation: bool = False,
    ) -> None:
        self.id = id
        self.key = str(id)
        self.task = task
        self.settings = settings
        self.order = order
        """The pool this trajectory stays on, then its stand-ins."""
        self.cause = cause
        self.evaluation = evaluation
        self.born: WeightVersion | None = None
        """Set at the first send to the version it will be at least, and made exact by the first token."""
        self.min_version: WeightVersion = 0
        self.last_engine: EngineView | None = None
        self.prefix = Prefix()
        self.turns: list[Turn] = []
        self.said: tuple[Tokens, bool, Completion, float, float] | None = None
        """An answer the environment has not replied to yet, and how long it took and was waited for."""
        self.notes: Notes | None = None
        """Where attempts are kept for people to read."""
        self.mover: Mover
        """When it moved last. Set as it begins."""
        self.started_s = 0.0
        self.stopped: tuple[Status, str] | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    def settle(self, reward: float = 0.0, env_s: float = 0.0) -> None:
        """Book the last answer as a turn, with what the environment made of it."""
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
