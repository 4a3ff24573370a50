"""The engines of a job: which are up, which weights they serve, and how one that was lost comes back.

Invariant: an engine takes requests only when it is up and serves the current version or, while a swap rolls through
the fleet, the one before. `serving` is the oldest version in rotation: that of the last completed swap.
The proxy sends requests to the slots; the weight driver swaps them.

An engine is judged by its progress, never by how long one request takes: one that has requests and computes nothing for
`limits.progress_s` is taken for hung.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollart.control.context import JobContext
from rollart.control.room import Room
from rollart.control.waits import Signal
from rollart.errors import (
    BoundaryError,
    ClusterError,
    EngineError,
    JobStopped,
    NoRoom,
    StoreFull,
    VersionGone,
    WeightError,
    boundary,
)
from rollart.events import schema
from rollart.policy.redundancy import backoff_s
from rollart.policy.stalls import Part
from rollart.policy.swap import waves
from rollart.ports import Cluster, Engine
from rollart.types import EngineSpec, EngineView, EngineWork, SwapReport, WeightManifest, WeightVersion

REPAIRS = 3
"""How often the trainer is asked to push a version again before an engine that cannot load it is given up."""

NOBODY = ""
"""The id of no request: aborting it stops nothing, and tells how far the engine has come."""

T = TypeVar("T")
Repair = Callable[[WeightVersion], Awaitable[WeightManifest]]


@dataclass(slots=True, eq=False)
class InFlightCall:
    """One request in an engine."""

    task: "asyncio.Task[Any]"
    lost: str = ""
    """Why it must be sent again."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine's place in the fleet; the engine in it may change."""

    spec: EngineSpec
    engine: Engine = field(init=False)
    view: EngineView = field(init=False)
    at_engine: boundary = field(init=False)
    further: bool = True
    """It is filled when a machine has room for it."""
    calls: dict[str, InFlightCall] = field(default_factory=dict)
    restarts: int = 0
    refused: int = 0
    """Answers in a row that could not be believed."""
    gone: bool = False
    served: int = 0
    """Requests answered, by whichever engine sat here."""
    work: EngineWork | None = None
    """What the engine that sits here last said it has done."""
    moved: tuple[int, int] = (0, 0)
    """How far it had come when it was looked at last: answers, and the engine's own count."""
    still: int = 0
    """Looks in a row that found it where it was; none is made while it takes new weights."""
    looking: bool = False
    loading: WeightVersion | None = None
    staged: WeightVersion = 0
    """The newest version that is on this engine's host."""
    told: WeightVersion = 0
    """The newest that it was told to stage."""
    staging: int = 0
    """Stage calls under way."""

    def __post_init__(self) -> None:
        self.view = EngineView(id=self.spec.id, pool=self.spec.pool)
        self.at_engine = boundary(EngineError, self.spec.id)


class Fleet:
    def __init__(
        self,
        context: JobContext,
        cluster: Cluster,
        engines: Mapping[EngineSpec, Engine],
        repair: Repair,
        changed: Callable[[Mapping[str, int], int], None],
    ) -> None:
        limits, waits = context.job.limits, context.waits
        self._limits = limits
        self._look_s = min(limits.progress_s, limits.lag_s) / 4
        """Between two looks at an engine's progress."""
        self.slots: dict[str, EngineSlot] = {}
        self.pools: dict[str, list[EngineView]] = {}
        for spec, engine in engines.items():
            slot = self._add(spec)
            slot.engine, slot.further = engine, False
        self.serving: WeightVersion = 0
        self._current: WeightManifest | None = None
        self._staging: WeightVersion = 0
        self._cluster = cluster
        self._supervisor = context.supervisor
        self._room = Room(context)
        self._log = context.log
        self._swaps = waits.on("engine.swap", limits.swap_s)
        self._starts = waits.on("engine.start", limits.start_s)
        self._looks = waits.on("engine.progress", limits.progress_s)
        self._waiting = waits.on("newer weights")
        self._stages = waits.on("engine.stage", limits.train_s)
        self._arriving = waits.on("weights on its host")
        self._staged = Signal()
        """A version is on one more host, or an engine came or went."""
        self._repair = repair
        self._repairs = 0
        """Over, since the job began."""
        self._repairing: Signal | None = None
        """Given when the one under way is over."""
        self.freed = Signal()
        """An engine may have become free to take requests."""
        self._changed = changed
        """Told the engines that are up, by pool, and the event that says so, when one came or went."""

    def expect(self, spec: EngineSpec) -> None:
        """One more engine may come: it joins when a machine has room for it, and leaves with its machine."""
        slot = self._add(spec)
        slot.view.up = slot.view.serving = False
        cause = self._log.emit(schema.EngineExpected(engine=spec.id, pool=spec.pool))
        self._supervisor.spawn(self._revive(slot, cause))

    def _add(self, spec: EngineSpec) -> EngineSlot:
        slot = self.slots[spec.id] = EngineSlot(spec)
        self.pools.setdefault(spec.pool, []).append(slot.view)
        return slot

    # --- who takes requests -------------------------------------------------------------------------------

    def down(self, slot: EngineSlot, reason: str) -> None:
        """Take a lost engine out of rotation, hand its requests back to be sent again, and revive it."""
        if not slot.view.up:
            return
        slot.view.up = slot.view.serving = False
        cause = self._log.emit(schema.EngineDown(engine=slot.spec.id, reason=reason, calls=len(slot.calls)))
        for call in list(slot.calls.values()):
            call.lost = reason
            call.task.cancel()
        self._staged.give()
        self._tell(cause)
        self._supervisor.spawn(self._revive(slot, cause))

    def _tell(self, cause: int) -> None:
        self._changed(engines_up(self.pools), cause)

    async def watch(self) -> None:
        """Look at the engines again and again; a background task."""
        while True:
            await asyncio.sleep(self._look_s)
            for slot in self.slots.values():
                if not slot.calls:
                    slot.still = 0
                if (slot.calls or slot.staging) and slot.view.serving and not slot.looking:
                    slot.looking = True
                    self._supervisor.spawn(self._look(slot), background=True)

    async def _look(self, slot: EngineSlot) -> None:
        """Ask an engine how far it has come; take it for hung where it does not answer, or has requests and comes no
        further."""
        engine = slot.engine
        try:
            with slot.at_engine:
                came = await self._looks.guard(slot.spec.id, engine.abort(NOBODY))
        except BoundaryError as error:
            if slot.engine is engine:
                self.down(slot, f"asked for its progress: {error}")
            return
        finally:
            slot.looking = False
        if slot.engine is not engine or not slot.view.serving:
            return
        moved = (slot.served, came)
        if moved != slot.moved or not slot.calls:
            slot.moved, slot.still = moved, 0
            return
        slot.still += 1
        if slot.still * self._look_s > self._limits.progress_s:  # its first request may have come just before a look
            self.down(
                slot,
                f"{slot.spec.id}: computed nothing for {self._limits.progress_s:g} s with {len(slot.calls)} requests "
                "under way (limits.progress_s)",
            )

    def parts(self) -> list[Part]:
        """The engines as they stand, also while they take new weights: one that was named then is not forgotten."""
        return [
            Part(kind="engine", name=slot.spec.id, still_s=slot.still * self._look_s if slot.calls else 0.0)
            for slot in self.slots.values()
            if slot.view.up
        ]

    def engine_of(self) -> dict[str, str]:
        """The engine that each attempt's call is in."""
        return {id.rpartition("/")[0]: slot.spec.id for slot in self.slots.values() for id in slot.calls}

    async def _revive(self, slot: EngineSlot, cause: int) -> None:
        """Start the engine again, give it the current weights, and put it back; or give it up."""
        while slot.restarts < self._limits.engine_restarts:
            slot.restarts += 1
            await asyncio.sleep(backoff_s(self._limits.backoff_s, slot.restarts))
            try:
                with boundary(ClusterError, "engine start"):
                    slot.engine = await self._starts.guard(slot.spec.id, self._cluster.engine(slot.spec))
                slot.work = None
                slot.view.version = slot.staged = slot.told = 0
                if self._staging:
                    self._begin_stage(slot)
                while self._current is not None and slot.view.version != self._current.version:
                    await self._load(slot, self._current)
            except BoundaryError as error:
                self._log.emit(schema.EngineRetry(engine=slot.spec.id, reason=str(error), cause=cause))
                if isinstance(error, VersionGone):
                    slot.restarts -= 1
                    await self._waiting.guard(slot.spec.id, self.freed.next())
                elif isinstance(error, NoRoom) and (slot.further or any(view.up for view in self._views())):
                    slot.restarts -= 1  # it waits for a machine while others serve: not its own failure
                continue
            slot.view.up = slot.view.serving = True
            slot.still = 0
            self._tell(self._log.emit(schema.EngineUp(engine=slot.spec.id, version=slot.view.version, cause=cause)))
            self.freed.give()
            self._staged.give()
            self._stage_next(slot)
            return
        slot.gone = True
        self._log.emit(schema.EngineGone(engine=slot.spec.id, restarts=slot.restarts, cause=cause))
        self.freed.give()
        if all(other.gone or (other.further and not other.view.up) for other in self.slots.values()):
            self._supervisor.fail(
                JobStopped(
                    f"no engine is left: each was restarted {self._limits.engine_restarts} times (pools: "
                    f"{', '.join(self.pools)}); see engine.down in events.jsonl for the reasons"
                )
            )

    def _views(self) -> list[EngineView]:
        return [slot.view for slot in self.slots.values()]

    # --- weights --------------------------------------------------------------------------------------------

    def stage(self, version: WeightVersion, arrived: WeightVersion = 0) -> None:
        """Tell all engines that a version is coming; one that does not have what has arrived yet, when it has loaded
        that: an engine keeps one staged version, and would let go of it."""
        self._staging = version
        for slot in self.slots.values():
            if slot.view.up and slot.view.version >= arrived and slot.told < version:
                self._begin_stage(slot)

    def stage_instead(self, version: WeightVersion) -> None:
        """A version is wanted as soon as it is here, and none before it: engines let go of what they have staged."""
        if self._staging == version:
            self.stage(version)

    async def staged(self, version: WeightVersion) -> None:
        """Wait until every engine in rotation has a version on its host, or serves it or a newer one."""
        while lacking := [
            slot for slot in self.slots.values() if slot.view.up and max(slot.staged, slot.view.version) < version
        ]:
            await self._arriving.guard(lacking[0].spec.id, self._staged.next())

    def _stage_next(self, slot: EngineSlot) -> None:
        """What is coming, where it was not told so yet."""
        if self._staging > max(slot.told, slot.view.version):
            self._begin_stage(slot)

    def _begin_stage(self, slot: EngineSlot) -> None:
        slot.told = self._staging
        self._supervisor.spawn(self._stage_one(slot, self._staging))

    async def _stage_one(self, slot: EngineSlot, version: WeightVersion) -> None:
        engine = slot.engine
        slot.staging += 1

        async def stage() -> None:
            if slot.engine is engine:
                await self._stages.guard(slot.spec.id, engine.stage(version))

        try:
            with boundary(EngineError, f"{slot.spec.id} stage"):
                await self._with_room(slot, stage)
        except BoundaryError as error:
            if slot.engine is engine:
                self.down(slot, str(error))
            return
        finally:
            slot.staging -= 1
        if slot.engine is engine:
            slot.staged = max(slot.staged, version)
            self._staged.give()

    async def _with_room(self, slot: EngineSlot, call: Callable[[], Awaitable[T]]) -> T:
        """A call of an engine; again, where its host has no room for the weights. Raises StayedFull."""
        what = f"weights on the host of {slot.spec.id}"
        while True:
            try:
                result = await call()
            except StoreFull as error:
                await self._room.wait(what, error)
            else:
                self._room.found(what)
                return result

    async def swap(self, manifest: WeightManifest, rolling: int) -> None:
        """Bring every engine to these weights; in-flight requests stay where they are and go on."""
        self._current = manifest
        for wave in waves(list(self.slots.values()), rolling):
            await self._swap_wave([slot for slot in wave if slot.view.up], manifest)
        self.serving = manifest.version
        self.freed.give()  # also engines that are down may wait for a version that they can have

    async def _swap_wave(self, slots: Sequence[EngineSlot], manifest: WeightManifest) -> None:
        """Suspend these, load; each resumes as soon as it has."""
        for slot in slots:
            slot.view.serving = False
        self._log.emit(schema.Suspend(engines=[slot.spec.id for slot in slots]))
        await asyncio.gather(*(self._swap_one(slot, manifest) for slot in slots))

    async def _swap_one(self, slot: EngineSlot, manifest: WeightManifest) -> None:
        engine = slot.engine
        try:
            await self._load(slot, manifest)
        except BoundaryError as error:
            if slot.engine is engine:
                self.down(slot, f"swap to {manifest.version}: {error}")
            return
        if slot.engine is engine and slot.view.up:
            slot.view.serving = True
            self._log.emit(schema.Resume(engines=[slot.spec.id]))
            self.freed.give()
        self._stage_next(slot)

    def oldest_loading(self) -> WeightVersion:
        """The oldest version that an engine loads now, or the newest one: nothing that is loaded may be dropped."""
        return min((slot.loading for slot in self.slots.values() if slot.loading is not None), default=self.serving)

    async def _load(self, slot: EngineSlot, manifest: WeightManifest) -> None:
        """Swap one engine, having damaged buckets pushed again where needed."""
        engine = slot.engine
        for tries_left in range(REPAIRS, -1, -1):
            slot.loading, repairs = manifest.version, self._repairs
            try:
                with boundary(EngineError, f"{slot.spec.id} swap"):
                    report = await self._with_room(slot, partial(self._swap_of, slot.spec.id, engine, manifest))
                break
            except WeightError as error:
                self._log.emit(schema.WeightsDamaged(engine=slot.spec.id, version=manifest.version, reason=str(error)))
                if not tries_left:
                    raise
                manifest = await self._whole(manifest.version, repairs)
            finally:
                slot.loading = None
        if slot.engine is engine:
            slot.view.version = report.version
            self._staged.give()
        self._log_swap(slot, report)

    async def _swap_of(self, name: str, engine: Engine, manifest: WeightManifest) -> SwapReport:
        return await self._swaps.guard(name, engine.swap(manifest))

    async def _whole(self, version: WeightVersion, repairs: int) -> WeightManifest:
        """What an engine loads that found the served version damaged: the same, pushed again, or a newer one that is
        served by then. `repairs`: how many there were when it began to load; where there was another since, that is
        what it tries. Raises VersionGone."""
        if self._repairing is not None:
            await self._repairing.next()
        elif self._served.version == version and self._repairs == repairs:
            try:
                await self._repair_for_all(version)
            except VersionGone:
                if self._served.version == version:
                    raise
        return self._served

    async def _repair_for_all(self, version: WeightVersion) -> None:
        """Those who find it damaged meanwhile wait for this one push, and try again."""
        over = self._repairing = Signal()
        try:
            repaired = await self._repair(version)
        finally:
            self._repairs += 1
            self._repairing = None
            over.give()
        if self._served.version == version:
            self._current = repaired  # a trainer that was rebuilt may have pushed other bits

    @property
    def _served(self) -> WeightManifest:
        """What every engine loads; since the first swap began."""
        assert self._current is not None
        return self._current

    def _log_swap(self, slot: EngineSlot, report: SwapReport) -> None:
        self._log.emit(
            schema.EngineSwap(
                engine=slot.spec.id,
                version=report.version,
                pull_s=round(report.pulled.seconds, 6),
                bytes=report.pulled.bytes,
                density=report.pulled.density,
                rebuilt=report.rebuilt_tokens,
                in_flight=len(slot.calls),
            ),
        )


def engines_up(pools: Mapping[str, list[EngineView]]) -> dict[str, int]:
    """By pool. One that is suspended for a swap is up all the same."""
    return {name: sum(view.up for view in views) for name, views in pools.items()}
