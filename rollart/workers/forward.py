"""The way from a place without a network to one server: a Unix socket, and inside a port on loopback that leads to it.

Threads of this process pass bytes on, and end with it. Standard library only.
"""

import contextlib
import functools
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

CHUNK = 65_536
MAX_LINES = 128
"""Connections of one user, which is one sandbox where we are root, passed on at a time; one more is closed."""
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
        self._folder = own_folder(RELAY)
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


def own_folder(prefix: str) -> Path:
    """A new one for temporary files, which nobody else may enter. Those of processes that were killed are removed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}[0-9]*-*"):
        if not Path("/proc", folder.name.removeprefix(prefix).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


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
    lines: Counter[int] = Counter()
    while True:
        client, _ = listener.accept()
        user = _user(client)
        if lines[user] >= MAX_LINES:
            client.close()
            continue
        try:
            server = connect()
        except OSError:
            client.close()
            continue
        with LOCK:
            lines[user] += 1
        threading.Thread(target=_pass_both_ways, args=(client, server, lines, user), daemon=True).start()


def _user(client: socket.socket) -> int:
    """Who is at the other end of a Unix socket."""
    if client.family != socket.AF_UNIX:
        return 0
    return int(PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])


PEER = struct.Struct("3i")
"""A process, its user and group."""
LOCK = threading.Lock()


def _pass_both_ways(client: socket.socket, server: socket.socket, lines: Counter[int], user: int) -> None:
    back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
    back.start()
    _pass_on(client, server)
    back.join()
    client.close()
    server.close()
    with LOCK:
        lines[user] -= 1


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):  # one side has ended: so has the other, for HTTP
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
