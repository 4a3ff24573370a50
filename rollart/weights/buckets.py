"""Weight versions as folders of bucket files: what the shared-memory and the file store have in common.

Owns: one directory per run, and below it one per version:

    v00000003/model-00001.safetensors    the buckets
    v00000003/manifest.json              last, by rename: a version with a manifest is complete

A subclass says where the directory is and what else a version's folder holds.
Invariants: a bucket never changes after its name appears; its digest (CRC-32, 4 GB/s here) is checked on every fetch;
a mapping outlives the dropping of its version; a push holds one bucket at a time, and the tensor after it, of tensors
that are made when they are asked for (a sharded trainer's). The trainer pushes, engines fetch, and whoever ends the run
closes.
"""

import asyncio
import json
import mmap
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.errors import WeightError, boundary, writing
from rollart.types import Bucket, Probe, TensorPlace, WeightManifest, WeightVersion
from rollart.weights.owner import Claim, claim

ALIGNMENT = 64
"""Bytes: where the first tensor of a bucket begins."""
CHUNK_BYTES = 1 << 20
"""Written and digested at a time, so that the digest reads from the cache."""
FIRST_LOOK_S = 0.01
"""Until a bucket that is not seen is looked for again; doubled each time."""
MANIFEST = "manifest.json"
BUCKETS = "model-*.safetensors"
VERSION = re.compile(r"v(\d{8,})")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors writes them."""

Members = list[tuple[str, Tensor]]
"""The tensors of one bucket, in the order of its bytes."""


class Mapped(NamedTuple):
    """One bucket in this process's memory, and the digest of what it holds."""

    data: mmap.mmap | bytes
    num_bytes: int
    digest: str


class BucketStore:
    """One run's versions. Making one costs nothing; any number of processes may have one for the same run."""

    def __init__(self, directory: Path, bucket_bytes: int, *, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a bucket that a manifest names may take to be seen here."""
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes: {bucket_bytes} is too small; give at least {ALIGNMENT}, such as {1 << 30}")
        self._dir = directory
        self._bucket_bytes = bucket_bytes
        self._patience_s = patience_s
        self._claim: Claim | None = None

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        """Write all buckets, then the manifest. Pushing a version again replaces it; old mappings stay valid.

        A tensor larger than `bucket_bytes` gets a bucket of its own. Raises StoreFull, leaving nothing of the version
        behind: a part of one would take the room that is missing.
        """
        folder, what = self.folder(version), f"push of version {version} to {self._dir}"
        with boundary(WeightError, what), writing(what), _whole_or_gone(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / MANIFEST).unlink(missing_ok=True)
            places: dict[str, TensorPlace] = {}
            buckets: list[Bucket] = []
            for members in self._split(tensors):
                # The number of buckets is not in their names: it is known when the last tensor has come.
                name = f"{folder.name}/model-{len(buckets) + 1:05d}.safetensors"
                buckets.append(self._write_bucket(name, len(buckets), members, places))
                members.clear()  # or they would live on beside the next bucket's
            for path in folder.glob(BUCKETS):
                if f"{folder.name}/{path.name}" not in {bucket.name for bucket in buckets}:
                    path.unlink()  # of an earlier push that was split otherwise
            manifest = WeightManifest(
                version=version, buckets=tuple(buckets), tensors={name: places[name] for name in tensors}, probe=probe
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

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, Mapped] | None = None) -> dict[str, Tensor]:
        """Map a version's tensors, digests checked. No copy: they are views of shared pages.

        Writing to one changes a private page, never the store. `ahead`: buckets that were mapped before, by name; one
        that is not what the manifest says is mapped again. Raises WeightError that names a missing or damaged bucket.
        """
        maps = [self._checked(bucket, (ahead or {}).get(bucket.name)) for bucket in manifest.buckets]
        with boundary(WeightError, f"manifest of version {manifest.version}"):
            return {name: _view(name, maps[place.bucket], place) for name, place in manifest.tensors.items()}

    def appeared(self, version: WeightVersion) -> list[str]:
        """The names of the buckets of a version that are there by now, in order."""
        folder = self.folder(version)
        return [f"{folder.name}/{path.name}" for path in sorted(folder.glob(BUCKETS))]

    def map_bucket(self, name: str) -> Mapped:
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

    def claim(self) -> bool:
        """Own the store for as long as this process lives. False where another live run does."""
        self._claim = self._claim or claim(self._dir)
        return self._claim is not None

    def close(self) -> None:
        """Remove everything of this run, also what a killed process left behind; nothing of another live run."""
        if self.claim() and self._claim is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._claim.release()
            self._claim = None

    def folder(self, version: WeightVersion) -> Path:
        """Where a version's files are."""
        return self._dir / f"v{version:08d}"

    def _complete(self, folder: Path, manifest: WeightManifest) -> None:
        """Write what else the version's folder holds; its manifest comes after it."""
        return

    def _drop_before(self, version: WeightVersion) -> None:
        if not self._dir.is_dir():
            return
        for folder in sorted(self._dir.iterdir()):
            found = VERSION.fullmatch(folder.name)
            if found and int(found[1]) < version:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _split(self, tensors: Mapping[str, Tensor]) -> Iterator[Members]:
        """Consecutive tensors, as many as fit in a bucket. Each is asked for once, when its turn comes."""
        members: Members = []
        size = 0
        for name, tensor in tensors.items():
            if members and size + tensor.nbytes > self._bucket_bytes:
                yield members
                members, size = [], 0
            members.append((name, tensor))
            size += tensor.nbytes
        if members:
            yield members

    def _write_bucket(self, name: str, index: int, members: Members, places: dict[str, TensorPlace]) -> Bucket:
        path = self._dir / name
        hidden = path.with_name(f".{path.name}")
        # Wide dtypes first: the format has no gaps, and so each tensor lies on a multiple of its item size.
        members = sorted(members, key=lambda member: -member[1].itemsize)
        head = _head(members)
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
                for at in range(0, len(data), CHUNK_BYTES):
                    digest = _write(file.fileno(), data[at : at + CHUNK_BYTES], digest)
                offset += len(data)
        os.replace(hidden, path)
        return Bucket(name=name, num_bytes=offset, digest=f"crc32:{digest:08x}")

    def _checked(self, bucket: Bucket, known: Mapped | None) -> mmap.mmap | bytes:
        """The bucket's bytes, which are what the manifest says; or WeightError."""
        if known is not None and (known.num_bytes, known.digest) == (bucket.num_bytes, bucket.digest):
            return known.data
        found = self._seen(bucket)
        if found.num_bytes != bucket.num_bytes:
            raise WeightError(
                f"weight bucket {bucket.name}: damaged, {found.num_bytes} bytes instead of {bucket.num_bytes}"
            )
        if found.digest != bucket.digest:
            raise WeightError(f"weight bucket {bucket.name}: damaged, digest {found.digest} instead of {bucket.digest}")
        return found.data

    def _seen(self, bucket: Bucket) -> Mapped:
        """The bucket, once it is seen here with all its bytes: a network file system shows what another machine wrote a
        little later. What is still missing when our patience ends is lost."""
        until_s, wait_s = time.monotonic() + self._patience_s, FIRST_LOOK_S
        while True:
            late = time.monotonic() + wait_s > until_s
            try:
                found = self.map_bucket(bucket.name)
            except WeightError:
                if late:
                    raise
            else:
                if late or found.num_bytes >= bucket.num_bytes:
                    return found
            time.sleep(wait_s)
            wait_s *= 2
            with suppress(OSError):
                os.listdir((self._dir / bucket.name).parent)  # or what was not there may stay so in a client's cache


@contextmanager
def _whole_or_gone(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _head(members: Members) -> bytes:
    """What a safetensors file begins with."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in members:
        end = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


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
        probe=None if raw["probe"] is None else _probe(*raw["probe"]),
    )


def _probe(tokens: list[int], logprobs: list[float], num_sequences: int) -> Probe:
    return Probe(tokens=tuple(tokens), logprobs=tuple(logprobs), num_sequences=num_sequences)
