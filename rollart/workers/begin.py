"""What a pod runs first: takes what its owner sends over the standard input, and becomes the worker.

Sent as text (`pod.py`): the image need not have RollArt, and the standard library is all that is used. Before the
calls come two blocks, each behind its length: words, variables and bounds as JSON; files as a compressed archive.
"""

import io
import json
import os
import resource
import select
import socket
import sys
import tarfile

REACHED_S = 0.2
"""How long the cluster's API may take to answer before it counts as out of reach."""


def take(count: int) -> bytes:
    """Raises EOFError where the owner has gone."""
    found = bytearray()
    while len(found) < count:
        part = os.read(0, min(count - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def calling() -> socket.socket | None:
    """A connection to the cluster's API, on its way; None where nobody said where it is."""
    try:
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex((os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])))
        return line
    except (KeyError, OSError):
        return None


def answered(line: socket.socket) -> bool:
    select.select([], [line], [], REACHED_S)
    try:
        line.getpeername()
    except OSError:  # refused at once, or no answer yet
        return False
    return True


def main() -> None:
    line = calling()
    head = json.loads(take(int.from_bytes(take(8), "big")))
    body = take(int.from_bytes(take(8), "big"))
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        tar.extraction_filter = staticmethod(lambda member, path: member)  # it is the owner's
        tar.extractall("/")
    if line is not None:
        if answered(line):
            sys.exit("this pod has a network: apply deploy/environment-pods.yaml, where the cluster enforces policies")
        line.close()
    for name, most in head["bounds"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    own = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    os.execve(sys.executable, [sys.executable, *head["words"]], {**own, **head["environment"]})


if __name__ == "__main__":
    main()
