"""These tests need the `train` extra; without it there is nothing here to collect."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]
