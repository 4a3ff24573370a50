"""Which interpreter has vLLM: ROLLART_VLLM_PYTHON names it, or it is `.venv-vllm`, as `make test-slow` makes it."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from rollart.engines.launch import PYTHON_VARIABLES

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get(PYTHON_VARIABLES["vllm"]) or str(ROOT / ".venv-vllm" / "bin" / "python")
HEAD_SIZE = 32
"""Of a model's attention: vLLM on a CPU computes none smaller."""
END_S = 30.0

needs_vllm = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"no vLLM: {PYTHON} is not there; `make .venv-vllm` makes it"
)


def left_in(folder: Path) -> list[str]:
    """Living processes that work below this folder, as servers and all that they start do in their run's logs."""
    left: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder):
                left.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return left


def none_left_in(folder: Path) -> None:
    """A guard first lets its server end by itself."""
    until = time.monotonic() + END_S
    while (left := left_in(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
