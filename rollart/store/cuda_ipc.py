"""Weight versions in the memory of one GPU, where trainer and engines compute on the same: CUDA IPC.

The trainer copies each version into memory of its own on the GPU; engines map that and copy from it at the swap, from
the GPU to itself. In the store's folder (`/dev/shm`, as `shm.py`) lies, in place of each file of weights, a small one
that says where its bytes are: index, manifest, dropping and repair are those of any store. Who reads holds a lock on
that small file, so memory is used again only when nobody reads it; the driver frees a dead process's part of it.
Memory: a copy of each version that is alive, two while one is pushed (`model/mapped.py`).
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rollart.errors import StoreFull, WeightError
from rollart.model.mapped import CudaBytes, CudaRuntime
from rollart.store.buckets import BucketStore, MappedFile
from rollart.store.device import DeviceFile, digest_on_device
from rollart.store.format import Weight, laid_out, sliced
from rollart.store.media import DiskMedium, Lease, leased
from rollart.store.owner import ROOT
from rollart.store.shm import folder_of
from rollart.types import Bucket


class _Mapped(CudaBytes):
    """Another process's."""

    lease: Lease

    def __del__(self) -> None:
        if hasattr(self, "lease"):
            self.runtime.close(self.pointer)


class _Own:
    """Memory of the trainer's process that is, or was, a file of a version."""

    def __init__(self, runtime: CudaRuntime, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.runtime = runtime
        self.pointer = runtime.allocate(num_bytes)
        self.raw = CudaBytes(runtime, self.pointer, num_bytes).tensor()
        self._file: int | None = None

    def become(self, path: Path) -> None:
        """Let others find it there."""
        self.let_go()
        handle = self.runtime.handle_of(self.pointer)
        told = {"gpu": self.runtime.uuid, "bytes": self.num_bytes, "handle": handle.hex()}
        hidden = path.with_name(f".{path.name}")
        hidden.write_text(json.dumps(told))
        self._file = os.open(hidden, os.O_RDWR)
        os.replace(hidden, path)
        _OWN[handle.hex()] = self

    @property
    def is_unused(self) -> bool:
        """Its version was dropped, and nobody reads it."""
        if self._file is None or os.fstat(self._file).st_nlink:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def free(self) -> None:
        self.let_go()
        _OWN.pop(self.runtime.handle_of(self.pointer).hex(), None)
        self.runtime.free(self.pointer)


_OWN: dict[str, _Own] = {}
"""By handle: a process cannot map its own memory (a cluster of type `inline` has one process)."""


class CudaIpcStore(BucketStore):
    """Versions of the run `run_id`, for the processes that compute on `device`."""

    def __init__(self, run_id: str, device: torch.device, bucket_bytes: int = 1 << 30, *, root: Path = ROOT) -> None:
        super().__init__(folder_of(run_id, root), bucket_bytes, DiskMedium())
        self._device = device
        self._runtime: CudaRuntime | None = None
        self._stream: torch.cuda.Stream | None = None
        self._owned: list[_Own] = []

    def map_file(self, name: str) -> MappedFile:
        try:
            lease = leased(self.directory / name)
            told = json.loads(os.pread(lease.handle, 4096, 0))
        except (OSError, ValueError):
            raise WeightError(f"weight bucket {name}: missing from {self.directory}") from None
        if told["handle"] in _OWN:
            mapped: CudaBytes = CudaBytes(self._cuda, _OWN[told["handle"]].pointer, told["bytes"])
            mapped.lease = lease  # type: ignore[attr-defined]
            return DeviceFile(mapped.tensor())
        if told["gpu"] != self._cuda.uuid:
            raise WeightError(
                f"weight bucket {name}: is on the GPU {told['gpu']}, and this engine computes on {self._cuda.uuid}; "
                "weights.type cuda_ipc is for one GPU, give engines and trainer the same device or take another type"
            )
        mapped = _Mapped(self._cuda, self._cuda.open(bytes.fromhex(told["handle"])), told["bytes"])
        mapped.lease = lease
        return DeviceFile(mapped.tensor())

    def _write(self, path: Path, members: Mapping[str, Weight]) -> Iterator[Bucket]:
        head, ordered = laid_out(members)
        memory = self._memory(len(head) + sum(tensor.nbytes for tensor in ordered))
        path.unlink(missing_ok=True)  # of a push before: who reads that goes on
        memory.become(path)
        for start, pieces in sliced(head, ordered, self.bucket_bytes):
            end = start
            with torch.cuda.stream(self._side):  # beside the step that is trained
                for at, piece in pieces:
                    end = at + len(piece)
                    memory.raw[at:end].copy_(torch.from_numpy(piece), non_blocking=True)
                digest = digest_on_device(memory.raw[start:end])
            yield Bucket(f"{path.parent.name}/{path.name}", end - start, digest, start)

    def _memory(self, num_bytes: int) -> _Own:
        """Of a version that was dropped, where one is of that size; others that nobody uses are freed."""
        unused = [one for one in self._owned if one.is_unused]
        for one in unused:
            if one.num_bytes == num_bytes:
                return one
        for one in unused:
            self._owned.remove(one)
            one.free()
        self._owned.append(_Own(self._cuda, num_bytes))
        return self._owned[-1]

    @property
    def _cuda(self) -> CudaRuntime:
        if self._runtime is None:
            self._runtime = CudaRuntime(self._device, WeightError, StoreFull, wanted="a version of the weights")
        return self._runtime

    @property
    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream
