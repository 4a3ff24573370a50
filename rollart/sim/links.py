"""Weight links and the store between trainer and engines, simulated.

A link has a rate, and times at which a fault slowed or cut it. Transfers are computed, not stepped: how many bytes have
passed by now, and when the rest will have.
"""

import asyncio
import math

from rollart.errors import StoreFull, WeightError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.types import Bucket, WeightManifest, WeightVersion

SLOW = 0.1
"""What a slow link keeps of its rate."""


class SimLink:
    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._dips: list[tuple[float, float, float]] = []

    def disturb(self, start_s: float, duration_s: float, factor: float) -> None:
        self._dips.append((start_s, start_s + duration_s, factor))

    def done_s(self, start_s: float, num_bytes: float) -> float:
        """When a transfer begun at `start_s` ends, as far as is known now."""
        at_s, left = start_s, num_bytes
        while True:
            factor, until_s = self._factor(at_s)
            rate = self._rate * factor
            passes = rate * (until_s - at_s) if rate else 0.0
            if rate and (passes >= left or until_s == math.inf):
                return at_s + left / rate
            left -= passes
            at_s = until_s

    def _factor(self, at_s: float) -> tuple[float, float]:
        """The share of the rate that holds at this time, and until when."""
        factor, until_s = 1.0, math.inf
        for start_s, end_s, dip in self._dips:
            if start_s <= at_s < end_s:
                factor, until_s = min(factor, dip), min(until_s, end_s)
            elif at_s < start_s:
                until_s = min(until_s, start_s)
        return factor, until_s

    async def transfer(self, num_bytes: float) -> None:
        """Wait until this many bytes have passed, whatever happens to the link meanwhile."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while (done_s := self.done_s(start_s, num_bytes)) > loop.time():  # noqa: ASYNC110 - the link may change
            await asyncio.sleep(done_s - loop.time())


class SimDisk:
    """Where weights, checkpoints and the journal are written. It may be full for a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._full_until_s = 0.0

    def fill(self, seconds: float) -> None:
        self._full_until_s = max(self._full_until_s, self._loop.time() + seconds)

    def must_have_room(self) -> None:
        """Raises StoreFull."""
        if self._loop.time() < self._full_until_s:
            raise StoreFull("no space left (simulated)")


class SimStore:
    """Buckets by version and position: when each was put, and whose bytes it holds."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._buckets: dict[WeightVersion, dict[int, tuple[float, str]]] = {}
        self._manifests: dict[WeightVersion, WeightManifest] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def put(self, version: WeightVersion, position: int, bucket: Bucket) -> None:
        self._buckets.setdefault(version, {})[position] = (self._loop.time(), bucket.digest)
        self._log.emit(schema.Bucket(version=version, bucket=position))

    def commit(self, manifest: WeightManifest) -> None:
        self._manifests[manifest.version] = manifest
        self._log.emit(schema.Manifest(version=manifest.version, buckets=len(manifest.buckets)))
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def next_manifest(self) -> "asyncio.Future[None]":
        """Done when one more version is complete."""
        self._waiting.append(self._loop.create_future())
        return self._waiting[-1]

    async def drop_before(self, version: WeightVersion) -> None:
        for old in [old for old in self._buckets if old < version]:
            del self._buckets[old]
            self._manifests.pop(old, None)

    def clear(self) -> None:
        self._buckets.clear()
        self._manifests.clear()

    def pull_done_s(self, manifest: WeightManifest, link: SimLink, start_s: float) -> tuple[float, float]:
        """(when the last bucket is there, seconds of transfer) for an engine that began to pull at `start_s`.

        Buckets are pulled in order, each as soon as it is in the store. Raises WeightError where one is not.
        """
        stored = self._buckets.get(manifest.version, {})
        at_s, busy_s = start_s, 0.0
        for position, bucket in enumerate(manifest.buckets):
            if position not in stored:
                raise WeightError(f"bucket {position} of version {manifest.version} is not in the store")
            begin_s = max(at_s, stored[position][0])
            at_s = link.done_s(begin_s, bucket.num_bytes)
            busy_s += at_s - begin_s
        return at_s, busy_s

    def staged_s(self, version: WeightVersion, link: SimLink, start_s: float) -> float | None:
        """When an engine that began to pull at `start_s` has all of a version; None while that is not complete. Raises
        WeightError where a bucket is lost."""
        manifest = self._manifests.get(version)
        return None if manifest is None else self.pull_done_s(manifest, link, start_s)[0]

    def read(self, manifest: WeightManifest) -> list[WeightVersion]:
        """The version each bucket's bytes are of. Raises WeightError where a digest is wrong."""
        stored = self._buckets.get(manifest.version, {})
        found: list[WeightVersion] = []
        for position, bucket in enumerate(manifest.buckets):
            if position not in stored:
                raise WeightError(f"bucket {position} of version {manifest.version} is not in the store")
            digest = stored[position][1]
            if digest != bucket.digest:
                raise WeightError(f"bucket {position} of version {manifest.version} is damaged")
            found.append(version_of(digest))
        return found

    def newest(self) -> WeightVersion | None:
        return max(self._buckets, default=None)

    def damage(self, version: WeightVersion, position: int, *, lose: bool) -> None:
        stored = self._buckets[version]
        if not stored:
            return  # its only bucket is lost already
        at = sorted(stored)[position % len(stored)]
        if lose:
            del stored[at]
        else:
            stored[at] = (stored[at][0], digest_of(-1, at))


def digest_of(version: WeightVersion, position: int) -> str:
    return f"v{version}:{position}"


def version_of(digest: str) -> WeightVersion:
    return int(digest[1:].split(":")[0])
