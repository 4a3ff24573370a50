"""The engines of a judge: a frozen model that grades trajectories. Reward backends and other jobs ask it.

They start with the job's other engines and are restarted like those, but they are a fleet of their own: no swap reaches
them, and they do not count in `serving`. What a grade cost is in its `reward` event; its calls are no events.
"""

import asyncio
from collections.abc import Mapping

from rollart.control.context import JobContext
from rollart.control.fleet import Fleet
from rollart.control.proxy import Proxy
from rollart.errors import WeightError
from rollart.policy.stalls import Part
from rollart.ports import Cluster, Engine
from rollart.types import Completion, EngineSpec, GenerateRequest, WeightManifest, WeightVersion


class JudgePool:
    """The FrozenModel port, over the engines of one pool."""

    def __init__(self, specs: tuple[EngineSpec, ...]) -> None:
        self.specs = specs
        self._begun = asyncio.Event()
        self._fleet: Fleet | None = None
        self._proxy: Proxy | None = None

    def begin(self, context: JobContext, cluster: Cluster, engines: Mapping[EngineSpec, Engine]) -> None:
        """Its engines are there."""
        self._fleet = Fleet(context, cluster, engines, _never_swapped, lambda up, cause: None)
        self._proxy = Proxy(context, self._fleet, recorded=False)
        context.supervisor.spawn(self._fleet.watch(), background=True)
        self._begun.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Who asks before the engines are there waits for them. Raises EngineError, RequestError or AnswerError."""
        await self._begun.wait()
        assert self._proxy is not None
        completion, *_ = await self._proxy.generate(request, (self.specs[0].pool,), None, -1)
        return completion

    def lost(self, engine: str, reason: str) -> None:
        """The cluster saw this engine die; nothing where it is none of these."""
        if self._fleet is not None and engine in self._fleet.slots:
            self._fleet.down(self._fleet.slots[engine], reason)

    def parts(self) -> list[Part]:
        return self._fleet.parts() if self._fleet is not None else []


async def _never_swapped(version: WeightVersion) -> WeightManifest:
    raise WeightError(f"version {version}: a judge has no versions")
