"""One end of two streams of calls, one each way: a coordinator's, or a shard's.

Invariant: what this end says arrives in the order in which it was said; an answer is said when its call is done, after
all that was said before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollart.control.supervisor import TaskSupervisor
from rollart.control.waits import Signal
from rollart.errors import (
    BoundaryError,
    ClusterError,
    NoRoom,
    StoreFull,
    TrainerError,
    VersionGone,
    WeightError,
    as_utf8,
)
from rollart.events.log import EventBuffer
from rollart.ports import Answer, Call, Events, ShardMessage

Handler = Callable[..., Any]
_ERRORS: dict[str, type[BoundaryError]] = {
    error.__name__: error for error in (ClusterError, NoRoom, StoreFull, TrainerError, VersionGone, WeightError)
}
"""That an answer may be; any other is a ClusterError there."""


class ShardLost(ClusterError):
    """Who was asked is gone."""


class Peer:
    def __init__(
        self, handlers: Mapping[str, Handler], supervisor: TaskSupervisor, events: EventBuffer | None = None
    ) -> None:
        """`handlers`: by method. One that is asked for an answer is a coroutine function. `events` are said with what
        follows them."""
        self._handlers = handlers
        self._supervisor = supervisor
        self._events = events
        self._said: list[ShardMessage] = []
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0
        self.some = Signal()
        """There is something to send."""

    def tell(self, method: str, *arguments: Any) -> None:
        self._say(Call(method, arguments))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Raises what the other end raised, where that is an error of ours, or what `lose` says."""
        self._numbers += 1
        number = self._numbers
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._say(Call(method, arguments, number))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def said(self) -> list[ShardMessage]:
        """All that is to be sent, events included."""
        self._say_events()
        said, self._said = self._said, []
        return said

    @property
    def waiting(self) -> bool:
        """There is something to send beside events."""
        return bool(self._said)

    def take(self, message: Call | Answer) -> None:
        match message:
            case Call(method, arguments, 0):
                self._handlers[method](*arguments)
            case Call(method, arguments, number):
                self._supervisor.spawn(self._answer(number, self._handlers[method](*arguments)))
            case Answer(number, value, error):
                asked = self._asked.get(number)
                if asked is None or asked.done():
                    return
                if error:
                    asked.set_exception(_ERRORS.get(error, ClusterError)(value))
                else:
                    asked.set_result(value)

    def lose(self, reason: str) -> None:
        """The other end is gone: nobody gets an answer any more."""
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(ShardLost(reason))

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        try:
            answer = Answer(number, await work)
        except BoundaryError as error:
            answer = Answer(number, as_utf8(str(error)), type(error).__name__)
        self._say(answer)

    def _say(self, message: ShardMessage) -> None:
        self._say_events()
        self._said.append(message)
        self.some.give()

    def _say_events(self) -> None:
        if self._events is not None and (events := self._events.take()):
            self._said.append(Events(events))
