"""The endpoint needs the `agents` extra, and these tests the `train` one; without them there is nothing to collect."""

from importlib.util import find_spec

from tests.real.conftest import model as model

NEEDED = ("torch", "transformers", "aiohttp", "openai")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]
