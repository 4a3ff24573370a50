"""How each version of the weights reached the engines: a fold over a run's events, with one meaning for every figure.

    push      from the begin of the push until all of the version is in the store
    arrival   from the begin of the push until every engine in rotation has it on its host
    pull      what went into bringing it to one engine, hidden or not, as the engine reports it
    crossed   bytes that came to the engine's host for it: with deltas less than it has
    density   the part of the weights that differ from the version before, where somebody looked
    exposed   from one engine's `suspend` to its `resume`: for as long it takes no requests

The same events come from every kind of engine, and from the simulator. One that joins or comes back loads before it
takes requests, and exposes nothing.
"""

import msgspec

from rollart.events import schema
from rollart.events.log import Fold


class EngineFigures(msgspec.Struct, kw_only=True):
    """One engine's part."""

    pull_s: float = 0.0
    exposed_s: float | None = None
    """None where it was not suspended: it joined."""
    crossed_bytes: int = 0
    density: float | None = None


class VersionFigures(msgspec.Struct, kw_only=True):
    """One version."""

    version: int
    push_s: float | None = None
    arrival_s: float | None = None
    bytes: int = 0
    """Of all its buckets."""
    engines: dict[str, EngineFigures] = {}


class RunningMean(msgspec.Struct):
    """Of the values so far."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> float:
        self.total += value
        self.count += 1
        return round(value, 6)

    def value(self) -> float:
        return round(self.total / self.count, 4) if self.count else 0.0


class VersionFold(Fold):
    """Feed it every event of a run, in order. `keep`: also have `versions`, which grows with the run."""

    def __init__(self, *, keep: bool = False) -> None:
        self.versions: list[VersionFigures] = []
        """In the order they were first heard of."""
        self.push_s, self.arrival_s, self.bytes = RunningMean(), RunningMean(), RunningMean()
        self.pull_s, self.exposed_s = RunningMean(), RunningMean()
        self.crossed, self.density = RunningMean(), RunningMean()
        self.in_flight = 0
        """Calls that went on over a swap."""
        self._keep = keep
        self._began_s: dict[int, float] = {}
        self._suspended_s: dict[str, float] = {}
        self._loaded: dict[str, EngineFigures] = {}
        """By engine, its last load."""
        super().__init__()

    def _on_push(self, event: schema.Push) -> None:
        self._began_s = {version: at_s for version, at_s in self._began_s.items() if version >= event.version - 1}
        self._began_s[event.version] = event.t

    def _on_pushed(self, event: schema.Pushed) -> None:
        began_s = self._began_s.get(event.version)
        if began_s is not None:
            row = self._row(event.version)
            row.push_s, row.bytes = self.push_s.add(event.t - began_s), event.bytes
            self.bytes.add(event.bytes)

    def _on_staged(self, event: schema.Staged) -> None:
        began_s = self._began_s.pop(event.version, None)
        if began_s is not None:
            self._row(event.version).arrival_s = self.arrival_s.add(event.t - began_s)

    def _on_suspend(self, event: schema.Suspend) -> None:
        self._suspended_s |= dict.fromkeys(event.engines, event.t)

    def _on_engine_swap(self, event: schema.EngineSwap) -> None:
        self.in_flight += event.in_flight
        figures = EngineFigures(pull_s=self.pull_s.add(event.pull_s), crossed_bytes=event.bytes, density=event.density)
        self.crossed.add(event.bytes)
        if event.density is not None:
            self.density.add(event.density)
        self._loaded[event.engine] = figures
        self._row(event.version).engines[event.engine] = figures

    def _on_resume(self, event: schema.Resume) -> None:
        for engine in event.engines:
            suspended_s, loaded = self._suspended_s.pop(engine, None), self._loaded.get(engine)
            if suspended_s is not None and loaded is not None:
                loaded.exposed_s = self.exposed_s.add(event.t - suspended_s)

    def _row(self, version: int) -> VersionFigures:
        if not self._keep:
            return VersionFigures(version=version)
        found = next((row for row in reversed(self.versions) if row.version == version), None)
        if found is None:
            found = VersionFigures(version=version)
            self.versions.append(found)
        return found
