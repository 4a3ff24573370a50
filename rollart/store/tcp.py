"""Weight versions that cross between machines which share neither memory nor a disk, over TCP.

The trainer writes them into shared memory of its own host, exactly as `shm.py` does, and a process there serves them
(`host.py`, `serve.py`). On every other host one such process brings a copy (`mirror.py`), once however many engines are
there; engines map it. On the trainer's own host they map what the trainer wrote. The coordinator reaches the trainer's
host over the same port to drop versions and to end it all.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from rollart.errors import WeightError
from rollart.store.buckets import BucketStore, MappedFile
from rollart.store.host import LINGER_S, READY, HostSetup, HostUser, read_ready
from rollart.store.index import drop_before, read_index, read_manifest, versions_in
from rollart.store.link import Link
from rollart.store.media import Memory
from rollart.store.mirror import read_state
from rollart.store.owner import ROOT, is_owned, users_file
from rollart.store.shm import folder_of
from rollart.types import Bucket, Probe, WeightManifest, WeightVersion

COPY = "-copy"
"""Added to the name of a host's copy, which is not the trainer's own."""
PATIENCE_S = 60.0
"""How long nothing may come of a version that is awaited, before the swap is told that it does not come."""
LOOK_S = 0.02
CLOSE_S = 5.0


class TcpStore(BucketStore):
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
        bucket_bytes: int = 1 << 30,
        root: Path = ROOT,
        patience_s: float = PATIENCE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """`address`: `host:port` where the trainer's host is reached. `bind`: where it listens, if not there."""
        self._origin = folder_of(run_id, root)
        self._copy = self._origin.with_name(self._origin.name + COPY)
        super().__init__(self._origin, bucket_bytes, Memory(self._origin))
        self._address = address
        self._token = token
        self._waits_s = patience_s
        self._serving = HostUser(
            HostSetup(directory=str(self._origin), token=token, bind=bind or address, linger_s=linger_s)
        )
        self._copying = HostUser(
            HostSetup(directory=str(self._copy), token=token, source=address, site=site, linger_s=linger_s)
        )

    # --- the trainer

    def serve(self) -> int:
        """Be the host that the others ask; returns the port. Raises WeightError where that cannot be."""
        port = self._serving.wait()
        self._serving.watch()
        return port

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        self.serve()
        return super().push(version, tensors, probe)

    # --- an engine

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        self._settle()
        return super().manifest(version)

    def appeared(self, version: WeightVersion) -> tuple[Bucket, ...]:
        self._settle()
        return super().appeared(version)

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, MappedFile] | None = None) -> dict[str, Tensor]:
        self._settle()
        if self.directory == self._copy:
            self._wait_for(manifest)
        return super().fetch(manifest, ahead)

    def _settle(self) -> None:
        """Use what the trainer wrote, where it is on this host; else this host's copy, and see to it that it is fed."""
        here = self._origin if (self._origin / READY).exists() else self._copy
        if here != self.directory:
            self.directory, self._medium = here, Memory(here)
        if here == self._copy:
            self._copying.ensure()

    def _wait_for(self, manifest: WeightManifest) -> None:
        """Until all of the version has come. Raises WeightError when nothing comes any more."""
        state, until_s = read_state(self._copy), time.monotonic() + self._waits_s
        while (found := read_index(self.folder(manifest.version))) is None or found.buckets != manifest.buckets:
            self._copying.ensure()
            before, state = state, read_state(self._copy)
            if state.bytes != before.bytes:
                until_s = time.monotonic() + self._waits_s
            if time.monotonic() > until_s:
                whole = [at for at in versions_in(self._copy) if read_manifest(self.folder(at)) is not None]
                raise WeightError(
                    f"version {manifest.version}: nothing of it came from {self._address} for {self._waits_s:g} s "
                    f"({state.trouble or 'it is not there'}); whole on this host: {whole or 'none'}"
                )
            time.sleep(LOOK_S)

    # --- the coordinator

    def claim(self) -> bool:
        """It is the process on each host that owns what is there."""
        return True

    async def drop_before(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self._drop, version)

    def close(self) -> None:
        """The run is over: each host removes what it has. One that cannot be told does so when nobody uses it."""
        with suppress(OSError, WeightError):
            self._link().post("/close", {})
        for user, directory in ((self._serving, self._origin), (self._copying, self._copy)):
            user.stop()
            until_s = time.monotonic() + CLOSE_S
            while is_owned(directory) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            if not is_owned(directory):
                shutil.rmtree(directory, ignore_errors=True)
                users_file(directory).unlink(missing_ok=True)

    def _drop(self, version: WeightVersion) -> None:
        if self._origin.exists():
            drop_before(self._origin, Memory(self._origin), version)
            return
        try:
            self._link().post("/drop", {"before": version})
        except OSError as error:
            raise WeightError(f"versions before {version} could not be dropped: {error}") from error

    def _link(self) -> Link:
        host, _, port = self._address.rpartition(":")
        if port == "0":
            port = str(read_ready(self._origin).get("port", 0))
        return Link(f"{host}:{port}", self._token)
