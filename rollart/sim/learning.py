"""What training is worth in the simulator: how far each version has come, in steps on trajectories of no age.

Nothing is learnt here: the chance of success follows a curve over these steps (`sim.tasks`), and
`sim.train.age_discount` says how much less an old trajectory teaches.
"""

from rollart.types import Batch, WeightVersion


class SimLearning:
    """Outlives the trainer and the coordinator: a step that is made again is worth the same."""

    def __init__(self, age_discount: float = 0.0) -> None:
        self._discount = age_discount
        self._come: dict[WeightVersion, float] = {}
        """By version, where steps are not all worth the same."""

    def trained(self, batch: Batch) -> None:
        if not self._discount:
            return
        worth = [
            max(0.0, 1.0 - self._discount * (batch.step - group.born)) for group in batch.groups for _ in group.members
        ]
        self._come[batch.step + 1] = self.steps(batch.step) + sum(worth) / max(1, len(worth))

    def steps(self, version: WeightVersion) -> float:
        """How many steps on fresh trajectories this version is worth."""
        return self._come.get(version, float(version) if not self._discount else 0.0)
