"""The engines of a job: which are up, which weights they serve, and how one that was lost comes back.

Invariant: an engine takes requests only when it is up and serves the current version or, while a swap rolls through
the fleet, the one before. `serving` is the oldest version in rotation: that of the last completed swap.
The proxy sends requests to the seats; the weight driver swaps them.

An engine is judged by its progress, never by how long one request takes: one that has requests and computes nothing for
`progress_limit_s` is taken for hung.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollart.control.supervisor import Crew
from rollart.control.waits import Waits
from rollart.errors import (
    BoundaryError,
    ClusterError,
    EngineError,
    JobStopped,
    NoRoom,
    VersionGone,
    WeightError,
    boundary,
)
from rollart.events import LogHandle
from rollart.policy.redundancy import backoff_s
from rollart.policy.stalls import Part
from rollart.policy.swap import waves
from rollart.ports import Cluster, Engine
from rollart.types import EngineSpec, EngineView, SwapReport, WeightManifest, WeightVersion

REPAIRS = 3
"""How often the trainer is asked to push a version again before an engine that cannot load it is given up."""

NOBODY = ""
"""The id of no request: aborting it stops nothing, and tells how far the engine has come."""

Repair = Callable[[WeightVersion], Awaitable[WeightManifest]]


class Call:
    """One request in an engine. `lost` says why it must be sent again."""

    __slots__ = ("lost", "task")

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self.task = task
        self.lost = ""


class Seat:
    """One engine's place in the fleet; the engine in it may change. A `further` one is filled when there is room."""

    __slots__ = (
        "boundary",
        "calls",
        "engine",
        "further",
        "gone",
        "looking",
        "moved",
        "refused",
        "restarts",
        "served",
        "spec",
        "still",
        "view",
    )

    def __init__(self, spec: EngineSpec, engine: Engine | None) -> None:
        self.spec = spec
        self.further = engine is None
        if engine is not None:
            self.engine: Engine = engine
        self.view = EngineView(id=spec.id, pool=spec.pool)
        self.boundary = boundary(EngineError, spec.id)
        self.calls: dict[str, Call] = {}
        self.restarts = 0
        self.refused = 0
        """Answers in a row that could not be believed."""
        self.gone = False
        self.served = 0
        """Requests answered, by whichever engine sat here."""
        self.moved: tuple[int, int] = (0, 0)
        """How far it had come when it was looked at last: answers, and the engine's own count."""
        self.still = 0
        """Looks in a row that found it where it was; none is made while it takes new weights."""
        self.looking = False


class Fleet:
    def __init__(
        self,
        engines: Mapping[EngineSpec, Engine],
        cluster: Cluster,
        crew: Crew,
        waits: Waits,
        log: LogHandle,
        *,
        restarts: int,
        backoff_s: float,
        swap_limit_s: float,
        start_limit_s: float,
        progress_limit_s: float,
        look_s: float,
        repair: Repair,
    ) -> None:
        self.progress_limit_s = progress_limit_s
        self._look_s = look_s
        """Between two looks at an engine's progress."""
        self.seats = {spec.id: Seat(spec, engine) for spec, engine in engines.items()}
        self.pools: dict[str, list[EngineView]] = {}
        for seat in self.seats.values():
            self.pools.setdefault(seat.spec.pool, []).append(seat.view)
        self.serving: WeightVersion = 0
        self._current: WeightManifest | None = None
        self._staging: WeightVersion = 0
        self._cluster = cluster
        self._crew = crew
        self._log = log
        self._restarts = restarts
        self._backoff_s = backoff_s
        self._swaps = waits.on("engine.swap", swap_limit_s)
        self._starts = waits.on("engine.start", start_limit_s)
        self._looks = waits.on("engine.progress", progress_limit_s)
        self._waiting = waits.on("newer weights")
        self._repair = repair
        self._idle: list[asyncio.Future[None]] = []
        self.on_change: Callable[[int], None] = lambda cause: None
        """Called with the event that says so when an engine came or went."""

    def expect(self, spec: EngineSpec) -> None:
        """One more engine may come: it joins when a machine has room for it, and leaves with its machine."""
        seat = self.seats[spec.id] = Seat(spec, None)
        seat.view.up = seat.view.serving = False
        self.pools.setdefault(spec.pool, []).append(seat.view)
        cause = self._log.emit("engine.expected", {"engine": spec.id, "pool": spec.pool})
        self._crew.spawn(self._revive(seat, cause))

    # --- who takes requests -------------------------------------------------------------------------------

    def changed(self) -> asyncio.Future[None]:
        """Done when an engine may have become free to take requests."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        return future

    def _wake(self) -> None:
        idle, self._idle = self._idle, []
        for future in idle:
            if not future.done():
                future.set_result(None)

    def down(self, seat: Seat, reason: str) -> None:
        """Take a lost engine out of rotation, hand its requests back to be sent again, and revive it."""
        if not seat.view.up:
            return
        seat.view.up = seat.view.serving = False
        cause = self._log.emit("engine.down", {"engine": seat.spec.id, "reason": reason, "calls": len(seat.calls)})
        for call in list(seat.calls.values()):
            call.lost = reason
            call.task.cancel()
        self.on_change(cause)
        self._crew.spawn(self._revive(seat, cause))

    async def watch(self) -> None:
        """Look at the engines for ever; a background task."""
        while True:
            await asyncio.sleep(self._look_s)
            for seat in self.seats.values():
                if not seat.calls:
                    seat.still = 0
                elif seat.view.serving and not seat.looking:
                    seat.looking = True
                    self._crew.spawn(self._look(seat), background=True)

    async def _look(self, seat: Seat) -> None:
        """Ask an engine that has requests how far it has come; take it for hung where that does not change."""
        engine = seat.engine
        try:
            with seat.boundary:
                came = await self._looks.guard(seat.spec.id, engine.abort(NOBODY))
        except BoundaryError as error:
            if seat.engine is engine:
                self.down(seat, f"asked for its progress: {error}")
            return
        finally:
            seat.looking = False
        if seat.engine is not engine or not seat.view.serving:
            return
        moved = (seat.served, came)
        if moved != seat.moved:
            seat.moved, seat.still = moved, 0
            return
        seat.still += 1
        if seat.still * self._look_s > self.progress_limit_s:  # its first request may have come just before a look
            self.down(
                seat,
                f"{seat.spec.id}: computed nothing for {self.progress_limit_s:g} s with {len(seat.calls)} requests "
                "under way (limits.progress_s)",
            )

    def parts(self) -> list[Part]:
        """The engines that take requests, as they stand."""
        return [
            Part(kind="engine", name=seat.spec.id, still_s=seat.still * self._look_s if seat.calls else 0.0)
            for seat in self.seats.values()
            if seat.view.serving
        ]

    def engine_of(self) -> dict[str, str]:
        """The engine that each attempt's call is in."""
        return {id.rpartition("/")[0]: seat.spec.id for seat in self.seats.values() for id in seat.calls}

    async def _revive(self, seat: Seat, cause: int) -> None:
        """Start the engine again, give it the current weights, and put it back; or give it up."""
        while seat.restarts < self._restarts:
            seat.restarts += 1
            await asyncio.sleep(backoff_s(self._backoff_s, seat.restarts))
            try:
                with boundary(ClusterError, "engine start"):
                    seat.engine = await self._starts.guard(seat.spec.id, self._cluster.engine(seat.spec))
                seat.view.version = 0
                if self._staging:
                    with boundary(EngineError, f"{seat.spec.id} stage"):
                        await self._swaps.guard(seat.spec.id, seat.engine.stage(self._staging))
                while self._current is not None and seat.view.version != self._current.version:
                    await self._load(seat, self._current)
            except BoundaryError as error:
                self._log.emit("engine.retry", {"engine": seat.spec.id, "reason": str(error), "cause": cause})
                if isinstance(error, VersionGone):
                    seat.restarts -= 1
                    await self._waiting.guard(seat.spec.id, self.changed())
                elif isinstance(error, NoRoom) and (seat.further or any(view.up for view in self._views())):
                    seat.restarts -= 1  # it waits for a machine while others serve: that is no failure of its own
                continue
            seat.view.up = seat.view.serving = True
            seat.still = 0
            self.on_change(
                self._log.emit("engine.up", {"engine": seat.spec.id, "version": seat.view.version, "cause": cause})
            )
            self._wake()
            return
        seat.gone = True
        self._log.emit("engine.gone", {"engine": seat.spec.id, "restarts": seat.restarts, "cause": cause})
        self._wake()
        if all(other.gone or (other.further and not other.view.up) for other in self.seats.values()):
            self._crew.fail(
                JobStopped(
                    f"no engine is left: each was restarted {self._restarts} times; "
                    "see engine.down in events.jsonl for the reasons"
                )
            )

    def _views(self) -> list[EngineView]:
        return [seat.view for seat in self.seats.values()]

    # --- weights --------------------------------------------------------------------------------------------

    async def stage(self, version: WeightVersion) -> None:
        """Tell all engines that a version is coming."""
        self._staging = version
        seats = [seat for seat in self.seats.values() if seat.view.up]
        await asyncio.gather(*(self._stage_one(seat, version) for seat in seats))

    async def _stage_one(self, seat: Seat, version: WeightVersion) -> None:
        engine = seat.engine
        try:
            with boundary(EngineError, f"{seat.spec.id} stage"):
                await self._swaps.guard(seat.spec.id, engine.stage(version))
        except BoundaryError as error:
            if seat.engine is engine:
                self.down(seat, str(error))

    async def swap(self, manifest: WeightManifest, rolling: int) -> None:
        """Bring every engine to these weights; in-flight requests stay where they are and go on."""
        self._current = manifest
        for wave in waves(list(self.seats.values()), rolling):
            await self._swap_wave([seat for seat in wave if seat.view.up], manifest)
        self.serving = manifest.version

    async def _swap_wave(self, seats: Sequence[Seat], manifest: WeightManifest) -> None:
        """Suspend these, load, resume."""
        for seat in seats:
            seat.view.serving = False
        self._log.emit("suspend", {"engines": [seat.spec.id for seat in seats]})
        await asyncio.gather(*(self._swap_one(seat, manifest) for seat in seats))
        for seat in seats:
            seat.view.serving = seat.view.up
        self._log.emit("resume", {"engines": [seat.spec.id for seat in seats if seat.view.up]})
        self._wake()

    async def _swap_one(self, seat: Seat, manifest: WeightManifest) -> None:
        engine = seat.engine
        try:
            await self._load(seat, manifest)
        except BoundaryError as error:
            if seat.engine is engine:
                self.down(seat, f"swap to {manifest.version}: {error}")

    async def _load(self, seat: Seat, manifest: WeightManifest) -> None:
        """Swap one engine, having damaged buckets pushed again where needed."""
        engine = seat.engine
        for tries_left in range(REPAIRS, -1, -1):
            try:
                with boundary(EngineError, f"{seat.spec.id} swap"):
                    report = await self._swaps.guard(seat.spec.id, engine.swap(manifest))
                break
            except WeightError as error:
                self._log.emit(
                    "weights.damaged", {"engine": seat.spec.id, "version": manifest.version, "reason": str(error)}
                )
                if not tries_left:
                    raise
                manifest = await self._repair(manifest.version)
                if self._current is not None and self._current.version == manifest.version:
                    self._current = manifest  # a trainer that was rebuilt may have pushed other bits
        if seat.engine is engine:
            seat.view.version = report.version
        self._log_swap(seat, report)

    def _log_swap(self, seat: Seat, report: SwapReport) -> None:
        self._log.emit(
            "engine.swap",
            {
                "engine": seat.spec.id,
                "version": report.version,
                "pull_s": round(report.pull_s, 6),
                "exposed_s": round(report.exposed_s, 6),
                "rebuilt": report.rebuilt_tokens,
                "in_flight": len(seat.calls),
            },
        )
