"""Which workers fit on which machines, and who stands in for whom."""

from rollart.hardware import HARDWARE
from rollart.policy.placement import Demand, fit, stand_ins
from rollart.types import Needs, Node


def test_the_most_alike_pool_stands_in_first() -> None:
    kinds = {"compute": HARDWARE["h800"], "bandwidth": HARDWARE["h20"], "mid": HARDWARE["a100"]}
    order = stand_ins(kinds)
    assert order["compute"] == ["compute", "mid", "bandwidth"]
    assert order["bandwidth"] == ["bandwidth", "mid", "compute"]
    assert list(order) == list(kinds)


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
