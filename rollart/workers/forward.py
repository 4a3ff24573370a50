"""The way from a place without a network to one server: a Unix socket, and inside a port on loopback that leads to it.

Threads of this process pass bytes on, and end with it. Standard library only.
"""

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

CHUNK = 65_536
RELAY = "rollart-endpoint-relay-"


@functools.cache
def forwarded(path: str) -> int:
    """The port, on this machine's (or this sandbox's) own loopback, where the Unix socket `path` is reached."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    _pass_on_from(listener, lambda: _connected(path))
    return int(listener.getsockname()[1])


class Relay:
    """A Unix socket that leads to a server on another machine. Bound into a sandbox, it is all that one reaches."""

    def __init__(self) -> None:
        _remove_left()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{RELAY}{os.getpid()}-"))  # for nobody else to enter
        self.path = self._folder / "endpoint.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        self.path.chmod(0o666)  # a sandbox has a user of its own
        listener.listen(64)
        self._url = ""
        _pass_on_from(listener, self._connect)

    def leading_to(self, url: str) -> str:
        """Its path; from now on it leads to the server of this URL."""
        self._url = url
        return str(self.path)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self) -> socket.socket:
        at = urlsplit(self._url)
        return socket.create_connection((at.hostname or "", at.port or 80))


def _remove_left() -> None:
    """Relays of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{RELAY}*-*"):
        if not Path("/proc", folder.name.removeprefix(RELAY).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _connected(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:
        server.close()
        raise
    return server


def _pass_on_from(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    threading.Thread(target=_serve, args=(listener, connect), name="rollart-forward", daemon=True).start()


def _serve(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = connect()
        except OSError:
            client.close()
            continue
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):  # one side has ended: so has the other, for HTTP
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
