"""The resource manager's view of a job before anything starts: pools, what is bound to them, and what is missing.

`rollart pools` shows it; `rollart train` refuses a job that cannot be placed, with the same words.
"""

import math
from dataclasses import replace

from rollart.config.job import Job
from rollart.config.settings import PoolSettings
from rollart.errors import JobError
from rollart.launch.pools import pool_stand_ins
from rollart.policy.devices import Assignment, DeviceDemand, assign
from rollart.policy.placement import Demand, Placement, fit
from rollart.policy.sharding import part_of
from rollart.report import reports
from rollart.report.reports import PoolsReport
from rollart.types import Needs, Node

ENV_WORKER_CPUS = 1.0
"""What an environment worker asks of a cluster, whatever its slots: most environments wait most of the time."""


SHARD_CPUS = 1.0
"""What a coordinator that plays a part of the rollout has to itself."""


def demands(job: Job, *, trains: bool = True) -> list[Demand]:
    """The workers that need machines, pool by pool. Engines that may join later ask for none now.

    `trains`, here and below: an evaluation has no trainer.
    """
    found: list[Demand] = []
    for pool in job.pools:
        kind = kind_of(pool)
        if pool.engines:
            engines = pool.engines
            # a server takes what hardware its pool has, an attached one has it elsewhere; the embedded engine is told
            attached = engines.url is not None
            on_cpu = engines.device == "cpu" if engines.type == "embedded" else attached or pool.hardware == "cpu"
            # an embedded engine's prefill is on the device on which it decodes
            gpus = engines.gpus if engines.type == "embedded" else engines.all_gpus
            needs = _needs(kind, engines.threads * (2 if engines.is_pair else 1), gpus, on_cpu=on_cpu)
            role = "judge" if pool.judge else "rollout"
            found.append(Demand(pool=pool.name, role=role, count=engines.count, needs=needs))
        if pool is job.shard_pool:
            needs = Needs(resource=kind, cpus=SHARD_CPUS)
            found.append(Demand(pool=pool.name, role="shards", count=job.cluster.coordinators, needs=needs))
        if pool.slots:
            shards = job.cluster.coordinators
            parts = [part_of(pool.slots, number, shards) for number in range(shards)]
            workers = sum(math.ceil(part / pool.slots_per_worker) for part in parts)
            needs = Needs(resource=kind, cpus=ENV_WORKER_CPUS)
            found.append(Demand(pool=pool.name, role="environments", count=workers, needs=needs))
        if trains and pool is job.train_pool:
            # each rank is a process of its own, with a GPU of its own
            needs = _needs(kind, job.train.threads, 1, on_cpu=job.train.device == "cpu")
            found.append(Demand(pool=pool.name, role="train", count=job.train.gpus, needs=needs))
    return found


def devices_for(job: Job, *, trains: bool = True) -> Assignment:
    """Which GPUs of this machine each worker gets. Ray gives out those of its machines itself."""
    from rollart.cluster.machine import devices

    found = assign(_device_demands(job, trains=trains), devices() if job.cluster.type != "ray" else [])
    if job.cluster.type == "inline" and found.own and len(found.own) + len(found.shared) > 1:
        workers = ", ".join([*found.own, *found.shared])
        text = (
            f"cluster.type: inline has one process, and {workers} would each see GPUs of their own; set cluster.type "
            "to local, or name the devices of all (device: cuda:0)"
        )
        return replace(found, missing=(*found.missing, text))
    return found


def visible_devices(job: Job, *, trains: bool = True) -> dict[str, tuple[str, ...]]:
    """By worker, the GPUs that its process sees; not there: all. A server takes whatever it sees, so it sees no more
    than it was given, its own or shared; the others are told which of all they use."""
    found = devices_for(job, trains=trains)
    servers = {
        f"{pool.name}-{number}"
        for pool, engines in job.all_engines
        if engines.type != "embedded"
        for number in range(engines.count)
    }
    return {**found.own, **{worker: names for worker, names in found.shared.items() if worker in servers}}


def gpu_shares(job: Job, *, trains: bool = True) -> dict[str, float]:
    """By worker, its share of its GPU; where one has a share, all that name a GPU have one. Empty: nobody has."""
    found = {
        f"{pool.name}-{number}": engines.share
        for pool, engines in job.all_engines
        if engines.device != "cpu"
        for number in range(engines.count)
    }
    if trains and job.train.device != "cpu":
        found["trainer"] = job.train.share
    return {worker: share or 1.0 for worker, share in found.items()} if any(found.values()) else {}


def _device_demands(job: Job, *, trains: bool) -> list[DeviceDemand]:
    """Of the workers that use GPUs of this machine. A server has its own; the others are told."""
    if job.cluster.type == "ray":
        return []
    found: list[DeviceDemand] = []
    for pool, engines in job.all_engines:
        for number in range(engines.count):
            worker, keys = f"{pool.name}-{number}", f"pools.{pool.name}.engines"
            if engines.type == "embedded":
                found += _told(worker, f"{keys}.device", engines.device, 1)
            elif engines.device != "cpu":
                found += _told(worker, f"{keys}.device", engines.device, engines.all_gpus)
            elif pool.hardware != "cpu" and engines.url is None:
                found.append(DeviceDemand(worker=worker, key=f"{keys}.gpus", own=engines.all_gpus))
    return found + (_told("trainer", "train.device", job.train.device, job.train.gpus) if trains else [])


def _told(worker: str, key: str, device: str, count: int) -> list[DeviceDemand]:
    """`cuda`: devices of its own; `cuda:1`: that one, and those after it."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):  # the second is told by `rollart.launch.checks`
        return []
    if not number:
        return [DeviceDemand(worker=worker, key=key, own=count)]
    return [DeviceDemand(worker=worker, key=key, named=tuple(range(int(number), int(number) + count)))]


def _needs(kind: str, threads: int, gpus: int, *, on_cpu: bool) -> Needs:
    return Needs(resource=kind, cpus=float(threads), gpus=0.0 if on_cpu else float(gpus))


def kind_of(pool: PoolSettings) -> str:
    """The resource by which a pool's machines are known."""
    if pool.resource is not None:
        return pool.resource
    return "" if pool.hardware == "cpu" else pool.hardware


def nodes_for(job: Job) -> list[Node]:
    """The machines a job would run on: those of a Ray cluster, or this one."""
    if job.cluster.type == "ray" and job.cluster.address is not None:
        from rollart.cluster.ray import nodes_at

        return nodes_at(job.cluster.address)
    from rollart.cluster.machine import this_machine

    return [this_machine()]


def refuse_unplaceable(job: Job, *, trains: bool = True) -> None:
    """Raises JobError that names each pool and what it lacks."""
    if job.cluster.type == "ray" and job.cluster.address is not None and not job.cluster.check:
        return
    nodes = nodes_for(job)
    hosts = {node.host for node in nodes}
    if job.weights.type in ("shm", "cuda_ipc") and len(hosts) > 1:
        raise JobError(
            f"weights.type: {job.weights.type} is for one machine, and the cluster has {len(hosts)}; set it to "
            "files and weights.path to a directory that they share, or to tcp (or cluster.check to false)"
        )
    if job.weights.type in ("tcp", "nccl") and len(hosts) > 1 and job.weights.address.endswith(":0"):
        raise JobError(
            f"weights.address: {job.weights.address} is nothing that the {len(hosts)} machines of the cluster could "
            "reach; give the address of the machine that trains and a free port, such as 10.0.0.1:7700"
        )
    lacking = [found for found in fit(demands(job, trains=trains), nodes) if found.missing]
    if lacking:
        raise JobError(
            "pools: the job cannot be placed. "
            + " ".join(f"{_words(found)}." for found in lacking)
            + " Add machines or lower the counts; `rollart pools JOB` shows everything"
            + (", and cluster.check=false waits for machines to come" if job.cluster.address else "")
        )
    if missing := devices_for(job, trains=trains).missing:
        raise JobError(" ".join(missing))


def report(job: Job) -> PoolsReport:
    """All that `rollart pools` shows."""
    nodes = nodes_for(job)
    fits = fit(demands(job), nodes)
    order = pool_stand_ins(job)
    devices = devices_for(job)
    return PoolsReport(
        cluster=reports.ClusterReport(job.cluster.type, job.cluster.address),
        nodes=[reports.Machine(node.name, _plain(node)) for node in nodes],
        pools=[
            reports.PoolReport(
                name=pool.name,
                hardware=pool.hardware,
                cost=job.kinds[pool.hardware].cost if pool.cost is None else pool.cost,
                resource=next((found.demand.needs.resource for found in fits if found.demand.pool == pool.name), ""),
                roles=[_role(found) for found in fits if found.demand.pool == pool.name],
                tasks=[task.name for task in job.tasks if task.affinity == pool.name],
                stand_ins=order.get(pool.name, [pool.name])[1:],
            )
            for pool in job.pools
        ],
        devices={worker: list(own) for worker, own in (dict(devices.own) | dict(devices.shared)).items()},
        missing=[*(_words(found) for found in fits if found.missing), *devices.missing],
        fallbacks=_fallbacks(fits, order),
    )


def _role(found: Placement) -> reports.Role:
    demand, placed, missing = found.demand, found.placed, found.missing
    each = reports.Each(demand.needs.cpus, demand.needs.gpus)
    return reports.Role(role=demand.role, workers=demand.count, placed=placed, each=each, missing=missing)


def _words(found: Placement) -> str:
    demand = found.demand
    return f"Pool {demand.pool}, {demand.role}: {found.placed} of {demand.count} workers placed; {found.missing}"


def _fallbacks(fits: list[Placement], order: dict[str, list[str]]) -> dict[str, str]:
    """Pool without any engine -> the pool that would serve its tasks."""
    serving = {found.demand.pool for found in fits if found.demand.role == "rollout" and found.placed}
    found: dict[str, str] = {}
    for pool, names in order.items():
        if pool not in serving:
            found[pool] = next((name for name in names if name in serving), "")
    return found


def _plain(node: Node) -> dict[str, float]:
    """Without what Ray keeps for itself."""
    return {key: value for key, value in sorted(node.resources.items()) if not key.startswith("node:")}
