"""Weight versions that cross between machines which share neither memory nor a disk, over TCP.

The trainer writes them into shared memory of its own host, exactly as `shm.py` does, and a process there serves them
(`host.py`, `serve.py`). On every other host one such process brings a copy (`mirror.py`), once however many engines are
there; engines map it. On the trainer's own host they map what the trainer wrote. The coordinator reaches the trainer's
host over the same port to drop versions and to end it all.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollart.errors import WeightError
from rollart.store.copied import COPY, LOOK_S, PATIENCE_S, CopiedStore
from rollart.store.format import Weight
from rollart.store.host import LINGER_S, READY, HostSetup, HostUser, read_ready
from rollart.store.index import drop_before
from rollart.store.media import SharedMemory
from rollart.store.owner import ROOT, is_owned, remove_store
from rollart.store.shm import folder_of
from rollart.store.tcp_source import TcpSource
from rollart.types import Probe, WeightManifest, WeightVersion

CLOSE_S = 5.0
"""How long the processes of this host may take to end."""


class TcpStore(CopiedStore):
    """Versions of the run `run_id`. Which part it plays follows from what is called: a trainer serves and pushes, an
    engine fetches, the coordinator drops and closes."""

    def __init__(
        self,
        run_id: str,
        address: str,
        token: str,
        *,
        bind: str | None = None,
        site: str = "",
        deltas: bool = True,
        bucket_bytes: int = 1 << 30,
        root: Path = ROOT,
        patience_s: float = PATIENCE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """`address`: `host:port` where the trainer's host is reached. `bind`: where it listens, if not there."""
        self._origin = folder_of(run_id, root)
        copy = str(self._origin.with_name(self._origin.name + COPY))
        setup = HostSetup(directory=copy, token=token, source=address, site=site, deltas=deltas, linger_s=linger_s)
        super().__init__(self._origin, bucket_bytes, setup, patience_s=patience_s)
        self._address = address
        self._token = token
        self.serving = HostUser(
            HostSetup(directory=str(self._origin), token=token, bind=bind or address, linger_s=linger_s)
        )

    def serve(self) -> int:
        """Be the host that the others ask; returns the port. Raises WeightError where that cannot be."""
        port = self.serving.wait()
        self.serving.watch()
        return port

    def push(self, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None = None) -> WeightManifest:
        self.serve()
        return super().push(version, tensors, probe)

    async def drop_before(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self._drop, version)

    def close(self) -> None:
        """The run is over: each host removes what it has. One that cannot be told does so when nobody uses it."""
        with suppress(OSError, WeightError):
            self._link().post("/close", {})
        for user, directory in ((self.serving, self._origin), (self._copying, self._copy)):
            user.stop()
            until_s = time.monotonic() + CLOSE_S
            while is_owned(directory) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            remove_store(directory)

    def _settle(self) -> None:
        """Use what the trainer wrote, where it is on this host; else this host's copy."""
        if not (self._origin / READY).exists():
            super()._settle()
        elif self.directory != self._origin:
            self.directory, self.medium = self._origin, SharedMemory(self._origin)

    def _drop(self, version: WeightVersion) -> None:
        if self._origin.exists():
            drop_before(self._origin, SharedMemory(self._origin), version)
            return
        try:
            self._link().post("/drop", {"before": version})
        except OSError as error:
            raise WeightError(f"versions before {version} could not be dropped: {error}") from error

    def _link(self) -> TcpSource:
        host, _, port = self._address.rpartition(":")
        if port == "0":
            port = str(read_ready(self._origin).get("port", 0))
        return TcpSource(f"{host}:{port}", self._token)
