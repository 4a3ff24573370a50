"""Starts an inference server as a child on loopback, and waits until it answers.

Owns: the server's process (through `guard.py`), its port and its log. The server ends with this process, however this
process ends. Nothing here knows what kind of server it is.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from rollart.engines import guard
from rollart.errors import EngineError

POLL_S = 0.25
TAIL_BYTES = 2000
"""How much of a dead server's log goes into the error."""


def free_port() -> int:
    """A loopback port nobody has now. The server may still lose it to someone else: then it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server below this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        life, self._life = os.pipe()
        # Servers write down how they were started: for nobody else to read.
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, str(life), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(life,),
                start_new_session=True,
                # Our own PYTHONPATH would put our packages before those of the server's interpreter.
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment),
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
                    raise EngineError(f"the server ended before it answered; {self.last_words()}")
                try:
                    if (await client.get(url)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not up yet
                if asyncio.get_running_loop().time() > until:
                    raise EngineError(f"the server did not answer within {limit_s:g} s; {self.last_words()}")
                await asyncio.sleep(POLL_S)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self) -> str:
        tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().replace("\n", " | ")
        return f"see {self._log}; it last said: {tail}"

    async def stop(self) -> None:
        """End the server and all below it, and wait until it is gone."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        await asyncio.to_thread(self._process.wait)
