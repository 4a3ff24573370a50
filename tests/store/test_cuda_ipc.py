"""Versions in the memory of one GPU, between processes: who reads finds the bytes; a death costs only itself."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollart.store.cuda_ipc import CudaIpcStore
from tests.contracts.store import tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

READER = """
import sys, torch
from pathlib import Path
from rollart.store.cuda_ipc import CudaIpcStore
from tests.contracts.store import is_version
store = CudaIpcStore("x", torch.device("cuda:0"), 4096, root=Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    version = int(line)
    found = {}
    for name in sorted({bucket.name for bucket in store.manifest(version).buckets}):
        found.update(store.map_file(name).tensors())
    print(is_version(found, version), next(iter(found.values())).is_cuda, flush=True)
"""


class Reader:
    """An engine's process."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", READER, str(root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def reads(self, version: int) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version}\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.mark.timeout(120)  # two processes load torch and CUDA
def test_another_process_reads_each_version_and_its_death_frees_the_memory(tmp_path: Path) -> None:
    trainer = CudaIpcStore("x", torch.device("cuda:0"), 4096, root=tmp_path)
    trainer.push(1, tensors(1))
    first, second = Reader(tmp_path), Reader(tmp_path)
    try:
        assert first.reads(1) == second.reads(1) == "True True"
        first.kill()
        for version in range(2, 12):
            trainer.push(version, tensors(version))
            asyncio.run(trainer.drop_before(version))
            assert second.reads(version) == "True True"
        free_before = torch.cuda.mem_get_info()[0]
        for version in range(12, 40):
            trainer.push(version, tensors(version))
            asyncio.run(trainer.drop_before(version))
            assert second.reads(version) == "True True"
        assert torch.cuda.mem_get_info()[0] >= free_before - (4 << 20), "memory of dropped versions is used again"
    finally:
        first.kill()
        second.kill()
        trainer.close()
