"""Brings a run's weights from elsewhere to this host, bucket by bucket while they are pushed. No torch.

Owns: `directory`, this host's copy, which looks like any store's folder (`index.py`): engines here map it. A bucket is
named in the copy's index when all its bytes are here and its digest is right; the manifest comes last. Versions that
were dropped at the source are dropped here; one that was pushed again is fetched again. What a mirror that was killed
had brought here, the next one goes on with. Where the weights come from is a `Source`: `tcp.py`, `mooncake.py`.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from rollart.errors import FULL, WeightError
from rollart.store.digests import digest_of
from rollart.store.index import (
    INDEX,
    MANIFEST,
    MANIFESTS,
    PULLED,
    WEIGHTS,
    Found,
    Writer,
    drop_before,
    folder_name,
    read_index,
    versions_in,
    void,
)
from rollart.store.media import Bytes, SharedMemory
from rollart.types import Bucket, Pulled, WeightVersion

log = logging.getLogger(__name__)

STATE = "state.json"
"""How it goes: bytes that came, and what is wrong. Rewritten while something happens."""
STATE_BYTES = 4096
STATE_S = 0.25
RETRY_S = 0.2
"""After trouble; doubled up to ten times of it."""


class VersionNews(NamedTuple):
    """What is new of one version."""

    push: str
    buckets: tuple[Bucket, ...]
    """That the asker did not have."""
    sizes: Mapping[str, int]
    """Of the files, by name."""
    others: Sequence[str]
    """The small files, where all of the version is there: its manifest is among them."""


class News(NamedTuple):
    """What has changed at the source."""

    versions: Sequence[WeightVersion]
    changed: Mapping[WeightVersion, VersionNews]
    closed: bool = False
    """The run is over."""


@dataclass
class _Pull:
    """What a version has taken so far."""

    seconds: float = 0.0
    bytes: int = 0
    looked_bytes: int = 0
    """Of the buckets that were compared with a version before,"""
    changed_bytes: float = 0.0
    """and what of that had changed."""

    def result(self) -> Pulled:
        density = round(self.changed_bytes / self.looked_bytes, 6) if self.looked_bytes else None
        return Pulled(round(self.seconds, 6), self.bytes, density)


Have = dict[WeightVersion, tuple[str, int, bool]]
"""By version: its push, how many of its buckets are here, and whether all of it."""

Came = Callable[[int], None]
"""Told how many bytes have come, from any thread."""


class Base(NamedTuple):
    """The same bucket of an older version, which is here."""

    version: WeightVersion
    push: str
    raw: Bytes


class Source(Protocol):
    """Where weights come from. Raises OSError where it cannot be reached, WeightError for what it does not have."""

    def news(self, have: Have) -> News:
        """Waits some seconds until there is something new."""

    def read(self, push: str, bucket: Bucket, into: Bytes, came: Came, base: Base | None = None) -> float | None:
        """Fetch a bucket's bytes; says how many have come, as they do. Where there is a base, what changed since that
        will do. Returns the part that differs from the base, where somebody looked."""

    def small(self, version: WeightVersion, name: str) -> bytes:
        """A small file, whole."""

    def close(self) -> None: ...


class State(NamedTuple):
    """How a mirror does."""

    bytes: int = 0
    trouble: str = ""
    full: bool = False
    """The trouble is that this host has no room."""


def read_state(directory: Path) -> State:
    """What the mirror of this copy says."""
    try:
        return State(**json.loads((directory / STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return State()


class Mirror:
    """Follows a source. `run` in a thread of its own."""

    def __init__(self, directory: Path, source: Source) -> None:
        self._directory = directory
        self._source = source
        self._memory = SharedMemory(directory)
        self._writers: dict[WeightVersion, Writer] = {}
        self._whole: set[WeightVersion] = set()
        self._pulls: dict[str, _Pull] = {}
        """By push that is on its way."""
        self.stopped = threading.Event()
        self.received_bytes = 0
        self._counting = threading.Lock()
        self._trouble = ""
        self._noted_s = 0.0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state = os.open(directory / STATE, os.O_RDWR | os.O_CREAT, 0o600)
        for version in versions_in(directory):
            folder = directory / folder_name(version)
            if (found := read_index(folder)) is not None:
                self._writers[version] = Writer(folder, found)
                if (folder / MANIFEST).exists():
                    self._whole.add(version)

    def run(self) -> None:
        """Until the source says that the run is over, or `stopped`."""
        try:
            self._run()
        finally:
            self._source.close()
            os.close(self._state)

    def _run(self) -> None:
        wait_s = RETRY_S
        while not self.stopped.is_set():
            try:
                news = self._source.news(self._have())
                if news.closed:
                    return
                self._follow(news)
            except (OSError, WeightError) as error:
                text = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
                self._note(text, full=getattr(error, "errno", None) in FULL)
                self.stopped.wait(wait_s)
                wait_s = min(2 * wait_s, 10 * RETRY_S)
            else:
                wait_s = RETRY_S
                self._note("")

    def coming(self, push: str) -> bool:
        """Whether it will have all of this push, if nothing happens."""
        return any(writer.push == push and at not in self._whole for at, writer in list(self._writers.items()))

    def _have(self) -> Have:
        """What is here. An engine that finds a version damaged removes its index: it is brought again."""
        for version in [at for at in self._writers if not (self._directory / folder_name(at) / INDEX).exists()]:
            del self._writers[version]
            self._whole.discard(version)
        return {at: (one.push, len(one.buckets), at in self._whole) for at, one in self._writers.items()}

    def _follow(self, news: News) -> None:
        if news.versions:
            self._drop(news.versions)
        failed: OSError | WeightError | None = None
        for version in sorted(news.changed):
            try:
                self._bring(version, news.changed[version])
            except (OSError, WeightError) as error:
                failed = failed or error  # one that is gone does not keep the next from coming
        if failed is not None:
            raise failed

    def _drop(self, versions: Sequence[WeightVersion]) -> None:
        drop_before(self._directory, self._memory, min(versions))
        for version in [version for version in self._writers if version not in versions]:
            folder = self._directory / folder_name(version)
            void(folder)
            shutil.rmtree(folder, ignore_errors=True)
            del self._writers[version]
            self._whole.discard(version)

    def _bring(self, version: WeightVersion, change: VersionNews) -> None:
        folder = self._directory / folder_name(version)
        writer = self._writers.get(version)
        if writer is None or writer.push != change.push:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._whole.discard(version)
            void(folder)
            self._memory.retire(sorted(folder.glob(WEIGHTS)), forget=False)
            writer = self._writers[version] = Writer(folder, Found(change.push, ()))
        for bucket in change.buckets:
            if self.stopped.is_set():
                return
            into = self._place(bucket, change.sizes[Path(bucket.name).name])
            base, began_s, received = self._base(version, bucket), time.monotonic(), self.received_bytes
            pull = self._pulls.setdefault(change.push, _Pull())
            try:
                density = self._source.read(change.push, bucket, into, self._came, base)
                found = digest_of(into)
                if found != bucket.digest and base is not None:
                    log.warning("weights: %s made from version %d is not what it should be", bucket.name, base.version)
                    self._source.read(change.push, bucket, into, self._came)
                    found = digest_of(into)
            finally:
                pull.seconds += time.monotonic() - began_s
                pull.bytes += self.received_bytes - received
            if density is not None:
                pull.looked_bytes += bucket.num_bytes
                pull.changed_bytes += density * bucket.num_bytes
            if found != bucket.digest:
                raise WeightError(f"weight bucket {bucket.name}: came damaged, digest {found}")
            writer.add(bucket)
        if change.others and version not in self._whole:
            self._finish(version, folder, writer, change.others)

    def _base(self, version: WeightVersion, bucket: Bucket) -> Base | None:
        """The bucket of the newest version before this one that is whole here, if it was cut the same way."""
        at = max((at for at in self._whole if at < version), default=None)
        if at is None:
            return None
        name = f"{folder_name(at)}/{Path(bucket.name).name}"
        writer, wanted = self._writers[at], (name, bucket.start, bucket.num_bytes)
        if not any((one.name, one.start, one.num_bytes) == wanted for one in writer.buckets):
            return None
        try:
            raw = self._memory.opened(self._directory / name)
        except OSError:
            return None
        return Base(at, writer.push, raw[bucket.start : bucket.start + bucket.num_bytes])

    def _place(self, bucket: Bucket, num_bytes: int) -> Bytes:
        path = self._directory / bucket.name
        fits = bucket.start and path.exists() and path.stat().st_size == num_bytes
        raw = self._memory.opened(path) if fits else self._memory.create(path, num_bytes)
        return raw[bucket.start : bucket.start + bucket.num_bytes]

    def _finish(self, version: WeightVersion, folder: Path, writer: Writer, others: Sequence[str]) -> None:
        """The small files, and last the manifest."""
        for name in others:
            if name not in (INDEX, MANIFEST):
                (folder / name).write_bytes(self._source.small(version, name))
        manifest = MANIFESTS.validate_json(self._source.small(version, MANIFEST))
        if manifest.buckets != tuple(writer.buckets):
            raise WeightError(f"version {version}: its manifest names other buckets than came; it was pushed again")
        (folder / PULLED).write_text(json.dumps(self._pulls.pop(writer.push, _Pull()).result()))
        writer.complete(manifest)
        self._whole.add(version)

    def _came(self, num_bytes: int) -> None:
        with self._counting:
            self.received_bytes += num_bytes
            self._note("")

    def _note(self, trouble: str, *, full: bool = False) -> None:
        """For engines that wait, and for people. Into a page that is there already: the host may be full."""
        if trouble and trouble != self._trouble:
            log.warning("weights: %s", trouble)
        now_s = time.monotonic()
        if trouble == self._trouble and now_s - self._noted_s < STATE_S:
            return
        self._trouble, self._noted_s = trouble, now_s
        state = State(self.received_bytes, trouble[: STATE_BYTES // 2], full)
        with suppress(OSError):  # it is for information
            os.pwrite(self._state, json.dumps(state._asdict()).encode().ljust(STATE_BYTES), 0)
