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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollart.cluster.link import Link, WorkerFailed, WorkerGone
from rollart.errors import BoundaryError, ClusterError, EngineError, RequestError, TrainerError, WeightError
from rollart.types import (
    Batch,
    Completion,
    EngineSpec,
    GenerateRequest,
    StepResult,
    SwapReport,
    WeightManifest,
    WeightVersion,
)

TAIL_BYTES = 1500
"""How much of a dead worker's stderr goes into the error."""
END_S = 1.0
"""How long to wait for the exit status of a worker that is gone."""
_ERRORS: dict[str, type[BoundaryError]] = {
    error.__name__: error for error in (EngineError, RequestError, WeightError, TrainerError)
}


class Worker:
    """One process and the link to it."""

    def __init__(self, name: str, log_dir: Path) -> None:
        self.name = name
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
        with theirs, open(self._log, "ab") as log:  # noqa: ASYNC230 - a log file on a local disk
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as it is forked
                [sys.executable, "-m", "rollart.worker", str(theirs.fileno()), str(life_read)],
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
        except (WorkerGone, WorkerFailed) as error:
            raise ClusterError(f"{self.name} could not start: {error or self.last_words()}") from error

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        """One call of the worker's port; what goes wrong is raised as the port's error."""
        assert self.link is not None
        try:
            return await self.link.call(method, *arguments)
        except WorkerGone:
            await self._wait_for_end()
            raise error(f"{self.name}: its process has ended; {self.last_words()}") from None
        except WorkerFailed as failure:
            raise _ERRORS.get(failure.kind, error)(f"{self.name}: {failure.kind}: {failure}") from None

    async def _wait_for_end(self) -> None:
        """Its socket closes a little before its exit status is to be had."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_S)

    def last_words(self) -> str:
        status = self._process.poll() if self._process is not None else None
        how = "no exit status yet" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"
        tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().replace("\n", " | ")
        return f"{how}; see {self._log}" + (f"; it last said: {tail}" if tail else "")

    async def stop(self) -> None:
        """End the process and all it started, and wait until it is gone."""
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


class LocalEngine:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def generate(self, request: GenerateRequest) -> Completion:
        whole = replace(request, prompt=(request.tokens(),))
        completion: Completion = await self._worker.call(EngineError, "generate", whole)
        return completion

    async def abort(self, request_id: str) -> None:
        await self._worker.call(EngineError, "abort", request_id)

    async def stage(self, version: WeightVersion) -> None:
        await self._worker.call(EngineError, "stage", version)

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        report: SwapReport = await self._worker.call(EngineError, "swap", manifest)
        return report


class LocalTrainer:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def train_step(self, batch: Batch) -> StepResult:
        result: StepResult = await self._worker.call(TrainerError, "train_step", batch)
        return result

    async def publish(self, version: WeightVersion) -> WeightManifest:
        manifest: WeightManifest = await self._worker.call(TrainerError, "publish", version)
        return manifest

    async def save(self) -> str:
        reference: str = await self._worker.call(TrainerError, "save")
        return reference

    async def restore(self, reference: str) -> WeightVersion:
        version: WeightVersion = await self._worker.call(TrainerError, "restore", reference)
        return version


class LocalCluster:
    """Starts workers as child processes. `engine_setup` and `trainer_setup` are what each is built from."""

    def __init__(
        self, log_dir: Path, engine_setup: Mapping[str, Mapping[str, Any]], trainer_setup: Mapping[str, Any]
    ) -> None:
        self._log_dir = log_dir
        self._engine_setup = engine_setup
        self._trainer_setup = trainer_setup
        self.workers: dict[str, Worker] = {}
        """By name: the engines' ids, and `trainer`."""

    async def engine(self, spec: EngineSpec) -> LocalEngine:
        return LocalEngine(
            await self._start(spec.id, {**self._engine_setup[spec.pool], "role": "engine", "id": spec.id})
        )

    async def trainer(self) -> LocalTrainer:
        return LocalTrainer(await self._start("trainer", {**self._trainer_setup, "role": "trainer"}))

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))

    async def _start(self, name: str, setup: Mapping[str, Any]) -> Worker:
        before = self.workers.pop(name, None)
        if before is not None:
            await before.stop()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        worker = self.workers[name] = Worker(name, self._log_dir)
        await worker.start(setup)
        return worker
