"""Which engine serves a request. Called by the proxy for every generate call.

A request goes to its trajectory's pool: to the engine that holds the session's cache if that one takes requests,
else to the least loaded. Another pool serves it only when its own has no engine up at all; the reason is recorded.
No request goes to weights older than those its trajectory has already seen.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.types import EngineView, WeightVersion


class Route(NamedTuple):
    engine: EngineView
    why: str
    """`session`, `least_loaded`, or `fallback`."""
    fallback: str = ""
    """Why not the wanted pool; empty when it is the wanted pool."""


def choose(
    pools: Mapping[str, Sequence[EngineView]],
    order: Sequence[str],
    last: EngineView | None,
    min_version: WeightVersion,
) -> Route | None:
    """The engine for one request, or None: wait until one takes requests again.

    `order` is the wanted pool followed by the pools that may stand in for it; `last` served the session before.
    """
    wanted = order[0]
    if last is not None and last.serving and last.pool == wanted and last.version >= min_version:
        return Route(last, "session")
    best = _least_loaded(pools[wanted], min_version)
    if best is not None:
        return Route(best, "least_loaded")
    if any(engine.up for engine in pools[wanted]):
        return None
    for name in order[1:]:
        best = _least_loaded(pools[name], min_version)
        if best is not None:
            return Route(best, "fallback", f"pool {wanted} has no engine up")
    return None


def _least_loaded(engines: Sequence[EngineView], min_version: WeightVersion) -> EngineView | None:
    best: EngineView | None = None
    for engine in engines:
        if engine.serving and engine.version >= min_version and (best is None or engine.in_flight < best.in_flight):
            best = engine
    return best
