"""What `rollart sim --chaos` and `rollart pools` find: printed as JSON, or as tables by `rollart.report.show`."""

import msgspec


class FaultCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one kind of fault happened."""

    fired: int
    during_swap: int
    """While engines swapped."""


class FailedPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    text: str
    """Its first violations."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """Many fault plans together."""

    plans: int
    violations: int
    deadlocks: int
    lost: int
    """Groups."""
    trained_twice: int
    """Tasks."""
    finished: int
    stopped: int
    stopped_full: int
    """The store was full for longer than the job may wait."""
    faults: dict[str, FaultCount]
    wall_s: float
    failures: list[FailedPlan]
