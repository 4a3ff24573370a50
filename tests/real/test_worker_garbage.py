"""What a full collection of garbage looks at in a worker's process."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.setups import worker_setup

BEFORE_BUILDING = """
import asyncio, gc, sys
import rollart.launch.worker as worker

async def build(setup, ranks=()):
    return gc.get_freeze_count(), len(gc.get_objects())

worker.build = build
print(*asyncio.run(worker.start(sys.argv[1])))
"""


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_what_is_imported_is_not_looked_at_again(role: Literal["engine", "trainer"], tmp_path: Path) -> None:
    setup = worker_setup(None, tmp_path, role=role)
    words = [sys.executable, "-c", BEFORE_BUILDING, setup.model_dump_json()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    kept, looked_at = map(int, done.stdout.split())
    assert kept > 100_000
    assert looked_at < 10_000, "what is built from here on"
