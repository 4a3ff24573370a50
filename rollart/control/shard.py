"""A shard: the rollout of a share of the engines, in a coordinator of its own, which the head tells what to play.

The head is the coordinator that admits, trains and swaps (`shards.py` is its side). Invariant: what happened is said
in order, and before anything that follows from it. A shard decides nothing about versions: it swaps when it is told.
"""

import asyncio
import contextvars
import dataclasses
from collections.abc import Mapping, Sequence

from rollart.config.job import Job
from rollart.control.affinity import measure
from rollart.control.context import JobContext
from rollart.control.groups import GroupPlayer
from rollart.control.peer import Peer
from rollart.control.share import Share
from rollart.control.watchdog import Watchdog
from rollart.control.world import RolloutWorld
from rollart.errors import ClusterError, boundary
from rollart.events import schema
from rollart.events.log import EventBuffer
from rollart.ports import Events, ShardMessage
from rollart.types import (
    EngineWork,
    Group,
    Status,
    Task,
    Trajectory,
    WeightManifest,
    WeightVersion,
)

EVENTS_S = 0.25
"""Events that nothing else follows are said after this long,"""
MOST_EVENTS = 2000
"""or when there are so many: the head takes a few milliseconds for them."""
IDLE_S = 5.0
"""A shard that has nothing to say says so this often, or more often where `limits.progress_s` is short."""


class Shard:
    def __init__(self, job: Job, world: RolloutWorld) -> None:
        """`job`: the whole job's, with this shard's share of slots and reward calls. `world`: of this shard."""
        self._job = job
        self._idle_s = min(IDLE_S, job.limits.progress_s / 4)
        self._loop = asyncio.get_running_loop()
        self.log = EventBuffer(self._loop.time, self._loop.time(), self._noted)
        self._context = JobContext(job, self.log)
        self.waits = self._context.waits
        self._supervisor = self._context.supervisor
        self._share = Share(self._context, world)
        self._player: GroupPlayer
        """Once it has begun."""
        self._peer = Peer(
            {
                "begin": self._begin,
                "play": self._play,
                "stop": self._stop,
                "too_old": self._too_old,
                "drain": self._drain,
                "reopen": self._reopen,
                "stage": self._stage,
                "stage_instead": self._stage_instead,
                "staged": self._staged,
                "swap": self._swap,
                "episode": self._share.episode,
                "stall": self._stall,
            },
            self._supervisor,
            self.log,
        )
        self._watchdog = Watchdog(self._context, self._share.parts, stalled=None)
        self._own = contextvars.copy_context()
        """Of what it is told to do; who listens to a shard does so in the background."""
        self._learns = False
        """The head wants to know what engines have done."""
        self._gone = ""

    # --- the port -------------------------------------------------------------------------------------------

    async def tell(self, messages: Sequence[ShardMessage]) -> None:
        self._must_live()
        for message in messages:
            assert not isinstance(message, Events), "a head has no events for a shard"
            self._own.run(self._peer.take, message)

    async def news(self) -> list[ShardMessage]:
        self._must_live()
        if not self._peer.waiting and not self.log:
            await self._some(self._idle_s)
        if not self._peer.waiting and self.log:
            await self._some(EVENTS_S)
        self._must_live()
        return self._peer.said()

    def _must_live(self) -> None:
        if not self._gone and self._supervisor.failed.done() and not self._supervisor.failed.cancelled():
            error = self._supervisor.failed.exception()
            self._gone = f"{type(error).__name__}: {error}"
        if self._gone:
            raise ClusterError(self._gone)

    async def _some(self, limit_s: float) -> None:
        """Until there is something to say, or for so long."""
        timer = self._loop.call_later(limit_s, self._peer.some.give)
        try:
            await asyncio.wait([self._peer.some.next(), self._supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _noted(self, events: int) -> None:
        if events in (1, MOST_EVENTS):
            self._peer.some.give()

    async def close(self, reason: str = "it was closed") -> None:
        """It is gone, and so is all that it has not said."""
        self._gone = self._gone or reason
        self._peer.some.give()
        await self._supervisor.close()
        self.waits.close()

    def lost(self, worker: str, reason: str) -> None:
        """The cluster saw this worker die, though nobody may be calling it now."""
        self.log.emit(schema.WorkerLost(worker=worker, reason=reason))
        self._share.lost(worker, reason)

    # --- what the head tells it -----------------------------------------------------------------------------

    async def _begin(
        self,
        now_s: float,
        manifest: WeightManifest | None,
        staging: WeightVersion,
        arrived: WeightVersion,
        learns: bool,
    ) -> list[str]:
        """Start the engines, and bring them to these weights. `now_s`: seconds since the run began. `staging`: the
        version that is on its way. `learns`: the head wants to know what engines have done. Returns those that are
        up."""
        self.log.zero_s = self._loop.time() - now_s
        with boundary(ClusterError, "start"):
            await self._share.start()
        self._learns = learns
        self._share.connect(self, self._repair)
        fleet = self._share.fleet
        self._player = self._share.player(self)
        self._supervisor.spawn(self._watchdog.run(), background=True)
        if manifest is not None:
            await fleet.swap(manifest, 0)
        if staging > fleet.serving:
            fleet.stage(staging, arrived)
        return self._engines_up

    @property
    def _engines_up(self) -> list[str]:
        return [slot.spec.id for slot in self._share.fleet.slots.values() if slot.view.up]

    def _play(self, group: str, task: Task, order: Sequence[str], first: int, cause: int) -> None:
        self._player.play(group, task, tuple(order), first=first, cause=cause)

    def _stop(self, group: str, status: Status, reason: str) -> None:
        """It may have been reported already."""
        if group in self._player.groups:
            self._player.stop(group, status, reason)

    async def _too_old(self, serving: WeightVersion) -> bool:
        return await self._player.any_too_old(serving)

    async def _drain(self) -> None:
        await self._player.drain()

    async def _reopen(self) -> None:
        self._player.reopen()

    def _stage(self, version: WeightVersion, arrived: WeightVersion) -> None:
        self._share.fleet.stage(version, arrived)

    def _stage_instead(self, version: WeightVersion) -> None:
        self._share.fleet.stage_instead(version)

    async def _staged(self, version: WeightVersion) -> None:
        await self._share.fleet.staged(version)

    async def _swap(self, manifest: WeightManifest, rolling: int) -> WeightVersion:
        """Returns the oldest version that is loaded here now, or the newest."""
        fleet = self._share.fleet
        await fleet.swap(manifest, rolling)
        if self._job.rollout.recheck == "live":
            for group in self._player.sweep(fleet.serving):
                self.given_up(group, "stale", -1)
        return fleet.oldest_loading()

    def _stall(self, text: str) -> None:
        """Nothing moves anywhere: say who waits here."""
        self._watchdog.report(schema.Stall, text)

    # --- what it tells the head -----------------------------------------------------------------------------

    async def _repair(self, version: WeightVersion) -> WeightManifest:
        manifest: WeightManifest = await self._peer.ask("repair", version)
        return manifest

    def engines_changed(self, up: Mapping[str, int], cause: int) -> None:
        self._peer.tell("engines", self._engines_up, cause)

    def worked(self, pool: str, before: EngineWork | None, now: EngineWork) -> None:
        if self._learns:
            self._peer.tell("worked", pool, before, now)

    def attempted(self, trajectory: Trajectory) -> None:
        measured = measure(trajectory)
        profile = None if measured is None else dataclasses.asdict(measured)
        reason = trajectory.reason if trajectory.status is Status.FAILED else None
        if profile is not None or reason is not None:
            self._peer.tell("attempted", trajectory.task.domain, profile, reason)

    def complete(self, group: str, done: Group | None, rewards: Sequence[float], cause: int) -> None:
        self._peer.tell("complete", group, done, list(rewards), cause)

    def given_up(self, group: str, how: str, cause: int) -> None:
        self._peer.tell("given_up", group, how, cause)

    def idle(self) -> None:
        """Nobody waits for it: `drain` is answered."""
