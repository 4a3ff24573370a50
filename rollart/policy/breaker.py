"""A circuit breaker for each task: one that keeps failing leaves the mix, and is probed back in. Used by the rollout.

Closed: the task is in the mix. After several failures in a row (groups, or draws) it opens: no group of the task is
admitted. After a while one group is, as a probe: if it ends well the breaker closes; if it fails it stays open, for
twice as long. While open only the probe counts; groups that were under way say nothing new. Pure: times are given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.types import BreakerState

MAX_WAIT_S = 600.0
"""Between two probes, however many have failed."""


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    """In a row."""
    open: bool = False
    probes: int = 0
    """Failed in a row since it opened."""
    due_s: float = 0.0
    """When it may be probed next, while open."""
    probe: str | None = None
    """The group that probes it now."""


class Breaker:
    def __init__(self, tasks: Iterable[str], *, failures: int, wait_s: float, probes: int) -> None:
        """Opens after `failures` in a row, first probes after `wait_s`, is hopeless after `probes` failed probes."""
        self._circuits = {task: _Circuit() for task in tasks}
        self._failures = failures
        self._wait_s = wait_s
        self._probes = probes

    def is_open(self, task: str) -> bool:
        return self._circuits[task].open

    def failures(self, task: str) -> int:
        """In a row, up to now."""
        return self._circuits[task].failures

    def probes(self, task: str) -> int:
        """Failed in a row since it opened."""
        return self._circuits[task].probes

    @property
    def hopeless(self) -> bool:
        """No task is left, and each has failed its probes."""
        return all(circuit.open and circuit.probes >= self._probes for circuit in self._circuits.values())

    def due(self, now_s: float) -> str | None:
        """The task to be probed now: the one that has waited longest."""
        found = [
            (circuit.due_s, task)
            for task, circuit in self._circuits.items()
            if circuit.open and circuit.probe is None and circuit.due_s <= now_s
        ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def probing(self, task: str, group: str) -> None:
        self._circuits[task].probe = group

    def failed(self, task: str, group: str, now_s: float) -> float | None:
        """A group or its draw failed. Seconds until the next probe where the breaker opens, or stays open."""
        circuit = self._circuits[task]
        circuit.failures += 1
        if circuit.open:
            if circuit.probe != group:
                return None
            circuit.probe = None
            circuit.probes += 1
        elif circuit.failures >= self._failures:
            circuit.open = True
        else:
            return None
        wait_s = min(MAX_WAIT_S, self._wait_s * 2.0 ** min(circuit.probes, 30))
        circuit.due_s = now_s + wait_s
        return wait_s

    def well(self, task: str, group: str) -> bool:
        """A group's members were scored. True where this closes the breaker."""
        circuit = self._circuits[task]
        if not circuit.open:
            circuit.failures = 0
            return False
        if circuit.probe != group:
            return False
        self._circuits[task] = _Circuit()
        return True

    def ended(self, task: str, group: str, now_s: float) -> None:
        """A group ended in a way that says nothing about its task (stale, surplus): it may be probed again at once."""
        circuit = self._circuits[task]
        if circuit.probe == group:
            circuit.probe = None
            circuit.due_s = now_s

    def state(self) -> dict[str, BreakerState]:
        """For a checkpoint. Times are left out: a resumed job has another clock, and may probe at once."""
        return {task: BreakerState(one.failures, one.open, one.probes) for task, one in self._circuits.items()}

    def restore(self, state: Mapping[str, BreakerState], now_s: float) -> None:
        """What is in the mix stays there, also where fewer failures open it now: the next one does."""
        for task, saved in state.items():
            failures = saved.failures if saved.open else min(saved.failures, self._failures - 1)
            self._circuits[task] = _Circuit(failures, saved.open, saved.probes, now_s)
