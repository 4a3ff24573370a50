"""Complete groups between rollout and training: ages them, and forms batches.

Invariant: every group that was put in is here until it is in a batch, or taken out. No time passes in here: the rollout
driver calls it and acts on what it says.
"""

from rollart.policy.admission import is_stale
from rollart.policy.mix import Mix, oldest_first
from rollart.types import Group, WeightVersion


class SampleBuffer:
    def __init__(self, mix: Mix, *, bound: int) -> None:
        self._mix = mix
        self._bound = bound
        self.ready: dict[str, Group] = {}

    def stale_ready(self, serving: WeightVersion) -> list[Group]:
        return [group for group in self.ready.values() if is_stale(group.born, serving, self._bound)]

    def form(self, *, relaxed: bool = False, short: bool = False) -> list[Group] | None:
        """The groups of the next batch, the oldest of each task first; None: wait for more.

        `relaxed`: nothing better will come, so shares need not hold. `short`: nor need the size.
        """
        by_task: dict[str, list[tuple[int, str]]] = {}
        for group in self.ready.values():
            by_task.setdefault(group.task.domain, []).append((group.born, group.id))
        counts = self._mix.pick(
            {name: len(groups) for name, groups in by_task.items()}, relaxed=relaxed or short, short=short
        )
        if counts is None:
            return None
        chosen = [name for domain, count in counts.items() for name in oldest_first(by_task[domain], count)]
        self._mix.consumed(counts)
        return [self.ready.pop(name) for name in chosen]
