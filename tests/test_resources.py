"""What a job needs of machines, what is refused, and whether the manifests we ship hold the job they carry."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart import resources
from rollart.cli import main
from rollart.cluster import machine
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.hardware import HARDWARE
from rollart.policy.placement import fit
from rollart.resources import demands
from rollart.types import Needs, Node

ROOT = Path(__file__).resolve().parent.parent

JOB: dict[str, Any] = {
    "name": "placed",
    "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake", "affinity": "bandwidth"}],
    "pools": [
        {"name": "compute", "hardware": "h800", "engines": {"count": 2, "gpus": 4, "device": "cuda:0", "threads": 8}},
        {"name": "bandwidth", "hardware": "h20", "resource": "accelerator_type:H20", "engines": {"count": 1}},
        {"name": "environments", "hardware": "cpu", "slots": 65, "slots_per_worker": 32},
    ],
    "train": {"pool": "compute", "threads": 2},
}


def test_every_worker_says_what_it_needs() -> None:
    found = {(demand.pool, demand.role): (demand.count, demand.needs) for demand in demands(build_job(JOB))}
    assert found == {
        ("compute", "rollout"): (2, Needs(resource="h800", cpus=8, gpus=4)),
        ("compute", "train"): (1, Needs(resource="h800", cpus=2)),
        ("bandwidth", "rollout"): (1, Needs(resource="accelerator_type:H20", cpus=1)),
        ("environments", "environments"): (3, Needs(cpus=1)),
    }


@pytest.mark.parametrize(("hardware", "gpus"), [("h20", 2.0), ("cpu", 0.0)])
def test_a_server_takes_the_gpus_of_its_pool(hardware: str, gpus: float) -> None:
    pool = {"name": "bandwidth", "hardware": hardware, "resource": "h20", "engines": {"type": "vllm", "gpus": 2}}
    found = demands(build_job({**JOB, "pools": [pool, {"name": "rooms", "slots": 1}], "train": {}}))
    assert found[0].needs == Needs(resource="h20", cpus=1, gpus=gpus)


def test_a_job_for_gpus_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    with pytest.raises(JobError, match=r"Pool compute, rollout: 0 of 2 workers placed") as refused:
        resources.refuse_unplaceable(build_job(JOB))
    assert "bandwidth" not in str(refused.value)
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H800"])
    resources.refuse_unplaceable(build_job(JOB))


def test_the_report_names_what_is_missing_and_who_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))

    assert main(["pools", str(file), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["fallbacks"] == {"compute": "bandwidth"}
    assert shown["missing"][0].startswith("Pool compute, rollout: 0 of 2")
    assert [role["role"] for role in shown["pools"][0]["roles"]] == ["rollout", "train"]
    assert shown["pools"][1]["tasks"] == ["lake"]

    assert main(["pools", str(file), "pools.compute.engines.device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "this machine" in shown
    assert "missing" not in shown


def test_shared_memory_is_refused_where_there_are_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(name=f"{host}/0", host=host, resources={"CPU": 64.0}) for host in ("one", "two")]
    monkeypatch.setattr(resources, "nodes_for", lambda job: nodes)
    raw = {**JOB, "pools": [{"name": "compute", "engines": {"count": 2}, "slots": 8}], "tasks": [{"name": "lake"}]}
    with pytest.raises(JobError, match=r"^weights.type: shm is the memory of one machine, and the cluster has 2"):
        resources.refuse_unplaceable(build_job(raw))
    resources.refuse_unplaceable(build_job({**raw, "weights": {"type": "files"}}))
    del nodes[1]
    resources.refuse_unplaceable(build_job(raw))


WRONG = [
    ({"cluster": {"type": "local", "address": "auto"}}, "cluster.address: has no effect with type local"),
    ({"cluster": {"type": "ray", "address": "ray://head:10001"}}, "cluster.address: ray:// is Ray Client"),
    ({"cluster": {"type": "ray", "wait_s": 600}}, "cluster.wait_s: 600 leaves no time"),
    ({"pools": [{"name": "a", "slots": 1, "engines": {"count": 3, "most": 2}}]}, "pools.0.engines.most: 2 is less"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    raw = {**JOB, "tasks": [{"name": "lake"}], "train": {}}
    with pytest.raises(JobError) as refused:
        build_job({**raw, **change})
    assert str(refused.value).startswith(message)


# --- the manifests ----------------------------------------------------------------------------------------------


def kuberay() -> dict[str, dict[str, Any]]:
    return {part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text())}


def kuberay_nodes(job: dict[str, Any]) -> list[Node]:
    """The machines of its worker groups, as Ray would see them."""
    nodes = []
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        kinds = json.loads(json.loads(group["rayStartParams"]["resources"]))
        has = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0)), **kinds}
        nodes += [Node(name=group["groupName"], resources=has)] * group["replicas"]
    return nodes


def test_the_kuberay_manifest_has_the_fields_of_a_ray_job() -> None:
    parts = kuberay()
    job = parts["RayJob"]
    assert job["apiVersion"] == "ray.io/v1"
    assert set(job["spec"]) <= {
        "entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "activeDeadlineSeconds",
        "backoffLimit", "submissionMode", "suspend", "entrypointNumCpus", "submitterPodTemplate", "rayClusterSpec",
    }  # fmt: skip
    spec = job["spec"]["rayClusterSpec"]
    assert set(spec) <= {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    claims = {parts["PersistentVolumeClaim"]["metadata"]["name"]}
    for group in groups:
        assert set(group) <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {
            v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
        } == claims
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def carried_job() -> Job:
    return build_job(yaml.safe_load(kuberay()["ConfigMap"]["data"]["job.yaml"]))


def test_the_kuberay_manifest_has_room_for_the_job_it_carries() -> None:
    job = carried_job()
    nodes = kuberay_nodes(kuberay()["RayJob"])
    assert [found.missing for found in fit(demands(job), nodes)] == [""] * 4
    without = [node for node in nodes if node.name != "bandwidth"]
    assert "no machine has the resource 'h20'" in [found.missing for found in fit(demands(job), without)]


def test_the_kuberay_job_sends_prompts_to_compute_and_long_answers_to_bandwidth() -> None:
    """As the paper maps them: many turns of short answers prefill more, few turns of long answers decode more."""
    job = carried_job()
    pools = {pool.name: HARDWARE[pool.hardware] for pool in job.engine_pools}
    decoding = sorted(job.tasks, key=lambda task: task.max_tokens / task.max_turns)
    bandwidth = [pools[task.affinity].bandwidth_gb_s / pools[task.affinity].tflops for task in decoding]
    assert len(set(bandwidth)) == len(job.tasks) == 2
    assert bandwidth == sorted(bandwidth)


@pytest.mark.slow
def test_ray_up_takes_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text()))
    validate_config(config)
