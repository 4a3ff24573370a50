"""Shards on the virtual clock: the real ones, in one process, that faults can kill; and the head's time for them."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from rollart.errors import ClusterError
from rollart.events import schema
from rollart.ports import Events, ShardMessage
from rollart.sim.cores import Core


class Closable(Protocol):
    """A shard that can be ended."""

    async def tell(self, messages: Sequence[ShardMessage]) -> None: ...

    async def news(self) -> Sequence[ShardMessage]: ...

    async def close(self, reason: str = ...) -> None: ...


class SimShard:
    def __init__(self, inner: Closable, head: Core, news_s: float) -> None:
        """`head`: on which `news_s` are spent for each of its generate calls."""
        self._inner = inner
        self._head = head
        self._news_s = news_s
        self.dead = ""
        self._closing: asyncio.Task[None] | None = None

    async def tell(self, messages: Sequence[ShardMessage]) -> None:
        self._must_live()
        await self._inner.tell(messages)

    async def news(self) -> Sequence[ShardMessage]:
        self._must_live()
        messages = await self._inner.news()
        self._must_live()
        if self._news_s:
            calls = sum(
                isinstance(event, schema.Said)
                for message in messages
                if isinstance(message, Events)
                for event in message.events
            )
            await self._head.work(calls * self._news_s)
            self._must_live()
        return messages

    def die(self, reason: str) -> None:
        """The process is gone, with all that it has not said."""
        if not self.dead:
            self.dead = reason
            self._closing = asyncio.get_running_loop().create_task(self._inner.close(reason))

    async def closed(self) -> None:
        """Nothing of it runs any more."""
        if self._closing is not None:
            await self._closing

    def _must_live(self) -> None:
        if self.dead:
            raise ClusterError(f"it died: {self.dead}")
