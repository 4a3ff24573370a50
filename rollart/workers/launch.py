"""Starts processes, and ends them with all that they started.

`spawn` starts any command in a session of its own, with its output in a file. `Process` is one of our own workers
(`server.py`) and the link to it: seen at once when it dies, with its last output in the error; killed whatever it is
doing. Nothing outlives this process. Used by the local cluster, by the ranks' trainer, by the pool of user code, and
for inference servers.
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
from functools import partial
from pathlib import Path
from typing import Any

from rollart.errors import BoundaryError, ClusterError
from rollart.workers.box import Box
from rollart.workers.handles import as_raised
from rollart.workers.lifeline import lifeline
from rollart.workers.link import Link, WorkerFailed, WorkerGone

EXIT_S = 1.0
"""How long a process whose socket is closed may take to have an exit status."""
CLIENT_S = 10.0
"""How long the client of a container's runtime may take to notice that its container is gone."""
TAIL_BYTES = 2000
"""How much of a dead process's output goes into the error."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""A log is emptied between two users of a process when it has grown beyond this."""

Lost = Callable[[str, str], None]
"""Told at once when a process dies by itself: its name, and how."""


def spawn(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    talk: socket.socket | None = None,
    **more: Any,
) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that one signal reaches everything below it. `talk`: its standard input and output,
    instead of nothing and the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Servers write down how they were started: for nobody else to read.
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
        return subprocess.Popen(
            command,
            stdin=talk.fileno() if talk else subprocess.DEVNULL,
            stdout=talk.fileno() if talk else out,
            stderr=out,
            pass_fds=pass_fds,
            start_new_session=True,
            env=environment,
            **more,
        )


def last_output(log: Path, start: int = 0) -> str:
    """Where to look, and on a line of its own how the file ends. `start`: what is before is of others."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL_BYTES))
        tail = file.read().decode(errors="replace").strip().replace("\n", " | ")
    return f"see {log}" + (f"\nit last said: {tail}" if tail else "")


class Process:
    """One worker process; `target` is the `module:function` that builds the worker there."""

    def __init__(
        self,
        name: str,
        target: str,
        log_dir: Path,
        environment: Mapping[str, str],
        lost: Lost | None = None,
        box: Box | None = None,
    ) -> None:
        """`environment`: all that it gets, but for what lets it find our code. `box`: where it is put."""
        self.name = name
        self.start_s = 0.0
        """How long its start took; set to 0 when it has been booked."""
        self.over_limit = False
        """It was ended for what it used; known once it has ended."""
        self._target = target
        self._log = log_dir / f"{name}.log"
        self._log_start = 0
        self._environment = environment
        self._lost = lost
        self._box = box
        self._popen: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._started = False
        self._killed = False
        """By us, while it was alive."""
        self._reaped: asyncio.Future[int] | None = None
        self._ending: asyncio.Task[str] | None = None

    @property
    def pid(self) -> int | None:
        """None when it has ended."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

    @property
    def ready(self) -> bool:
        """Alive as far as is known, with no call under way."""
        return self._link is not None and not self._link.lost.done() and not self._link.busy

    async def start(self, *arguments: Any) -> None:
        """Build the worker from these arguments. Raises ClusterError."""
        began_s = time.monotonic()
        if self._box is not None and self._log.exists():
            self.trim_log(self._box.output_bytes // 2)  # what it may write, it may write beside what is there
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        words = [sys.executable, "-m", "rollart.workers.server", self._target]
        environment = {**self._environment, "PYTHONPATH": paths}
        with theirs:
            if self._box is None:
                handed = (theirs.fileno(), lifeline())
                self._popen = spawn([*words, *map(str, handed)], self._log, environment, pass_fds=handed)
            else:
                words, environment = self._box.command(words, environment)
                try:
                    self._popen = spawn(words, self._log, environment, pass_fds=self._box.pass_fds, talk=theirs)
                except OSError:
                    await asyncio.to_thread(self._box.remove)
                    raise
        ours.setblocking(False)
        most = None if self._box is None else self._box.output_bytes
        try:
            link = partial(Link, max_bytes=most)
            _, self._link = await asyncio.get_running_loop().create_unix_connection(link, sock=ours)
            self._link.lost.add_done_callback(lambda _: self._end())
            if self._box is not None:
                self._link.send(self._box.opening)
            await self.ask("setup", *arguments)
        except (WorkerFailed, WorkerGone) as error:
            self.kill()
            raise ClusterError(f"{self.name} could not start: {error}") from error
        except BaseException:
            self.kill()
            raise
        self._started = True
        self.start_s = time.monotonic() - began_s

    async def ask(self, method: str, *arguments: Any) -> Any:
        """One call. Raises WorkerFailed with what it raised, or WorkerGone with how the process ended."""
        assert self._link is not None
        try:
            return await self._link.call(method, *arguments)
        except TypeError as error:
            raise WorkerFailed("TypeError", f"this cannot be sent: {error}") from error
        except WorkerGone:
            raise WorkerGone(await self._how_it_ended()) from None

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        """One call of the worker's port; what goes wrong is raised as the port's error."""
        try:
            return await self.ask(method, *arguments)
        except WorkerGone as gone:
            raise error(f"{self.name}: {gone}") from None
        except WorkerFailed as failure:
            raise as_raised(self.name, failure.kind, str(failure), error) from None

    def kill(self) -> None:
        """End it and all that it started, at once, whatever it is doing."""
        if self._popen is None or self._reaped is not None:
            return
        self._killed = self._popen.poll() is None and self._ending is None
        if self._box is None or self._box.ends_with_command:
            self._kill_group()
        # In a thread: a process with much memory takes a while to go, and nobody should wait for it here.
        self._reaped = asyncio.get_running_loop().run_in_executor(None, self._reap)
        if self._link is not None:
            self._link.close()

    def _reap(self) -> int:
        assert self._popen is not None
        removed = False
        if self._box is not None and not self._box.ends_with_command:
            self._box.remove()
            until_s = time.monotonic() + CLIENT_S
            while self._popen.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
            removed = self._started and self._popen.poll() is not None
            self._kill_group()  # whoever waits in it for our end, too
        status = self._popen.wait()
        if self._box is not None and not removed:
            self._box.remove()
        return status

    def _kill_group(self) -> None:
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        if self._reaped is not None:
            await asyncio.shield(self._reaped)

    def trim_log(self, max_bytes: int | None = None) -> None:
        if self._log.stat().st_size > (MAX_LOG_BYTES if max_bytes is None else max_bytes):
            os.truncate(self._log, 0)
            self._log_start = 0

    def _end(self) -> None:
        """The link is lost: find out why, once."""
        if self._ending is None and not self._killed:
            self._ending = asyncio.get_running_loop().create_task(self._see_the_end())

    async def _how_it_ended(self) -> str:
        self._end()
        return "its process was killed" if self._ending is None else await asyncio.shield(self._ending)

    async def _see_the_end(self) -> str:
        assert self._popen is not None
        assert self._link is not None
        wrong = self._link.lost.result()
        for _ in range(50):
            if wrong or (status := self._popen.poll()) is not None:
                break
            await asyncio.sleep(EXIT_S / 50)
        if wrong:
            how = f"{wrong} and was killed"
        elif status is None:
            how = "stopped answering and was killed"
        elif status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"exited with status {status}"
        if self._box is not None and (over := await asyncio.to_thread(self._box.over)):
            how, self.over_limit = f"{how}: {over}", True
        self.kill()
        words = f"its process {how}; {last_output(self._log, self._log_start)}"
        if self._lost is not None and self._started:
            self._lost(self.name, words)
        return words
