"""Carries weights from the trainer to the engines: publish in the background, swap when the plan says.

A push takes its time, and nobody waits for it but a step that the engines are too old for (`ready_for`). A version has
arrived when its manifest exists and every engine in rotation has it on its host: then a swap only loads it. One version
is on its way at a time, since two would share the link; one that cannot be pushed before there is a newer one is left
out. Invariant: versions are swapped in order, one swap at a time, and only once they have arrived. Control moves
manifests; tensors never pass through here.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeVar

from rollart.control.supervisor import TaskSupervisor
from rollart.control.trainer import TrainerDriver
from rollart.control.waits import Waits
from rollart.errors import VersionGone, WeightError, boundary
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.swap import SwapPlan, may_start
from rollart.ports import WeightStore
from rollart.types import WeightManifest, WeightVersion

T = TypeVar("T")

DROP_LIMIT_S = 600.0
"""A store that takes longer to forget old versions is left to itself, with a warning."""


class Swapped(Protocol):
    """The rollout, as a swap sees it."""

    async def drain(self) -> None: ...

    def reopen(self) -> None: ...

    def swapped(self, cause: int) -> None: ...


class Engines(Protocol):
    """All engines, as a swap sees them."""

    @property
    def serving(self) -> WeightVersion: ...

    def stage(self, version: WeightVersion, arrived: WeightVersion = 0) -> None: ...

    def stage_instead(self, version: WeightVersion) -> None: ...

    async def staged(self, version: WeightVersion) -> None: ...

    async def swap(self, manifest: WeightManifest, rolling: int) -> None: ...

    def oldest_loading(self) -> WeightVersion: ...


class WeightDriver:
    def __init__(
        self,
        plan: SwapPlan,
        trainer: TrainerDriver,
        fleet: Engines,
        rollout: Swapped,
        store: WeightStore,
        supervisor: TaskSupervisor,
        waits: Waits,
        log: LogHandle,
    ) -> None:
        self._plan = plan
        self._trainer = trainer
        self._fleet = fleet
        self._rollout = rollout
        self._store = store
        self._supervisor = supervisor
        self._log = log
        self._publishing = waits.on("publish")
        self._swapping = waits.on("swap")
        self._dropping = waits.on("store", DROP_LIMIT_S)
        self._lock = asyncio.Lock()
        self._pushes: dict[WeightVersion, asyncio.Future[None]] = {}
        """Done when a version or, where it was left out, a newer one is in the store."""
        self._manifests: dict[WeightVersion, asyncio.Future[WeightManifest]] = {}
        """Of the same, when it has arrived."""
        self._arrived: WeightVersion = 0
        """The newest that has."""
        self._last_push: asyncio.Future[None] | None = None
        """Done when the version that was published last has arrived, or was left out."""
        self._reached: asyncio.Future[None] | None = None

    def publish(self, version: WeightVersion) -> None:
        """Start to push a version; engines stage its buckets as they appear."""
        loop = asyncio.get_running_loop()
        before, self._last_push = self._last_push, loop.create_future()
        self._pushes[version] = loop.create_future()
        self._manifests[version] = loop.create_future()
        self._supervisor.spawn(self._push(version, before, self._last_push))

    async def _push(
        self, version: WeightVersion, before: "asyncio.Future[None] | None", over: "asyncio.Future[None]"
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        began = self._log.emit(schema.Push(version=version))
        self._fleet.stage(version, self._arrived)
        try:
            manifest = await self._trainer.publish(version, newest=True)
        except VersionGone as error:
            self._log.emit(schema.PushSkipped(version=version, reason=str(error), cause=began))
            over.set_result(None)
            return
        self._log.emit(schema.Pushed(version=version, bytes=manifest.num_bytes, cause=began))
        _settle(self._pushes, version, None)
        await self._fleet.staged(version)
        self._log.emit(schema.Staged(version=version, cause=began))
        self._arrived = version
        _settle(self._manifests, version, manifest)
        over.set_result(None)
        if self._plan.when_published:
            await self.to(version)

    async def pushed(self, version: WeightVersion) -> None:
        """Wait until a version's push, if one is under way, is done."""
        push = self._pushes.get(version)
        if push is not None:
            await self._publishing.guard(f"version {version}", asyncio.shield(push))

    async def repair(self, version: WeightVersion) -> WeightManifest:
        """A bucket was lost or damaged: push the version again. One that is gone cannot be served; the next one is then
        swapped in as it arrives, or with all engines waiting for it no batch would be taken that lets it in."""
        try:
            return await self._trainer.publish(version)
        except VersionGone:
            self._supervisor.spawn(self.to(max(self._manifests)))
            raise

    async def batch_taken(self, step: int) -> None:
        """Bring the engines to the weights of the step before. Where these are still on their way nobody waits: they
        go in as they arrive, beside the step. But a drain is for them."""
        if self._plan.drains or self._arrived >= step:
            await self.to(step)
        else:
            self._supervisor.spawn(self.to(step))

    async def to(self, version: WeightVersion) -> None:
        """Bring the engines to a version, or a newer one; returns at once where they have it."""
        if version <= self._fleet.serving:
            return
        who = f"version {version}"
        if self._arrived < version:
            self._fleet.stage_instead(version)
        manifest = await self._publishing.guard(who, asyncio.shield(self._manifests[version]))
        async with self._lock:
            if version <= self._fleet.serving:
                return
            await self._swapping.guard(who, self._swap(manifest))

    async def _swap(self, manifest: WeightManifest) -> None:
        if self._plan.drains:
            await self._rollout.drain()
        began = self._log.emit(schema.SwapStart(version=manifest.version, serving=self._fleet.serving))
        await self._fleet.swap(manifest, self._plan.rolling)
        ended = self._log.emit(schema.SwapEnd(version=manifest.version, cause=began))
        for version in [version for version in self._manifests if version < manifest.version]:
            del self._manifests[version], self._pushes[version]
        self._rollout.swapped(ended)
        if self._plan.drains:
            self._rollout.reopen()
        if self._reached is not None and not self._reached.done():
            self._reached.set_result(None)
        self._supervisor.spawn(self._drop_before(min(manifest.version, self._fleet.oldest_loading())))

    async def ready_for(self, step: int) -> None:
        """Wait until the engines are new enough for this step to start."""
        while not may_start(step, self._fleet.serving):
            self._reached = asyncio.get_running_loop().create_future()
            await self._swapping.guard(f"step {step}", self._reached)

    async def _drop_before(self, version: WeightVersion) -> None:
        try:
            with boundary(WeightError, "drop old weights"):
                await self._dropping.guard(f"version {version}", self._store.drop_before(version))
        except WeightError as error:
            self._log.emit(schema.Warning(text=str(error)))


def _settle(futures: "Mapping[WeightVersion, asyncio.Future[T]]", version: WeightVersion, result: T) -> None:
    """Those of this version, and of older ones that were left out."""
    for older, future in futures.items():
        if older <= version and not future.done():
            future.set_result(result)
