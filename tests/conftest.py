"""What holds for every test: a time limit, and one thread of torch.

A hang is a failure of that test, with the stack of every thread, and not of the suite. Fast tests have the limit of
pyproject.toml. Slow ones start real processes on machines that may be busy: they have the one below, or that of their
own `@pytest.mark.timeout`.
"""

import sys
from collections.abc import Iterator

import pytest

SLOW_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_S))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models of the tests are so small that a second thread only waits, and on a busy machine waits long."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
