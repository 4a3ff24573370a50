"""Weight versions broadcast from the trainer to all engines, device to device: NCCL between GPUs, gloo between CPUs.

Nothing is kept on the way: each engine receives a version into memory of its own device, bucket by bucket, beside what
it computes, and copies from there at the swap. The trainer runs a key-value store of torch (`TCPStore`), in which it
and the coordinator write one message after another; engines read all of them, in order:

    call, group        which engines make up the next process group: those that answered the call
    begin              a version, whose buckets follow
    bucket             what comes next by a broadcast of the group
    manifest           the version is whole; each engine says that it has it
    drop               versions that nobody needs any more

Invariants: an engine has a version when its manifest came over the group that brought all its buckets, and serves it
when the digests are right. A group that lost a member ends; the version begins again in another, with those that
answer. An engine that comes later, or was left out, asks for the version as for a damaged one: it is pushed again.
NCCL and this store know no tokens: keep their ports on a network of your own.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rollart.errors import WeightError, boundary
from rollart.store.buckets import BucketStore, LaidOut, MappedFile, buckets_of
from rollart.store.device import DeviceFile, digest_on_device
from rollart.store.format import Weight
from rollart.store.index import MANIFESTS, folder_name
from rollart.store.media import DiskMedium
from rollart.store.mooncake_client import way_to
from rollart.store.nccl_group import STALL_S, Group, GroupLost
from rollart.types import Bucket, ParsedJson, Probe, Pulled, WeightManifest, WeightVersion

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long engines may take to answer the trainer's call."""
LOOK_S = 2.0
"""How often an engine that hears nothing looks whether it was left behind."""
POLL_S, IDLE_S = 0.001, 0.02
"""How often an engine looks for a message, at first and when none has come for a while. torch's own way to wait warns
each time that nothing came."""
RETRY_S = 0.2
GROUPS = 5
"""In how many groups a push is tried."""
ALL = 1 << 62
"""No version comes after it."""
JOINED, SAID, OLDEST = "joined", "said", "oldest"
"""Counters: engines that ever joined, messages, and the first of those that are still there."""


@dataclass
class Received:
    """A version in an engine's memory."""

    files: dict[str, Tensor] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    manifest: WeightManifest | None = None
    seconds: float = 0.0


class NcclStore(BucketStore):
    """Versions of one run. A trainer serves and pushes, an engine receives, the coordinator drops."""

    def __init__(
        self,
        address: str,
        device: torch.device,
        bucket_bytes: int = 1 << 30,
        *,
        bind: str | None = None,
        patience_s: float = STALL_S,
    ) -> None:
        """`address`: `host:port` where the trainer is reached, within `patience_s`. `bind`: where it listens, if not
        there."""
        super().__init__(Path("/nowhere"), bucket_bytes, DiskMedium())
        self._address = address
        self._bind = bind or address
        self._device = device
        self._waits_s = patience_s
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._groups = 0
        self._gone: set[int] = set()
        self._begins: list[int] = []
        """Messages with which the last two pushes began."""
        self._buffers: list[Tensor] = []
        self._side: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._versions: dict[WeightVersion, Received] = {}
        self._whole: dict[WeightVersion, WeightManifest] = {}
        self._fetched: WeightVersion = -1
        self._joined = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the trainer

    def serve(self) -> None:
        """Be the one whom engines join. Raises WeightError where that cannot be."""
        if self._store is None:
            host, _, port = self._bind.rpartition(":")
            with boundary(WeightError, f"weights.address: {self._bind}"):
                listener = socket.create_server((host, int(port)))
                self._store = TCPStore(
                    host,
                    int(port),
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=STALL_S),
                    master_listen_fd=listener.detach(),
                )

    @property
    def members(self) -> list[int]:
        """The engines that had the last version whole, by the number with which they joined."""
        joined = self._group.members if self._group is not None else []
        return [number for number in joined if number not in self._gone]

    def push(self, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None = None) -> WeightManifest:
        """Send all buckets, then the manifest. Where an engine is lost meanwhile, again to the others."""
        with boundary(WeightError, f"push of version {version} to the engines"):
            self.serve()
            for left in range(GROUPS - 1, -1, -1):
                try:
                    return self._send(self._group_of_now(), version, tensors, probe)
                except GroupLost as error:
                    log.warning("push of version %d: %s; it begins again with those that answer", version, error)
                    self._leave()
                    if not left:
                        raise WeightError(f"{GROUPS} groups of engines were lost, the last one: {error}") from error
            raise AssertionError

    def _group_of_now(self) -> Group:
        """All engines that joined; the group that there is where these are its members."""
        store = self.connected()
        members = [number for number in range(1, store.add(JOINED, 0) + 1) if number not in self._gone]
        if self._group is None or self._group.members != members:
            self._leave()
            self._groups += 1
            name = f"group-{self._groups}"
            self._say(call=name, members=members)
            present = self._answered([f"{name}/{number}" for number in members], ANSWER_S)
            here = [number for number, answered in zip(members, present, strict=True) if answered]
            self._gone |= set(members) - set(here)
            self._say(group=name, members=here)
            self._group = Group(name, here, 0, self._connect(), self._device, self._host)
        return self._group

    def _send(
        self, group: Group, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None
    ) -> WeightManifest:
        self._begin(version, group)
        buckets: list[Bucket] = []
        sent: Callable[[], None] | None = None
        for turn, one in enumerate(buckets_of(tensors, self.bucket_bytes)):
            with self._beside:
                raw = self._lay_out(turn % 2, one)
                digest = digest_on_device(raw)
            buckets.append(Bucket(f"{folder_name(version)}/{one.file}", one.num_bytes, digest, one.start))
            if sent is not None:
                sent()
            self._say(bucket=buckets[-1], file_bytes=one.file_bytes, by=group.name)
            with self._beside:
                sent = group.broadcast(raw)
        if sent is not None:
            sent()
        manifest = WeightManifest(version=version, buckets=tuple(buckets), probe=probe)
        said = self._say(manifest=MANIFESTS.dump_python(manifest), by=group.name)
        answered = self._answered([f"{said}/{number}" for number in group.members], STALL_S)
        self._gone |= {number for number, has in zip(group.members, answered, strict=True) if not has}
        return manifest

    def _lay_out(self, turn: int, one: LaidOut) -> Tensor:
        """The bucket in memory of the device: one of two, since the one before may still be on its way."""
        while len(self._buffers) <= turn:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if len(self._buffers[turn]) < one.num_bytes:
            self._buffers[turn] = torch.empty(one.num_bytes, dtype=torch.uint8, device=self._device)
        raw = self._buffers[turn][: one.num_bytes]
        for at, piece in one.pieces:
            raw[at - one.start : at - one.start + len(piece)].copy_(torch.from_numpy(piece), non_blocking=True)
        return raw

    @property
    def _beside(self) -> AbstractContextManager[object]:
        """Beside the step that is trained meanwhile."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._side)

    def _say(self, **message: Any) -> int:
        """Returns the message's number."""
        store = self.connected()
        number = store.add(SAID, 1) - 1
        store.set(f"say/{number}", json.dumps(message))
        return number

    def _answered(self, keys: list[str], within_s: float) -> list[bool]:
        """Which of these keys are written before the time is over."""
        store, until_s = self.connected(), time.monotonic() + within_s
        present = [False] * len(keys)
        while not all(present) and time.monotonic() < until_s:
            present = [has or store.check([key]) for key, has in zip(keys, present, strict=True)]
            time.sleep(0.002)
        for key in keys:
            store.delete_key(key)
        return present

    def _begin(self, version: WeightVersion, group: Group) -> None:
        """What was said before the push before this one, everybody who was in that has heard."""
        self._begins.append(self._say(begin=version, by=group.name))
        if len(self._begins) > 2:
            store, before = self.connected(), self._begins.pop(0)
            oldest = store.add(OLDEST, 0)
            store.add(OLDEST, before - oldest)
            for number in range(oldest, before):
                store.delete_key(f"say/{number}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    # --- the coordinator

    async def drop_before(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self._drop, version)

    def _drop(self, version: WeightVersion) -> None:
        with boundary(WeightError, f"drop of versions before {version}"):
            if self._store is None:
                self._store = self._connect()
            try:
                self._say(drop=version)
            except RuntimeError:  # the trainer is another by now
                self._store = self._connect()
                self._say(drop=version)

    def claim(self) -> bool:
        """There is nothing to own: what is of the run is in its processes."""
        return True

    def close(self) -> None:
        """Of the coordinator: the run is over, and engines let go of everything."""
        if self._thread is None and self._group is None:
            with suppress(WeightError):
                self._drop(ALL)
        self._stopped.set()
        self._leave()
        if self._thread is not None:
            self._thread.join(STALL_S)
        self._store = None

    # --- an engine

    def receive(self) -> None:
        """Take what is sent, from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="rollart-receive", daemon=True)
            self._thread.start()

    def joined(self, within_s: float) -> bool:
        """Whether the trainer knows of this engine."""
        return self._joined.wait(within_s)

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        with self._lock:
            return self._whole.get(version)

    def appeared(self, version: WeightVersion) -> tuple[Bucket, ...]:
        with self._lock:
            found = self._versions.get(version)
            return tuple(found.buckets) if found is not None else ()

    def may_come(self, version: WeightVersion) -> bool:
        """Of a push that left this engine out nothing does."""
        with self._lock:
            return version in self._versions

    def map_file(self, name: str) -> MappedFile:
        with self._lock:
            found = self._versions.get(int(Path(name).parent.name[1:]))
            if found is None or name not in found.files:
                raise WeightError(f"weight bucket {name}: missing; it was not sent to this engine, or was dropped")
            return DeviceFile(found.files[name])

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, MappedFile] | None = None) -> dict[str, Tensor]:
        """They are this engine's own. What is older is let go of at once, this one when another begins to come."""
        if not self.appeared(manifest.version) and not self.joined(self._waits_s):
            raise WeightError(f"version {manifest.version}: no trainer answers at {self._address}")
        found = super().fetch(manifest, ahead)
        self._fetched = manifest.version
        self._forget(manifest.version)
        return found

    def pulled(self, version: WeightVersion) -> Pulled:
        with self._lock:
            found = self._versions.get(version, Received())
            return Pulled(found.seconds, sum(bucket.num_bytes for bucket in found.buckets))

    def _forget(self, before: WeightVersion) -> None:
        with self._lock:
            self._versions = {at: one for at, one in self._versions.items() if at >= before}
            self._whole = {at: one for at, one in self._whole.items() if at >= before - 1}

    def _follow(self) -> None:
        """Join, and listen; again when the trainer is another, or has given this engine up."""
        while not self._stopped.is_set():
            try:
                self._listen(self._connect())
            except (OSError, RuntimeError, GroupLost) as error:
                log.info("weights: %s; joining again", error)
            self._joined.clear()
            self._lose_group()
            self._stopped.wait(RETRY_S)

    def _lose_group(self) -> None:
        """With the part of a version that will not be finished."""
        self._leave()
        with self._lock:
            self._versions = {at: one for at, one in self._versions.items() if one.manifest is not None}

    @contextmanager
    def _others_may_be_lost(self) -> Iterator[None]:
        """The trainer sees it too, and calls those that are left: this engine stays who it is."""
        try:
            yield
        except GroupLost as error:
            log.info("weights: %s; waiting for the trainer's call", error)
            self._lose_group()

    def _is_in(self, group: str) -> bool:
        return self._group is not None and self._group.name == group

    def _listen(self, store: TCPStore) -> None:
        at = store.add(SAID, 0)
        own = store.add(JOINED, 1)
        called: list[int] = []
        self._joined.set()
        while (message := self._heard(store, at)) is not None:
            match message:
                case {"call": name, "members": called}:
                    if own in called:
                        store.set(f"{name}/{own}", "")
                    elif own < max(called, default=0):
                        raise GroupLost("the trainer did not wait for this engine")
                case {"group": name, "members": members}:
                    self._leave()
                    if own in members:
                        with self._others_may_be_lost():
                            rank = members.index(own) + 1
                            self._group = Group(name, members, rank, self._connect(), self._device, self._host)
                    elif own in called:
                        raise GroupLost("the trainer did not wait for this engine")
                case {"begin": version, "by": name} if self._is_in(name):
                    self._forget(self._fetched + 1)
                    with self._lock:
                        self._versions[version] = Received()
                        self._whole.pop(version, None)
                case {"bucket": bucket, "file_bytes": file_bytes, "by": name} if self._is_in(name):
                    with self._others_may_be_lost():
                        self._take(Bucket(*bucket), file_bytes)
                case {"manifest": manifest, "by": name} if self._is_in(name):
                    self._complete_version(MANIFESTS.validate_python(manifest))
                    store.set(f"{at}/{own}", "")
                case {"drop": version}:
                    self._forget(version)
            at += 1

    def _heard(self, store: TCPStore, at: int) -> ParsedJson | None:
        """The next message; None where there will be none."""
        until_s, pause_s = time.monotonic() + LOOK_S, POLL_S
        while not store.check([f"say/{at}"]):
            if self._stopped.wait(pause_s):
                return None
            pause_s = min(1.5 * pause_s, IDLE_S)
            if time.monotonic() > until_s:
                if store.add(OLDEST, 0) > at:
                    raise GroupLost("this engine has fallen behind")
                until_s = time.monotonic() + LOOK_S
        found: ParsedJson = json.loads(store.get(f"say/{at}"))
        return found

    def _take(self, bucket: Bucket, file_bytes: int) -> None:
        began_s = time.perf_counter()
        assert self._group is not None
        with self._lock:
            version = self._versions[int(Path(bucket.name).parent.name[1:])]
            if bucket.name not in version.files:
                version.files[bucket.name] = torch.empty(file_bytes, dtype=torch.uint8, device=self._device)
        raw = version.files[bucket.name][bucket.start : bucket.start + bucket.num_bytes]
        self._group.broadcast(raw)()
        with self._lock:
            version.buckets.append(bucket)
            version.seconds += time.perf_counter() - began_s

    def _complete_version(self, manifest: WeightManifest) -> None:
        with self._lock:
            self._versions[manifest.version].manifest = manifest
            self._whole[manifest.version] = manifest

    # --- everybody

    def connected(self) -> TCPStore:
        assert self._store is not None
        return self._store

    def _connect(self) -> TCPStore:
        """As one who asks. Raises OSError."""
        host, _, port = self._address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=LOOK_S).close()  # torch's own would try for long
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STALL_S))

    @property
    def _host(self) -> str:
        """This machine's address on the way to the others."""
        return way_to(self._address)
