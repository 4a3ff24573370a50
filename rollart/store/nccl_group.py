"""A process group of the trainer and some engines, apart from torch's global one: NCCL between GPUs, gloo between CPUs.

A group that lost a member is of no use any more. gloo says so at once; NCCL would wait forever, so a broadcast has a
limit, and `abort` ends it.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

STALL_S = 60.0
"""A broadcast that takes longer has lost a member."""
NEVER = timedelta(days=1)
"""For NCCL's own watchdog, which would end the process."""


class GroupLost(Exception):
    """A process group has lost a member, or could not be made."""


class Group:
    """The trainer (rank 0) and the engines `members`, in this order."""

    def __init__(self, name: str, members: list[int], rank: int, store: Store, device: torch.device, host: str) -> None:
        self.name = name
        self.members = members
        self._device = device
        self._ranks: Any = None
        if not members:
            return
        apart, size = PrefixStore(name, store), len(members) + 1
        try:
            if device.type == "cuda":
                nccl: Any = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
                nccl._timeout = NEVER
                self._side = torch.cuda.Stream(device)
                self._ranks = dist.ProcessGroupNCCL(apart, rank, size, nccl)  # type: ignore[attr-defined]
            else:
                gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout = timedelta(seconds=STALL_S)
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                self._ranks = dist.ProcessGroupGloo(apart, rank, size, gloo)
        except RuntimeError as error:
            raise GroupLost(f"{error}") from error

    def broadcast(self, raw: Tensor) -> Callable[[], None]:
        """Begin to send (the trainer) or to receive. What it returns waits for the end. Raises GroupLost."""
        if self._ranks is None:
            return lambda: None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            if self._device.type != "cuda":
                work = self._ranks.broadcast([raw], options)
                return lambda: _lost_if_it_fails(work.wait)
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                self._ranks.broadcast([raw], options).wait()
                done = self._side.record_event()
        except RuntimeError as error:
            raise GroupLost(f"{error}") from error
        return lambda: self._until(done)

    def abort(self) -> None:
        """Nothing of it is under way any more."""
        if self._ranks is not None:
            self._ranks.abort()
            self._ranks = None

    def _until(self, done: torch.cuda.Event) -> None:
        """NCCL waits for a dead member forever."""
        until_s = time.monotonic() + STALL_S
        while not done.query():
            if time.monotonic() > until_s:
                raise GroupLost(f"a broadcast took longer than {STALL_S:g} s")
            time.sleep(0.0005)


def _lost_if_it_fails(work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError as error:
        raise GroupLost(f"{error}") from error
