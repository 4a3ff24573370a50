"""Child processes that run user code, seen from the parent: started when needed, reused while healthy, else killed.

`Child` makes one call at a time. A child that is given back while a call is under way, or that died, is killed
with everything it started, and the next user gets a new one. Its stdout and stderr go to files of bounded size.
Used by the process environment host and by local rewards; `child.py` is the other end.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.workers.child import LENGTH, MAX_MESSAGE_BYTES, pack, unpack
from rollart.workers.variables import for_children

MAX_LOG_BYTES = 16 * 1024 * 1024
"""A child's output file is emptied between users when it has grown beyond this."""
TAIL_BYTES = 2000
"""How much of a dead child's stderr goes into the error."""


class ChildError(Exception):
    """User code failed, or the process that ran it. `gone` tells the second from the first."""

    def __init__(self, text: str, *, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


Lost = Callable[[str, str], None]
"""Told when a child dies by itself, at work or idle: its name, and how."""


class ChildPool:
    """At most `size` children at a time, all made from the same set-up."""

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        size: int,
        log_dir: Path,
        name: str,
        variables: Sequence[str] = (),
        lost: Lost | None = None,
    ) -> None:
        """`variables`: of our environment, those that children get beside what every program needs."""
        self._module = module
        self._variables = variables
        self._setup = setup
        self._log_dir = log_dir
        self._name = name
        self._lost = lost
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Child] = []
        self._all: dict[int, Child] = {}
        self._life: tuple[int, int] | None = None
        self._closed = False

    async def acquire(self) -> "Child":
        """Wait for a slot and give a child that is ready. Raises ChildError where none can be started."""
        await self._slots.acquire()
        try:
            while self._idle:
                child = self._idle.pop()
                if child.ready and child.running():
                    return child
                if child.ready:
                    child.died_idle()  # the end of its socket has not been seen yet
                self._forget(child)
            return await self._start()
        except BaseException:
            self._slots.release()
            raise

    def release(self, child: "Child") -> None:
        """Give it back. It is killed unless it waits for its next call."""
        if child.ready and not self._closed:
            child.trim_logs()
            self._idle.append(child)
        else:
            self._forget(child)
        self._slots.release()

    async def close(self) -> None:
        """Kill all children, and wait until they are gone."""
        self._closed = True
        children = list(self._all.values())
        for child in children:
            self._forget(child)
        await asyncio.gather(*(child.gone() for child in children))
        if self._life is not None:
            for end in self._life:
                os.close(end)
            self._life = None

    @property
    def pids(self) -> list[int]:
        """The processes now running."""
        return sorted(child.pid for child in self._all.values())

    async def _start(self) -> "Child":
        if self._closed:
            raise ChildError(f"{self._name}: closed", gone=True)
        if self._life is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._life = os.pipe()
        slot = next(number for number in range(len(self._all) + 1) if number not in self._all)
        log = self._log_dir / f"{self._name}-{slot}"
        child = Child(self._module, log, life=self._life[0], variables=self._variables, lost=self._lost)
        self._all[slot] = child
        began_s = time.monotonic()
        try:
            await child.connect()
            await child.call(self._setup)
        except BaseException:
            self._forget(child)
            raise
        child.cold_start_s = time.monotonic() - began_s
        return child

    def _forget(self, child: "Child") -> None:
        child.kill()
        self._all = {slot: other for slot, other in self._all.items() if other is not child}


class Child:
    """One process; one call at a time."""

    def __init__(
        self, module: str, log: Path, *, life: int, variables: Sequence[str] = (), lost: Lost | None = None
    ) -> None:
        self._name, self._lost = log.name, lost
        self._reporting: asyncio.Task[str] | None = None
        self._killed_alive = False
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        self._err_start = self._err.stat().st_size if self._err.exists() else 0
        self._sock, theirs = socket.socketpair()
        environment = for_children(os.environ, variables)
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment.setdefault("OMP_NUM_THREADS", "1")
        with theirs, self._out.open("ab") as out, self._err.open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(theirs.fileno(), life),
                start_new_session=True,
                env=environment,
            )
        self._link: _Link | None = None
        self._reaped: asyncio.Future[int] | None = None
        self.cold_start_s = 0.0
        """How long its start took; set to 0 by whoever has booked it."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Alive, with no call under way."""
        return self._link is not None and not self._link.closed and self._link.answer is None

    def running(self) -> bool:
        """Asks the system: the end of the socket may not have been seen yet."""
        return self._process.poll() is None

    async def connect(self) -> None:
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_unix_connection(lambda: _Link(self.died_idle), sock=self._sock)

    async def call(self, request: Mapping[str, Any]) -> Any:
        """The handler's value. Raises ChildError with its error, or with how the process ended."""
        assert self.ready
        assert self._link is not None
        try:
            frame = pack(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise ChildError(f"this cannot be sent to a child process: {error}") from error
        try:
            answer = unpack(await self._link.ask(frame))
        except EOFError:
            raise ChildError(await self._how_it_ended(), gone=True) from None
        except ValueError as error:
            self.kill()
            raise ChildError(f"the child process answered nonsense: {error}", gone=True) from error
        if isinstance(answer, dict) and "error" in answer:
            raise ChildError(str(answer["error"]))
        if not isinstance(answer, dict) or "value" not in answer:
            self.kill()
            raise ChildError("the child process answered nonsense", gone=True)
        return answer["value"]

    def kill(self) -> None:
        """End it and all that it started, at once, whatever it is doing."""
        if self._reaped is not None:
            return
        self._killed_alive = self._process.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._link is not None:
            self._link.close()
        else:
            self._sock.close()
        # In a thread: a process with much memory takes a while to go, and nobody should wait for it here.
        self._reaped = asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def gone(self) -> int:
        """Killed and reaped; its exit status."""
        self.kill()
        assert self._reaped is not None
        return await asyncio.shield(self._reaped)

    def trim_logs(self) -> None:
        for path in (self._out, self._err):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > MAX_LOG_BYTES:
                    os.truncate(path, 0)
                    self._err_start = 0

    def died_idle(self) -> None:
        """Say so, when its exit status is known."""
        if self._lost is not None:
            self._reporting = asyncio.get_running_loop().create_task(self._how_it_ended())

    async def _how_it_ended(self) -> str:
        """How it ended, and its last words. It closed its socket, so it is dead or as good as dead."""
        if self._killed_alive:
            return "its process was killed"
        for _ in range(20):  # give it the time to be a proper corpse, with its own exit status
            if (status := self._process.poll()) is not None:
                break
            await asyncio.sleep(0.05)
        if status is None:
            how = "stopped answering and was killed"
        elif status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"exited with status {status}"
        self.kill()
        with self._err.open("rb") as file:
            file.seek(max(self._err_start, self._err.stat().st_size - TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        words = f"its process {how}" + (f"; the end of its stderr:\n{tail}" if tail else "")
        if self._lost is not None:
            self._lost(self._name, words)
        return words


class _Link(asyncio.Protocol):
    """The socket's parent end: puts frames together and hands each to who asked."""

    def __init__(self, died_idle: Callable[[], None]) -> None:
        self._died_idle = died_idle
        self.answer: asyncio.Future[bytes] | None = None
        self.closed = False
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()

    async def ask(self, frame: bytes) -> bytes:
        """Raises EOFError when the other end is gone. Cancelled, it stays busy: the answer would still come."""
        assert self.answer is None
        assert self._transport is not None
        answer = self.answer = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        body: bytes = await answer
        self.answer = None
        return body

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < LENGTH.size:
            return
        count = LENGTH.unpack_from(self._buffer)[0]
        end = LENGTH.size + count
        if self.answer is None or count > MAX_MESSAGE_BYTES or len(self._buffer) > end:
            self._fail(ValueError("it spoke out of turn"))
        elif len(self._buffer) == end:
            body = bytes(self._buffer[LENGTH.size :])
            self._buffer.clear()
            if not self.answer.done():
                self.answer.set_result(body)

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is None and not self.closed:
            self._died_idle()
        self.closed = True
        self._fail(EOFError())

    def _fail(self, error: Exception) -> None:
        self.closed = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)
        if self._transport is not None:
            self._transport.abort()
