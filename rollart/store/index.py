"""What a store's folders look like on a host, and the small files that say what is there. Imports no torch.

    v00000003/model-00001.safetensors    tensors by name; one that is larger than a bucket has a file of its own
    v00000003/buckets.jsonl              a line for each bucket that is whole: a file, or a slice of a large one
    v00000003/manifest.json              last, by rename: a version with a manifest is complete

Invariant: what a line of the index names does not change any more. A version that is pushed again has a new index,
whose first line is another.
"""

import errno
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from rollart.store.media import Medium
from rollart.types import Bucket, Pulled, WeightManifest, WeightVersion

MANIFEST = "manifest.json"
PULLED = "pulled.json"
"""Where a version was brought from elsewhere: what that took."""
INDEX = "buckets.jsonl"
WEIGHTS = "model-*.safetensors"
VERSION = re.compile(r"v(\d{8,})")
MANIFESTS = TypeAdapter(WeightManifest)


class Found(NamedTuple):
    """What of a version is there by now."""

    push: str
    """Names this push of the version: another one has other bytes, perhaps."""
    buckets: tuple[Bucket, ...]


def folder_name(version: WeightVersion) -> str:
    return f"v{version:08d}"


def versions_in(directory: Path) -> list[WeightVersion]:
    """Those that have a folder, oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for name in names if (found := VERSION.fullmatch(name)))


def pulled(folder: Path) -> Pulled:
    """How this version came to this host; it did not where it was written here."""
    try:
        return Pulled(*json.loads((folder / PULLED).read_text()))
    except (OSError, ValueError, TypeError):
        return Pulled()


def void(folder: Path) -> None:
    """The version is not complete any more."""
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / INDEX).unlink(missing_ok=True)


class Writer:
    """Writes a version's index, line by line."""

    def __init__(self, folder: Path, found: Found | None = None) -> None:
        """`found`: go on with this index, which may be there already, or may be new."""
        self._folder = folder
        self.push = found.push if found is not None else secrets.token_hex(8)
        self.buckets = list(found.buckets) if found is not None else []
        if found is None or read_index(folder) != found:
            void(folder)
            hidden = folder / f".{INDEX}"
            hidden.write_text("".join(f"{json.dumps(line)}\n" for line in (self.push, *self.buckets)))
            os.replace(hidden, folder / INDEX)

    def add(self, bucket: Bucket) -> None:
        """It is whole. Raises OSError, and then the index is as it was: a part of a line would spoil the next one."""
        with open(self._folder / INDEX, "ab", buffering=0) as file:
            size, line = os.fstat(file.fileno()).st_size, json.dumps(bucket).encode() + b"\n"
            if file.write(line) != len(line):
                os.truncate(file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder / INDEX)
        self.buckets.append(bucket)

    def complete(self, manifest: WeightManifest) -> None:
        """All of it is whole."""
        hidden = self._folder / f".{MANIFEST}"
        hidden.write_text(json.dumps(MANIFESTS.dump_python(manifest)))
        os.replace(hidden, self._folder / MANIFEST)


def read_index(folder: Path) -> Found | None:
    """None where no push of it has begun. A line that is being written is not there yet."""
    try:
        text = (folder / INDEX).read_text()
    except OSError:
        return None
    lines = text[: text.rfind("\n") + 1].splitlines()
    return Found(json.loads(lines[0]), tuple(Bucket(*json.loads(line)) for line in lines[1:])) if lines else None


def read_manifest(folder: Path) -> WeightManifest | None:
    """None while the version is not complete. Raises ValueError where it cannot be read."""
    try:
        text = (folder / MANIFEST).read_text()
    except OSError:
        return None
    return MANIFESTS.validate_json(text)


def drop_before(directory: Path, medium: Medium, version: WeightVersion) -> None:
    """Remove the versions before this one. The files of the newest of them may be used again."""
    old = [folder for at in versions_in(directory) if at < version and (folder := directory / folder_name(at)).exists()]
    for folder in old:
        void(folder)
    if old:
        medium.retire(sorted(old[-1].glob(WEIGHTS)))
    for folder in old:
        shutil.rmtree(folder, ignore_errors=True)
