"""An engine's side of staging: maps the buckets of a coming version while the trainer still pushes them.

Owns: one thread, which sleeps unless a version is awaited, and the mappings of that version. Mapping a bucket reads it
once for its digest, so that a swap finds pages that are there and checked.
Invariants: what `fetch` gives is what the manifest says, whatever was mapped ahead: a file of other bytes (it was
pushed again) is mapped anew. A version's files stay as they are while somebody holds a tensor of them.
"""

import threading
import time
from concurrent.futures import Future
from enum import Enum, auto

from torch import Tensor

from rollart.errors import StoreFull, WeightError
from rollart.store.buckets import BucketStore, MappedFile
from rollart.types import Bucket, Pulled, WeightManifest, WeightVersion

LATE_S = 5.0
"""How long a bucket may be missing from a version whose manifest is there, or nothing come of a version at all, before
that is left to the swap to say."""
POLL_S = 0.01
"""How often the store is looked at while a version is awaited. Files have no portable way to call."""


class _Step(Enum):
    """What became of a look at the store."""

    MAPPED = auto()
    NOTHING_YET = auto()


class FetchAhead:
    """`stage` and `fetch` of an engine, over a store. `fetch` may be called from any thread."""

    def __init__(self, store: BucketStore) -> None:
        self.store = store
        self._changed = threading.Condition()
        """Held while a bucket is mapped: a fetch waits for the bucket under way, and no longer."""
        self._version: WeightVersion | None = None
        self._awaited = False
        self._held: dict[str, MappedFile] = {}
        self._wrong: set[Bucket] = set()
        """Buckets whose bytes were not those of their digest."""
        self._spent_s: dict[WeightVersion, float] = {}
        self._here: Future[WeightManifest | None] = Future()
        """Of the version that is awaited."""
        self._missing_since_s = 0.0
        self._thread: threading.Thread | None = None

    def stage(self, version: WeightVersion) -> "Future[WeightManifest | None]":
        """Begin to map what appears of this version, and let go of any other. Returns at once. What it returns is done
        when all of the version is here: its manifest. None where a bucket is lost or damaged, which is the swap's to
        find, or where the version is not awaited any more. StoreFull where this host has no room for it: ask again."""
        with self._changed:
            if self._version != version:
                self._version, self._held, self._wrong, self._spent_s = version, {}, set(), {}
                self._settle()
                self._begin()
            elif self._here.done() and self._here.exception() is not None:
                self._begin()
            if self._here.done():
                return self._here
            self._awaited = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rollart-stage", daemon=True)
                self._thread.start()
            self._changed.notify()
            return self._here

    def fetch(self, manifest: WeightManifest) -> dict[str, Tensor]:
        """The version's tensors; only what was not mapped ahead is mapped now. Raises WeightError."""
        with self._changed:
            held = self._held if self._version == manifest.version else {}
            if self._version == manifest.version:
                self._version, self._awaited, self._held = None, False, {}
                self._settle()
        return self.store.fetch(manifest, held)

    def pulled(self, version: WeightVersion) -> Pulled:
        """What went into bringing this version to this host, and into mapping it ahead."""
        found = self.store.pulled(version)
        return found._replace(seconds=found.seconds + self._spent_s.get(version, 0.0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited)
                try:
                    step = self._map_one()
                except StoreFull as error:
                    self._awaited = False
                    self._here.set_exception(error)
                    continue
                if not isinstance(step, _Step):
                    self._awaited = False
                    self._settle(step)
            if step is _Step.NOTHING_YET:
                time.sleep(POLL_S)

    def _begin(self) -> None:
        self._here, self._missing_since_s = Future(), 0.0

    def _settle(self, whole: WeightManifest | None = None) -> None:
        if not self._here.done():
            self._here.set_result(whole)

    def _map_one(self) -> "_Step | WeightManifest | None":
        """Map the next bucket that is there. Where no more will come: the manifest of what is whole here, or None."""
        assert self._version is not None
        version, began_s = self._version, time.perf_counter()
        try:
            for bucket in self.store.appeared(version):
                file = self._held.get(bucket.name)
                if bucket in self._wrong or (file is not None and file.holds([bucket])):
                    continue
                if file is None or file.looked_at(bucket):  # or it was pushed again, with other bytes
                    file = self._held[bucket.name] = self.store.map_file(bucket.name)
                if file.digest(bucket) != bucket.digest:
                    self._wrong.add(bucket)  # the swap will say so
                self._spent_s[version] = self._spent_s.get(version, 0.0) + time.perf_counter() - began_s
                return _Step.MAPPED
        except WeightError:
            pass  # gone again
        try:
            manifest = self.store.manifest(version)
        except WeightError:
            return self._is_late()
        if manifest is None and self.store.may_come(version):
            self._missing_since_s = 0.0
            return _Step.NOTHING_YET
        if manifest is None:
            return self._is_late()
        held = self._held
        if all(one.name in held and held[one.name].holds([one]) for one in manifest.buckets):
            return manifest
        if all(one in self._wrong or (one.name in held and held[one.name].holds([one])) for one in manifest.buckets):
            return None
        return self._is_late()

    def _is_late(self) -> "_Step | None":
        """What its manifest names is not here, or nothing of it comes: None where that is so for long."""
        now_s = time.monotonic()
        self._missing_since_s = self._missing_since_s or now_s
        return None if now_s - self._missing_since_s > LATE_S else _Step.NOTHING_YET
