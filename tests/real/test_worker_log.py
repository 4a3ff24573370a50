"""What a worker notes while it starts can be read in its log."""

import subprocess
import sys

NOTES = """
import logging
from rollart.launch.worker import log_to_stderr
log_to_stderr()
logging.getLogger("rollart.engines.embedded.engine").info("cache: 4096 tokens")
logging.getLogger("another.library").info("chatter")
"""


def test_our_notes_are_in_the_log_and_those_of_others_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", NOTES], capture_output=True, text=True, check=True)
    assert done.stderr.rstrip().endswith("cache: 4096 tokens")
    assert "chatter" not in done.stderr
