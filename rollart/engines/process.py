"""Starts an inference server as a child on loopback, and waits until it answers.

Owns: the server's process (through `guard.py`), its port and its log. The server ends with this process, however this
process ends. Nothing here knows what kind of server it is.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from rollart.errors import EngineError
from rollart.workers import guard
from rollart.workers.launch import last_output, spawn

POLL_S = 0.25


def free_port() -> int:
    """A loopback port nobody has now. The server may still lose it to someone else: then it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server below this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        life, self._life = os.pipe()
        self._process = spawn(
            [sys.executable, guard.__file__, str(life), *command],
            log,
            # Our own PYTHONPATH would put our packages before those of the server's interpreter.
            {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment),
            pass_fds=(life,),
            cwd=log.parent,
        )
        os.close(life)

    async def ready(self, url: str, limit_s: float, token: str) -> None:
        """Wait until `url` answers 200 to who shows `token`. Raises EngineError with the server's last words."""
        until = asyncio.get_running_loop().time() + limit_s
        shown = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0, headers=shown) as client:
            while True:
                if self._process.poll() is not None:
                    raise EngineError(f"the server ended before it answered; {last_output(self._log)}")
                try:
                    if (await client.get(url)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not up yet
                if asyncio.get_running_loop().time() > until:
                    raise EngineError(f"the server did not answer within {limit_s:g} s; {last_output(self._log)}")
                await asyncio.sleep(POLL_S)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def stop(self) -> None:
        """End the server and all below it, and wait until it is gone."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        await asyncio.to_thread(self._process.wait)
