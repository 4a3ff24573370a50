"""A box made by bubblewrap: no network, a root that cannot be written, a /tmp of its own, and limits.

What is inside: the system's programs and libraries, this Python, RollArt's own code, and the places that are named. Not
inside: the job's files, the run directory, other processes, any address or port, any Unix socket that is not named. It
ends with its process, and that ends with us: killing bubblewrap ends all that was started inside.

Where we are root, what runs inside is another user, of which there is one for each box; elsewhere it is ourselves in
a user namespace. The kernel is shared: this is for code that is careless or curious, not for who can break Linux.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rollart
from rollart.config.settings import SandboxSettings
from rollart.workers.cgroup import Cgroup

MIB = 1024 * 1024
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives")
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
OWN_TMP = "/tmp"
INSIDE = "ROLLART_SANDBOX"
"""A variable that is set inside."""
OWN = {
    INSIDE: "1",
    "HOME": OWN_TMP,
    "TMPDIR": OWN_TMP,
    "TEMP": OWN_TMP,
    "TMP": OWN_TMP,
    "USER": "nobody",
    "LOGNAME": "nobody",
}
FIRST_USER = 2**30
"""Users of boxes are numbered from here on: beyond all that a system gives out."""
OPEN_FILES = 1024
"""Of one process: files that are in memory and have no name are bounded by nothing else."""
TRIAL_S = 20.0
PACKAGES = ("site-packages", "dist-packages")
"""What folders of installed packages are called."""
PROGRAMS = ("bwrap", "prlimit", "setpriv")
INSTALL = "apt-get install bubblewrap util-linux, or dnf install bubblewrap util-linux"


@dataclass(slots=True, kw_only=True)
class Sandbox:
    """The box of one process."""

    settings: SandboxSettings
    read: Sequence[Path] = ()
    """Files and folders that can be read inside, under the same names, beside those of Python. A Unix socket among
    them can be connected to."""
    write: Sequence[Path] = ()
    """The same, and written, where its user may."""
    hide: Sequence[Path] = ()
    """Folders that are empty inside."""
    _cgroup: Cgroup | None = field(default=None, init=False)

    @property
    def output_bytes(self) -> int:
        return self.settings.output_mb * MIB

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return ()

    @property
    def opening(self) -> bytes:
        return b""

    @property
    def ends_with_command(self) -> bool:
        return True

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        limits = self.settings
        self._cgroup = Cgroup.make(limits.memory_mb * MIB, limits.processes, limits.cpus)
        joining = self._cgroup.joining if self._cgroup else []
        join = "".join(f'echo $$ > "{path}" && ' for path in joining)
        enter = ["sh", "-c", f'{join}exec "$@"', "sh"] if join else []
        inside = [*self._limited(), *words]
        return [*enter, "bwrap", *self._namespaces(), *self._places(), "--", *inside], {**environment, **OWN}

    def over(self) -> str:
        what = self._cgroup.over() if self._cgroup else ""
        key, limit = {
            "memory": ("memory_mb", self.settings.memory_mb),
            "processes": ("processes", self.settings.processes),
        }.get(what, ("", 0))
        return f"it went over sandbox.{key} {limit}" if key else ""

    def remove(self) -> None:
        if self._cgroup is not None:
            self._cgroup.remove()

    def _namespaces(self) -> list[str]:
        own = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if os.geteuid() == 0:
            own += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            own += ["--unshare-user", "--disable-userns"]
        return [*own, "--die-with-parent", "--new-session", "--hostname", "sandbox"]

    def _places(self) -> list[str]:
        mib = str(self.settings.tmp_mb * MIB)
        words: list[str] = []
        for system in SYSTEM:
            if os.path.islink(system):
                words += ["--symlink", os.readlink(system), system]
            elif os.path.isdir(system):
                words += ["--ro-bind", system, system]
        for loader in LOADER:
            words += ["--ro-bind-try", loader, loader]
        words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", mib, "--tmpfs", "/dev/shm"]
        words += ["--perms", "1777", "--size", mib, "--tmpfs", OWN_TMP]
        bound = list(SYSTEM)
        for how, places in (("--ro-bind", [*python_places(), *map(str, self.read)]), ("--bind", map(str, self.write))):
            for place in places:
                for above in reversed(Path(place).parents):  # bubblewrap would make them for root alone
                    if str(above) != "/" and not _within(str(above), bound):
                        words += ["--perms", "0755", "--dir", str(above)]
                words += [how, place, place]
                bound.append(place)
        for place in map(str, self.hide):
            words += ["--tmpfs", place, "--remount-ro", place]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", OWN_TMP]

    def _limited(self) -> list[str]:
        """Of each process; those of all together are the control group's."""
        limits = self.settings
        words = ["prlimit", "--core=0", f"--cpu={max(1, round(limits.cpu_s))}", f"--fsize={limits.output_mb * MIB}"]
        words += [f"--nproc={limits.processes}", f"--nofile={OPEN_FILES}"]
        if self._cgroup is None:
            words += [f"--as={limits.memory_mb * MIB}"]
        if os.geteuid() == 0:
            user = str(FIRST_USER + secrets.randbelow(FIRST_USER - 1))
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
        return [*words, "--"]


def python_places() -> list[str]:
    """What this Python and RollArt need, outermost first. Of a clone of RollArt, its package alone. Packages may lie in
    another environment, which a `.pth` file names."""
    wanted = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(rollart.__file__)}
    wanted |= {place for place in sys.path if os.path.basename(place) in PACKAGES and os.path.isdir(place)}
    found: list[str] = []
    for place in sorted(map(os.path.abspath, wanted)):
        if not _within(place, [*SYSTEM, *found]):
            found.append(place)
    return found


def _within(place: str, others: Sequence[str]) -> bool:
    return any(place == other or place.startswith(f"{other}/") for other in others)


def missing() -> str:
    """Why there can be no sandbox on this machine, and the fix; nothing where there can. Tried, not guessed."""
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    if gone:
        return f"needs {', '.join(gone)}, which this machine has not; install it: {INSTALL}"
    box = Sandbox(settings=SandboxSettings())
    words, environment = box.command(["true"], {"PATH": os.environ.get("PATH", os.defpath)})
    try:
        done = subprocess.run(words, env=environment, capture_output=True, timeout=TRIAL_S, check=False)
        said = done.stderr.decode(errors="replace").strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"no answer in {TRIAL_S:g} s"
    finally:
        box.remove()
    if not said:
        return ""
    return (
        f"bubblewrap cannot make a sandbox here ({said}); allow user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, or user.max_user_namespaces), start it as root, or use process"
    )
