"""Memory, processes and CPUs of a box counted together, by a control group of Linux, where we may make one.

Without one each process of a box is limited by itself. Both versions of the interface are known. Of version 2 a group
is made below our own or beside it, wherever the controllers are there: who starts us decides that.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Self

PERIOD_US = 100_000
"""In which a group may use so many CPUs."""
ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NUMBERS = itertools.count()


class Cgroup:
    """The folders of one box, one for each controller (version 2: one for all)."""

    def __init__(self, folders: dict[str, Path]) -> None:
        """`folders`: by controller, `memory`, `pids`, and `cpu` where that may be bounded."""
        self._folders = folders

    @classmethod
    def make(cls, memory_bytes: int, processes: int, cpus: float, *, root: Path = ROOT, own: Path = OWN) -> Self | None:
        """One with these limits; None where we may not. Where its CPUs alone cannot be bounded, it is one without."""
        name = f"rollart-{os.getpid()}-{next(_NUMBERS)}"
        for places in _candidates(root, own):
            for place in dict.fromkeys(places.values()):
                _remove_left_behind(place)
            folders = {controller: place / name for controller, place in places.items()}
            try:
                for folder in dict.fromkeys(folders.values()):
                    folder.mkdir()
                _write_first(folders["memory"], ("memory.max", "memory.limit_in_bytes"), memory_bytes)
                _write_first(folders["pids"], ("pids.max",), processes)
            except OSError:
                cls(folders).remove()
                continue
            with contextlib.suppress(OSError):  # not every kernel counts swap
                _write_first(folders["memory"], ("memory.swap.max",), 0)
            with contextlib.suppress(OSError, KeyError):
                quota_us = max(1000, round(cpus * PERIOD_US))
                _write_first(folders["cpu"], ("cpu.max", "cpu.cfs_quota_us"), quota_us)  # of a period, by default 0.1 s
            return cls(folders)
        return None

    @property
    def joining(self) -> list[Path]:
        """A process that writes its number into these files is in the group, with all that it starts."""
        return [folder / "cgroup.procs" for folder in dict.fromkeys(self._folders.values())]

    def over(self) -> str:
        """`memory` or `processes`, where something was refused or killed for it."""
        for controller, names, key, what in (
            ("memory", ("memory.events", "memory.oom_control"), "oom_kill", "memory"),
            ("pids", ("pids.events",), "max", "processes"),
        ):
            if any(_counted(self._folders[controller] / name, key) for name in names):
                return what
        return ""

    def remove(self) -> None:
        """Once its last process is gone, which is now or soon. Blocks."""
        folders = [folder for folder in dict.fromkeys(self._folders.values()) if folder.exists()]
        for _ in range(100):
            folders = [folder for folder in folders if not _removed(folder)]
            if not folders:
                return
            time.sleep(0.02)


def _remove_left_behind(place: Path) -> None:
    """Groups of processes that were killed before they could."""
    for folder in place.glob("rollart-*-*"):
        if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
            _removed(folder)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _candidates(root: Path, own: Path) -> list[dict[str, Path]]:
    """Where a group may be made, by controller."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found: list[dict[str, Path]] = []
    paths = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    if "memory" in paths and "pids" in paths:
        found.append({name: root / name / paths[name] for name in ("memory", "pids", "cpu") if name in paths})
    if "" in paths:
        here = root / paths[""]
        found += [
            dict.fromkeys(("memory", "pids", "cpu"), place)
            for place in (here, here.parent)
            if place.is_relative_to(root)
        ]
    return found


def _write_first(folder: Path, names: tuple[str, ...], value: int) -> None:
    """Into the first of these files that there is."""
    for name in names:
        if (folder / name).exists():
            (folder / name).write_text(str(value))
            return
    raise FileNotFoundError(f"{folder} has none of {', '.join(names)}")


def _counted(file: Path, key: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == key:
                return int(number)
    return 0
