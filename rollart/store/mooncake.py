"""Weight versions in a Mooncake store: the trainer puts buckets there, a process on each engine's host copies them.

The store is a service of its own: `mooncake_master`, and the memory that `mooncake_client` processes and our hosts give
it. `mooncake_client.py` says what its keys mean. A push lays out one bucket in registered memory while the one before
it is on its way: two buckets, whatever the model's size. Mooncake knows no tokens: keep it on a network of your own.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollart.errors import BoundaryError, StoreFull, WeightError, boundary
from rollart.store.buckets import buckets_of
from rollart.store.copied import COPY, LOOK_S, PATIENCE_S, CopiedStore
from rollart.store.digests import name_of, new_digest
from rollart.store.format import Bytes, Weight
from rollart.store.host import LINGER_S, HostSetup
from rollart.store.index import MANIFESTS, folder_name
from rollart.store.mooncake_client import ALIVE_S, MooncakeClient, MooncakeSetup, Pushed, bucket_key
from rollart.store.owner import ROOT, is_owned, remove_store
from rollart.store.shm import folder_of
from rollart.types import Bucket, Probe, WeightManifest, WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""After a push that failed; doubled up to ten times of it."""
STEP_BYTES = 1024 * 1024
"""Buffers grow by multiples of this: a model that is smaller than a bucket needs no bucket of memory."""
HEARD_S = 1.0
"""How long a run's end stays written in the store for the hosts to see."""
CLOSE_S = 5.0


class MooncakeStore(CopiedStore):
    """Versions of the run `setup.run_id`. A trainer pushes, an engine fetches, the coordinator drops and closes."""

    def __init__(
        self,
        setup: MooncakeSetup,
        *,
        bucket_bytes: int = 1 << 30,
        root: Path = ROOT,
        patience_s: float = PATIENCE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        copy = folder_of(setup.run_id + COPY, root)
        host = HostSetup(directory=str(copy), token="", source=setup.master, mooncake=setup, linger_s=linger_s)
        super().__init__(copy, bucket_bytes, host, patience_s=patience_s)
        self._client_setup = replace(setup, segment_bytes=0)  # its memory is given by the host's process
        self._client: MooncakeClient | None = None
        self._buffers: list[Bytes] = []
        self._old: set[WeightVersion] = set()
        """Versions that are dropped, and may still be in the store."""
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rollart-put")
        self._ended = threading.Event()

    def serve(self) -> None:
        """Be the trainer's: what is in the store is somebody's while this process lives. Raises WeightError."""
        threading.Thread(target=self._live, args=(self.connect(),), name="rollart-alive", daemon=True).start()

    def begin(self) -> None:
        """Be an engine's: this host adds its memory to the store now, and not when the first push needs it."""
        self._settle()

    def _live(self, client: MooncakeClient) -> None:
        number = time.time_ns()  # another than that of a trainer that was killed
        while not self._ended.is_set():
            with suppress(BoundaryError, OSError):
                if client.noted("closed"):
                    return
                client.note("alive", number)
            number += 1
            self._ended.wait(ALIVE_S)

    def connect(self) -> MooncakeClient:
        """This process's own client. Raises WeightError."""
        if self._client is None:
            self._client = MooncakeClient(self._client_setup)
        return self._client

    def push(self, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None = None) -> WeightManifest:
        """Put all buckets, then the manifest. Where the store does not answer, again from the beginning, under other
        keys: what was half put may still have the old ones. Raises StoreFull, and then removes what was put of it."""
        until_s, wait_s = time.monotonic() + self._waits_s, RETRY_S
        while True:
            try:
                return self._push_once(version, tensors, probe)
            except WeightError as error:
                if time.monotonic() > until_s:
                    raise
                log.warning("%s; tried again", error)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 10 * RETRY_S)

    def _push_once(self, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None) -> WeightManifest:
        push, folder = secrets.token_hex(8), folder_name(version)
        with boundary(WeightError, f"push of version {version} to Mooncake"):
            client = self.connect()
            dropped, head = client.noted("dropped") or 0, client.noted("head") or {}
            head = {at: one for at, one in head.items() if int(at) >= dropped}
            before = head.pop(str(version), None)
            entry: Pushed = {"push": push, "buckets": [], "sizes": {}, "manifest": None}
            head[str(version)] = entry

            def put(bucket: Bucket, raw: Bytes, file_bytes: int) -> None:
                client.put(bucket_key(push, bucket), raw)
                entry["sizes"][Path(bucket.name).name] = file_bytes
                entry["buckets"].append(bucket)
                client.note("head", head)

            try:
                self._put_all(put, folder, tensors)
            except BaseException as error:
                with suppress(BoundaryError):
                    client.remove(f"{folder}/{push}/.*")
                    client.note("head", {at: one for at, one in head.items() if at != str(version)})
                if isinstance(error, StoreFull):
                    raise StoreFull(f"push of version {version} to Mooncake: {error}") from error
                raise
            manifest = WeightManifest(version=version, buckets=tuple(entry["buckets"]), probe=probe)
            entry["manifest"] = MANIFESTS.dump_python(manifest)
            client.note("head", head)
            if before is not None:
                client.remove(f"{folder}/{before['push']}/.*")
        return manifest

    def _put_all(self, put: Callable[[Bucket, Bytes, int], None], folder: str, tensors: Mapping[str, Weight]) -> None:
        """One bucket is laid out while the one before it is put; who follows hears of that one meanwhile."""
        under_way: Future[None] | None = None
        try:
            for laid_out in self._laid_out(folder, tensors):
                if under_way is not None:
                    under_way.result()
                under_way = self._sender.submit(put, *laid_out)
            if under_way is not None:
                under_way.result()
        finally:
            if under_way is not None:
                wait([under_way])  # nothing may use the buffer any more

    def _laid_out(self, folder: str, tensors: Mapping[str, Weight]) -> Iterator[tuple[Bucket, Bytes, int]]:
        """Buckets in registered memory, in two buffers by turns, each with the size of its file."""
        for turn, one in enumerate(buckets_of(tensors, self.bucket_bytes)):
            raw, digest = self._buffer(turn % 2, one.num_bytes)[: one.num_bytes], new_digest()
            for at, piece in one.pieces:
                raw[at - one.start : at - one.start + len(piece)] = piece
                digest.update(piece)
            yield Bucket(f"{folder}/{one.file}", one.num_bytes, name_of(digest), one.start), raw, one.file_bytes

    def _buffer(self, turn: int, num_bytes: int) -> Bytes:
        while len(self._buffers) <= turn:
            self._buffers.append(np.zeros(0, dtype=np.uint8))
        if len(self._buffers[turn]) < num_bytes:
            if len(self._buffers[turn]):
                self.connect().unregister(self._buffers[turn])
            self._buffers[turn] = np.empty(-(-num_bytes // STEP_BYTES) * STEP_BYTES, dtype=np.uint8)
            self.connect().register(self._buffers[turn])
        return self._buffers[turn]

    async def drop_before(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self._drop, version)

    def _drop(self, version: WeightVersion) -> None:
        with boundary(WeightError, f"drop of versions before {version}"):
            client = self.connect()
            # Before it is said that they are dropped: the trainer then leaves them out of its next `head`.
            self._old |= {int(at) for at in client.noted("head") or {} if int(at) < version}
            client.note("dropped", version)
            for at in sorted(self._old):
                client.remove(f"{folder_name(at)}/.*")
                self._old.discard(at)

    def close(self) -> None:
        """The run is over: nothing of it stays in the store or on this host; the other hosts see that it is."""
        self._ended.set()
        with suppress(BoundaryError, OSError):
            client = self.connect()
            client.note("closed", True)
            client.remove("v.*")
            time.sleep(HEARD_S)
            client.remove(".*")
            client.close()
        self._client = None
        self._sender.shutdown()
        self._copying.stop()
        until_s = time.monotonic() + CLOSE_S
        while is_owned(self._copy) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        remove_store(self._copy)
