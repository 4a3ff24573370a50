"""Files that a job names, on machines that do not have them: the model's directory, task files.

The coordinator describes what it has (`described`). A worker's machine uses its own copy under the same path where that
holds the same; else one in the machine's cache, by content, which the coordinator sends once per machine (`Receiver`).
Invariant: a name in the cache appears when all its files are whole, and never changes. `cluster/ray.py` moves the
bytes; a worker asks where they are (`rollart.workers.setup`).
"""

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.config.job import Job
from rollart.config.settings import Settings
from rollart.errors import ClusterError

CHUNK_BYTES = 8_000_000
"""Sent at a time: what a worker's machine must hold of a file."""
WHOLE_BYTES = 16_000_000
"""Up to this size all of a file counts for its digest; of a larger one `SAMPLES` blocks, spread evenly: other weights
of the same shapes differ in all of them, and a machine need not read a whole model twice."""
SAMPLES, SAMPLE_BYTES = 64, 65_536
HIDDEN = ".unfinished-"


class Carried(Settings):
    """A directory (its plain files) or one file, as the coordinator has it."""

    path: str
    """Absolute; as in the job."""
    digest: str
    sizes: dict[str, int]
    """By file name."""
    roles: tuple[str, ...]
    """The workers that need it."""


def carried_by(job: Job) -> list[Carried]:
    """All that the workers of a job read from paths that the job names."""
    train = job.train
    trainers = ("trainer", "rank")
    wanted: dict[str, set[str]] = {job.model.path: {"engine", "shard", *trainers}}
    for pool in job.judge_pools:
        assert pool.judge is not None
        wanted.setdefault(pool.judge.path, set()).update(("engine", "shard"))
    for path in (train.reference, train.lora.adapter if train.lora is not None else None):
        if path is not None:
            wanted.setdefault(path, set()).update(trainers)
    played = [task.use for task in job.tasks] + [task.agent.function for task in job.tasks if task.agent]
    rewards = job.asked_rewards.values() if job.cluster.coordinators > 1 else ()
    scoring = [reward.function for reward in rewards if reward.function is not None]
    for code in [*played, *scoring]:
        file = code.rpartition(":")[0] if ".py:" in code else code
        if file.endswith(".py"):
            wanted.setdefault(file, set()).update(("environments", "shard") if code in played else ("shard",))
    return [described(Path(path), sorted(roles)) for path, roles in wanted.items()]


def described(path: Path, roles: Iterable[str] = ()) -> Carried:
    """Raises OSError where it is not there."""
    digest, sizes = hashlib.sha256(), {}
    for file in _files(path):
        sizes[file.name] = file.stat().st_size
        digest.update(f"{file.name}\0{sizes[file.name]}\0".encode())
        for block in _sampled(file, sizes[file.name]):
            digest.update(block)
    if not sizes:
        raise FileNotFoundError(f"{path} holds no files")
    return Carried(path=str(path), digest=digest.hexdigest()[:32], sizes=sizes, roles=tuple(roles))


def here(carried: Carried) -> Path | None:
    """Where this machine has it: under its own path, or in the cache."""
    own = Path(carried.path)
    try:
        if described(own).digest == carried.digest:
            return own
    except OSError:
        pass
    kept = _cache() / carried.digest
    if not kept.is_dir():
        return None
    return kept if own.name not in carried.sizes else kept / own.name  # one file has its own name inside


def with_paths_here(body: Any, carried: Iterable[Carried]) -> Any:
    """Plain data in which every path that is carried is where this machine has it. Raises ClusterError."""
    places: dict[str, str] = {}
    for one in carried:
        found = here(one)
        if found is None:
            raise ClusterError(f"{one.path} is not on this machine, and was not sent; share it, or copy it there")
        places[one.path] = str(found)
    return _replaced(body, places)


class Receiver:
    """Takes one that is not here, file by file. Two at a time may receive the same: the first stays."""

    def __init__(self, carried: Carried) -> None:
        self._carried = carried
        _remove_abandoned(_cache())
        self._hidden = _cache() / f"{HIDDEN}{secrets.token_hex(8)}"
        try:
            self._hidden.mkdir(parents=True)
            self._lock = os.open(self._hidden, os.O_RDONLY)  # held while this process lives
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ClusterError(
                f"{carried.path} is not on this machine, and {_cache()} cannot hold it ({error.strerror}); set "
                "XDG_CACHE_HOME there to a directory that can be written"
            ) from error

    def take(self, name: str, data: bytes) -> None:
        """The next bytes of a file."""
        assert name in self._carried.sizes, name
        with open(self._hidden / name, "ab") as file:
            file.write(data)

    def finish(self) -> None:
        """All bytes are here. Raises ClusterError where they are not what was described."""
        name = Path(self._carried.path).name
        inside = self._hidden / name if name in self._carried.sizes else self._hidden
        try:
            if described(inside).digest != self._carried.digest:
                raise ClusterError(f"{self._carried.path} changed while it was sent; start the job again")
            os.rename(self._hidden, _cache() / self._carried.digest)
        except OSError as error:  # another's is there
            if here(self._carried) is None:
                raise ClusterError(f"{self._carried.path} could not be kept: {error}") from error
        finally:
            self._drop()

    def _drop(self) -> None:
        """Forget what came, where it was not kept."""
        shutil.rmtree(self._hidden, ignore_errors=True)
        os.close(self._lock)


def chunks(carried: Carried) -> Iterator[tuple[str, bytes]]:
    """All its bytes, in order, from this machine; an empty file is one empty chunk."""
    for file in _files(here(carried) or Path(carried.path)):
        with file.open("rb") as opened:
            data = opened.read(CHUNK_BYTES)
            yield file.name, data
            while data := opened.read(CHUNK_BYTES):
                yield file.name, data


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())


def _sampled(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            yield file.read()
            return
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "rollart" / "files"


def _remove_abandoned(cache: Path) -> None:
    """What a process left that was killed while it received."""
    for path in cache.glob(f"{HIDDEN}*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _replaced(data: Any, places: Mapping[str, str]) -> Any:
    match data:
        case str():
            file, colon, name = data.rpartition(":")
            return places.get(data) or (f"{places[file]}:{name}" if colon and file in places else data)
        case Mapping():
            return {key: _replaced(value, places) for key, value in data.items()}
        case list() | tuple():
            return [_replaced(item, places) for item in data]
    return data
