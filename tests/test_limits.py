"""No test may hang the suite: each has a time limit."""

import pytest

from tests.conftest import SLOW_S


@pytest.mark.slow
def test_a_slow_test_has_a_longer_limit(request: pytest.FixtureRequest) -> None:
    assert limit(request) == SLOW_S


def test_a_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert limit(request) == float(request.config.getini("timeout")) > 0
    assert request.config.pluginmanager.hasplugin("timeout"), "nobody would read the limit"


def limit(request: pytest.FixtureRequest) -> float:
    marker = request.node.get_closest_marker("timeout")
    return float(marker.args[0] if marker else request.config.getini("timeout"))
