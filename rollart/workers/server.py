"""The inside of a worker process: `python -m rollart.workers.server MODULE:FUNCTION [SOCKET LIFELINE]`.

Without the numbers, for a process in a box, it confines itself (`seccomp.py`) and talks over its standard input and
output; what is printed goes to the standard error, and the box ends it with its parent.

The function builds the worker from the arguments of the first call; every later call is a method of the worker. Where
the function is a coroutine, so are the methods, and calls run side by side (engines, trainers). Otherwise they run one
after another in the main thread, without an event loop, as user code expects it (environments, rewards). An exception
becomes an answer with its text; its traceback goes to the log. The process ends with its parent.
This module stays light, so that a process is up fast.
"""

import contextlib
import importlib
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from rollart.errors import text_of
from rollart.workers.lifeline import die_with_parent
from rollart.workers.wire import LENGTH, frame, unpack


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    if len(sys.argv) == 2:
        from rollart.workers.seccomp import confine

        confine()
        incoming, outgoing = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        _one_by_one(incoming, outgoing, getattr(importlib.import_module(module), name))
        os._exit(0)
    link = socket.socket(fileno=int(sys.argv[2]))
    link.set_inheritable(False)
    die_with_parent(int(sys.argv[3]))
    build = getattr(importlib.import_module(module), name)
    if inspect.iscoroutinefunction(build):
        _side_by_side(link, build)
    else:
        _one_by_one(link.fileno(), link.fileno(), build)
    os.killpg(0, signal.SIGKILL)  # the parent has gone, or has no use for us: take along what was started here


def _one_by_one(read_fd: int, write_fd: int, build: Callable[..., Any]) -> None:
    worker: Any = None
    with open(read_fd, "rb", closefd=False) as incoming, open(write_fd, "wb", closefd=False) as outgoing:
        while len(head := incoming.read(LENGTH.size)) == LENGTH.size:
            number, method, arguments = unpack(incoming.read(LENGTH.unpack(head)[0]))
            try:
                if worker is None:
                    worker, value = build(*arguments), None
                else:
                    value = getattr(worker, method)(*arguments)
                answer = frame([number, True, value])
            except Exception as error:  # the boundary to user code
                answer = frame([number, False, failure(error)])
            sys.stdout.flush()
            try:
                outgoing.write(answer)
                outgoing.flush()
            except OSError:
                return


def _side_by_side(link: socket.socket, build: Callable[..., Awaitable[Any]]) -> None:
    import asyncio

    from rollart.workers.link import Outbox

    async def serve() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=link, limit=2**26)
        outbox = Outbox(writer.write)
        worker: Any = None
        running: set[asyncio.Task[None]] = set()

        async def answer(number: int, method: str, arguments: list[Any]) -> None:
            nonlocal worker
            try:
                if worker is None:
                    worker, value = await build(*arguments), None
                else:
                    value = await getattr(worker, method)(*arguments)
                outbox.put([number, True, value])
            except Exception as error:  # the boundary of the process: whatever it is, the caller hears it
                outbox.put([number, False, failure(error)])

        while True:
            try:
                head = await reader.readexactly(LENGTH.size)
                call = unpack(await reader.readexactly(LENGTH.unpack(head)[0]))
            except (asyncio.IncompleteReadError, ConnectionError):
                os.killpg(0, signal.SIGKILL)
            task = asyncio.get_running_loop().create_task(answer(*call))
            running.add(task)
            task.add_done_callback(running.discard)

    asyncio.run(serve())


def failure(error: Exception) -> list[str]:
    """What the caller is told: the class and a text. The traceback of an error that is not ours goes to the log."""
    if not type(error).__module__.startswith("rollart."):
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exception(error)
    return [type(error).__name__, describe(error)]


def describe(error: BaseException) -> str:
    """An exception in one line; where it is not ours, with the place in the user's file where it was raised."""
    name, text = type(error).__name__, text_of(error)
    text = name if text == name else f"{name}: {text}"
    frames = [] if type(error).__module__ == "rollart.errors" else traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(os.path.dirname(__file__))]
    return f"{text} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else text


if __name__ == "__main__":
    main()
