"""`python -m tests.real.hashed train JOB ...`: rollart, whose workers note in a file what weights they push and hold.

The trainer notes the hash of every version that it pushes; an engine the hash of its live parameters after each swap,
and after each swap that failed. Where a test asks for it (`Strike`), a push stops when a part of it is there, and a
pull before it reads anything, until the test has done what it wants. Everything else is the real thing.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTES = "PYTHON_ROLLART_TEST_NOTES"


def note(**what: Any) -> None:
    line = json.dumps({**what, "pid": os.getpid()}) + "\n"
    handle = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, line.encode())
    os.close(handle)


def hash_of(tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()


class Strike:
    """A push or a pull of this version, or a newer one, waits for the test."""

    def __init__(self, folder: Path, event: str) -> None:
        self._file = folder / f"hold-{event}"
        self._event = event

    def ask(self, first: int) -> None:
        hidden = self._file.with_suffix(".new")
        hidden.write_text(str(first))
        hidden.rename(self._file)

    def release(self) -> None:
        self._file.unlink()

    def meet(self, version: int) -> None:
        """In the worker."""
        met = False
        while self._file.exists() and version >= int(self._file.read_text()):
            if not met:
                note(event=f"held {self._event}", version=version)
            met = True
            time.sleep(0.01)


class Stopping(Mapping[str, Any]):
    """Tensors, the last of which comes when the test lets it."""

    def __init__(self, tensors: Mapping[str, Any], version: int) -> None:
        self._tensors = tensors
        self._version = version

    def __getitem__(self, name: str) -> Any:
        if name == list(self._tensors)[-1]:
            Strike(Path(os.environ[NOTES]).parent, "push").meet(self._version)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class NotedStore:
    def __init__(self, store: Any) -> None:
        self._store = store

    def push(self, version: int, tensors: Mapping[str, Any], probe: Any = None) -> Any:
        note(event="push", version=version, hash=hash_of(tensors))
        return self._store.push(version, Stopping(tensors, version), probe)


async def start(body: str, ranks: Sequence[Any] = ()) -> Any:
    from rollart.launch import worker
    from rollart.workers.setup import WorkerSetup

    name = WorkerSetup.model_validate_json(body).name
    made: Any = await worker.start(body, ranks)
    if name == "trainer":
        made.store = NotedStore(made.store)
        return made
    from rollart.model.network import named_weights
    from rollart.store.buckets import BucketStore

    core, swap = made.core, made.swap

    async def holds(event: str, version: int) -> None:
        found = await made.call(lambda: (core.version, hash_of(named_weights(core.model))))
        note(event=event, engine=name, asked=version, version=found[0], hash=found[1])

    async def noted(manifest: Any) -> Any:
        try:
            report = await swap(manifest)
        except BaseException:
            await holds("failed", manifest.version)
            raise
        await holds("swapped", manifest.version)
        return report

    kind = type(made.fetch.__self__.store)
    map_file = kind.map_file

    def stopping(store: BucketStore, file: str) -> Any:
        Strike(Path(os.environ[NOTES]).parent, "pull").meet(int(file.split("/")[0][1:]))
        return map_file(store, file)

    made.swap = noted
    kind.map_file = stopping
    await holds("began", 0)
    return made


if __name__ == "__main__":
    from rollart.cli import main
    from rollart.launch import worker

    worker.START = "tests.real.hashed:start"
    sys.exit(main(sys.argv[1:]))
