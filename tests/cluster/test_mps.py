"""Shares of a GPU: who gets which, and a daemon that lives as long as the run. The daemon here is a script."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.cluster.local import LocalCluster
from rollart.cluster.mps import CONTROL, Mps
from rollart.config.load import build_job
from rollart.errors import ClusterError, JobError
from rollart.launch import worker
from rollart.launch.resources import gpu_shares
from rollart.workers.launch import Process
from rollart.workers.setup import ShardSetup
from tests.real.processes import SPEC
from tests.setups import worker_setup

DAEMON = """#!/bin/sh
if [ "$1" = "-f" ]; then
  echo $$ > "$CUDA_MPS_LOG_DIRECTORY/pid"
  exec sleep 600
fi
test -e "$CUDA_MPS_LOG_DIRECTORY/pid"
"""
JOB: dict[str, Any] = {
    "name": "shared",
    "model": {"path": "."},
    "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake"}],
    "pools": [
        {"name": "gpu", "hardware": "h200", "engines": {"device": "cuda:0", "share": 0.4}},
        {"name": "rooms", "slots": 8},
    ],
    "train": {"device": "cuda:0"},
}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts come first: one that waits as the daemon does, and answers once it is there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / CONTROL).write_text(DAEMON)
    (folder / CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def variables_of(process: Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def pid_of(variables: dict[str, str]) -> int:
    return int((Path(variables["CUDA_MPS_LOG_DIRECTORY"]) / "pid").read_text())


def test_each_worker_has_its_share_and_the_daemon_ends_with_the_cluster(daemon: Path, tmp_path: Path) -> None:
    async def main() -> tuple[int, list[dict[str, str]]]:
        shares = {"cpu-0": 0.36, "cpu-1": 1.0}
        cluster = LocalCluster("benchmarks.stub:start", worker_setup(None, tmp_path), shares=shares)
        try:
            for name in ("cpu-0", "cpu-1", "cpu-2"):
                await cluster.engine(replace(SPEC, id=name))
            found = [variables_of(worker) for worker in cluster.workers.values()]
            os.kill(pid_of(found[0]), 0)
            return pid_of(found[0]), found
        finally:
            await cluster.close()

    pid, found = asyncio.run(main())
    assert [each.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for each in found] == ["36", "100", None]
    (pipe,) = {each["CUDA_MPS_PIPE_DIRECTORY"] for each in found[:2]}  # one daemon for all
    assert not Path(pipe).exists()
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_shards_and_their_engines_share_the_daemon_of_the_first_coordinator(
    daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two daemons would take turns on the GPU."""
    shares = {"cpu-0": 0.36, "trainer": 0.5}
    setup = worker_setup(None, tmp_path, shard=ShardSetup())

    async def main() -> tuple[dict[str, str], dict[str, str], int]:
        head = LocalCluster("benchmarks.stub:start", setup, shares=shares)
        try:
            await head.shard(1)
            shard = variables_of(head.workers["shard-1"])
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                monkeypatch.setenv(name, shard[name])
            within = LocalCluster("benchmarks.stub:start", setup.as_shard(1), shares=shares)
            try:
                await within.engine(replace(SPEC, id="cpu-0"))
                return shard, variables_of(within.workers["cpu-0"]), pid_of(shard)
            finally:
                await within.close()
                os.kill(pid_of(shard), 0)  # not the shard's to end
        finally:
            await head.close()

    shard, engine, pid = asyncio.run(main())
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shard
    assert engine["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "36"
    assert engine["CUDA_MPS_PIPE_DIRECTORY"] == shard["CUDA_MPS_PIPE_DIRECTORY"]
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_daemon_that_does_not_answer_is_said_with_its_last_words(daemon: Path, tmp_path: Path) -> None:
    (daemon / CONTROL).write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    with pytest.raises(ClusterError, match=r"does not answer: no device.*mps\.log"):
        Mps(tmp_path)


def test_without_the_daemon_a_share_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="remove `share`"):
        Mps(tmp_path)


def test_where_one_has_a_share_all_that_name_the_gpu_have_one() -> None:
    job = build_job(JOB)
    assert gpu_shares(job) == {"gpu-0": 0.4, "trainer": 1.0}
    assert gpu_shares(job, trains=False) == {"gpu-0": 0.4}
    assert gpu_shares(build_job(JOB | {"train": {}})) == {"gpu-0": 0.4}
    whole = [JOB["pools"][0] | {"engines": {"device": "cuda:0"}}, JOB["pools"][1]]
    assert gpu_shares(build_job(JOB | {"pools": whole})) == {}


def test_who_prefills_for_another_has_a_share_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    class Started(Process):
        def __init__(self, name: str, target: str, log_dir: Path, environment: dict[str, str]) -> None:
            super().__init__(name, target, log_dir, environment)
            started.append((name, environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]))

        async def start(self, *arguments: Any) -> None:
            raise ClusterError("far enough")

    def make(*_: Any) -> Any: ...

    monkeypatch.setattr(worker, "Process", Started)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")  # of who decodes, as the cluster starts it
    for share, prefill in ((0.4, {"share": 0.55}), (None, {})):
        engines = {"device": "cuda:0", "share": share, "prefill": prefill}
        job = build_job(JOB | {"pools": [JOB["pools"][0] | {"engines": engines}, JOB["pools"][1]]})
        setup = worker_setup(job, tmp_path, role="engine", pool="gpu", name="gpu-0")
        with pytest.raises(ClusterError, match="far enough"):
            asyncio.run(worker.pair(setup, make, make))
    assert started == [("gpu-0-prefill", "55"), ("gpu-0-prefill", "40")], "its own, or that of the engine"


def test_engines_of_several_coordinators_may_have_shares() -> None:
    pools = [JOB["pools"][0] | {"engines": {"device": "cuda:0", "share": 0.25, "count": 2}}, JOB["pools"][1]]
    train = {"device": "cuda:0", "share": 0.5}
    job = build_job(JOB | {"mode": "sync+", "cluster": {"coordinators": 2}, "pools": pools, "train": train})
    assert gpu_shares(job) == {"gpu-0": 0.25, "gpu-1": 0.25, "trainer": 0.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train": {"share": 0.5}}, "train.share: is a share of a GPU"),
        (
            {"pools": [{"name": "gpu", "engines": {"share": 0.5}}, {"name": "rooms", "slots": 8}]},
            r"\.share: is a share",
        ),
        ({"cluster": {"type": "inline"}}, r"pools\.0\.engines\.share: has an effect only with cluster\.type local"),
        ({"cluster": {"type": "ray"}, "train": {"device": "cuda:0", "share": 0.5}}, r"train\.share: has an effect"),
    ],
)
def test_a_share_without_effect_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        build_job(JOB | change)
