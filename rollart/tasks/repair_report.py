"""A plugin of pytest that tells who started the tests which of them passed: exit status 0 alone is easily made.

It reads a word from standard input before pytest captures anything and before code of the package is loaded, and ends
with a line of that word and the tests. Tests that never ran, were skipped, or ran in a process that ended itself are
not in it. Code under test is in the same process: it could forge the line on purpose, not by leaving early.
"""

import json
import os
from typing import Any

from rollart.workers.seccomp import confine

confine()
WORD = os.read(0, 64).decode()
OUT = os.dup(1)
PASSED: list[str] = []


def pytest_runtest_logreport(report: Any) -> None:
    if report.passed and report.when == "call":
        PASSED.append(report.nodeid.partition("::")[2])


def pytest_unconfigure() -> None:
    os.write(OUT, f"\n{WORD} {json.dumps(PASSED)}\n".encode())
