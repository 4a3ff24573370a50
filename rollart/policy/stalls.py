"""Which part of a job stands still while its peers move: an engine, a task or a trajectory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FAR = 10.0
"""How many times longer than its peers, and than is usual for its kind, counts as far longer."""
AGAIN = 2.0
"""A part that was named is named again when it has stood still for this many times as long."""
MOST = 3
"""Parts of one kind that are named at a time: the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    kind: str
    """`engine`, `task` or `trajectory`."""
    name: str
    still_s: float
    """Since it last moved; 0 where it has nothing to do."""
    usual_s: float = 0.0
    """How long parts like it take from one move to the next, as measured; 0 where that is not known."""
    among: str = ""
    """Its peers are the parts of its kind with the same word here: the trajectories of one task."""
    within: tuple[str, ...] = ()
    """Parts that explain it: where one of these is named, it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    part: Part
    peers_s: float
    """How long the peer in the middle has stood still."""


def lagging(parts: Sequence[Part], least_s: float) -> list[Lag]:
    """Those that have not moved for far longer than their peers, and for `least_s` at least; the longest first.

    A part without peers is held against what is usual, if that is known. When all of a kind stand still, that is a
    stall of the whole, and none is named.
    """
    peers: dict[tuple[str, str], list[float]] = {}
    for part in parts:
        peers.setdefault((part.kind, part.among), []).append(part.still_s)
    for ages in peers.values():
        ages.sort()
    found: list[Lag] = []
    for part in parts:
        ages = peers[part.kind, part.among]
        if part.still_s < least_s or (len(ages) < 2 and not part.usual_s):
            continue
        # the middle of the others, the part being one of the longest
        peers_s = ages[(len(ages) - 2) // 2] if len(ages) > 1 else part.usual_s
        if part.still_s >= FAR * max(peers_s, part.usual_s):
            found.append(Lag(part=part, peers_s=peers_s))
    causes = {lag.part.name for lag in found}
    unexplained = [lag for lag in found if not any(cause in causes for cause in lag.part.within)]
    return sorted(unexplained, key=lambda lag: (lag.part.kind, -lag.part.still_s, lag.part.name))


def to_name(found: Iterable[Lag], named: Mapping[str, float], quiet_s: float, least_s: float) -> list[Lag]:
    """Those to tell the user of now. `named`: how long each one that was named had stood still then. `quiet_s`: since a
    trajectory was named last; there are many, and some of them are slow in every job."""
    count: dict[str, int] = {}
    chosen: list[Lag] = []
    for lag in found:
        if lag.part.still_s < AGAIN * named.get(lag.part.name, 0.0):
            continue
        if lag.part.kind == "trajectory" and quiet_s < FAR * least_s:
            continue
        count[lag.part.kind] = count.get(lag.part.kind, 0) + 1
        if count[lag.part.kind] <= MOST:
            chosen.append(lag)
    return chosen
