"""Which engine serves a request, and when none does."""

from rollart.policy.routing import Route, choose
from rollart.types import EngineView

ORDER = ("fast", "other", "third")


def engine(name: str, *, load: int = 0, version: int = 0, up: bool = True, serving: bool = True) -> EngineView:
    pool = name.split("-")[0]
    return EngineView(id=name, pool=pool, version=version, in_flight=load, up=up, serving=serving and up)


def pools(*engines: EngineView) -> dict[str, list[EngineView]]:
    found: dict[str, list[EngineView]] = {name: [] for name in ORDER}
    for one in engines:
        found[one.pool].append(one)
    return found


def test_the_engine_with_the_sessions_cache_serves_it_however_loaded() -> None:
    last, idle = engine("fast-0", load=50), engine("fast-1")
    assert choose(pools(last, idle), ORDER, last, 0) == Route(last, "session")


def test_the_least_loaded_serves_a_new_session_and_the_first_of_equals() -> None:
    engines = [engine("fast-0", load=3), engine("fast-1", load=1), engine("fast-2", load=1)]
    assert choose(pools(*engines), ORDER, None, 0) == Route(engines[1], "least_loaded")


def test_a_session_whose_engine_swaps_goes_to_another_of_the_pool() -> None:
    last, other = engine("fast-0", serving=False), engine("fast-1")
    assert choose(pools(last, other), ORDER, last, 0) == Route(other, "least_loaded")


def test_while_the_pool_swaps_a_request_waits_rather_than_go_elsewhere() -> None:
    suspended, elsewhere = engine("fast-0", serving=False), engine("other-0")
    assert choose(pools(suspended, elsewhere), ORDER, None, 0) is None


def test_another_pool_serves_only_when_no_engine_of_the_own_is_up_and_says_why() -> None:
    down, other, third = engine("fast-0", up=False), engine("other-0", load=9), engine("third-0")
    assert choose(pools(down, other, third), ORDER, None, 0) == Route(other, "fallback", "pool fast has no engine up")
    other.up = other.serving = False
    route = choose(pools(down, other, third), ORDER, None, 0)
    assert route is not None
    assert route.engine is third


def test_with_no_engine_up_anywhere_a_request_waits() -> None:
    assert choose(pools(engine("fast-0", up=False), engine("other-0", up=False)), ORDER, None, 0) is None


def test_a_session_that_fell_back_returns_to_its_pool_when_that_is_up() -> None:
    home, away = engine("fast-0"), engine("other-0")
    assert choose(pools(home, away), ORDER, away, 0) == Route(home, "least_loaded")


def test_no_request_goes_to_older_weights_than_its_trajectory_has_seen() -> None:
    old, new = engine("fast-0", version=3), engine("fast-1", version=4, load=9)
    assert choose(pools(old, new), ORDER, old, 4) == Route(new, "least_loaded")
    new.serving = False
    assert choose(pools(old, new), ORDER, old, 4) is None
    old.up = old.serving = new.up = False
    assert choose(pools(old, new, engine("other-0", version=3)), ORDER, None, 4) is None
