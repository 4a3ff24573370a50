"""Other interpreters with other people's libraries: made once for all tests of a session, or taken from a folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

VENVS = "ROLLART_TEST_VENVS"
"""A folder with environments made before, one for each library, by its name. Without it, pip makes them."""
INSTALL_S = 600


def interpreter_with(distributions: tuple[str, ...], folder: Path, name: str) -> Path:
    """Skips the test where it can't be made here."""
    made = Path(os.environ.get(VENVS, folder)) / name
    python = made / "bin" / "python"
    if not python.exists():
        venv.create(made, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", *distributions]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {name} here: {done.stderr.strip().splitlines()[-1]}")
    return python


def interpreter_like_ours(folder: Path, modules: dict[str, str]) -> Path:
    """Another interpreter that has all our packages but RollArt, and these modules. Takes a tenth of a second."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    assert sys.executable != str(folder / "bin" / "python")
    return folder / "bin" / "python"
