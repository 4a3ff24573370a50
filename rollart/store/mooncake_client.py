"""Weights in a Mooncake store: its client, what its keys mean, and the side that brings buckets to a host. No torch.

    RUN/VERSION/PUSH/START/FILE    the bytes of a bucket; never written twice, since each push has a name of its own
    RUN/head                       JSON, replaced after each bucket: what is there of each version, and whole manifests
    RUN/dropped                    the oldest version that stays, where the coordinator has dropped some
    RUN/closed                     the run is over
    RUN/alive                      a number that the trainer's process raises again and again

The small ones are a digest and JSON, filled up with spaces: Mooncake replaces a value by one of the same size in place,
but keeps the room of one that had another size for ten minutes more. Buckets are pinned, so that the store never evicts
one that somebody may ask for. The trainer alone writes `head`.
"""

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, TypedDict

from rollart.errors import StoreFull, WeightError, install
from rollart.store.digests import digest_of
from rollart.store.index import MANIFEST, folder_name
from rollart.store.media import Bytes
from rollart.store.mirror import Base, Came, Have, News, VersionNews
from rollart.types import Bucket, Json, WeightVersion

FULL = -200
"""Mooncake's code for: no segment has room."""
NEWS_S = 2.0
LOOK_S = 0.05
"""How often `head` is looked at."""
BUFFER_BYTES = 64 * 1024 * 1024
"""Of the client, for values that it copies."""
NOTE_BYTES = 4096
"""Of a small value, or twice that, and so on."""
DIGEST_BYTES = len(digest_of(b""))
ALIVE_S = 2.0
"""How often a trainer's process says that it is alive; one that did not for three times as long is dead."""
TORN_S, TORN_TRIES = 0.005, 40
"""A value that is being replaced is read again: after how long, and how many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSetup:
    """How a process reaches the store."""

    master: str
    run_id: str
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    """Memory that this process adds to the store."""


class Pushed(TypedDict):
    """What `head` says of a version."""

    push: str
    buckets: list[Bucket]
    sizes: dict[str, int]
    manifest: Json


def way_to(address: str) -> str:
    """This host's address on the way to another. Nothing is sent."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class MooncakeClient:
    """One process's client. Raises WeightError where the store cannot be reached, StoreFull where it has no room."""

    def __init__(self, setup: MooncakeSetup) -> None:
        self._setup = setup
        self._prefix = f"{setup.run_id}/"
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise WeightError(f"weights.type mooncake: {error}; install it with {install('mooncake')}") from error
        refuse_unreachable(setup.master)
        self._room: dict[str, int] = {}
        """Of the small values that this client has written: it only grows."""
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            way_to(setup.master),
            setup.metadata,
            setup.segment_bytes,
            BUFFER_BYTES,
            setup.protocol,
            setup.devices,
            setup.master,
        )
        if code:
            raise WeightError(
                f"weights.master: the Mooncake master at {setup.master} refused this client (code {code})"
            )

    def register(self, raw: Bytes) -> None:
        """Let bytes go to and from this memory without a copy."""
        self._check("register memory", self._store.register_buffer(raw.ctypes.data, len(raw)))

    def unregister(self, raw: Bytes) -> None:
        self._store.unregister_buffer(raw.ctypes.data)

    def put(self, key: str, raw: Bytes) -> None:
        """From registered memory."""
        self._check(f"put {key}", self._store.put_from(self._prefix + key, raw.ctypes.data, len(raw), self._pinned))

    def get_into(self, key: str, raw: Bytes) -> None:
        """Into registered memory."""
        got = self._store.get_into(self._prefix + key, raw.ctypes.data, len(raw))
        if got != len(raw):
            self._check(f"get {key}", got)
            raise WeightError(f"weight bucket {key}: {got} bytes instead of {len(raw)}")

    def note(self, key: str, value: Any) -> None:
        """Replace a small value."""
        body = json.dumps(value).encode()
        self._room.setdefault(key, NOTE_BYTES)
        while self._room[key] < DIGEST_BYTES + len(body):
            self._room[key] *= 2
        raw = (digest_of(body).encode() + body).ljust(self._room[key])
        self._check(f"write {key}", self._store.upsert(self._prefix + key, raw, self._pinned))

    def noted(self, key: str) -> Any:
        """A small value, None where there is none, or none that can be read. Raises OSError where the store does not
        answer."""
        for _ in range(TORN_TRIES):
            raw = self._store.get(self._prefix + key)
            body = raw[DIGEST_BYTES:].rstrip()
            if raw and raw[:DIGEST_BYTES] == digest_of(body).encode():
                return json.loads(body)
            there = self._store.is_exist(self._prefix + key)
            if there < 0:
                raise OSError(f"the Mooncake master at {self._setup.master} does not answer (code {there})")
            if not there:
                return None
            time.sleep(TORN_S)  # it is being replaced
        return None

    def remove(self, pattern: str) -> None:
        """All keys of the run that match."""
        self._check(f"remove {pattern}", self._store.remove_by_regex(f"^{self._prefix}{pattern}", True))

    def close(self) -> None:
        self._store.close()

    def _check(self, what: str, code: int) -> None:
        if code == FULL:
            raise StoreFull(
                f"{what}: the Mooncake store has no room (code {code}); give it more: weights.segment_mb, or another "
                "mooncake_client"
            )
        if code < 0:
            raise WeightError(f"{what}: the Mooncake store at {self._setup.master} answered with code {code}")


def refuse_unreachable(master: str) -> None:
    """Said before the client tries for a long time."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise WeightError(
            f"weights.master: no Mooncake master answers at {master} ({error}); start one with "
            f"mooncake_master --rpc_port={port}, or correct the address"
        ) from error


def bucket_key(push: str, bucket: Bucket) -> str:
    folder, _, file = bucket.name.partition("/")
    return f"{folder}/{push}/{bucket.start}/{file}"


class MooncakeSource:
    """`rollart.store.mirror.Source` over Mooncake."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._head: dict[str, Pushed] = {}

    def news(self, have: Have) -> News:
        until_s = time.monotonic() + NEWS_S
        known = {str(version): list(state) for version, state in have.items()}
        while True:
            if self._client.noted("closed"):
                return News((), {}, closed=True)
            dropped = self._client.noted("dropped") or 0
            head = self._client.noted("head")
            if head is not None:
                self._head = {version: one for version, one in head.items() if int(version) >= dropped}
                state = {
                    version: [one["push"], len(one["buckets"]), one["manifest"] is not None]
                    for version, one in self._head.items()
                }
                if state != known or time.monotonic() > until_s:
                    return self._changed(state, known)
            elif time.monotonic() > until_s:
                return News((), {})
            time.sleep(LOOK_S)

    def _changed(self, state: dict[str, list[Any]], known: dict[str, list[Any]]) -> News:
        changed = {}
        for version, (push, _, whole) in state.items():
            before = known.get(version, ["", 0, False])
            if before != state[version]:
                one, since = self._head[version], before[1] if before[0] == push else 0
                buckets = tuple(Bucket(*bucket) for bucket in one["buckets"][since:])
                changed[int(version)] = VersionNews(push, buckets, one["sizes"], [MANIFEST] if whole else [])
        return News([int(version) for version in state], changed)

    def read(self, push: str, bucket: Bucket, into: Bytes, came: Came, base: Base | None = None) -> float | None:
        self._client.register(into)
        try:
            self._client.get_into(bucket_key(push, bucket), into)
        finally:
            self._client.unregister(into)
        came(bucket.num_bytes)
        return None

    def small(self, version: WeightVersion, name: str) -> bytes:
        one = self._head.get(str(version))
        if name != MANIFEST or one is None or one["manifest"] is None:
            raise WeightError(f"{folder_name(version)}/{name}: not in the store")
        return json.dumps(one["manifest"]).encode()

    def remove_if_dead(self) -> bool:
        """For a host of which nobody uses the copy: where the trainer is dead too, all of the run goes from the store,
        which would keep it for ever. False where it lives; it pushes again what somebody misses."""
        before = self._client.noted("alive")
        time.sleep(3 * ALIVE_S)
        if self._client.noted("alive") != before:
            return False
        self._client.remove(".*")
        return True

    def close(self) -> None:
        self._client.close()
