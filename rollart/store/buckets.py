"""Weight versions as folders of safetensors files: what the stores have in common.

Owns: one directory per run (`index.py` says what is in it), on a disk or in shared memory (`media.py`).
A bucket is what travels and what has a digest: a file of consecutive tensors, or a slice of the file of one tensor that
is larger than `bucket_bytes`. Invariants: a bucket does not change once the index names it; its digest is checked
before anybody gets a tensor of it; a mapping outlives the dropping of its version; a push holds the tensors of one
bucket at a time, and the tensor after them, where tensors are made when they are asked for (a sharded trainer's).
The trainer pushes, engines fetch, and the end of the run closes.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.errors import WeightError, boundary, writing
from rollart.store.digests import digest_of, name_of, new_digest
from rollart.store.format import Bytes, Weight, laid_out, sliced, tensors_of
from rollart.store.index import (
    WEIGHTS,
    Writer,
    drop_before,
    folder_name,
    pulled,
    read_index,
    read_manifest,
)
from rollart.store.media import Medium, SharedMemory
from rollart.store.owner import Claim, claim
from rollart.types import Bucket, Probe, Pulled, WeightManifest, WeightVersion

FIRST_LOOK_S = 0.01
"""Until a bucket that is not seen is looked for again; doubled each time."""


class MappedFile:
    """One file of a version in this process's memory, and the digests of what was looked at of it."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        self._seen: dict[tuple[int, int], str] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._raw)

    def digest(self, bucket: Bucket) -> str:
        """Of the bytes at this bucket's place, taken once."""
        place = (bucket.start, bucket.num_bytes)
        if place not in self._seen:
            self._seen[place] = self._digest_at(bucket)
        return self._seen[place]

    def looked_at(self, bucket: Bucket) -> bool:
        """Whether its digest was taken."""
        return (bucket.start, bucket.num_bytes) in self._seen

    def holds(self, buckets: Sequence[Bucket]) -> bool:
        """Whether these are what it was found to hold. Nothing is read for it."""
        return all(self._seen.get((one.start, one.num_bytes)) == one.digest for one in buckets)

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(torch.from_numpy(self._raw))

    def _digest_at(self, bucket: Bucket) -> str:
        return digest_of(self._raw[bucket.start : bucket.start + bucket.num_bytes])


class BucketStore:
    """One run's versions. Making one costs nothing; any number of processes may have one for the same run."""

    in_memory = True
    """What is fetched is in this host's memory for as long as a tensor of it lives, and may be computed with there."""

    def __init__(self, directory: Path, bucket_bytes: int, medium: Medium, *, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a bucket that a manifest names may take to be seen here."""
        self.directory = directory
        self.bucket_bytes = bucket_bytes
        self.medium = medium
        self._patience_s = patience_s
        self._claim: Claim | None = None

    def push(self, version: WeightVersion, tensors: Mapping[str, Weight], probe: Probe | None = None) -> WeightManifest:
        """Write all buckets, then the manifest. Pushing a version again replaces it; old mappings stay valid.

        Raises StoreFull, and then removes what it has written: a part of a version would take the room that is missing.
        """
        folder, what = self.folder(version), f"push of version {version} to {self.directory}"
        with boundary(WeightError, what), writing(what), _whole_or_gone(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            index, places = Writer(folder), dict[str, str]()
            for number, members in enumerate(split(tensors, self.bucket_bytes), 1):
                path = folder / file_name(number)
                places |= dict.fromkeys(members, path.name)
                for bucket in self._write(path, members):
                    index.add(bucket)
                members.clear()  # or they would live on beside the next file's
            of_now = {folder / file for file in places.values()}
            self.medium.retire(sorted(set(folder.glob(WEIGHTS)) - of_now))  # of a push that was split otherwise
            self._complete(folder, places)
            manifest = WeightManifest(version=version, buckets=tuple(index.buckets), probe=probe)
            index.complete(manifest)
        return manifest

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        """The manifest of a version, or None while it is not complete (or was dropped)."""
        with boundary(WeightError, f"manifest of version {version} in {self.directory}"):
            return read_manifest(self.folder(version))

    def fetch(self, manifest: WeightManifest, ahead: Mapping[str, MappedFile] | None = None) -> dict[str, Tensor]:
        """Map a version's tensors, digests checked. No copy: they are views of shared pages.

        Writing to one changes a private page, never the store. `ahead`: files that were mapped before, by name; one
        that is not what the manifest says is mapped again. Raises WeightError that names a missing or damaged bucket.
        """
        found: dict[str, Tensor] = {}
        for name, grouped in groupby(manifest.buckets, lambda bucket: bucket.name):
            buckets, known = list(grouped), (ahead or {}).get(name)
            file = known if known is not None and known.holds(buckets) else self._checked(name, buckets)
            with boundary(WeightError, f"weights in {name}"):
                found |= file.tensors()
        return found

    def appeared(self, version: WeightVersion) -> tuple[Bucket, ...]:
        """The buckets of a version that are there by now, in order."""
        with boundary(WeightError, f"index of version {version} in {self.directory}"):
            found = read_index(self.folder(version))
        return found.buckets if found is not None else ()

    def may_come(self, version: WeightVersion) -> bool:
        """Whether a version that is not complete may still become so here, without another push. Raises StoreFull."""
        return True

    def map_file(self, name: str) -> MappedFile:
        """Map one file as it is. Raises WeightError where it is not there."""
        try:
            return MappedFile(self.medium.mapped(self.directory / name))
        except FileNotFoundError:
            raise WeightError(f"weight bucket {name}: missing from {self.directory}") from None
        except (OSError, ValueError) as error:
            raise WeightError(f"weight bucket {name}: cannot be mapped ({error})") from error

    async def drop_before(self, version: WeightVersion) -> None:
        """Forget all versions older than this one. Mappings that engines hold stay valid until they let go."""
        await asyncio.to_thread(drop_before, self.directory, self.medium, version)

    def pulled(self, version: WeightVersion) -> Pulled:
        """What it took to bring it to this host; nothing where it is read where it was written."""
        return pulled(self.folder(version))

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
        """Where a version's files are on this host: safetensors by tensor name, and an index of them."""
        return self.directory / folder_name(version)

    def _complete(self, folder: Path, places: Mapping[str, str]) -> None:
        """Write what else the version's folder holds, before its manifest. `places`: the file of each tensor."""
        return

    def _write(self, path: Path, members: Mapping[str, Weight]) -> Iterator[Bucket]:
        """Write one file; each of its buckets as it is whole."""
        head, ordered = laid_out(members)
        name = f"{path.parent.name}/{path.name}"
        with self.medium.writing(path, len(head) + sum(tensor.nbytes for tensor in ordered)) as put:
            for start, parts in sliced(head, ordered, self.bucket_bytes):
                digest, end = new_digest(), start
                for at, piece in parts:
                    put(at, piece)
                    digest.update(piece)
                    end = at + len(piece)
                yield Bucket(name=name, num_bytes=end - start, digest=name_of(digest), start=start)

    def _checked(self, name: str, buckets: Sequence[Bucket]) -> MappedFile:
        """The file, if its bytes are what the manifest says; or WeightError."""
        num_bytes = buckets[-1].start + buckets[-1].num_bytes
        file = self._seen(name, num_bytes)
        if file.num_bytes != num_bytes:
            raise WeightError(f"weight bucket {name}: damaged, {file.num_bytes} bytes instead of {num_bytes}")
        damaged = [bucket for bucket in buckets if file.digest(bucket) != bucket.digest]
        if damaged and isinstance(self.medium, SharedMemory):
            # Or somebody has written to tensors of an earlier fetch, on pages of ours alone.
            self.medium.forget(self.directory / name)
            file = self._seen(name, num_bytes)
            damaged = [bucket for bucket in buckets if file.digest(bucket) != bucket.digest]
        for bucket in damaged:
            raise WeightError(
                f"weight bucket {name}{f' at {bucket.start}' if bucket.start else ''}: damaged, digest "
                f"{file.digest(bucket)} instead of {bucket.digest}"
            )
        return file

    def _seen(self, name: str, num_bytes: int) -> MappedFile:
        """The file, once it is seen here with all its bytes: a network file system shows what another machine wrote a
        little later. What is still missing when our patience ends is lost."""
        until_s, wait_s = time.monotonic() + self._patience_s, FIRST_LOOK_S
        while True:
            late = time.monotonic() + wait_s > until_s
            try:
                found = self.map_file(name)
            except WeightError:
                if late:
                    raise
            else:
                if late or found.num_bytes >= num_bytes:
                    return found
            time.sleep(wait_s)
            wait_s *= 2
            with suppress(OSError):
                os.listdir((self.directory / name).parent)  # or a client's cache may go on without it


def split(tensors: Mapping[str, Weight], bucket_bytes: int) -> Iterator[dict[str, Weight]]:
    """Consecutive tensors, as many as fit in a bucket. Each is asked for once, when its turn comes: the splitter of
    huggingface_hub wants all sizes first, which needs all tensors."""
    members: dict[str, Weight] = {}
    size = 0
    for name, tensor in tensors.items():
        if members and size + tensor.nbytes > bucket_bytes:
            yield members
            members, size = {}, 0
        members[name] = tensor
        size += tensor.nbytes
    if members:
        yield members


class LaidOut(NamedTuple):
    """One bucket of a push, before it has a place."""

    file: str
    file_bytes: int
    start: int
    num_bytes: int
    pieces: Iterator[tuple[int, Bytes]]
    """Of its bytes, each with its place in the file. Read them before the next bucket is asked for."""


def buckets_of(tensors: Mapping[str, Weight], bucket_bytes: int) -> Iterator[LaidOut]:
    """For stores whose buckets travel one by one instead of being written to a file."""
    for number, members in enumerate(split(tensors, bucket_bytes), 1):
        head, ordered = laid_out(members)
        file_bytes = len(head) + sum(tensor.nbytes for tensor in ordered)
        limit = bucket_bytes if file_bytes - len(head) > bucket_bytes else file_bytes
        for start, pieces in sliced(head, ordered, bucket_bytes):
            yield LaidOut(file_name(number), file_bytes, start, min(limit, file_bytes - start), pieces)
        members.clear()  # or they would live on beside the next file's


def file_name(number: int) -> str:
    """The number of files is not in it: that is known when the last tensor has come."""
    return f"model-{number:05d}.safetensors"


@contextmanager
def _whole_or_gone(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
