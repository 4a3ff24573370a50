"""Simulated engines for tests: one spec, one world, requests of a chosen size."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from rollart.config.settings import Spread
from rollart.config.sim import SimEngineSettings, SimTaskSettings
from rollart.events.log import EventLog
from rollart.hardware import HARDWARE, MODELS, Disaggregated
from rollart.sim.clock import VirtualLoop
from rollart.sim.cores import Core
from rollart.sim.dice import Dice
from rollart.sim.disaggregated import SimDisaggregated
from rollart.sim.engine import EngineWorld, SimEngine
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink, SimStore, digest_of
from rollart.types import Bucket, EngineSpec, GenerateRequest, Sampling, WeightManifest

T = TypeVar("T")
SPEC = EngineSpec(id="pool-0", pool="pool", type="embedded", hardware="h20", gpus=1)


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def awaited() -> T:
        return await work()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(awaited())


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """An engine, its store, and a way to ask it."""

    def __init__(
        self,
        *,
        answer: Spread | None = None,
        max_batch: int = 16,
        model: str = "qwen3-8b",
        settings: SimEngineSettings | None = None,
        apart: Disaggregated | None = None,
        kind: str = "embedded",
        call_s: float = 0.0,
        kv_tokens: int | None = None,
    ) -> None:
        self.log = EventLog(now)
        self.store = SimStore(self.log)
        world = EngineWorld(
            model=MODELS[model],
            hardware={"pool": HARDWARE["h20"]},
            settings=settings or SimEngineSettings(load_gb_s=10.0),
            max_batch={"pool": max_batch},
            disaggregated={} if apart is None else {"pool": apart},
            tasks={"a": SimTaskSettings(answer_tokens=answer or Spread(mean=100))},
            dice=Dice(0),
            store=self.store,
            pull=SimLink(10e9),
            blocking=False,
            log=self.log,
            faults=Faults((), self.log),
            kv_tokens={"pool": kv_tokens},
            cores={SPEC.id: Core()},
            call_s=call_s,
        )
        spec = replace(SPEC, type=kind, gpus=1 if apart is None else apart.decoders)
        self.died: list[str] = []
        self.engine = (SimEngine if apart is None else SimDisaggregated)(spec, world, self.died.append)

    def put(self, version: int, gb: float = 1.0) -> WeightManifest:
        """A version of so many gigabytes, complete in the store."""
        bucket = Bucket(f"{version}/0", int(gb * 1e9), digest_of(version, 0))
        self.store.put(version, 0, bucket)
        manifest = WeightManifest(version=version, buckets=(bucket,))
        self.store.commit(manifest)
        return manifest


def ask(
    name: str, prompt_tokens: int = 100, *, max_tokens: int = 10_000, turn: int = 0, last: bool = False
) -> GenerateRequest:
    prompt = np.zeros(prompt_tokens, dtype=np.int32)
    return GenerateRequest(
        id=f"{name}/{turn}",
        session=name,
        domain="a",
        turn=turn,
        prompt=(prompt,),
        prompt_tokens=prompt_tokens,
        sampling=Sampling(max_tokens=max_tokens),
        last=last,
    )
