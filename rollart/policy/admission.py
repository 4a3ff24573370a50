"""How many groups may live, and what is too old. Used by the coordinator and the buffer.

Age of a trajectory = serving version - version of its first sampled token. The bound limits it; the slots
limit how many groups can be started per version, and with them memory.
"""

from collections.abc import Iterable

from rollart.types import WeightVersion


def is_stale(born: WeightVersion | None, serving: WeightVersion, bound: int) -> bool:
    """Older than the bound allows. What has not sampled a token yet has no age."""
    return born is not None and born < serving - bound


class Slots:
    """One slot per living group.

    A slot is freed at once when its group dies untrained; otherwise at the first swap completed after its batch
    was taken. So no more groups are ever started under one version than the bound can still use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._alive: dict[str, None] = {}
        self._taken: dict[str, None] = {}

    @property
    def alive(self) -> int:
        return len(self._alive)

    @property
    def room(self) -> int:
        return self.size - len(self._alive)

    def admit(self, group: str) -> None:
        assert self.room > 0, f"no slot for {group}"
        self._alive[group] = None

    def died(self, group: str) -> None:
        """The group ended untrained."""
        del self._alive[group]

    def taken(self, groups: Iterable[str]) -> None:
        """These are in a batch; their slots wait for the next swap."""
        self._taken.update(dict.fromkeys(groups))

    def swapped(self) -> int:
        """A swap completed: the slots of all taken groups are free. Returns how many."""
        for group in self._taken:
            del self._alive[group]
        freed = len(self._taken)
        self._taken.clear()
        return freed
