"""These tests need the `train` extra; without it there is nothing here to collect."""

from importlib.util import find_spec

NEEDED = ("torch", "transformers", "xxhash", "aiohttp")

collect_ignore_glob = [] if all(find_spec(name) for name in NEEDED) else ["test_*.py"]
