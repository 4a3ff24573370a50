"""The inside of a child process that runs user code: environments, reward functions.

One request, one answer, over a socket inherited from the parent: four bytes of length, then msgpack (never pickle).
The first message is the set-up; each later one goes to the handler made from it. An exception becomes an answer with
its text, and its traceback goes to stderr, which is a file. The child and all that it started die with the parent: a
thread reads a pipe whose other end only the parent holds, and at its end kills the process group.
This module stays light, so that a child is up fast.
"""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from rollart.errors import text_of

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

Handler = Callable[[Mapping[str, Any]], Any]


def serve(start: Callable[[Mapping[str, Any]], Handler]) -> None:
    """Run until the parent goes away. `start` makes the handler from the set-up message."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    die_with_parent(int(sys.argv[2]))
    handler: Handler | None = None
    while (request := _receive(link)) is not None:
        try:
            if handler is None:
                handler, value = start(request), None
            else:
                value = handler(request)
            answer = pack({"value": value})
        except Exception as error:  # the boundary to user code
            traceback.print_exc()
            answer = pack({"error": describe(error)})
        sys.stdout.flush()
        try:
            link.sendall(answer)
        except OSError:
            break
    os.killpg(0, signal.SIGKILL)  # the parent has gone, or has no use for us: take along what user code started


def pack(message: Mapping[str, Any]) -> bytes:
    """One framed message. Raises TypeError, ValueError or OverflowError for what msgpack cannot hold."""
    body: bytes = msgpack.packb(message, default=_plain)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """What `pack` framed, without the length. Raises ValueError."""
    try:
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"not msgpack: {error}") from error


def describe(error: BaseException) -> str:
    """An exception in one line, with the place in the user's file where it was raised."""
    name, text = type(error).__name__, text_of(error)
    text = name if text == name else f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(os.path.dirname(__file__))]
    return f"{text} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else text


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays, which user code likes to return."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent; use JSON values")


def _receive(link: socket.socket) -> Any:
    head = _exactly(link, LENGTH.size)
    if head is None:
        return None
    body = _exactly(link, LENGTH.unpack(head)[0])
    return None if body is None else unpack(body)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def die_with_parent(life: int) -> None:
    """From now on this process, and all that it starts, ends when its parent does.

    Two ways, since each alone has a gap. A thread reads the pipe that only the parent holds; but it needs the
    interpreter, and a call that never gives it back (a regular expression that explodes) keeps it for ever. So the
    kernel is asked as well: when the pipe's other end closes, it kills the process group.
    """
    os.set_inheritable(life, False)

    def wait() -> None:
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)

    with contextlib.suppress(OSError, AttributeError):  # Linux, with /proc
        # Opened anew: the owner belongs to the open file, and siblings share the one that was handed down.
        own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    threading.Thread(target=wait, daemon=True).start()
