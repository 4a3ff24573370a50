"""What a process in a box may not ask of the kernel, as a filter of system calls: what no namespace keeps apart.

Sockets to the machine that runs this one (vsock) and other families than the usual ones; namespaces of its own, in
which it would be root again; the kernel's keyrings; and calls that are there for tracing and tuning and make the kernel
larger to attack (bpf, perf, userfaultfd, io_uring, which also makes sockets past any filter). All else is allowed.

A process loads it into itself, before it loads code of anybody: so it is the same in every box. On other machines than
x86-64 and 64-bit ARM there is none.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from typing import NamedTuple

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
NAMESPACES = 0x7E020000
"""Flags of `clone` and `unshare`: mounts, cgroups, names, IPC, users, processes, network."""
OLD_WORLD = 0x40000000
"""Numbers from here on are a second set on x86-64, of another width."""

_LOAD, _EQUAL, _FROM, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST = 0, 4, 16
"""Where the kernel shows the number of the call, the machine and the lower half of the first argument."""
_ALLOW = 0x7FFF0000


class _Calls(NamedTuple):
    """Numbers of one machine."""

    machine: int
    seccomp: int
    socket: int
    clone: int
    unshare: int
    refused: tuple[int, ...]
    """setns, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup."""


_CALLS = {
    "x86_64": _Calls(0xC000003E, 317, 41, 56, 272, (308, 248, 249, 250, 321, 298, 323, 425)),
    "aarch64": _Calls(0xC00000B7, 277, 198, 220, 97, (268, 217, 218, 219, 280, 241, 282, 425)),
}
_CLONE3 = 435
"""Its flags are in memory, where a filter cannot look: libraries take `clone` where it is not there."""


def program(machine: str = platform.machine()) -> bytes:
    """For the classic BPF machine; empty where there is none for this kind of machine."""
    calls = _CALLS.get(machine)
    if calls is None:
        return b""
    steps = [_step(_LOAD, _MACHINE), _step(_EQUAL, calls.machine, 1, 0), _refuse(errno.ENOSYS), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_FROM, OLD_WORLD, 0, 1), _refuse(errno.ENOSYS)]
    for number in calls.refused:
        steps += [_step(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    steps += [_step(_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    for number in (calls.clone, calls.unshare):
        steps += [_step(_EQUAL, number, 0, 4), _step(_LOAD, _FIRST), _step(_ANY, NAMESPACES, 0, 1)]
        steps += [_refuse(errno.EPERM), _step(_RETURN, _ALLOW)]
    steps += [_step(_EQUAL, calls.socket, 0, 2 * len(FAMILIES) + 2), _step(_LOAD, _FIRST)]
    for family in FAMILIES:
        steps += [_step(_EQUAL, family, 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*steps, _refuse(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, jump: int = 0, jump_else: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump, jump_else, value)


def _refuse(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)


class _Program(ctypes.Structure):
    _fields_ = [("steps", ctypes.c_ushort), ("text", ctypes.c_char_p)]


def confine() -> None:
    """Hold this process, all its threads and all that it will start to it. Raises OSError where the kernel has no
    filters."""
    text = program()
    if not text:
        return
    kernel = ctypes.CDLL(None, use_errno=True)
    filtered = _Program(len(text) // 8, text)
    number = ctypes.c_long(_CALLS[platform.machine()].seccomp)
    if (
        kernel.prctl(NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        or kernel.syscall(number, ctypes.c_ulong(BY_PROGRAM), ctypes.c_ulong(ALL_THREADS), ctypes.byref(filtered)) != 0
    ):
        raise OSError(ctypes.get_errno(), f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


NO_NEW_PRIVILEGES, BY_PROGRAM, ALL_THREADS = 38, 1, 1
