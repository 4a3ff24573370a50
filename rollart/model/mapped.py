"""Memory that another process of this machine maps: of a GPU by CUDA IPC, of the machine as a file without a name.

On a GPU it is made by the CUDA runtime itself and not by torch, whose own counting of readers never hears of one that
is killed. Used for weights (`store/cuda_ipc.py`) and for prompts that one engine computes for another
(`engines/embedded/handover.py`).
"""

import ctypes
import os
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.errors import BoundaryError, EngineError

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
OUT_OF_MEMORY = 2
"""Of the CUDA runtime."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaRuntime:
    """The part of the CUDA runtime that torch does not give."""

    def __init__(
        self, device: torch.device, error: type[BoundaryError], full: type[BoundaryError], *, wanted: str
    ) -> None:
        """`error`, and `full` where there is no memory for what is `wanted`: what its calls raise."""
        torch.zeros(1, device=device)  # the device's context is this process's from here on
        self.device = device
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._error, self._full, self._wanted = error, full, wanted
        self._library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        self._library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)

    def allocate(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def handle_of(self, pointer: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        found = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), found, ctypes.c_uint(LAZY_PEER_ACCESS))
        return int(pointer.value or 0)

    def close(self, pointer: int) -> None:
        torch.cuda.synchronize(self.device)  # what was asked to be copied from there is copied
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def _call(self, name: str, *arguments: object) -> None:
        with torch.cuda.device(self.device):
            code = getattr(self._library, name)(*arguments)
        if code == OUT_OF_MEMORY:
            raise self._full(f"{self.device} has no memory for {self._wanted} beside what runs there")
        if code:
            raise self._error(f"{name} on {self.device}: CUDA error {code}")


class CudaBytes:
    """Memory of the GPU, as torch takes it without a copy. Lives as long as a tensor of it."""

    def __init__(self, runtime: CudaRuntime, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
        self.runtime = runtime
        self.pointer = pointer

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self.runtime.device)


class MemoryPlace(NamedTuple):
    """By which another process finds it: on a GPU a handle, else a file."""

    num_bytes: int
    file: str = ""
    gpu: str = ""
    handle: str = ""


class Lending:
    """Memory of this process that others may map, for as long as the process lives."""

    def __init__(self, num_bytes: int, device: torch.device, wanted: str) -> None:
        """`wanted`: what it is for. Raises EngineError."""
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later is no memory of the runtime's
            runtime = CudaRuntime(device, EngineError, EngineError, wanted=wanted)
            pointer = runtime.allocate(num_bytes)
            self.raw = CudaBytes(runtime, pointer, num_bytes).tensor()
            self.place = MemoryPlace(num_bytes, gpu=runtime.uuid, handle=runtime.handle_of(pointer).hex())
            _OWN[self.place.handle] = self.raw
        else:
            handle = os.memfd_create("rollart")
            os.truncate(handle, num_bytes)
            self.place = MemoryPlace(num_bytes, file=f"/proc/{os.getpid()}/fd/{handle}")
            self.raw = _of_file(self.place)


_OWN: dict[str, Tensor] = {}
"""By handle: a process cannot map its own memory."""


def mapped(place: MemoryPlace, device: torch.device) -> Tensor:
    """What another process lends. Stays mapped. Raises EngineError."""
    if place.file:
        return _of_file(place)
    if place.handle in _OWN:
        return _OWN[place.handle]
    runtime = CudaRuntime(device, EngineError, EngineError, wanted="what another process lends")
    if place.gpu != runtime.uuid:
        raise EngineError(f"memory of the GPU {place.gpu} cannot be mapped on {runtime.uuid}: give both one device")
    return CudaBytes(runtime, runtime.open(bytes.fromhex(place.handle)), place.num_bytes).tensor()


def _of_file(place: MemoryPlace) -> Tensor:
    return torch.from_file(place.file, shared=True, size=place.num_bytes, dtype=torch.uint8)
