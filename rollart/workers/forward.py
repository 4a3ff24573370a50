"""A Unix socket as a port on loopback, for clients that know only TCP: those in a place without a network.

Threads of this process pass bytes on, and end with it. Standard library only.
"""

import contextlib
import functools
import socket
import threading

CHUNK = 65_536


@functools.cache
def forwarded(path: str) -> int:
    """The port, on this machine's (or this sandbox's) own loopback, where the Unix socket `path` is reached."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threading.Thread(target=_serve, args=(listener, path), name="rollart-forward", daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
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
