"""Roles on pools, engines by name, and who stands in for whom."""

from rollart.hardware import HARDWARE
from rollart.policy.placement import Binding, Demand, PoolOffer, bindings, engine_specs, fit, further_specs, stand_ins
from rollart.types import Needs, Node

POOLS = [
    PoolOffer(name="compute", hardware=HARDWARE["h800"], engines=2, engine_type="vllm", gpus_per_engine=4),
    PoolOffer(name="bandwidth", hardware=HARDWARE["h20"], engines=1, engine_type="sglang"),
    PoolOffer(name="mid", hardware=HARDWARE["a100"], engines=1, engine_type="vllm"),
    PoolOffer(name="trainers", hardware=HARDWARE["h200"]),
    PoolOffer(name="rooms", hardware=HARDWARE["cpu"], env_slots=64),
]


def test_every_role_is_bound_to_its_pool_with_the_devices_it_takes() -> None:
    assert bindings(POOLS, "trainers", 8) == [
        Binding(role="rollout", pool="compute", hardware="h800", workers=2, devices=8),
        Binding(role="rollout", pool="bandwidth", hardware="h20", workers=1, devices=1),
        Binding(role="rollout", pool="mid", hardware="a100", workers=1, devices=1),
        Binding(role="train", pool="trainers", hardware="h200", workers=1, devices=8),
        Binding(role="environments", pool="rooms", hardware="cpu", workers=64, devices=0),
    ]


def test_one_pool_may_have_every_role() -> None:
    alone = [PoolOffer(name="all", hardware=HARDWARE["cpu"], engines=1, engine_type="embedded", env_slots=4)]
    assert [binding.role for binding in bindings(alone, "all", 1)] == ["rollout", "environments", "train"]


def test_engines_are_named_after_their_pool() -> None:
    specs = engine_specs(POOLS)
    assert [spec.id for spec in specs] == ["compute-0", "compute-1", "bandwidth-0", "mid-0"]
    assert (specs[0].type, specs[0].hardware, specs[0].gpus) == ("vllm", "h800", 4)


def test_the_most_alike_pool_stands_in_first() -> None:
    order = stand_ins(POOLS)
    assert order["compute"] == ["compute", "mid", "bandwidth"]
    assert order["bandwidth"] == ["bandwidth", "mid", "compute"]
    assert list(order) == ["compute", "bandwidth", "mid"], "only pools with engines"


def nodes(*kinds: str, cpus: float = 2.0, gpus: float = 0.0) -> list[Node]:
    return [
        Node(name=f"n{number}", resources={"CPU": cpus, "GPU": gpus, kind: 1.0}) for number, kind in enumerate(kinds)
    ]


def want(pool: str, count: int, kind: str = "", *, role: str = "rollout", cpus: float = 1.0, gpus: float = 0) -> Demand:
    return Demand(pool=pool, role=role, count=count, needs=Needs(resource=kind, cpus=cpus, gpus=gpus))


def test_workers_that_fit_are_placed_and_those_that_do_not_are_named_with_what_is_missing() -> None:
    found = fit([want("a", 4, "h800"), want("b", 1, "h20"), want("c", 2, "l40s")], nodes("h800", "h800", "h20"))
    assert [(one.demand.pool, one.placed) for one in found] == [("a", 4), ("b", 1), ("c", 0)]
    assert [one.missing for one in found[:2]] == ["", ""]
    assert found[2].missing == "no machine has the resource 'l40s'"


def test_the_largest_worker_finds_its_machine_whatever_the_order() -> None:
    machines = [Node(name="big", resources={"CPU": 4.0}), Node(name="small", resources={"CPU": 2.0})]
    found = fit([want("little", 2), want("large", 1, cpus=4.0)], machines)
    assert [one.placed for one in found] == [2, 1]
    found = fit([want("little", 3), want("large", 1, cpus=4.0)], machines)
    assert [one.placed for one in found] == [2, 1]
    assert found[0].missing.startswith(
        "3 times 1 CPU are needed beside the other workers, and the machines have big: 4"
    )


def test_gpus_are_counted_on_a_cluster() -> None:
    found = fit([want("a", 3, "h800", gpus=4)], nodes("h800", cpus=64, gpus=8))
    assert found[0].placed == 2
    assert "3 times 1 CPU and 4 GPU" in found[0].missing


def test_without_a_cluster_only_a_missing_gpu_is_a_lack() -> None:
    here = Node(name="this machine", resources={"CPU": 2.0, "GPU": 0.0}, taken_on_trust=True)
    found = fit([want("a", 64, "h800"), want("b", 1, "h20", gpus=1)], [here])
    assert [one.placed for one in found] == [64, 0]
    assert "this machine: 2 CPU and 0 GPU" in found[1].missing
    assert fit([want("b", 2, gpus=1)], [Node(name="x", resources={"GPU": 1.0}, taken_on_trust=True)])[0].placed == 2


def test_engines_that_may_join_have_the_names_after_those_that_must_be_there() -> None:
    pool = PoolOffer(name="compute", hardware=HARDWARE["h800"], engines=2, most_engines=4)
    assert [spec.id for spec in engine_specs([pool])] == ["compute-0", "compute-1"]
    assert [spec.id for spec in further_specs([pool])] == ["compute-2", "compute-3"]
