"""Carries weights from the trainer to the engines: publish in the background, swap when the plan says.

Invariant: versions are swapped in order, one swap at a time, and only once their manifest exists. Control moves
manifests; tensors never pass through here.
"""

import asyncio
from typing import Protocol

from rollart.control.fleet import Fleet
from rollart.control.supervisor import TaskSupervisor
from rollart.control.trainer import TrainerDriver
from rollart.control.waits import Waits
from rollart.errors import WeightError, boundary
from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.swap import SwapPlan, may_start
from rollart.ports import WeightStore
from rollart.types import WeightManifest, WeightVersion

DROP_LIMIT_S = 600.0
"""A store that takes longer to forget old versions is left to itself, with a warning."""


class Swapped(Protocol):
    """The rollout, as a swap sees it."""

    async def drain(self) -> None: ...

    def reopen(self) -> None: ...

    def swapped(self, cause: int) -> None: ...


class WeightDriver:
    def __init__(
        self,
        plan: SwapPlan,
        trainer: TrainerDriver,
        fleet: Fleet,
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
        self._manifests: dict[WeightVersion, asyncio.Future[WeightManifest]] = {}
        self._reached: asyncio.Future[None] | None = None

    def publish(self, version: WeightVersion) -> None:
        """Start to push a version; engines stage its buckets as they appear."""
        previous = self._manifests.get(version - 1)
        self._manifests[version] = asyncio.get_running_loop().create_future()
        self._supervisor.spawn(self._push(version, previous))

    async def _push(self, version: WeightVersion, previous: "asyncio.Future[WeightManifest] | None") -> None:
        if previous is not None:
            await asyncio.wait([previous])
        began = self._log.emit(schema.Push(version=version))
        await self._fleet.stage(version)
        manifest = await self._trainer.publish(version)
        self._log.emit(schema.Pushed(version=version, bytes=manifest.num_bytes, cause=began))
        self._manifests[version].set_result(manifest)
        if self._plan.when_published:
            await self.to(version)

    async def pushed(self, version: WeightVersion) -> None:
        """Wait until a version's push, if one is under way, is done."""
        manifest = self._manifests.get(version)
        if manifest is not None:
            await self._publishing.guard(f"version {version}", asyncio.shield(manifest))

    async def repair(self, version: WeightVersion) -> WeightManifest:
        """A bucket was lost or damaged: push the version again."""
        return await self._trainer.publish(version)

    async def to(self, version: WeightVersion) -> None:
        """Bring the engines to a version; returns at once where they have it."""
        if version <= self._fleet.serving:
            return
        who = f"version {version}"
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
            del self._manifests[version]
        self._rollout.swapped(ended)
        if self._plan.drains:
            self._rollout.reopen()
        if self._reached is not None and not self._reached.done():
            self._reached.set_result(None)
        self._supervisor.spawn(self._drop_before(manifest.version))

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
