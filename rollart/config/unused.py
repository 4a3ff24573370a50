"""Keys that a job gives and that nothing would read, because of what another key says: each is refused with the reason.

What a single section shows is refused there, in `settings.py` and `sim.py`; what only real runs do not read, in
`rollart/launch/real.py`. A key given its default is let through, as a resolved job has them all.
`tests/test_keys.py` finds keys that are missing here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from rollart.config.job import Job
    from rollart.config.settings import RewardSettings


def unused(job: "Job") -> list[str]:
    """One sentence for each key that has no effect."""
    return [
        f"{place}.{key}: has an effect only with {needs}; change that, or remove it"
        for place, settings, keys, is_read, needs in _rows(job)
        if not is_read
        for key in keys.split()
        if getattr(settings, key) != type(settings).model_fields[key].get_default(call_default_factory=True)
    ]


def _rows(job: "Job") -> Iterator[tuple[str, BaseModel, str, bool, str]]:
    """Place, its settings, keys, whether they are read in this job, and what they need to be."""
    ray = job.cluster.type == "ray"
    serverless = any(reward.type == "http" for reward in job.asked_rewards.values())
    asked = "rewards" in job.asked_rewards
    yield "rewards", job.rewards, " ".join(type(job.rewards).model_fields), asked, "a task without rewards of its own"
    yield "rewards", job.rewards, "function name weight", False, "a task: give it in tasks.N.rewards"
    yield from _reward_rows("rewards", job.rewards)
    spare = job.rollout.spare_groups > 0 or job.rollout.staleness == 0
    yield "rollout", job.rollout, "surplus", spare, "spare_groups, or staleness 0"
    tcp = job.weights.type == "tcp"
    yield "weights", job.weights, "path", job.weights.type == "files", "weights.type files"
    yield "weights", job.weights, "address bind", tcp or job.weights.type == "nccl", "weights.type tcp or nccl"
    yield "weights", job.weights, "delta", tcp, "weights.type tcp"
    mooncake = job.weights.type == "mooncake"
    yield "weights", job.weights, "master metadata protocol segment_mb", mooncake, "weights.type mooncake"
    yield "weights", job.weights, "devices", job.weights.protocol == "rdma", "weights.protocol rdma"
    yield "cluster", job.cluster, "address wait_s", ray, "cluster.type ray"
    yield "cluster", job.cluster, "check", ray and job.cluster.address is not None, "cluster.type ray and an address"
    local = job.cluster.type == "local"
    yield "track", job.track, "project", job.track.wandb != "off", "track.wandb offline or online"
    yield "endpoint", job.endpoint, "host port", bool(job.programs), "an agent.function or agent.command of a task"
    train = job.train
    yield "train", train, "eps_low eps_high", train.algorithm != "rloo", "an algorithm that clips, which rloo does not"
    yield "train", train, "length_constant", train.algorithm == "dr_grpo", "train.algorithm dr_grpo"
    yield "train", train, "reference", train.kl_coef > 0, "a KL, by train.kl_coef"
    yield "train", train, "weight_level", train.correction == "decoupled", "train.correction decoupled"
    yield "train", train, "weight_cap over_cap", train.correction != "none", "train.correction bypass or decoupled"
    yield "train", train, "weight_floor", train.over_cap == "mask", "train.over_cap mask"
    yield "train", train, "share", local, "cluster.type local"
    for position, task in enumerate(job.tasks):
        place = f"tasks.{position}"
        yield place, task, "weight", task.quota is None, "no quota, which is the task's share"
        yield place, task, "top_p top_k", task.temperature > 0, "a temperature above 0"
        for number, reward in enumerate(task.rewards):
            yield from _reward_rows(f"{place}.rewards.{number}", reward)
        found = {job.isolation(task, pool) for pool in job.pools if pool.slots}
        boxed, needs = bool(found & {"sandbox", "container"}), "isolation sandbox or container"
        yield place, task, "warm", boxed, needs
        yield f"{place}.sandbox", task.sandbox, " ".join(type(task.sandbox).model_fields), boxed, needs
        keys = " ".join(type(task.container).model_fields)
        yield f"{place}.container", task.container, keys, "container" in found, "isolation container"
        pods = "container" in found and task.container.runtime == "kubernetes"
        yield f"{place}.container", task.container, "namespace pod", pods, "container.runtime kubernetes"
    for position, pool in enumerate(job.pools):
        place = f"pools.{position}"
        yield place, pool, "resource", ray, "cluster.type ray"
        yield place, pool, "slots_per_worker", ray and pool.slots is not None, "cluster.type ray and slots"
        yield place, pool, "site", tcp and pool.engines is not None, "weights.type tcp, and engines"
        yield place, pool, "isolation", pool.slots is not None, "slots"
        if pool.engines is not None:
            place, engines, embedded = f"{place}.engines", pool.engines, pool.engines.type == "embedded"
            yield place, engines, "share", local, "cluster.type local"
            yield place, engines, "python url args", not embedded, "engines.type vllm or sglang"
            yield (
                place,
                engines,
                "kv_tokens memory stage step_tokens draft_tokens cores",
                embedded,
                "engines.type embedded",
            )
            yield place, engines, "keep_kv", engines.type != "sglang", "engines.type embedded or vllm"
            yield place, engines, "python args prefill device", engines.url is None, "a server that is started: no url"
            if engines.prefill is not None:
                place = f"{place}.prefill"
                yield place, engines.prefill, "share", local, "cluster.type local"
                yield place, engines.prefill, "connector", not embedded, "engines.type vllm"
    platform = job.sim.reward
    yield "sim.reward", platform, "cold_start_s idle_s quota", serverless, "rewards.type http"
    yield (
        "sim.reward",
        platform,
        "others_per_s",
        serverless and platform.quota is not None,
        "rewards.type http and a quota",
    )
    yield "sim.reward", platform, "others_s", platform.others_per_s > 0, "others_per_s"
    images = any(task.image_gb > 0 for task in job.sim.tasks.values())
    yield "sim.images", job.sim.images, "cache_gb pull_gb_s", images, "an image_gb of a sim.tasks"
    traffic = any(task.call_mb.mean or task.reward_mb.mean for task in job.sim.tasks.values())
    yield "sim.links", job.sim.links, "calls_gb_s", traffic, "a call_mb or reward_mb of a sim.tasks"
    simulated, colocated = job.sim.train, job.train.colocated
    yield "sim.train", simulated, "host_gb_s state_bytes", colocated, "train.colocated"
    own = "a trainer with GPUs of its own: no train.colocated"
    yield "sim.links", job.sim.links, "push_gb_s pull_gb_s shared_pull_gb_s blocking", not colocated, own
    control = job.sim.control
    yield "sim.control", control, "news_s", job.cluster.coordinators > 1, "a cluster.coordinators above 1"
    for name, behaviour in job.sim.tasks.items():
        yield f"sim.tasks.{name}", behaviour, "reset_tail_s", behaviour.reset_tail > 0, "a reset_tail above 0"
        yield f"sim.tasks.{name}", behaviour, "step_tail_s", behaviour.step_tail > 0, "a step_tail above 0"
        linked, needs = job.sim.links.calls_gb_s is not None, "sim.links.calls_gb_s"
        yield f"sim.tasks.{name}", behaviour, "call_mb reward_mb", linked, needs
        yield f"sim.tasks.{name}", behaviour, "images", behaviour.image_gb > 0, "an image_gb above 0"


def _reward_rows(place: str, reward: "RewardSettings") -> Iterator[tuple[str, BaseModel, str, bool, str]]:
    local, judge = reward.type == "local", reward.type == "judge"
    yield place, reward, "url concurrency", not local, "type http or judge"
    yield place, reward, "pool rubric votes max_tokens", judge, "type judge"
    yield place, reward, "model", judge and reward.pool is None, "type judge and a url: pools.N.judge names its own"
    priced = not local and reward.pool is None
    yield place, reward, "call_cost", priced, "a url: local workers and the engines of a judge are paid by the hour"
    yield place, reward, "gb_second_cost", reward.type == "http", "type http"
    yield place, reward, "memory_mb", reward.gb_second_cost > 0, "a gb_second_cost"
    yield place, reward, "cost", not judge, "type local or http: a judge is paid by the call"
    here = local or reward.on_outage == "local"
    yield place, reward, "workers environment function", here, "type local, or on_outage local"
    away = not local and reward.pool is None
    yield place, reward, "on_outage", away, "a url: local workers and the engines of a judge are this job's own"
    yield place, reward, "outage_s", reward.on_outage == "wait", "on_outage wait"
    yield place, reward, "hedge", reward.type == "http", "type http"
