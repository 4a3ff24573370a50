"""Nothing that this process starts outlives it.

All children read one pipe whose other end only this process holds. When it closes, each kills its process group, and
with it all that it started.
"""

import contextlib
import fcntl
import functools
import os
import signal
import threading


@functools.cache
def lifeline() -> int:
    """The end of the pipe that children inherit. The other one is closed by nobody but the end of this process."""
    return os.pipe()[0]


def die_with_parent(line: int) -> None:
    """From now on this process, and all that it starts, ends when its parent does.

    Two ways, since each alone has a gap. A thread reads the pipe; but it needs the interpreter, which a call may
    never give back (a regular expression that explodes). So the kernel is asked as well: when the pipe's other end
    closes, it kills the process group.
    """
    os.set_inheritable(line, False)

    def wait() -> None:
        os.read(line, 1)
        os.killpg(0, signal.SIGKILL)

    with contextlib.suppress(OSError, AttributeError):  # Linux, with /proc
        # Opened anew: the owner belongs to the open file, and siblings share the one that was handed down.
        own = os.open(f"/proc/self/fd/{line}", os.O_RDONLY)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    threading.Thread(target=wait, daemon=True).start()
