"""An engine's side of a store that is on another machine: a copy in this host's memory, once for all engines here.

Owns nothing: a process per host (`host.py`) feeds the copy and removes it. Engines map what is in it, as they would
what a trainer of this host wrote.
"""

import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rollart.errors import StoreFull, WeightError
from rollart.store.buckets import BucketStore, MappedFile
from rollart.store.host import HostSetup, HostUser
from rollart.store.index import read_index, read_manifest, versions_in, void
from rollart.store.media import SharedMemory
from rollart.store.mirror import State, read_state
from rollart.types import Bucket, WeightManifest, WeightVersion

log = logging.getLogger(__name__)

COPY = "-copy"
"""Added to the name of a host's copy, which is not the trainer's own."""
PATIENCE_S = 60.0
"""How long nothing may come of a version that is awaited, before the swap is told that it does not come."""
LOOK_S = 0.02


class CopiedStore(BucketStore):
    """What is asked of it is answered from `directory`, which `_settle` chooses each time."""

    def __init__(self, directory: Path, bucket_bytes: int, setup: HostSetup, *, patience_s: float = PATIENCE_S) -> None:
        """`setup`: of the process that feeds the copy."""
        super().__init__(directory, bucket_bytes, SharedMemory(directory))
        self._copy = Path(setup.directory)
        self._copying = HostUser(setup)
        self._waits_s = patience_s

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        self._settle()
        return super().manifest(version)

    def appeared(self, version: WeightVersion) -> tuple[Bucket, ...]:
        self._settle()
        return super().appeared(version)

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, MappedFile] | None = None) -> dict[str, Tensor]:
        """Where this host's copy is damaged it is brought anew, once."""
        self._settle()
        if self.directory != self._copy:
            return super().fetch(manifest, ahead)
        self._wait_for(manifest)
        try:
            return super().fetch(manifest, ahead)
        except WeightError as error:
            log.warning("%s; it is fetched again", error)
            void(self.folder(manifest.version))
            self._wait_for(manifest)
            return super().fetch(manifest)

    def may_come(self, version: WeightVersion) -> bool:
        """Raises StoreFull where this host has no room for it."""
        if self.directory == self._copy:
            self._refuse_full(read_state(self._copy))
        return super().may_come(version)

    def claim(self) -> bool:
        """It is the process on each host that owns what is there."""
        return True

    def _settle(self) -> None:
        """Use this host's copy, and see to it that it is fed."""
        if self.directory != self._copy:
            self.directory, self.medium = self._copy, SharedMemory(self._copy)
        self._copying.ensure()

    def _wait_for(self, manifest: WeightManifest) -> None:
        """Until all of the version has come. Raises WeightError when nothing comes any more, StoreFull where this host
        has no room for it."""
        self._copying.wait()
        state, until_s = read_state(self._copy), time.monotonic() + self._waits_s
        while (found := read_index(self.folder(manifest.version))) is None or found.buckets != manifest.buckets:
            self._copying.ensure()
            before, state = state, read_state(self._copy)
            self._refuse_full(state)
            if state.bytes != before.bytes:
                until_s = time.monotonic() + self._waits_s
            if time.monotonic() > until_s:
                whole = [at for at in versions_in(self._copy) if read_manifest(self.folder(at)) is not None]
                raise WeightError(
                    f"version {manifest.version}: nothing of it came from {self._copying.setup.source} for "
                    f"{self._waits_s:g} s ({state.trouble or 'it is not there'}); whole here: {whole or 'none'}; "
                    "see whether this machine reaches that address"
                )
            time.sleep(LOOK_S)

    def _refuse_full(self, state: State) -> None:
        if state.full:
            raise StoreFull(
                f"{socket.gethostname()} has no room for a copy of the weights in {self._copy} ({state.trouble}); it "
                "takes two versions of the model there, one that is served and one that comes"
            )
