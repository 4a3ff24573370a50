"""`python -m tests.real.hashed train JOB ...`: rollart, whose workers note in a file what weights they push and hold.

The trainer notes the hash of every version that it pushes, before the push and after; an engine the hash of its live
parameters after each swap, and after each swap that failed. Pushes and pulls take longer than they would, so that a
test can strike in the middle. Everything else is the real thing.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOTES = "PYTHON_ROLLART_TEST_NOTES"
PUSH_S, PULL_S = 1.5, 0.4
"""How much longer a push takes in all, and a pull for each file."""


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


class Slow(Mapping[str, Any]):
    """Tensors that take their time."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        time.sleep(PUSH_S / len(self._tensors))
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
        manifest = self._store.push(version, Slow(tensors), probe)
        note(event="pushed", version=version)
        return manifest


async def start(body: str, ranks: Sequence[Any] = ()) -> Any:
    from rollart.launch import worker
    from rollart.workers.setup import WorkerSetup

    name = WorkerSetup.model_validate_json(body).name
    made: Any = await worker.start(body, ranks)
    if name == "trainer":
        made._store = NotedStore(made._store)
        return made
    from rollart.model.network import named_weights
    from rollart.store.buckets import BucketStore

    core, swap, map_file = made._core, made.swap, BucketStore.map_file

    async def holds(event: str, version: int) -> None:
        found = await made._call(lambda: (core.version, hash_of(named_weights(core._model))))
        note(event=event, engine=name, asked=version, version=found[0], hash=found[1])

    async def noted(manifest: Any) -> Any:
        try:
            report = await swap(manifest)
        except BaseException:
            await holds("failed", manifest.version)
            raise
        await holds("swapped", manifest.version)
        return report

    def slow(store: BucketStore, file: str) -> Any:
        note(event="pull", engine=name, version=int(file.split("/")[0][1:]))
        time.sleep(PULL_S)
        return map_file(store, file)

    made.swap = noted
    BucketStore.map_file = slow  # type: ignore[method-assign,assignment]
    await holds("began", 0)
    return made


if __name__ == "__main__":
    from rollart.cli import main
    from rollart.launch import worker

    worker.START = "tests.real.hashed:start"
    sys.exit(main(sys.argv[1:]))
