"""Each engine and the trainer in an OS process of its own on this machine.

Handles have the call shape of the ports. A worker that dies is seen at once; its stderr is kept in the run directory
and its last words go into the error. Nothing outlives the parent.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.cluster.machine import VISIBLE
from rollart.errors import BoundaryError, ClusterError
from rollart.types import EngineSpec
from rollart.workers.handles import WorkerEngine, WorkerTrainer, as_raised
from rollart.workers.link import Link, WorkerFailed, WorkerGone

EXIT_S = 2.0
"""How long a worker whose socket is closed may take to have an exit status."""
TAIL_BYTES = 1500
"""How much of a dead worker's stderr goes into the error."""


Lost = Callable[[str, str], None]
"""Told at once when a worker dies by itself: its name, and how."""


class Process:
    """One process and the link to it."""

    def __init__(
        self, name: str, log_dir: Path, lost: Lost | None = None, devices: Sequence[str] | None = None
    ) -> None:
        """`devices`: the only GPUs that it sees, by the names CUDA_VISIBLE_DEVICES knows; None: all that we see."""
        self.name = name
        self._devices = devices
        self._lost = lost
        self._stopped = False
        self._reporting: asyncio.Task[None] | None = None
        self._log = log_dir / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._life: int | None = None
        self.link: Link | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self, setup: Mapping[str, Any]) -> None:
        """Raises ClusterError with the worker's last words."""
        ours, theirs = socket.socketpair()
        life_read, self._life = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment["OMP_NUM_THREADS"] = str(setup["threads"])
        if self._devices is not None:
            environment[VISIBLE] = ",".join(self._devices)
        with theirs, open(self._log, "ab") as log:  # noqa: ASYNC230 - a log file on a local disk
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as it is forked
                [sys.executable, "-m", "rollart.launch.worker", str(theirs.fileno()), str(life_read)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), life_read),
                start_new_session=True,
                env=environment,
            )
        os.close(life_read)
        ours.setblocking(False)
        _, self.link = await asyncio.get_running_loop().create_unix_connection(Link, sock=ours)
        try:
            await self.link.call("setup", dict(setup))
        except WorkerFailed as error:
            raise ClusterError(f"{self.name} could not start: {error}") from error
        except WorkerGone:
            raise ClusterError(f"{self.name} could not start: {await self.last_words()}") from None
        self.link.lost.add_done_callback(self._gone)

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        """One call of the worker's port; what goes wrong is raised as the port's error."""
        assert self.link is not None
        try:
            return await self.link.call(method, *arguments)
        except WorkerGone:
            raise error(f"{self.name}: its process has ended; {await self.last_words()}") from None
        except WorkerFailed as failure:
            raise as_raised(self.name, failure.kind, str(failure), error) from None

    def _gone(self, _: object) -> None:
        if self._lost is not None and not self._stopped:
            self._reporting = asyncio.get_running_loop().create_task(self._report_loss(self._lost))

    async def _report_loss(self, lost: Lost) -> None:
        words = await self.last_words()
        if not self._stopped:
            lost(self.name, f"its process has ended; {words}")

    async def last_words(self) -> str:
        """How it ended, and what it said last."""
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = await asyncio.to_thread(self._process.wait, EXIT_S)
        how = "no exit status yet" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"
        tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().replace("\n", " | ")
        return f"{how}; see {self._log}" + (f"; it last said: {tail}" if tail else "")

    async def stop(self) -> None:
        """End the process and all it started, and wait until it is gone."""
        self._stopped = True
        if self._process is None:
            return
        if self.link is not None:
            self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        if self._life is not None:
            os.close(self._life)
            self._life = None


class LocalCluster:
    """Starts workers as child processes. `engine_setup` and `trainer_setup` are what each is built from."""

    def __init__(
        self,
        log_dir: Path,
        engine_setup: Mapping[str, Mapping[str, Any]],
        trainer_setup: Mapping[str, Any],
        lost: Lost | None = None,
        devices: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`devices`: by worker, the GPUs that are its own."""
        self._devices = devices or {}
        self._log_dir = log_dir
        self._lost = lost
        self._engine_setup = engine_setup
        self._trainer_setup = trainer_setup
        self.workers: dict[str, Process] = {}
        """By name: the engines' ids, and `trainer`."""

    async def engine(self, spec: EngineSpec) -> WorkerEngine:
        return WorkerEngine(
            await self._start(spec.id, {"role": "engine", **self._engine_setup[spec.pool], "id": spec.id})
        )

    async def trainer(self) -> WorkerTrainer:
        return WorkerTrainer(await self._start("trainer", {**self._trainer_setup, "role": "trainer"}))

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))

    async def _start(self, name: str, setup: Mapping[str, Any]) -> Process:
        before = self.workers.pop(name, None)
        if before is not None:
            await before.stop()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        worker = self.workers[name] = Process(name, self._log_dir, self._lost, self._devices.get(name))
        await worker.start(setup)
        return worker
