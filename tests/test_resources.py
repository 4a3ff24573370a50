"""What a job needs of machines, what is refused, and whether the manifests we ship hold the job they carry."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import main
from rollart.cluster import machine
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import ClusterSettings
from rollart.errors import JobError
from rollart.hardware import HARDWARE
from rollart.launch import resources
from rollart.launch.pools import Binding, bindings, engine_specs
from rollart.launch.resources import demands
from rollart.policy.placement import fit
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
    "cluster": {"type": "ray"},  # of this machine alone
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
    with pytest.raises(JobError, match=r"^weights.type: shm is for one machine, and the cluster has 2"):
        resources.refuse_unplaceable(build_job(raw))
    resources.refuse_unplaceable(build_job({**raw, "weights": {"type": "files"}}))
    del nodes[1]
    resources.refuse_unplaceable(build_job(raw))


WRONG = [
    ({"cluster": {"type": "local", "address": "auto"}}, "cluster.address: has an effect only with cluster.type ray"),
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


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H200"] * count)
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE, visible)


def local(*pools: dict[str, Any], **train: Any) -> Job:
    tasks = [{"name": "lake", "use": "rollart.tasks.frozen_lake", "affinity": pools[0]["name"]}]
    rooms = {"name": "rooms", "slots": 1}
    return build_job({**JOB, "tasks": tasks, "pools": [*pools, rooms], "train": train, "cluster": {"type": "local"}})


EMBEDDED = {"name": "own", "hardware": "h200", "engines": {"count": 2, "device": "cuda"}}
SERVERS = {"name": "served", "hardware": "h200", "engines": {"type": "vllm", "count": 2, "gpus": 2}}


def test_each_worker_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 7)
    job = local(EMBEDDED, SERVERS, pool="own", device="cuda")
    resources.refuse_unplaceable(job)
    assert resources.visible_devices(job) == {
        "own-0": ("0",),
        "own-1": ("1",),
        "served-0": ("2", "3"),
        "served-1": ("4", "5"),
        "trainer": ("6",),
    }


def test_a_device_that_is_named_is_shared_and_nobodys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4)
    named = {**EMBEDDED, "engines": {"count": 2, "device": "cuda:1"}}
    job = local(named, SERVERS | {"engines": {"type": "vllm", "gpus": 2}}, pool="own", device="cuda:1")
    resources.refuse_unplaceable(job)
    assert resources.visible_devices(job) == {"served-0": ("0", "2")}, "the others see all, and use cuda:1"
    assert resources.report(job).devices == {
        "served-0": ["0", "2"],
        "own-0": ["1"],
        "own-1": ["1"],
        "trainer": ["1"],
    }


def test_a_server_may_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU for server and trainer."""
    on_gpus(monkeypatch, 1)
    job = local({"name": "one", "hardware": "h200", "engines": {"type": "vllm", "device": "cuda:0"}}, device="cuda:0")
    resources.refuse_unplaceable(job)
    assert resources.visible_devices(job) == {"one-0": ("0",)}
    alone = local({"name": "one", "hardware": "h200", "engines": {"type": "vllm"}}, device="cuda:0")
    with pytest.raises(JobError, match=r"pools.one.engines.gpus: 1 GPU is asked for \(one-0 1\), and this"):
        resources.refuse_unplaceable(alone)


def test_more_gpus_than_there_are_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, 3)
    job = local(EMBEDDED, SERVERS, device="cuda:0")
    with pytest.raises(JobError) as refused:
        resources.refuse_unplaceable(job)
    assert str(refused.value) == (
        "pools.own.engines.device, pools.served.engines.gpus: 6 GPUs are asked for (own-0 1, own-1 1, served-0 2, "
        "served-1 2), and this machine has 3, 1 of them named by other workers; lower the counts, or let workers share "
        "one by naming it (device: cuda:0)"
    )
    assert resources.report(job).missing == [str(refused.value)]
    with pytest.raises(JobError, match=r"train.device: trainer would use cuda:3, and this machine has 3 GPUs"):
        resources.refuse_unplaceable(local(EMBEDDED, device="cuda:3"))


def test_the_pools_command_shows_who_has_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, 2, "GPU-abc,7")
    file = tmp_path / "job.yaml"
    tasks = [{"name": "lake", "use": "rollart.tasks.frozen_lake", "affinity": "own"}]
    file.write_text(yaml.safe_dump({"name": "two", "tasks": tasks, "pools": [EMBEDDED, {"name": "rooms", "slots": 1}]}))
    assert main(["pools", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == {"own-0": ["GPU-abc"], "own-1": ["7"]}
    assert main(["pools", str(file)]) == 0
    assert "GPU-abc" in capsys.readouterr().out


def test_ray_and_attached_servers_are_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 0)
    job = build_job({**JOB, "cluster": {"type": "ray", "address": "auto"}})
    assert resources.visible_devices(job) == {}
    attached = {**SERVERS, "engines": {"type": "vllm", "url": "http://127.0.0.1:1"}}
    assert resources.devices_for(local(attached)).missing == ()
    resources.refuse_unplaceable(local(attached))


def test_an_evaluation_needs_no_gpu_for_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its engines have theirs: with the trainer counted there would be too few, and nobody would get any."""
    on_gpus(monkeypatch, 2)
    job = local(EMBEDDED, pool="own", device="cuda")
    with pytest.raises(JobError, match="3 GPUs are asked for"):
        resources.refuse_unplaceable(job)
    resources.refuse_unplaceable(job, trains=False)
    assert resources.visible_devices(job, trains=False) == {"own-0": ("0",), "own-1": ("1",)}
    on_gpus(monkeypatch, 0)
    job = local({**EMBEDDED, "engines": {"device": "cpu"}}, pool="own", device="cuda")
    with pytest.raises(JobError, match="Pool own, train: 0 of 1"):
        resources.refuse_unplaceable(job)
    resources.refuse_unplaceable(job, trains=False)


def test_one_process_cannot_see_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4)
    job = local(EMBEDDED).model_copy(update={"cluster": ClusterSettings(type="inline")})
    with pytest.raises(JobError, match=r"cluster.type: inline has one process, and own-0, own-1 would each see GPUs"):
        resources.refuse_unplaceable(job)


def test_one_process_cannot_have_a_gpu_of_its_own_and_share_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` would be cuda:0 there, which the other names."""
    on_gpus(monkeypatch, 2)
    inline = {"cluster": ClusterSettings(type="inline")}
    one = {**EMBEDDED, "engines": {"device": "cuda"}}
    with pytest.raises(JobError, match=r"cluster.type: inline has one process, and own-0, trainer would each see GPUs"):
        resources.refuse_unplaceable(local(one, pool="own", device="cuda:0").model_copy(update=inline))
    resources.refuse_unplaceable(local(one, pool="own").model_copy(update=inline))


def test_an_engine_needs_the_gpus_of_all_its_workers() -> None:
    engines = {"type": "vllm", "gpus": 2, "prefill": {"workers": 2, "gpus": 3, "decoders": 4}}
    found = demands(local({"name": "apart", "hardware": "h200", "engines": engines}))
    assert found[0].needs.gpus == 4 * 2 + 2 * 3


def test_an_embedded_engine_prefills_and_decodes_on_one_gpu() -> None:
    engines = {"device": "cuda", "threads": 2, "prefill": {}}
    found = demands(local({"name": "pair", "hardware": "h200", "engines": engines}))
    assert (found[0].needs.gpus, found[0].needs.cpus) == (1, 4)


POOLS: list[dict[str, Any]] = [
    {"name": "compute", "hardware": "h800", "engines": {"type": "vllm", "count": 2, "most": 4, "gpus": 4}},
    {"name": "bandwidth", "hardware": "h20", "engines": {"type": "sglang"}},
    {"name": "trainers", "hardware": "h200"},
]


def test_every_role_is_bound_to_its_pool_with_the_devices_it_takes() -> None:
    assert bindings(local(*POOLS, pool="trainers", type="fsdp2", gpus=8)) == [
        Binding(role="rollout", pool="compute", hardware="h800", workers=2, devices=8),
        Binding(role="rollout", pool="bandwidth", hardware="h20", workers=1, devices=1),
        Binding(role="train", pool="trainers", hardware="h200", workers=1, devices=8),
        Binding(role="environments", pool="rooms", hardware="cpu", workers=1, devices=0),
    ]


def test_one_pool_may_have_every_role() -> None:
    alone = local({"name": "all", "engines": {}, "slots": 4})
    assert [binding.role for binding in bindings(alone) if binding.pool == "all"] == [
        "rollout",
        "environments",
        "train",
    ]


def test_engines_are_named_after_their_pool_and_those_that_may_join_come_after() -> None:
    job = local(*POOLS, pool="trainers")
    specs = engine_specs(job)
    assert [spec.id for spec in specs] == ["compute-0", "compute-1", "bandwidth-0"]
    assert (specs[0].type, specs[0].hardware, specs[0].gpus) == ("vllm", "h800", 4)
    assert [spec.id for spec in engine_specs(job, further=True)] == ["compute-2", "compute-3"]
