"""NVIDIA's Multi-Process Service: several processes on one GPU at the same time, each with a share of it.

Without it processes take turns on a GPU. One control daemon per run, with a directory of its own, so that no other
run's processes meet ours there; it ends with this process, however that ends.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rollart.errors import ClusterError
from rollart.workers import guard
from rollart.workers.launch import last_output, spawn

CONTROL = "nvidia-cuda-mps-control"
START_S = 20.0


def share_of(share: float) -> dict[str, str]:
    """What a process that is under the daemon needs to have this share of a GPU's multiprocessors."""
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * share:g}"}


class Mps:
    """The daemon of one run."""

    variables: dict[str, str]
    """With which a process finds it, and so do those that it starts."""

    def __init__(self, log_dir: Path) -> None:
        if shutil.which(CONTROL) is None:
            raise ClusterError(f"a share of a GPU needs {CONTROL}, which comes with NVIDIA's driver; remove `share`")
        # Sockets have short names: a run directory's may be too long.
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-mps-")
        self._log = log_dir / "mps.log"
        pipe, logs = Path(self._folder.name) / "pipe", Path(self._folder.name) / "log"
        for folder in (pipe, logs):
            folder.mkdir()
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        life, self._life = os.pipe()
        self._process = spawn(
            [sys.executable, guard.__file__, str(life), CONTROL, "-f"],
            self._log,
            {**os.environ, **self.variables},
            pass_fds=(life,),
        )
        os.close(life)
        self._wait()

    def environment(self, share: float) -> dict[str, str]:
        """What a process needs to have this share of a GPU's multiprocessors."""
        return {**self.variables, **share_of(share)}

    def close(self) -> None:
        """After all processes that use it have ended."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        self._process.wait()
        self._folder.cleanup()

    def _wait(self) -> None:
        """Until the daemon answers. Raises ClusterError."""
        until = time.monotonic() + START_S
        while True:
            asked = subprocess.run(
                [CONTROL],
                input="get_server_list\n",
                env={**os.environ, **self.variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=START_S,
            )
            if asked.returncode == 0:
                return
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise ClusterError(f"{CONTROL} does not answer: {asked.stderr.strip()}; {last_output(self._log)}")
            time.sleep(0.1)
