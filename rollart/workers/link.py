"""Many calls at a time over one socket to one worker process, seen from the parent.

A frame is a message of `wire.py`: `[number, method, arguments]` one way, `[number, ok, value]` back. An answer that
nobody asked for, or that cannot be read, ends the link: nothing more that this worker says can be believed. When the
worker goes, every call under way learns so at once.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from rollart.workers.wire import LENGTH, MAX_BYTES, frame, unpack, unpack_untrusted


class WorkerGone(Exception):
    """The process at the other end has ended, or is not believed any more."""


class WorkerFailed(Exception):
    """The worker is well, but the call raised. `kind` is the error's class name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Outbox:
    """Writes all that one round of the event loop has to say at once: calls come in bursts, and each write costs."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._frames: list[bytes] = []

    def put(self, message: Any) -> None:
        """Raises TypeError for what may not cross; then nothing is sent."""
        body = frame(message)
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(body)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        self._write(b"".join(frames))


class Link(asyncio.Protocol):
    """The parent's end."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: of one answer of a worker that is not trusted; a longer one is not believed, nor one of too many
        parts."""
        self._max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        self._unpack = unpack if max_bytes is None else unpack_untrusted
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the other end is gone: what it did wrong, or empty."""
        self._transport: asyncio.WriteTransport | None = None
        self._outbox = Outbox(self.send)
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0

    @property
    def busy(self) -> bool:
        """Whether it owes an answer, perhaps to a caller that has stopped listening."""
        return bool(self._calls)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises WorkerFailed or WorkerGone; TypeError for what may not cross. A caller that is cancelled only stops
        listening."""
        if self.lost.done() or self._transport is None:
            raise WorkerGone
        self._numbers += 1
        self._outbox.put([self._numbers, method, list(arguments)])
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._numbers] = future
        return await future

    def send(self, data: bytes) -> None:
        """As it is; for calls there is `call`."""
        if self._transport is not None and not self.lost.done():
            self._transport.write(data)

    def close(self, reason: str = "") -> None:
        if self._transport is not None:
            self._transport.abort()
        if not self.lost.done():
            self.lost.set_result(reason)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(WorkerGone())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            count = LENGTH.unpack_from(self._buffer, at)[0]
            end = at + LENGTH.size + count
            if count > self._max_bytes:
                self.close(f"answered with more than {self._max_bytes} bytes, or nonsense,")
                return
            if len(self._buffer) < end:
                break
            try:
                self._settle(self._unpack(bytes(self._buffer[at + LENGTH.size : end])))
            except (ValueError, TypeError, KeyError):
                self.close("answered nonsense")
                return
            at = end
        del self._buffer[:at]

    def _settle(self, answer: Any) -> None:
        number, ok, value = answer
        outcome = value if ok is True else WorkerFailed(*value)
        future = self._calls.pop(number)
        if future.done():
            return
        if ok is True:
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
