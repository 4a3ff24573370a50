"""The same workers as Ray actors, placed on the machines that their pool names. The only file that imports ray.

An actor hosts what `rollart.launch.worker.start` makes. Calls carry `rollart.workers.wire` bytes; Ray wraps them in
its own serialisation, between our own processes only, behind the cluster's token. An actor that dies raises the
port's error in every call under way, and is never restarted by Ray: control does that, because only control knows which
weights it must load first. A worker no machine has room for waits `wait_s` for one to join, then raises NoRoom.

A trainer's place is a placement group. One of several ranks has a bundle for each, on as few machines as have room, and
an actor in each bundle; one more, the trainer itself, sits with the first and calls them.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import orjson
import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollart.errors import BoundaryError, ClusterError, JobError, NoRoom
from rollart.types import EngineSpec, Needs, Node
from rollart.workers.carried import Carried, Receiver, chunks, here
from rollart.workers.handles import WorkerEngine, WorkerShard, WorkerTrainer, as_raised, close_shard
from rollart.workers.server import failure
from rollart.workers.setup import WorkerSetup
from rollart.workers.wire import pack, unpack

Build = Callable[..., Awaitable[Any]]
"""Makes a worker from its set-up's JSON, and from its ranks where it has some: `rollart.launch.worker.start`."""
KIND_SHARE = 0.001
"""What a worker takes of the resource that names its kind. The resource says where; CPUs and GPUs say how much."""
PLACED = "placed.jsonl"
"""In the run's log directory: one line for each start of a worker, with its node, host and process."""
Locks = Mapping[str, asyncio.Lock]
"""By machine."""
MAX_CALLS = 100_000
"""Calls under way in one actor. Far above any batch: a swap must never queue behind generate calls."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    node: str
    host: str
    pid: int


class ActorWorker:
    """The inside of an actor: one worker, called by method name."""

    def __init__(self, build: Build, directory: str) -> None:
        self._build = build
        self._worker: Any = None
        self._receiver: Receiver | None = None
        with contextlib.suppress(OSError):
            os.chdir(directory)  # relative paths of the job mean the same here, where the directory is shared

    async def where(self) -> Place:
        """Answers as soon as the actor has a machine."""
        return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())

    async def rendezvous(self) -> str:
        """Where ranks can meet: this machine's address, and a port that is free now."""
        with socket.socket() as listener:
            address = ray.util.get_node_ip_address()
            listener.bind((address, 0))
            return f"tcp://{address}:{listener.getsockname()[1]}"

    async def lacks(self, body: str) -> list[int]:
        """Which of the files that a worker of this set-up reads are not on this machine, by their place in the list."""
        needed = WorkerSetup.model_validate_json(body).needed
        return [place for place, one in enumerate(needed) if here(one) is None]

    async def receive(self, carried: str) -> bytes:
        return await self._answer(self._receive(Carried.model_validate_json(carried)))

    async def take(self, name: str, data: bytes) -> None:
        assert self._receiver is not None
        self._receiver.take(name, data)

    async def finish(self) -> bytes:
        assert self._receiver is not None
        return await self._answer(asyncio.to_thread(self._receiver.finish))

    async def setup(self, body: str, ranks: Sequence[Any] = ()) -> bytes:
        return await self._answer(self._set_up(body, [RankActor(rank, actor) for rank, actor in enumerate(ranks)]))

    async def call(self, method: str, body: bytes) -> bytes:
        return await self._answer(getattr(self._worker, method)(*unpack(body)))

    async def _receive(self, carried: Carried) -> None:
        self._receiver = Receiver(carried)

    async def _set_up(self, body: str, ranks: "Sequence[RankActor]") -> None:
        self._worker = await self._build(body, ranks)

    async def _answer(self, work: Awaitable[Any]) -> bytes:
        try:
            return pack([True, await work])
        except Exception as error:  # the boundary of the process: whatever it is, the caller hears it
            return pack([False, failure(error)])


class RankActor:
    """One rank, seen from the trainer."""

    def __init__(self, rank: int, actor: Any) -> None:
        self._actor = actor
        self.gone = False
        self.name = f"rank-{rank}"

    @property
    def pid(self) -> int | None:
        """None when it is lost; which process it is, is another machine's business."""
        return None if self.gone else 0

    async def start(self, body: str) -> None:
        await _answered(self, ClusterError, self._actor.setup.remote(body))

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        return await _answered(self, error, self._actor.call.remote(method, pack(list(arguments))))

    async def stop(self) -> None:
        ray.kill(self._actor)


class RayWorker:
    """One actor, seen from the coordinator; with it, those of its ranks."""

    def __init__(self, name: str, actor: Any, ranks: Sequence[Any] = (), group: Any = None) -> None:
        self.name = name
        self.gone = False
        """It was stopped, or a call has found that it is lost."""
        self.places: dict[str, Place] = {}
        """By name, its own and those of its ranks."""
        self._actor = actor
        self._ranks = ranks
        self._group = group

    async def start(self, setup: WorkerSetup, wait_s: float, wanted: str, locks: Locks) -> None:
        """Raises NoRoom when no machine takes it in time, ClusterError when it cannot be built. `locks`: one for each
        machine; files that it lacks are sent by one worker's start, and the others find them there."""
        actors = {self.name: self._actor} | {f"rank-{place}": actor for place, actor in enumerate(self._ranks)}
        try:
            async with asyncio.timeout(wait_s):
                for name, actor in actors.items():
                    self.places[name] = await actor.where.remote()
                if self._ranks:
                    setup = setup.model_copy(update={"rendezvous": await self._ranks[0].rendezvous.remote()})
        except TimeoutError:
            raise NoRoom(f"{self.name}: {wanted}, and no machine had room for {wait_s:g} s") from None
        except RayError as error:
            raise ClusterError(f"{self.name} could not start: {_one_line(error)}") from None
        for name, actor in actors.items():
            async with locks[self.places[name].node]:
                await self._send_files(actor, setup)
        await _answered(self, ClusterError, self._actor.setup.remote(setup.model_dump_json(), list(self._ranks)))

    async def _send_files(self, actor: Any, setup: WorkerSetup) -> None:
        """What its machine lacks, a chunk at a time."""
        try:
            for place in await actor.lacks.remote(setup.model_dump_json()):
                carried = setup.needed[place]
                await _answered(self, ClusterError, actor.receive.remote(carried.model_dump_json()))
                for name, data in chunks(carried):
                    await actor.take.remote(name, data)
                await _answered(self, ClusterError, actor.finish.remote())
        except (RayError, OSError) as error:
            raise ClusterError(f"{self.name} could not be sent its files: {_one_line(error)}") from None

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        """One call of the worker's port; what goes wrong is raised as the port's error."""
        if self.gone:  # Ray raises a plain Exception for an actor of a cluster that was let go of
            raise error(f"{self.name}: its actor is lost")
        return await _answered(self, error, self._actor.call.remote(method, pack(list(arguments))))

    def stop(self) -> None:
        self.gone = True
        for actor in (self._actor, *self._ranks):
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)


async def _answered(worker: RankActor | RayWorker, error: type[BoundaryError], answer: Any) -> Any:
    """What its actor answered; what the work raised is raised here, and a lost actor is the port's error."""
    try:
        ok, value = unpack(await answer)
    except RayError as lost:
        worker.gone = True
        raise error(f"{worker.name}: its actor is lost: {_one_line(lost)}") from None
    if not ok:
        raise as_raised(worker.name, value[0], value[1], error)
    return value


class RayCluster:
    """Starts workers as actors. `room` is what all workers of the job need, for a cluster of its own."""

    def __init__(
        self,
        build: Build,
        setup: WorkerSetup,
        *,
        engine_needs: Mapping[str, Needs],
        trainer_needs: Needs,
        shard_needs: Needs | None = None,
        room: Sequence[Needs],
    ) -> None:
        self._build = build
        self._setup = setup
        self._engine_needs = engine_needs
        self._trainer_needs = trainer_needs
        """Of one rank."""
        self._shard_needs = shard_needs
        self._wait_s = setup.job.cluster.wait_s
        self._log_dir = setup.log_dir
        self.workers: dict[str, RayWorker] = {}
        """By name: the engines' ids, `trainer`, and the environment workers'."""
        self._locks: Locks = defaultdict(asyncio.Lock)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        _say_into(self._log_dir / "ray.log")
        self._joined = connect(setup.job.cluster.address, room)

    async def engine(self, spec: EngineSpec) -> WorkerEngine:
        return WorkerEngine(await self.worker(self._setup.engine(spec), self._engine_needs[spec.pool]))

    async def trainer(self) -> WorkerTrainer:
        return WorkerTrainer(await self.worker(self._setup, self._trainer_needs, reserve=self._setup.job.train.gpus))

    async def shard(self, number: int) -> WorkerShard:
        """Engines and environments of a shard are its own actors, and end with it."""
        assert self._shard_needs is not None, "this job has no shards"
        return WorkerShard(await self.worker(self._setup.as_shard(number), self._shard_needs))

    async def worker(self, setup: WorkerSetup, needs: Needs, *, reserve: int = 0) -> RayWorker:
        """Start, or start again, the worker of this set-up. `reserve`: its place is a group of this many bundles."""
        name = setup.name
        before = self.workers.pop(name, None)
        if before is not None:
            before.stop()
        worker = self.workers[name] = self._create(name, needs, reserve=reserve)
        times = f"{reserve} times " if reserve > 1 else ""
        try:
            await worker.start(setup, self._wait_s, f"it needs {times}{described(needs)}", self._locks)
        except BaseException:
            worker.stop()
            raise
        with (self._log_dir / PLACED).open("ab") as log:
            for part, place in worker.places.items():
                log.write(orjson.dumps({"worker": part, **asdict(place)}, option=orjson.OPT_APPEND_NEWLINE))
        return worker

    async def close(self) -> None:
        """Stop all workers and let go of the cluster; an embedded one ends."""
        shards = [worker for name, worker in self.workers.items() if name.startswith("shard-")]
        await asyncio.gather(*(close_shard(shard) for shard in shards))
        for worker in self.workers.values():
            worker.stop()
        self.workers.clear()
        if self._joined:
            await asyncio.to_thread(ray.shutdown)

    def _create(self, name: str, needs: Needs, *, reserve: int) -> RayWorker:
        if not reserve:
            return RayWorker(name, self._actor(needs, "SPREAD"))
        bundle = {"CPU": needs.cpus, "GPU": needs.gpus, **_kinds(needs)}
        bundles = [{key: value for key, value in bundle.items() if value}] * reserve
        group = placement_group(bundles, strategy="PACK")
        places = [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
            for number in range(reserve)
        ]
        if reserve == 1:
            return RayWorker(name, self._actor(needs, places[0]), group=group)
        ranks = [self._actor(needs, place) for place in places]
        return RayWorker(name, self._actor(Needs(resource="", cpus=0.0), places[0]), ranks, group)

    def _actor(self, needs: Needs, strategy: Any) -> Any:
        return (
            ray.remote(ActorWorker)
            .options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                resources=_kinds(needs),
                scheduling_strategy=strategy,
                max_concurrency=MAX_CALLS,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(self._build, os.getcwd())
        )


def _kinds(needs: Needs) -> dict[str, float]:
    return {needs.resource: KIND_SHARE} if needs.resource else {}


def connect(address: str | None, room: Sequence[Needs]) -> bool:
    """Join the cluster at this address; without one, start a cluster of this machine alone, with that room. False: who
    is an actor has joined already."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    start = partial(ray.init, logging_level=logging.ERROR, log_to_driver=False)
    if address is not None:
        try:
            start(address=address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise JobError(
                f"cluster.address: no Ray cluster answers at {address!r} ({_one_line(error)}); start one with "
                "`ray start --head`, or remove the address to have one for this job alone"
            ) from None
        return True
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own default makes its workers the last to get a core
    kinds = {need.resource: 1.0 for need in room if need.resource}
    cpus = max(os.cpu_count() or 1, math.ceil(sum(need.cpus for need in room)))
    start(address="local", num_cpus=cpus, resources=kinds, include_dashboard=False)
    return True


class _Lines(TypedDict):
    """What a process of the cluster has written."""

    pid: int
    lines: list[str]


def _say_into(path: Path) -> None:
    """What Ray tells a driver of its nodes goes to a file: on stdout it would end up in our JSON. It has no setting."""

    def write(data: _Lines, ignore_prefix: bool) -> None:
        with path.open("a") as log:
            log.writelines(f"({data.get('pid')}) {line}\n" for line in data["lines"])

    ray_worker.print_to_stdstream = write


def nodes_at(address: str) -> list[Node]:
    """The machines of the cluster at this address."""
    connect(address, ())
    try:
        return [
            Node(
                name=f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}",
                host=node["NodeManagerHostname"],
                resources=dict(node["Resources"]),
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        ]
    finally:
        ray.shutdown()


def described(needs: Needs) -> str:
    parts = [f"{needs.cpus:g} CPU", *([f"{needs.gpus:g} GPU"] if needs.gpus else [])]
    return " and ".join(parts) + (f" on a machine with the resource {needs.resource!r}" if needs.resource else "")


def _one_line(error: BaseException) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
