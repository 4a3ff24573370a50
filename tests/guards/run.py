"""Every guard is needed: takes one out at a time, and sees that something notices.

Each `*.patch` here removes one guard. It is applied to a copy of the tree; then fault plans are run until one of them
breaks a promise, deadlocks or crashes (or, where the patch's first line says `caught by: tests/...`, until that test
fails). A patch that no longer applies, or that nothing notices, fails this script. Run by `make test-slow`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLANS = 520
"""Fault plans that may be run before a guard counts as unnoticed."""
AT_A_TIME = 26


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="guards to try (default: all)")
    names = parser.parse_args().names
    patches = [path for path in sorted(HERE.glob("*.patch")) if not names or path.stem in names]
    unnoticed = []
    for patch in patches:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            caught = _try(patch, Path(folder) / "tree")
        seen = caught or "NOT NOTICED (or the patch no longer applies)"
        print(f"{patch.stem:28} {seen:80.80} {time.monotonic() - began_s:5.0f} s", flush=True)
        if not caught:
            unnoticed.append(patch.stem)
    print(f"{len(patches) - len(unnoticed)} passed, {len(unnoticed)} failed")
    return 1 if unnoticed else 0


def _try(patch: Path, tree: Path) -> str:
    """What noticed that the guard is gone; empty if nothing did."""
    for name in ("rollart", "jobs", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = ["git", "apply", "--unsafe-paths", f"--directory={tree}", str(patch)]
    applied = subprocess.run(command, cwd="/", check=False)
    if applied.returncode:
        return ""
    first = patch.read_text().splitlines()[0]
    if first.startswith("caught by: "):
        test = first.removeprefix("caught by: ")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", test], cwd=tree, capture_output=True, text=True
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0] if done.returncode == 1 and failed else ""
    for start in range(0, PLANS, AT_A_TIME):
        command = [sys.executable, "-m", "rollart.cli", "sim", "jobs/chaos.yaml", "--json"]
        command += ["--chaos", str(AT_A_TIME), "--first", str(start)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not done.stdout:
            raise RuntimeError(f"{patch.stem}: {done.stderr[-2000:]}")
        report = json.loads(done.stdout)
        if report["failures"]:
            failure = report["failures"][0]
            return f"seed {failure['seed']}: {failure['text']}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
