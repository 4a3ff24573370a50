"""The head's side of the shards: who plays which group, one swap for all of them, and what they say.

A shard is started with its share of the engines, and again when it is lost; its groups are then begun anew, as new
attempts, wherever a shard is up. Invariants: a group is played by one shard at a time; an event of a shard is written
before what the head makes of it; a swap is over when every shard has made it.
"""

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollart.control.affinity import AffinityDriver
from rollart.control.context import JobContext
from rollart.control.fleet import Repair
from rollart.control.peer import Peer, ShardLost
from rollart.control.rollout import ATTEMPTS_PER_LIFE, Rollout
from rollart.control.waits import Signal
from rollart.control.world import Sharding
from rollart.errors import BoundaryError, ClusterError, JobStopped, NoRoom, boundary
from rollart.events import schema
from rollart.events.log import LogHandle, Renumbering
from rollart.policy.profile import TaskProfile
from rollart.policy.redundancy import backoff_s
from rollart.policy.sharding import ShardView, least_loaded
from rollart.policy.stalls import Part
from rollart.ports import Events, Shard, ShardMessage
from rollart.types import (
    EngineSpec,
    EngineWork,
    Group,
    Status,
    Task,
    Trajectory,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)


@dataclass(slots=True, eq=False)
class Place:
    """One shard's place; the shard in it may change."""

    view: ShardView
    engines: tuple[EngineSpec, ...]
    peer: Peer | None = None
    """Of the shard that is there."""
    renumbering: Renumbering = field(default_factory=Renumbering)
    talking: tuple["asyncio.Task[None]", ...] = ()
    engines_up: Sequence[str] = ()
    episodes: dict[str, None] = field(default_factory=dict)
    """Of evaluations, that it plays."""
    restarts: int = 0
    gone: bool = False
    loading: WeightVersion | None = None
    """What it begins with, while it does."""

    @property
    def name(self) -> str:
        return f"shard-{self.view.number}"

    def note_engines(self, up: Sequence[str]) -> None:
        self.engines_up = up
        self.view.pools = frozenset(engine.pool for engine in self.engines if engine.id in up)


@dataclass(slots=True, eq=False)
class Played:
    """A group, and where."""

    id: str
    task: Task
    order: tuple[str, ...]
    first: int
    cause: int
    restarts: int = 0
    place: Place | None = None
    """None: it waits for one."""


class Shards:
    """Plays groups and serves weights as one player and one fleet would."""

    def __init__(
        self,
        context: JobContext,
        log: LogHandle,
        sharding: Sharding,
    ) -> None:
        job, limits, waits = context.job, context.job.limits, context.waits
        self._limits = limits
        self._log = log
        self._start = sharding.start
        self._supervisor = context.supervisor
        self._loop = asyncio.get_running_loop()
        self._places = [Place(ShardView(number), tuple(own)) for number, own in enumerate(sharding.engines)]
        self._learns = any(task.affinity == "auto" for task in job.tasks)
        self._attempts = limits.attempts
        self._starts = waits.on("shard.start", limits.start_s)
        self._hearing = waits.on("shard", limits.progress_s)
        self._drains = waits.on("drain")
        self._arriving = waits.on("weights on their hosts")
        self._rooms = waits.on("a shard")
        self._repair_version: Repair
        """Once it is connected."""
        self._repairs: dict[WeightVersion, asyncio.Task[WeightManifest]] = {}
        """Under way: several shards may find the same version damaged."""
        self._groups: dict[str, Played] = {}
        self._came = Signal()
        """A shard came up, or none will any more."""
        self._affinity: AffinityDriver | None = None
        self._rollout: Rollout | None = None
        self.serving: WeightVersion = 0
        self._current: WeightManifest | None = None
        self._staging: tuple[WeightVersion, WeightVersion] = (0, 0)
        """The version that is on its way, and what had arrived when it began."""
        self._oldest: WeightVersion = 0
        """That was being loaded in a shard when the last swap ended there."""
        self._closed = False
        self._own = contextvars.copy_context()
        """Of what follows from what they say; who listens to them does so in the background."""

    async def start(self) -> None:
        """All at once, with their engines. Raises ClusterError."""
        await asyncio.gather(*(self._begin_first(place) for place in self._places))

    async def _begin_first(self, place: Place) -> None:
        """One that is lost meanwhile is started again; one whose engines cannot start ends the job."""
        while True:
            try:
                await self._begin(place)
            except ShardLost as error:
                if place.restarts == self._limits.engine_restarts:
                    raise
                place.restarts += 1
                self._log.emit(schema.ShardRetry(shard=place.name, reason=str(error)))
                await asyncio.sleep(backoff_s(self._limits.backoff_s, place.restarts))
            else:
                return

    def connect(self, affinity: AffinityDriver, repair: Repair) -> None:
        """Who is told what they say, and who pushes a damaged version again."""
        self._affinity, self._repair_version = affinity, repair
        self._tell_engines(-1)

    @property
    def fleet(self) -> "Shards":
        return self

    def player(self, rollout: Rollout) -> "Shards":
        self._rollout = rollout
        return self

    # --- groups: as `Players` -------------------------------------------------------------------------------

    def play(self, group_id: str, task: Task, order: tuple[str, ...], *, first: int, cause: int) -> None:
        played = self._groups[group_id] = Played(group_id, task, order, first, cause)
        self._give(played)

    def _give(self, played: Played) -> None:
        """To a shard, where one is up; else when one is."""
        view = least_loaded([place.view for place in self._places], played.order[0])
        if view is None:
            return
        played.place = self._places[view.number]
        view.groups[played.order[0]] += 1
        first = played.first + played.restarts * self._attempts
        self._peer(played.place).tell("play", played.id, played.task, list(played.order), first, played.cause)

    def _taken_back(self, group_id: str) -> Played:
        played = self._groups.pop(group_id)
        if played.place is not None:
            played.place.view.groups[played.order[0]] -= 1
        return played

    def stop(self, group_id: str, status: Status, reason: str) -> None:
        played = self._taken_back(group_id)
        if played.place is not None:
            self._peer(played.place).tell("stop", group_id, status, reason)

    def sweep(self, serving: WeightVersion) -> list[str]:
        """Each shard has done so, and reported it, as it made the swap."""
        return []

    async def any_too_old(self, serving: WeightVersion) -> bool:
        return any(await self._all("too_old", serving))

    async def drain(self) -> None:
        self._closed = True
        await self._drains.guard("shards", self._all("drain"))

    def reopen(self) -> None:
        self._closed = False
        self._supervisor.spawn(self._all("reopen"))

    # --- evaluations ------------------------------------------------------------------------------------------

    async def episode(
        self, id: TrajectoryId, task: Task, order: Sequence[str], temperature: float | None
    ) -> Trajectory:
        """One episode; again, as a new attempt, where its shard is lost."""
        while True:
            view = least_loaded([place.view for place in self._places], order[0])
            if view is None:
                await self._rooms.guard(str(id), self._came.next())
                continue
            place = self._places[view.number]
            peer, key = self._peer(place), str(id)
            place.episodes[key] = None
            view.groups[order[0]] += 1
            try:
                played: Trajectory = await peer.ask("episode", id, task, list(order), temperature)
                place.restarts = 0
                return played
            except ClusterError:
                id = id._replace(attempt=id.attempt + 1)
            finally:
                if place.peer is peer:
                    del place.episodes[key]
                    view.groups[order[0]] -= 1

    # --- weights: as a fleet --------------------------------------------------------------------------------

    def stage(self, version: WeightVersion, arrived: WeightVersion = 0) -> None:
        self._staging = (version, arrived)
        for place in self._up:
            self._peer(place).tell("stage", version, arrived)

    def stage_instead(self, version: WeightVersion) -> None:
        for place in self._up:
            self._peer(place).tell("stage_instead", version)

    async def staged(self, version: WeightVersion) -> None:
        await self._arriving.guard("shards", self._all("staged", version))

    async def swap(self, manifest: WeightManifest, rolling: int) -> None:
        self._current = manifest
        at_a_time = max(1, rolling // len(self._places)) if rolling else 0
        loading = await self._all("swap", manifest, at_a_time)
        self._oldest = min(loading, default=manifest.version)
        self.serving = manifest.version

    def oldest_loading(self) -> WeightVersion:
        """Nothing that is loaded may be dropped."""
        return min([self._oldest, *(place.loading for place in self._places if place.loading is not None)])

    # --- shards -----------------------------------------------------------------------------------------------

    @property
    def _up(self) -> list[Place]:
        return [place for place in self._places if place.view.up]

    def _peer(self, place: Place) -> Peer:
        assert place.peer is not None, f"{place.name} is not there"
        return place.peer

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """What every shard answers, also those that come up meanwhile; nothing of one that is lost."""
        answers: dict[Peer, Any] = {}
        asked: dict[Peer, None] = {}
        while lacking := [peer for place in self._up if (peer := self._peer(place)) not in asked]:
            asked.update(dict.fromkeys(lacking))
            found = await asyncio.gather(*(peer.ask(method, *arguments) for peer in lacking), return_exceptions=True)
            for peer, answer in zip(lacking, found, strict=True):
                if not isinstance(answer, BaseException):
                    answers[peer] = answer
                elif not isinstance(answer, ClusterError):
                    raise answer
        return list(answers.values())

    async def _begin(self, place: Place) -> None:
        """Start a shard, with the weights that are served now. Raises ClusterError."""
        manifest, closed = self._current, False
        place.loading = None if manifest is None else manifest.version
        number = place.view.number
        try:
            with boundary(ClusterError, place.name):
                peer = self._talk(place, await self._starts.guard(place.name, self._start(number)))
                now_s = self._loop.time() - self._log.zero_s
                asked = peer.ask("begin", now_s, manifest, *self._staging, self._learns)
                place.note_engines(await self._starts.guard(place.name, asked))
                while self._current is not manifest or self._closed is not closed:  # since it was asked
                    if self._closed is not closed:
                        closed = self._closed
                        await peer.ask("drain" if closed else "reopen")
                    else:
                        manifest = self._current
                        if place.loading is None and manifest is not None:
                            place.loading = manifest.version
                        await peer.ask("swap", manifest, 0)
        except ClusterError:
            self._leave(place, "it could not start")
            raise
        finally:
            place.loading = None
        place.view.up = True
        peer.tell("stage", *self._staging)

    def _talk(self, place: Place, shard: Shard) -> Peer:
        peer = place.peer = Peer(
            {
                "attempted": self._attempted,
                "complete": partial(self._complete, place),
                "given_up": partial(self._given_up, place),
                "engines": partial(self._engines, place),
                "worked": self._worked,
                "repair": self._repair,
            },
            self._supervisor,
        )
        place.renumbering = Renumbering()
        place.talking = (
            self._supervisor.spawn(self._listen(place, peer, shard), background=True),
            self._supervisor.spawn(self._speak(place, peer, shard), background=True),
        )
        return peer

    async def _listen(self, place: Place, peer: Peer, shard: Shard) -> None:
        try:
            while True:
                with boundary(ClusterError, place.name), self._hearing.during(place.name):
                    messages = await shard.news()
                self._own.run(self._take, place, peer, messages)
        except ClusterError as error:
            self._own.run(self._down, place, peer, str(error))

    async def _speak(self, place: Place, peer: Peer, shard: Shard) -> None:
        try:
            while True:
                if not peer.waiting:
                    await peer.some.next()
                with boundary(ClusterError, place.name):
                    await shard.tell(peer.said())
        except ClusterError as error:
            self._own.run(self._down, place, peer, str(error))

    def stalled(self, text: str) -> None:
        """Nothing moves: let each say who waits there."""
        for place in self._up:
            self._peer(place).tell("stall", text)

    def parts(self) -> Sequence[Part]:
        """Each names its own."""
        return ()

    def lost(self, worker: str, reason: str) -> None:
        """The cluster saw this worker die."""
        for place in self._places:
            if place.name == worker and place.peer is not None:
                self._down(place, place.peer, reason)

    def _leave(self, place: Place, reason: str) -> None:
        """Nobody is there any more: no answer comes, and nothing more is heard."""
        if place.peer is not None:
            place.peer.lose(f"{place.name}: {reason}")
        place.peer = None
        current = asyncio.current_task(self._loop)
        for task in place.talking:
            if task is not current:
                task.cancel()
        place.talking = ()

    def _down(self, place: Place, peer: Peer, reason: str) -> None:
        """A shard is lost: start it again, and begin its groups anew."""
        if place.peer is not peer:
            return
        was_up, place.view.up = place.view.up, False
        self._leave(place, reason)
        if not was_up:
            return  # who starts it is told
        lost = [played for played in self._groups.values() if played.place is place]
        cause = self._log.emit(
            schema.ShardDown(
                shard=place.name,
                reason=reason,
                engines=[engine.id for engine in place.engines],
                groups=[played.id for played in lost],
                episodes=list(place.episodes),
            )
        )
        place.note_engines(())
        place.episodes.clear()
        place.view.groups.clear()
        self._tell_engines(cause)
        self._supervisor.spawn(self._revive(place, cause))
        for played in lost:
            self._again(played, cause)

    def _again(self, played: Played, cause: int) -> None:
        """Its attempts have numbers that none before had."""
        played.restarts += 1
        played.place = None
        if (played.restarts + 1) * self._attempts > ATTEMPTS_PER_LIFE:
            del self._groups[played.id]
            self._reports.given_up(played.id, "failed", cause)
            return
        event = schema.Admit(group=played.id, task=played.task.id, serving=self.serving, cause=cause)
        played.cause = self._log.emit(event)
        self._give(played)

    async def _revive(self, place: Place, cause: int) -> None:
        """Start it again, or give it up."""
        while place.restarts < self._limits.engine_restarts:
            place.restarts += 1
            await asyncio.sleep(backoff_s(self._limits.backoff_s, place.restarts))
            try:
                await self._begin(place)
            except BoundaryError as error:
                self._log.emit(schema.ShardRetry(shard=place.name, reason=str(error), cause=cause))
                if isinstance(error, NoRoom) and any(other.view.up for other in self._places):
                    place.restarts -= 1  # a machine may come
                continue
            up = self._log.emit(
                schema.ShardUp(
                    shard=place.name,
                    engines=list(place.engines_up),
                    version=0 if self._current is None else self._current.version,
                    cause=cause,
                )
            )
            self._tell_engines(up)
            self._came.give()
            for played in self._groups.values():
                if played.place is None:
                    self._give(played)
            return
        place.gone = True
        self._log.emit(schema.ShardGone(shard=place.name, restarts=place.restarts, cause=cause))
        if all(other.gone for other in self._places):
            self._supervisor.fail(
                JobStopped(
                    f"no shard is left: each was started again {self._limits.engine_restarts} times; see shard.down in "
                    "events.jsonl for the reasons"
                )
            )

    # --- what they say ----------------------------------------------------------------------------------------

    def _take(self, place: Place, peer: Peer, messages: Sequence[ShardMessage]) -> None:
        for message in messages:
            if place.peer is not peer:
                return  # one of them was the last straw
            if isinstance(message, Events):
                self._log.adopt(message.events, place.renumbering)
            else:
                peer.take(message)

    @property
    def _reports(self) -> Rollout:
        assert self._rollout is not None, "groups are played for nobody"
        return self._rollout

    def _attempted(self, task: str, profile: Mapping[str, float] | None, reason: str | None) -> None:
        if self._affinity is not None and profile is not None:
            self._affinity.measured(task, TaskProfile(**profile))  # type: ignore[arg-type]
        if reason is not None:
            self._reports.health.attempt_failed(task, reason)

    def _complete(self, place: Place, group: str, done: Group | None, rewards: Sequence[float], cause: int) -> None:
        if group in self._groups:  # else it was taken back meanwhile
            self._taken_back(group)
            place.restarts = 0
            self._reports.complete(group, done, rewards, place.renumbering.of(cause))

    def _given_up(self, place: Place, group: str, how: str, cause: int) -> None:
        if group in self._groups:
            self._taken_back(group)
            self._reports.given_up(group, how, place.renumbering.of(cause))

    def _engines(self, place: Place, up: Sequence[str], cause: int) -> None:
        place.note_engines(up)
        if place.view.up:
            self._tell_engines(place.renumbering.of(cause))

    def _tell_engines(self, cause: int) -> None:
        if self._affinity is not None:
            up = dict.fromkeys((engine.pool for place in self._places for engine in place.engines), 0)
            for place in self._places:
                for engine in place.engines:
                    up[engine.pool] += engine.id in place.engines_up
            self._affinity.engines_changed(up, cause)

    def _worked(self, pool: str, before: EngineWork | None, now: EngineWork) -> None:
        if self._affinity is not None:
            self._affinity.worked(pool, before, now)

    async def _repair(self, version: WeightVersion) -> WeightManifest:
        """Push a version again, once for all who find it damaged meanwhile."""
        repairing = self._repairs.get(version)
        if repairing is None:
            repairing = self._repairs[version] = asyncio.ensure_future(self._repair_version(version))
            repairing.add_done_callback(lambda _: self._repairs.pop(version))
        manifest = await asyncio.shield(repairing)
        if self._current is not None and self._current.version == version:
            self._current = manifest
        return manifest
