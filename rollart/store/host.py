"""The process that keeps a run's weights on a host: `python -m rollart.store.host`, its set-up on standard input.

On the trainer's host it serves what the trainer writes into the store's folder; on another it brings a copy from there
and serves that to hosts of its site. One per run and host, started by whoever finds none (`HostUser`): it owns the
folder by its lock, and outlives the engines and the trainer, so that one that is killed finds everything there when it
comes back. It ends, and removes the folder, when the run is over, or when nobody has used it for `LINGER_S`. The token
comes over standard input and stays in memory. No torch: it starts in a fraction of a second.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import msgspec

from rollart.errors import WeightError
from rollart.store.index import drop_before
from rollart.store.media import SharedMemory
from rollart.store.mirror import Mirror, Source
from rollart.store.mooncake_client import MooncakeClient, MooncakeSetup, MooncakeSource, way_to
from rollart.store.owner import claim, is_owned, is_used, remove_left_behind, users_file
from rollart.store.serve import StoreServer
from rollart.store.tcp_source import TcpSource

LINGER_S = 30.0
"""How long it stays when nobody uses it any more."""
LOOK_S = 0.5
"""How often it looks whether somebody does."""
WATCH_S = 1.0
"""How often a trainer's process looks after it."""
START_S = 60.0
"""How long it may take until it serves; a port that an earlier run of the same job still has is waited for."""
READY = "host.json"
"""In the folder, from when it serves on: its process and port, or what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """What the process is built from."""

    directory: str
    token: str
    bind: str = ""
    """`host:port` to serve at; empty: a mirror, which serves at the address from which it reaches its source."""
    source: str = ""
    """`host:port` that a mirror follows; with `mooncake`, the Mooncake master."""
    mooncake: MooncakeSetup | None = None
    """A mirror of a Mooncake store. It serves nobody: the others ask the store too."""
    site: str = ""
    deltas: bool = False
    linger_s: float = LINGER_S


class HostUser:
    """A process's use of the host's copy: keeps it there, and starts who looks after it where nobody does."""

    def __init__(self, setup: HostSetup) -> None:
        self.setup = setup
        self._directory = Path(setup.directory)
        self._users: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._looked_s = 0.0
        self._watching: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def pid(self) -> int:
        """Of the process that this one started, or 0."""
        return self._process.pid if self._process is not None else 0

    def ensure(self) -> None:
        """There is a process, or one is started. Looks once in a while only."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._use()
        ours = self._process is not None and self._process.poll() is None
        if not ours and not is_owned(self._directory):
            self.start()
        self._looked_s = time.monotonic()

    def _use(self) -> None:
        """Hold the lock that says that somebody uses the copy; anew where a process that ended removed its file."""
        path = users_file(self._directory)
        if self._users is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._users), path.stat()):
                    return
            os.close(self._users)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._users = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._users, fcntl.LOCK_SH)

    def wait(self) -> int:
        """Until it serves; returns the port. Raises WeightError with what it says is wrong."""
        until_s = time.monotonic() + START_S
        while True:
            self.ensure()
            state = read_ready(self._directory)
            if "port" in state and is_owned(self._directory):
                return int(state["port"])
            if time.monotonic() > until_s:
                raise WeightError(f"the store of this host did not start: {state.get('error') or 'it said nothing'}")
            time.sleep(0.02)

    def watch(self) -> None:
        """See to it, from now on, that there is a process whatever happens to it."""
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="rollart-host", daemon=True)
            self._watching.start()

    def stop(self) -> None:
        """This process has no use for it any more."""
        self._stopped.set()
        if self._watching is not None:
            self._watching.join()
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            self.ensure()

    def start(self) -> None:
        # In a session of its own: it must not go with the worker that happens to start it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollart.store.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(asdict(self.setup)).encode())
        threading.Thread(
            target=self._process.wait, name="rollart-host-end", daemon=True
        ).start()  # or it stays a zombie


class Ready(TypedDict, total=False):
    """What a process writes of itself: where it is, or what is wrong."""

    pid: int
    port: int
    error: str


def read_ready(directory: Path) -> Ready:
    try:
        found: Ready = json.loads((directory / READY).read_text())
    except (OSError, ValueError):
        return {}
    return found


class HostProcess:
    """The process itself."""

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        self._directory = Path(setup.directory)
        self._over = asyncio.Event()
        self._mirror: Mirror | None = None
        self._shared: MooncakeSource | None = None
        self._memory = SharedMemory(self._directory)
        self._server = StoreServer(
            self._directory, setup.token, drop=self._drop, closing=self._over.set, coming=self._coming
        )

    async def run(self) -> None:
        """Until the run is over, or nobody uses it."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._directory / READY).unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._over.set)
        try:
            await self._serve()
            await self._watch()
            await self._server.stop()
        except WeightError as error:
            self._say({"error": str(error)})
            await asyncio.sleep(2 * LOOK_S)  # for who waits for it to read
        finally:
            if self._mirror is not None:
                self._mirror.stopped.set()
            shutil.rmtree(self._directory, ignore_errors=True)
            users_file(self._directory).unlink(missing_ok=True)

    async def _serve(self) -> None:
        setup = self._setup
        if setup.mooncake is not None:
            self._shared = MooncakeSource(MooncakeClient(setup.mooncake))
            self._follow(self._shared)
            self._say({"pid": os.getpid(), "port": 0})
            return
        host, _, port = (setup.bind or f"{way_to(setup.source)}:0").rpartition(":")
        until_s = time.monotonic() + START_S
        while True:
            try:
                serving_at = await self._server.start(host, int(port))
                break
            except OSError as error:
                await self._server.stop()
                text = f"cannot listen at {host}:{port}: {error.strerror or error}"
                self._say({"error": f"{text}; give another port or address (weights.address, weights.bind)"})
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(LOOK_S)
        if setup.source:
            self._follow(
                TcpSource(setup.source, setup.token, site=setup.site, peer=f"{host}:{serving_at}", deltas=setup.deltas)
            )
        self._say({"pid": os.getpid(), "port": serving_at})

    def _follow(self, source: Source) -> None:
        """Feed the copy, in a thread; its end is the run's."""
        loop, mirror = asyncio.get_running_loop(), Mirror(self._directory, source)
        self._mirror = mirror

        def follow() -> None:
            try:
                mirror.run()
            finally:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._over.set)

        threading.Thread(target=follow, name="rollart-mirror", daemon=True).start()

    async def _watch(self) -> None:
        """Return when the run is over, or nobody has used this for a while."""
        while not await self._unused_or_over():
            pass

    async def _unused_or_over(self) -> bool:
        used_s = time.monotonic()
        while time.monotonic() - used_s < self._setup.linger_s:
            if is_used(self._directory):
                used_s = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LOOK_S)
                await self._server.all_told()
                return True
        if self._shared is not None:
            with suppress(OSError, WeightError):
                await asyncio.to_thread(self._shared.remove_if_dead)
        return not is_used(self._directory)

    def _drop(self, before: int) -> None:
        drop_before(self._directory, self._memory, before)

    def _coming(self, push: str) -> bool:
        return self._mirror is not None and self._mirror.coming(push)

    def _say(self, what: Ready) -> None:
        hidden = self._directory / f".{READY}"
        hidden.write_text(json.dumps(what))
        os.replace(hidden, self._directory / READY)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=HostSetup)
    owned = None
    for _ in range(20):  # who only looks whether somebody owns it has it for a moment
        owned = claim(Path(setup.directory))
        if owned is not None:
            break
        time.sleep(0.05)
    if owned is None:
        return
    remove_left_behind(Path(setup.directory).parent)
    try:
        asyncio.run(HostProcess(setup).run())
    finally:
        owned.release()
        os._exit(0)  # a thread may still wait for an answer


if __name__ == "__main__":
    main()
