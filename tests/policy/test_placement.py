"""Roles on pools, engines by name, and who stands in for whom."""

from rollart.hardware import HARDWARE
from rollart.policy.placement import Binding, PoolOffer, bindings, engine_specs, stand_ins

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
