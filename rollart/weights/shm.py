"""Weight buckets in shared memory: files under /dev/shm, mapped by engines without a copy.

Owns: one directory per run, `/dev/shm/rollart-<run>/`, and below it one per version:

    v00000003/00000.bucket     tensors end to end, raw, 64-byte aligned; places are in the manifest
    v00000003/manifest.json    written last, by rename: a version with a manifest is complete

Files, not `multiprocessing.shared_memory`: a reader's resource tracker (Python 3.11) would unlink segments at exit.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.errors import WeightError, boundary
from rollart.types import Bucket, TensorPlace, WeightManifest, WeightVersion

ROOT = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes: a cache line, and more than any dtype needs."""
CHUNK_BYTES = 1 << 20
"""Written and digested at a time, so that the digest reads from the cache."""
MANIFEST = "manifest.json"
RUN_ID = re.compile(r"[A-Za-z0-9._+-]+")
VERSION = re.compile(r"v(\d{8,})")


class Mapped(NamedTuple):
    """One bucket in this process's memory, and the digest of what it holds."""

    data: mmap.mmap | bytes
    num_bytes: int
    digest: str


class ShmStore:
    """One run's versions. Making one costs nothing; any number of processes may have one for the same run."""

    def __init__(self, run_id: str, bucket_bytes: int = 1 << 30, *, root: Path = ROOT) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"run_id: {run_id!r} is not a file name; use letters, digits, dot, dash, plus, underscore")
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is too small; give at least {ALIGNMENT}, such as {1 << 30}")
        self._dir = root / f"rollart-{run_id}"
        self._bucket_bytes = bucket_bytes

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Write all buckets, then the manifest. Pushing a version again replaces it; old mappings stay valid.

        A tensor larger than `bucket_bytes` gets a bucket of its own.
        """
        folder = self._folder(version)
        with boundary(WeightError, f"push of version {version} to {self._dir}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / MANIFEST).unlink(missing_ok=True)
            places: dict[str, TensorPlace] = {}
            buckets: list[Bucket] = []
            for members in self._split(tensors):
                name = f"{folder.name}/{len(buckets):05d}.bucket"
                buckets.append(self._write_bucket(name, len(buckets), members, places))
            manifest = WeightManifest(version=version, buckets=tuple(buckets), tensors=places)
            hidden = folder / f".{MANIFEST}"
            hidden.write_text(_to_json(manifest))
            os.replace(hidden, folder / MANIFEST)
        return manifest

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        """The manifest of a version, or None while it is not complete (or was dropped)."""
        try:
            text = (self._folder(version) / MANIFEST).read_text()
        except OSError:
            return None
        with boundary(WeightError, f"manifest of version {version} in {self._dir}"):
            return _from_json(text)

    def fetch(self, manifest: WeightManifest, ahead: "Mapping[str, Mapped] | None" = None) -> dict[str, Tensor]:
        """Map a version's tensors, digests checked. No copy: they are views of shared pages.

        Writing to one changes a private page, never the store. `ahead`: buckets that were mapped before, by name; one
        that is not what the manifest says is mapped again. Raises WeightError that names a missing or damaged bucket.
        """
        maps = [self._checked(bucket, (ahead or {}).get(bucket.name)) for bucket in manifest.buckets]
        with boundary(WeightError, f"manifest of version {manifest.version}"):
            return {name: _view(name, maps[place.bucket], place) for name, place in manifest.tensors.items()}

    def appeared(self, version: WeightVersion) -> list[str]:
        """The names of the buckets of a version that are there by now, in order."""
        folder = self._folder(version)
        return [f"{folder.name}/{path.name}" for path in sorted(folder.glob("[0-9]*.bucket"))]

    def map_bucket(self, name: str) -> "Mapped":
        """Map one bucket as it is, and take its digest. Raises WeightError where it is not there."""
        try:
            with open(self._dir / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Copy-on-write: torch wants writable memory, and pages stay shared until someone writes.
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        except FileNotFoundError:
            raise WeightError(f"weight bucket {name}: missing from {self._dir}") from None
        except OSError as error:
            raise WeightError(f"weight bucket {name}: cannot be mapped ({error.strerror})") from error
        return Mapped(mapped, size, f"crc32:{zlib.crc32(mapped):08x}")

    async def drop_before(self, version: WeightVersion) -> None:
        """Forget all versions older than this one. Mappings that engines hold stay valid until they let go."""
        await asyncio.to_thread(self._drop_before, version)

    def close(self) -> None:
        """Remove everything of this run, also what a killed process left behind."""
        shutil.rmtree(self._dir, ignore_errors=True)

    def _folder(self, version: WeightVersion) -> Path:
        return self._dir / f"v{version:08d}"

    def _drop_before(self, version: WeightVersion) -> None:
        if not self._dir.is_dir():
            return
        for folder in sorted(self._dir.iterdir()):
            found = VERSION.fullmatch(folder.name)
            if found and int(found[1]) < version:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _split(self, tensors: Mapping[str, Tensor]) -> Iterable[list[tuple[str, Tensor]]]:
        """Consecutive tensors, as many as fit in a bucket."""
        members: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in tensors.items():
            if members and size + tensor.nbytes > self._bucket_bytes:
                yield members
                members, size = [], 0
            members.append((name, tensor))
            size += _aligned(tensor.nbytes)
        if members:
            yield members

    def _write_bucket(
        self, name: str, index: int, members: list[tuple[str, Tensor]], places: dict[str, TensorPlace]
    ) -> Bucket:
        path = self._dir / name
        hidden = path.with_name(f".{path.name}")
        offset = digest = 0
        with open(hidden, "wb", buffering=0) as file:
            for key, tensor in members:
                places[key] = TensorPlace(
                    bucket=index,
                    offset=offset,
                    num_bytes=tensor.nbytes,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                )
                data = _bytes(tensor)
                padding = bytes(_aligned(len(data)) - len(data))
                for at in range(0, len(data), CHUNK_BYTES):
                    digest = _write(file.fileno(), data[at : at + CHUNK_BYTES], digest)
                digest = _write(file.fileno(), memoryview(padding), digest)
                offset += len(data) + len(padding)
        os.replace(hidden, path)
        return Bucket(name=name, num_bytes=offset, digest=f"crc32:{digest:08x}")

    def _checked(self, bucket: Bucket, known: "Mapped | None") -> mmap.mmap | bytes:
        """The bucket's bytes, which are what the manifest says; or WeightError."""
        if known is not None and (known.num_bytes, known.digest) == (bucket.num_bytes, bucket.digest):
            return known.data
        found = self.map_bucket(bucket.name)
        if found.num_bytes != bucket.num_bytes:
            raise WeightError(
                f"weight bucket {bucket.name}: damaged, {found.num_bytes} bytes instead of {bucket.num_bytes}"
            )
        if found.digest != bucket.digest:
            raise WeightError(f"weight bucket {bucket.name}: damaged, digest {found.digest} instead of {bucket.digest}")
        return found.data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


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
    )
