"""Keeps one process that speaks no link of ours, and ends it, with all it started, when whoever asked for it is gone.

`python guard.py LIFE COMMAND...`: run as a file, so it imports nothing of ours and costs little. LIFE is a pipe whose
other end only the parent holds. The guard has a session of its own, so that killing the parent's whole process group
leaves it to do its work; the server has another, so that one signal reaches everything below it. And it is no direct
child: a Ray worker that ends kills those first. The child in between only waits for it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

TERM_S = 5.0
"""A server may take this long to leave by itself."""
LOOK_S = 0.5
"""How often a server that ended by itself is noticed."""


def main() -> int:
    life, command = int(sys.argv[1]), sys.argv[2:]
    guard = os.fork()
    if guard:
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os.setsid()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True)
    while server.poll() is None:
        if select.select([life], [], [], LOOK_S)[0]:
            _end(server)
            return 0
    _signal(server, signal.SIGKILL)  # what it may have left behind
    return server.returncode


def _end(server: "subprocess.Popen[bytes]") -> None:
    _signal(server, signal.SIGTERM)
    until = time.monotonic() + TERM_S
    while server.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    _signal(server, signal.SIGKILL)
    server.wait()


def _signal(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
