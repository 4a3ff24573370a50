"""Weight versions as folders of bucket files: what the shared-memory and the file store have in common.

Owns: one directory per run, and below it one per version:

    v00000003/<bucket files>   the tensors; which bytes are whose is in the manifest
    v00000003/manifest.json    written last, by rename: a version with a manifest is complete

A subclass says how a bucket file begins, what it is called and what else a version's folder holds.
Invariants: a bucket never changes after its name appears; its digest (CRC-32, 4 GB/s here) is checked on every fetch;
a mapping outlives the dropping of its version. The trainer pushes, engines fetch, and whoever ends the run closes.
"""

import asyncio
import json
import mmap
import os
import re
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollart.errors import WeightError, boundary
from rollart.types import Bucket, Probe, TensorPlace, WeightManifest, WeightVersion

ALIGNMENT = 64
"""Bytes: a cache line, and more than any dtype needs."""
CHUNK_BYTES = 1 << 20
"""Written and digested at a time, so that the digest reads from the cache."""
MANIFEST = "manifest.json"
VERSION = re.compile(r"v(\d{8,})")

Members = list[tuple[str, Tensor]]
"""The tensors of one bucket, in the order of its bytes."""


class BucketStore(ABC):
    """One run's versions. Making one costs nothing; any number of processes may have one for the same run."""

    alignment = ALIGNMENT
    """Each tensor is padded to a multiple of this."""

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is too small; give at least {ALIGNMENT}, such as {1 << 30}")
        self._dir = directory
        self._bucket_bytes = bucket_bytes

    # --- what a kind of store decides

    @abstractmethod
    def _file_name(self, index: int, count: int) -> str:
        """Of bucket `index`, from 0, among `count`."""

    @abstractmethod
    def _head(self, members: Members) -> bytes:
        """What the bucket's file begins with, before its tensors."""

    def _ordered(self, members: Members) -> Members:
        return members

    def _complete(self, folder: Path, manifest: WeightManifest) -> None:
        """Write what else the version's folder holds; its manifest comes after it."""
        return

    # --- the store

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        """Write all buckets, then the manifest. Pushing a version again replaces it; old mappings stay valid.

        A tensor larger than `bucket_bytes` gets a bucket of its own.
        """
        folder = self.folder(version)
        with boundary(WeightError, f"push of version {version} to {self._dir}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / MANIFEST).unlink(missing_ok=True)
            places: dict[str, TensorPlace] = {}
            parts = list(self._split(tensors))
            buckets = tuple(
                self._write_bucket(f"{folder.name}/{self._file_name(index, len(parts))}", index, members, places)
                for index, members in enumerate(parts)
            )
            manifest = WeightManifest(
                version=version, buckets=buckets, tensors={name: places[name] for name in tensors}, probe=probe
            )
            self._complete(folder, manifest)
            hidden = folder / f".{MANIFEST}"
            hidden.write_text(_to_json(manifest))
            os.replace(hidden, folder / MANIFEST)
        return manifest

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        """The manifest of a version, or None while it is not complete (or was dropped)."""
        try:
            text = (self.folder(version) / MANIFEST).read_text()
        except OSError:
            return None
        with boundary(WeightError, f"manifest of version {version} in {self._dir}"):
            return _from_json(text)

    def fetch(self, manifest: WeightManifest) -> dict[str, Tensor]:
        """Map a version's tensors, digests checked. No copy: they are views of shared pages.

        Writing to one changes a private page, never the store. Raises WeightError that names a missing or damaged
        bucket.
        """
        maps = [self._map(bucket) for bucket in manifest.buckets]
        with boundary(WeightError, f"manifest of version {manifest.version}"):
            return {name: _view(name, maps[place.bucket], place) for name, place in manifest.tensors.items()}

    async def drop_before(self, version: WeightVersion) -> None:
        """Forget all versions older than this one. Mappings that engines hold stay valid until they let go."""
        await asyncio.to_thread(self._drop_before, version)

    def close(self) -> None:
        """Remove everything of this run, also what a killed process left behind."""
        shutil.rmtree(self._dir, ignore_errors=True)

    def folder(self, version: WeightVersion) -> Path:
        """Where a version's files are."""
        return self._dir / f"v{version:08d}"

    def _drop_before(self, version: WeightVersion) -> None:
        if not self._dir.is_dir():
            return
        for folder in sorted(self._dir.iterdir()):
            found = VERSION.fullmatch(folder.name)
            if found and int(found[1]) < version:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _split(self, tensors: Mapping[str, Tensor]) -> Iterable[Members]:
        """Consecutive tensors, as many as fit in a bucket."""
        members: Members = []
        size = 0
        for name, tensor in tensors.items():
            if members and size + tensor.nbytes > self._bucket_bytes:
                yield members
                members, size = [], 0
            members.append((name, tensor))
            size += _padded(tensor.nbytes, self.alignment)
        if members:
            yield members

    def _write_bucket(self, name: str, index: int, members: Members, places: dict[str, TensorPlace]) -> Bucket:
        path = self._dir / name
        hidden = path.with_name(f".{path.name}")
        members = self._ordered(members)
        head = self._head(members)
        offset = len(head)
        with open(hidden, "wb", buffering=0) as file:
            digest = _write(file.fileno(), memoryview(head), 0)
            for key, tensor in members:
                places[key] = TensorPlace(
                    bucket=index,
                    offset=offset,
                    num_bytes=tensor.nbytes,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                )
                data = _bytes(tensor)
                padding = bytes(_padded(len(data), self.alignment) - len(data))
                for at in range(0, len(data), CHUNK_BYTES):
                    digest = _write(file.fileno(), data[at : at + CHUNK_BYTES], digest)
                digest = _write(file.fileno(), memoryview(padding), digest)
                offset += len(data) + len(padding)
        os.replace(hidden, path)
        return Bucket(name=name, num_bytes=offset, digest=f"crc32:{digest:08x}")

    def _map(self, bucket: Bucket) -> mmap.mmap | bytes:
        path = self._dir / bucket.name
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != bucket.num_bytes:
                    raise WeightError(
                        f"weight bucket {bucket.name}: damaged, {size} bytes instead of {bucket.num_bytes}"
                    )
                # Copy-on-write: torch wants writable memory, and pages stay shared until someone writes.
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        except FileNotFoundError:
            raise WeightError(f"weight bucket {bucket.name}: missing from {self._dir}") from None
        except OSError as error:
            raise WeightError(f"weight bucket {bucket.name}: cannot be mapped ({error.strerror})") from error
        digest = f"crc32:{zlib.crc32(mapped):08x}"
        if digest != bucket.digest:
            raise WeightError(f"weight bucket {bucket.name}: damaged, digest {digest} instead of {bucket.digest}")
        return mapped


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes; a copy only where it is not contiguous or not on the CPU."""
    flat = tensor.detach().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write(handle: int, piece: memoryview, digest: int) -> int:
    """Write all of a piece; returns the digest continued over it."""
    left = piece
    while left:
        left = left[os.write(handle, left) :]
    return zlib.crc32(piece, digest)


def _view(name: str, mapped: mmap.mmap | bytes, place: TensorPlace) -> Tensor:
    dtype = getattr(torch, place.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {name!r} has dtype {place.dtype!r}, which torch does not know")
    if place.num_bytes == 0:
        return torch.empty(place.shape, dtype=dtype)
    count = place.num_bytes // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=place.offset).view(place.shape)


def _to_json(manifest: WeightManifest) -> str:
    return json.dumps(
        {
            "version": manifest.version,
            "buckets": [list(bucket) for bucket in manifest.buckets],
            "tensors": {name: list(place) for name, place in manifest.tensors.items()},
            "probe": None if manifest.probe is None else list(manifest.probe),
        }
    )


def _from_json(text: str) -> WeightManifest:
    raw = json.loads(text)
    return WeightManifest(
        version=raw["version"],
        buckets=tuple(Bucket(*bucket) for bucket in raw["buckets"]),
        tensors={
            name: TensorPlace(bucket=bucket, offset=offset, num_bytes=num_bytes, dtype=dtype, shape=tuple(shape))
            for name, (bucket, offset, num_bytes, dtype, shape) in raw["tensors"].items()
        },
        probe=None if raw["probe"] is None else Probe(*map(tuple, raw["probe"])),
    )
