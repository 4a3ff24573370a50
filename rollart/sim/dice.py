"""Random draws that depend on nothing but a seed and a name.

Every draw belongs to one entity: `uniform("g7.3.0/answer/2")` is the same number whenever and wherever it is asked
for, so one run's draws never shift another's. A hash takes the place of a generator object: nothing to seed, nothing
to share.
"""

from hashlib import blake2b

from rollart.config.settings import Spread


class Dice:
    def __init__(self, seed: int) -> None:
        self._keyed = blake2b(digest_size=8, key=str(seed).encode())

    def uniform(self, name: str) -> float:
        """In (0, 1)."""
        named = self._keyed.copy()  # half the time of a new one with a key
        named.update(name.encode())
        return (int.from_bytes(named.digest()) + 0.5) / 2.0**64

    def number(self, name: str, below: int) -> int:
        return int(self.uniform(name) * below)

    def draw(self, spread: Spread, name: str) -> float:
        return spread.mean if spread.kind == "constant" else spread.value(self.uniform(name))

    def count(self, spread: Spread, name: str) -> int:
        """At least 1."""
        drawn = round(spread.mean if spread.kind == "constant" else spread.value(self.uniform(name)))
        return drawn if drawn > 1 else 1
