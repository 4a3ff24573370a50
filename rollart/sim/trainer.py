"""The simulated trainer, the cluster that starts workers, and the journal: what survives a crash and what does not."""

import asyncio
from collections.abc import Callable, Sequence

from rollart.config.sim import FaultSettings, SimTrainSettings
from rollart.errors import StartAgain, TrainerError
from rollart.hardware import Hardware, ModelShape, TrainCosts, train_costs
from rollart.sim.disaggregated import SimDisaggregated
from rollart.sim.engine import EngineWorld, SimEngine
from rollart.sim.faults import Faults
from rollart.sim.learning import SimLearning
from rollart.sim.links import SLOW, SimDisk, SimLink, SimStore, digest_of
from rollart.sim.shards import SimShard
from rollart.types import (
    Batch,
    Bucket,
    Checkpoint,
    EngineSpec,
    SetAside,
    StepResult,
    WeightManifest,
    WeightVersion,
)

PUSH_FIRST_S = 1e-3
"""A step that excludes pushes lets the push of the step before it begin first."""


class SimTrainer:
    def __init__(
        self,
        settings: SimTrainSettings,
        model: ModelShape,
        costs: TrainCosts,
        bucket_bytes: float,
        store: SimStore,
        push: SimLink,
        faults: Faults,
        disk: SimDisk,
        noted: dict[int, tuple[SetAside, ...]],
        answered: Callable[[], int],
        blocking: bool,
        hold: Callable[[bool], None],
        learning: SimLearning,
        change_s: float,
        skips: bool,
    ) -> None:
        """`noted`: what each step set aside, which outlives the trainer. `answered`: generate calls answered so far, by
        the engines there are now. `hold`: called with true when engines are to stand still, with false when they may go
        on. `change_s`: until the trainer has the engines' GPUs, and until they have them again; 0 with its own.
        `skips`: it passes over groups whose members all earned the same."""
        self._settings = settings
        self._answered = answered
        self._hold = hold
        self._learning = learning
        self._change_s = change_s
        self._skips = skips
        self._at_work = asyncio.Lock()
        """Held by a push, and by a step where these exclude each other."""
        self._blocking = blocking
        self._costs = costs
        self._store = store
        self._push = push
        self._faults = faults
        self._disk = disk
        self._noted = noted
        self._loop = asyncio.get_running_loop()
        sizes = [bucket_bytes] * int(model.weight_bytes // bucket_bytes)
        rest = model.weight_bytes - sum(sizes)
        self._bucket_bytes = [int(size) for size in (*sizes, rest) if size]
        self.version: WeightVersion = 0
        self._restored: WeightVersion = 0
        self.dead = ""
        self.stepping = False
        self._lost: asyncio.Future[None] = self._loop.create_future()

    async def train_step(self, batch: Batch) -> StepResult:
        self._check()
        if batch.step != self.version:
            raise AssertionError(f"step {batch.step} on a trainer at version {self.version}")
        lengths = [
            sum(len(turn.context) + len(turn.completion.tokens) for turn in member.turns)
            for group in batch.groups
            if any(group.advantages) or not self._skips
            for member in group.members
        ]
        tokens = sum(lengths)
        seconds = self._settings.step_s
        if seconds is None:
            pairs = sum(0.5 * length * length for length in lengths)
            seconds = self._settings.fixed_s + self._costs.step_s(tokens, pairs)
        if self._faults.take("trainer_before", f"step {batch.step}"):
            self.die("before its step")
        self._check()
        self._set_aside(batch)
        self.stepping = True
        try:
            if self._change_s:
                self._hold(True)
                await self._sleep(self._change_s)
            if self._faults.take("trainer_during", f"step {batch.step}"):
                await self._sleep(seconds / 2)
                self.die("in the middle of a step")
            if self._blocking:
                await self._sleep(PUSH_FIRST_S)
                async with self._at_work:
                    self._check()
                    await self._work(seconds)
            else:
                await self._work(seconds)
            if self._change_s:
                await self._sleep(self._change_s)
        finally:
            self.stepping = False
            if self._change_s:
                self._hold(False)
        self._learning.trained(batch)
        self.version += 1
        if self._faults.take("trainer_after", f"step {batch.step}"):
            self.die("after the optimizer step")
        self._check()
        metrics = {"perf/tokens": float(tokens)}
        return StepResult(version=self.version, metrics=metrics, set_aside=self._noted[batch.step])

    def _set_aside(self, batch: Batch) -> None:
        """Decided at the first try, and noted: every other one does the same. Some data first ends the trainer."""
        if batch.step in self._noted:
            return
        fault = self._faults.take("untrainable_batch", f"step {batch.step}")
        self._noted[batch.step] = () if fault is None else _untrainable(batch, fault.target)
        if fault is not None and fault.target % 4 == 3:
            self.die("of its data")
            raise StartAgain("the trainer died of its data, which it has noted (simulated)")

    async def publish(self, version: WeightVersion) -> WeightManifest:
        if not self._blocking:
            return await self._publish(version)
        async with self._at_work:
            self._hold(True)
            try:
                return await self._publish(version)
            finally:
                self._hold(False)

    async def _publish(self, version: WeightVersion) -> WeightManifest:
        self._check()
        if not max(self._restored, self.version - 1) <= version <= self.version:
            raise TrainerError(f"version {version} is not held by a trainer at {self.version} (simulated)")
        buckets: list[Bucket] = []
        for position, num_bytes in enumerate(self._bucket_bytes):
            await self._push.transfer(num_bytes)
            self._check()
            self._disk.must_have_room()
            bucket = Bucket(name=f"{version}/{position}", num_bytes=num_bytes, digest=digest_of(version, position))
            self._store.put(version, position, bucket)
            buckets.append(bucket)
            for kind in ("bucket_lost", "bucket_corrupt"):
                if self._faults.take(kind, f"{version}/{position}"):
                    self._store.damage(version, position, lose=kind == "bucket_lost")
        manifest = WeightManifest(version=version, buckets=tuple(buckets))
        self._store.commit(manifest)
        return manifest

    async def save(self) -> str:
        self._check()
        await self._sleep(self._settings.save_s)
        self._disk.must_have_room()
        return str(self.version)

    async def restore(self, reference: str) -> WeightVersion:
        self._check()
        await self._sleep(self._settings.restore_s)
        self.version = self._restored = int(reference or 0)
        return self.version

    def die(self, reason: str) -> None:
        self.dead = self.dead or reason
        if not self._lost.done():
            self._lost.set_result(None)

    def _check(self) -> None:
        if self.dead:
            raise TrainerError(f"the trainer died {self.dead} (simulated)")

    async def _work(self, seconds: float) -> None:
        """This many seconds of the core, of which the coordinator takes some for each call answered meanwhile."""
        before = self._answered()
        await self._sleep(seconds)
        while self._settings.call_s and (now := self._answered()) > before:
            seconds, before = (now - before) * self._settings.call_s, now
            await self._sleep(seconds)

    async def _sleep(self, seconds: float) -> None:
        """Work for so long, or until the process dies."""
        timer = self._loop.create_future()
        handle = self._loop.call_later(seconds, _set, timer)
        self._lost.add_done_callback(lambda _: _set(timer))
        try:
            await timer
        finally:
            handle.cancel()
        self._check()


def _untrainable(batch: Batch, way: int) -> tuple[SetAside, ...]:
    """One trajectory, a whole group, or all."""
    group = batch.groups[way // 4 % len(batch.groups)]
    groups = {0: [group], 2: batch.groups}.get(way % 4, ())
    found = [member.id for one in groups for member in one.members] or [group.members[way % len(group.members)].id]
    return tuple(SetAside(name, "its loss is not a finite number (simulated)") for name in found)


def _change_s(model: ModelShape, train: SimTrainSettings, gpus: int) -> float:
    """Until the trainer's state is on its GPUs, or off them: each has a part of it, and a link of its own."""
    return model.params * train.state_bytes / (train.host_gb_s * 1e9 * gpus)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class SimCluster:
    """Starts simulated workers, and lets faults at them."""

    def __init__(
        self,
        engines: EngineWorld,
        train: SimTrainSettings,
        train_hardware: Hardware,
        train_gpus: int,
        bucket_bytes: float,
        push: SimLink,
        faults: Faults,
        noted: dict[int, tuple[SetAside, ...]],
        disk: SimDisk | None = None,
        learning: SimLearning | None = None,
        colocated: bool = False,
        start_shard: Callable[[int], SimShard] | None = None,
        shard_engines: Sequence[Sequence[str]] = (),
        skips: bool = False,
    ) -> None:
        """`start_shard`: makes the shard of this number. `shard_engines`: those of each. `skips`: the trainer passes
        over groups whose members all earned the same."""
        self._change_s = _change_s(engines.model, train, train_gpus) if colocated else 0.0
        self._disk = disk or SimDisk()
        self._learning = learning or SimLearning()
        self._world = engines
        self._train = train
        self._costs = train_costs(
            engines.model,
            train_hardware,
            train_gpus,
            efficiency=train.efficiency,
            tensor=train.tensor,
            expert=train.expert,
        )
        if train.token_s is not None:
            self._costs = TrainCosts(update_s=0.0, token_s=train.token_s, pair_s=0.0)
        self._bucket_bytes = bucket_bytes
        self._push = push
        self._faults = faults
        self._noted = noted
        self._loop = asyncio.get_running_loop()
        self.engines: dict[str, SimEngine] = {}
        self.shards: dict[int, SimShard] = {}
        self._start_shard = start_shard
        self._shard_engines = shard_engines
        self._skips = skips
        self.current: SimTrainer | None = None
        for kind in ("engine_death", "engine_hang", "engine_restart"):
            faults.on(kind, self._hit_engine)
        faults.on("slow_answer", self._slow_down)
        faults.on("shard_death", self._kill_shard)
        faults.on("trainer_before", self._kill_idle)
        faults.on("trainer_during", self._kill_busy)
        for kind in ("bucket_lost", "bucket_corrupt"):
            faults.on(kind, self._hit_bucket)
        for kind in ("link_slow", "link_cut"):
            faults.on(kind, self._hit_link)

    async def engine(self, spec: EngineSpec) -> SimEngine:
        await asyncio.sleep(self._world.settings.start_s)
        kind = SimDisaggregated if spec.pool in self._world.disaggregated else SimEngine
        engine = kind(spec, self._world, lambda name: self.engines.pop(name, None))
        self.engines[spec.id] = engine
        return engine

    async def shard(self, number: int) -> SimShard:
        before = self.shards.get(number)
        if before is not None:
            before.die("it is started again")
            await before.closed()
        assert self._start_shard is not None, "this job has no shards"
        shard = self.shards[number] = self._start_shard(number)
        return shard

    async def trainer(self) -> SimTrainer:
        await asyncio.sleep(self._train.fixed_s)
        self.current = SimTrainer(
            self._train,
            self._world.model,
            self._costs,
            self._bucket_bytes,
            self._world.store,
            self._push,
            self._faults,
            self._disk,
            self._noted,
            lambda: sum(engine.answered for engine in self.engines.values()),
            self._world.blocking,
            self._hold_engines,
            self._learning,
            self._change_s,
            self._skips,
        )
        return self.current

    def _hold_engines(self, held: bool) -> None:
        for name in sorted(self.engines):
            self.engines[name].hold(held)

    async def close(self) -> None:
        """All workers end; so they do when their coordinator is killed."""
        for shard in self.shards.values():
            shard.die("the job ended")
        for shard in self.shards.values():
            await shard.closed()
        for engine in list(self.engines.values()):
            engine.die("the job ended")
        if self.current is not None:
            self.current.die("with the job")
        self._world.store.clear()

    def _hit_engine(self, fault: FaultSettings) -> bool:
        well = [name for name in sorted(self.engines) if not self.engines[name].hung]
        if not well:
            return True
        name = well[fault.target % len(well)]
        self._faults.fired(fault, name)
        if fault.kind == "engine_hang":
            self.engines[name].hang(fronted=fault.target % 2 == 1)
        else:
            self.engines[name].die("killed" if fault.kind == "engine_death" else "restarted by its machine")
        return True

    def _kill_shard(self, fault: FaultSettings) -> bool:
        """Its engines are its children, and end with it."""
        well = [number for number, shard in self.shards.items() if not shard.dead]
        if not well:
            return True
        number = well[fault.target % len(well)]
        self._faults.fired(fault, f"shard-{number}")
        self.shards[number].die("killed")
        for name in self._shard_engines[number]:
            if name in self.engines:
                self.engines[name].die("its shard was killed")
        return True

    def _slow_down(self, fault: FaultSettings) -> bool:
        busy = [(name, call) for name in sorted(self.engines) for call in self.engines[name].calls()]
        if not busy:
            return True
        name, call = busy[fault.target % len(busy)]
        self._faults.fired(fault, self.engines[name].slow(call, fault.duration_s))
        return True

    def _kill_idle(self, fault: FaultSettings) -> bool:
        if self.current is None or self.current.dead or self.current.stepping:
            return False
        self._faults.fired(fault, "trainer")
        self.current.die("before its step")
        return True

    def _kill_busy(self, fault: FaultSettings) -> bool:
        if self.current is None or self.current.dead or not self.current.stepping:
            return False
        self._faults.fired(fault, "trainer")
        self.current.die("in the middle of a step")
        return True

    def _hit_bucket(self, fault: FaultSettings) -> bool:
        newest = self._world.store.newest()
        if newest is None:
            return False
        self._faults.fired(fault, f"version {newest}")
        self._world.store.damage(newest, fault.target, lose=fault.kind == "bucket_lost")
        return True

    def _hit_link(self, fault: FaultSettings) -> bool:
        link, name = ((self._push, "push"), (self._world.pull, "pull"))[fault.target % 2]
        self._faults.fired(fault, name)
        link.disturb(self._loop.time(), fault.duration_s, SLOW if fault.kind == "link_slow" else 0.0)
        return True


class SimJournal:
    """Survives the coordinator: everything in it is frozen, so keeping it is as good as writing it down."""

    def __init__(self, disk: SimDisk | None = None, learning: SimLearning | None = None) -> None:
        self._disk = disk
        self.learning = learning or SimLearning()
        self._batches: dict[int, Batch] = {}
        self._checkpoint: Checkpoint | None = None
        self.noted: dict[int, tuple[SetAside, ...]] = {}
        """What the trainer wrote into the run directory beside: step -> what it set aside."""

    def write_batch(self, batch: Batch) -> None:
        if self._disk is not None:
            self._disk.must_have_room()
        self._batches[batch.step] = batch

    def batches(self, from_step: int) -> Sequence[Batch]:
        return [self._batches[step] for step in sorted(self._batches) if step >= from_step]

    def commit(self, checkpoint: Checkpoint) -> None:
        if self._disk is not None:
            self._disk.must_have_room()
        self._checkpoint = checkpoint
        self._batches = {step: batch for step, batch in self._batches.items() if step >= checkpoint.step}

    def latest(self) -> Checkpoint | None:
        return self._checkpoint
