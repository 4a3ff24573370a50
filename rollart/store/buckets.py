"""Weight versions as folders of bucket files: what the shared-memory and the file store have in common.

Owns: one directory per run, and below it one per version:

    v00000003/model-00001.safetensors    the buckets
    v00000003/manifest.json              last, by rename: a version with a manifest is complete

A subclass says where the directory is and what else a version's folder holds.
safetensors writes and maps the buckets. Invariants: a bucket never changes after its name appears; its digest (CRC-32)
is checked on every fetch; a mapping outlives the dropping of its version; a push holds one bucket at a time, and the
tensor after it, of tensors that are made when they are asked for (a sharded trainer's). The trainer pushes, engines
fetch, and the end of the run closes.
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
from typing import BinaryIO, NamedTuple

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollart.errors import WeightError, boundary, writing
from rollart.store.owner import Claim, claim
from rollart.types import Bucket, Probe, WeightManifest, WeightVersion

FIRST_LOOK_S = 0.01
"""Until a bucket that is not seen is looked for again; doubled each time."""
MANIFEST = "manifest.json"
BUCKETS = "model-*.safetensors"
VERSION = re.compile(r"v(\d{8,})")
MANIFESTS = TypeAdapter(WeightManifest)


class Mapped(NamedTuple):
    """One bucket in this process's memory, and the digest of what it holds."""

    tensors: dict[str, Tensor]
    num_bytes: int
    digest: str


class BucketStore:
    """One run's versions. Making one costs nothing; any number of processes may have one for the same run."""

    def __init__(self, directory: Path, bucket_bytes: int, *, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a bucket that a manifest names may take to be seen here."""
        self.directory = directory
        self.bucket_bytes = bucket_bytes
        self._patience_s = patience_s
        self._claim: Claim | None = None

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        """Write all buckets, then the manifest. Pushing a version again replaces it; old mappings stay valid.

        A tensor larger than `bucket_bytes` gets a bucket of its own. Raises StoreFull, and then removes what it has
        written: a part of a version would take the room that is missing.
        """
        folder, what = self.folder(version), f"push of version {version} to {self.directory}"
        with boundary(WeightError, what), writing(what), _whole_or_gone(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / MANIFEST).unlink(missing_ok=True)
            buckets: list[Bucket] = []
            places: dict[str, str] = {}
            for members in self._split(tensors):
                # The number of buckets is not in their names: it is known when the last tensor has come.
                path = folder / f"model-{len(buckets) + 1:05d}.safetensors"
                places |= dict.fromkeys(members, path.name)
                buckets.append(_write_bucket(path, members))
                members.clear()  # or they would live on beside the next bucket's
            for path in set(folder.glob(BUCKETS)) - {self.directory / bucket.name for bucket in buckets}:
                path.unlink()  # of an earlier push that was split otherwise
            self._complete(folder, places)
            manifest = WeightManifest(version=version, buckets=tuple(buckets), probe=probe)
            hidden = folder / f".{MANIFEST}"
            hidden.write_text(json.dumps(MANIFESTS.dump_python(manifest)))
            os.replace(hidden, folder / MANIFEST)
        return manifest

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        """The manifest of a version, or None while it is not complete (or was dropped)."""
        try:
            text = (self.folder(version) / MANIFEST).read_text()
        except OSError:
            return None
        with boundary(WeightError, f"manifest of version {version} in {self.directory}"):
            return MANIFESTS.validate_json(text)

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, Mapped] | None = None) -> dict[str, Tensor]:
        """Map a version's tensors, digests checked. No copy: they are views of shared pages.

        Writing to one changes a private page, never the store. `ahead`: buckets that were mapped before, by name; one
        that is not what the manifest says is mapped again. Raises WeightError that names a missing or damaged bucket.
        """
        found: dict[str, Tensor] = {}
        for bucket in manifest.buckets:
            found |= self._checked(bucket, (ahead or {}).get(bucket.name))
        return found

    def appeared(self, version: WeightVersion) -> list[str]:
        """The names of the buckets of a version that are there by now, in order."""
        folder = self.folder(version)
        return [f"{folder.name}/{path.name}" for path in sorted(folder.glob(BUCKETS))]

    def map_bucket(self, name: str) -> Mapped:
        """Map one bucket as it is, and take its digest. Raises WeightError where it is not there."""
        tensors: dict[str, Tensor] = {}
        try:
            with open(self.directory / name, "rb") as file:
                size, digest = _size_and_digest(file)
                # By its handle: another push may have given the name to other bytes. Mapped copy-on-write: pages stay
                # shared until someone writes. A file that is not readable has another digest than its manifest says.
                with suppress(SafetensorError), safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as opened:
                    tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
        except FileNotFoundError:
            raise WeightError(f"weight bucket {name}: missing from {self.directory}") from None
        except OSError as error:
            raise WeightError(f"weight bucket {name}: cannot be mapped ({error.strerror})") from error
        return Mapped(tensors, size, digest)

    async def drop_before(self, version: WeightVersion) -> None:
        """Forget all versions older than this one. Mappings that engines hold stay valid until they let go."""
        await asyncio.to_thread(self._drop_before, version)

    def claim(self) -> bool:
        """Own the store for as long as this process lives. False where another live run does."""
        self._claim = self._claim or claim(self.directory)
        return self._claim is not None

    def close(self) -> None:
        """Remove everything of this run, also what a killed process left behind. Other live runs keep theirs."""
        if self.claim() and self._claim is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._claim.release()
            self._claim = None

    def folder(self, version: WeightVersion) -> Path:
        """Where a version's files are."""
        return self.directory / f"v{version:08d}"

    def _complete(self, folder: Path, places: Mapping[str, str]) -> None:
        """Write what else the version's folder holds, before its manifest. `places`: the file of each tensor."""
        return

    def _drop_before(self, version: WeightVersion) -> None:
        if not self.directory.is_dir():
            return
        for folder in sorted(self.directory.iterdir()):
            found = VERSION.fullmatch(folder.name)
            if found and int(found[1]) < version:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _split(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Consecutive tensors, as many as fit in a bucket. Each is asked for once, when its turn comes: the splitter of
        huggingface_hub wants all sizes first, which needs all tensors."""
        members: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors.items():
            if members and size + tensor.nbytes > self.bucket_bytes:
                yield members
                members, size = {}, 0
            members[name] = tensor.contiguous()
            size += tensor.nbytes
        if members:
            yield members

    def _checked(self, bucket: Bucket, known: Mapped | None) -> dict[str, Tensor]:
        """The bucket's tensors, if its bytes are what the manifest says; or WeightError."""
        if known is not None and (known.num_bytes, known.digest) == (bucket.num_bytes, bucket.digest):
            return known.tensors
        found = self._seen(bucket)
        if found.num_bytes != bucket.num_bytes:
            raise WeightError(
                f"weight bucket {bucket.name}: damaged, {found.num_bytes} bytes instead of {bucket.num_bytes}"
            )
        if found.digest != bucket.digest:
            raise WeightError(f"weight bucket {bucket.name}: damaged, digest {found.digest} instead of {bucket.digest}")
        return found.tensors

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
                os.listdir((self.directory / bucket.name).parent)  # or a client's cache may go on without it


@contextmanager
def _whole_or_gone(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_bucket(path: Path, members: dict[str, Tensor]) -> Bucket:
    hidden = path.with_name(f".{path.name}")
    save_file(members, hidden, {"format": "pt"})
    with open(hidden, "rb") as file:
        size, digest = _size_and_digest(file)
    os.replace(hidden, path)
    return Bucket(name=f"{path.parent.name}/{path.name}", num_bytes=size, digest=digest)


def _size_and_digest(file: BinaryIO) -> tuple[int, str]:
    size, crc = os.fstat(file.fileno()).st_size, 0
    if size:
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            crc = zlib.crc32(mapped)
    return size, f"crc32:{crc:08x}"
