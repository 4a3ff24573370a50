"""What holds for every test: a time limit, and one thread of torch.

A hang is a failure of that test, with the stack of every thread, and not of the suite. Fast tests have the limit of
pyproject.toml. Slow ones start real processes on machines that may be busy: they have the one below, or that of their
own `@pytest.mark.timeout`.
"""

import os

import pytest

SLOW_S = 900

# Before anybody imports torch. The models of the tests are so small that a second thread only waits, and on a busy
# machine waits long; and the fast tests run side by side already.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_S))
