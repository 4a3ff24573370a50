"""What a job says of an embedded engine is what its process builds."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.cluster import machine
from rollart.cluster.local import LocalCluster
from rollart.config.load import build_job
from rollart.control.world import RolloutWorld
from rollart.envs.process import ProcessEnvHost
from rollart.errors import RewardError
from rollart.launch.real import RealWorld, real_world
from rollart.launch.worker import build
from rollart.model.network import load_model, named_weights
from rollart.rewards.local import LocalRewards
from rollart.store.journal import FileJournal
from rollart.store.shm import ShmStore
from rollart.types import GenerateRequest, Sampling, TrajectoryId
from rollart.workers.launch import Process
from tests.contracts.reward_functions import trajectory
from tests.real.harness import job
from tests.real.processes import SPEC
from tests.setups import worker_setup
from tests.tasks.test_variables import environment_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedded_engine_computes_as_its_pool_says(dtype: torch.dtype, model: Path, tmp_path: Path) -> None:
    engines = {"dtype": str(dtype).removeprefix("torch."), "step_tokens": 96, "max_batch": 32, "kv_tokens": 1024}
    settings = build_job(job(model, pools=[{"name": "cpu", "engines": engines, "slots": 1}]))
    setup = worker_setup(settings, tmp_path, stop_tokens=(40,))
    store = ShmStore(setup.store.run_id, bucket_bytes=1 << 20)
    asked = GenerateRequest(
        id="a/0",
        session="a",
        domain="a",
        turn=0,
        prompt=(np.array([7, 20, 30], dtype=np.int32),),
        prompt_tokens=3,
        sampling=Sampling(max_tokens=8, seed=1),
    )

    async def work() -> None:
        engine = await build(setup.engine(SPEC))
        try:
            assert engine.core.model.dtype == dtype
            assert engine.core.scheduler.step_tokens == 96
            assert 40 in engine.core.eos
            await engine.swap(store.push(1, named_weights(load_model(model))))  # the trainer's are float32
            assert np.isfinite((await engine.generate(asked)).logprobs).all()
        finally:
            await engine.close()

    try:
        asyncio.run(work())
    finally:
        store.close()


def test_the_end_of_turn_of_the_chat_template_ends_answers(model: Path, tmp_path: Path) -> None:
    """Also where the model's files name another token: the engines are told."""
    own = tmp_path / "model"
    shutil.copytree(model, own)
    template = (own / "chat_template.jinja").read_text()
    (own / "chat_template.jinja").write_text(template.replace("<|end|>", "<|pad|>"))
    out = tmp_path / "run"
    out.mkdir()

    async def work() -> tuple[int, ...]:
        real = real_world(build_job(job(own)), out, FileJournal(out / "journal"))
        try:
            assert isinstance(real.world.cluster, LocalCluster)
            return real.world.cluster.setup.stop_tokens
        finally:
            await real.close()

    assert asyncio.run(work()) == (0, 2)


def built(job_file: dict[str, object], out: Path) -> RealWorld:
    out.mkdir()
    return real_world(build_job(job_file), out, FileJournal(out / "journal"))


def test_the_gpus_of_each_worker_reach_its_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H200"] * 3)
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    engines = {"count": 2, "device": "cuda", "gpus": 1}
    pools = [{"name": "own", "hardware": "h200", "engines": engines, "slots": 1}]
    seen: dict[str, object] = {}

    class Watched(Process):
        async def start(self, *arguments: object) -> None:
            seen[self.name] = self._environment[machine.VISIBLE]

    monkeypatch.setattr("rollart.cluster.local.Process", Watched)

    async def work() -> None:
        real = built(job(model, pools=pools, train={"pool": "own", "device": "cuda"}), tmp_path / "run")
        try:
            for spec in real.world.engines:
                await real.world.cluster.engine(spec)
            await real.world.cluster.trainer()
        finally:
            await real.close()

    asyncio.run(work())
    assert seen == {"own-0": "0", "own-1": "1", "trainer": "2"}


def test_the_variables_that_a_job_names_reach_those_who_run_user_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOR_TASKS", "t")
    monkeypatch.setenv("FOR_REWARDS", "r")
    raw = job(model)
    raw["tasks"][0]["environment"] = ["FOR_TASKS"]
    raw["rewards"]["environment"] = ["FOR_REWARDS"]

    async def work() -> tuple[dict[str, str], dict[str, str]]:
        real = built(raw, tmp_path / "run")
        assert isinstance(real.world.rollout, RolloutWorld)
        host, rewards = real.world.rollout.host, real.world.rollout.rewards
        assert isinstance(host, ProcessEnvHost)
        assert isinstance(rewards, LocalRewards)
        try:
            task = real.world.task_sets["slow"].task(0)
            env = await host.open(task, TrajectoryId("g0", 0, 0))
            with contextlib.suppress(RewardError):  # what it earns is not asked
                await rewards.score(trajectory("sum", domain="slow"))
            found = environment_of(host.pool.pids[0]), environment_of(rewards.pool.pids[0])
            await env.close()
            return found
        finally:
            await real.close()

    tasks, scorers = asyncio.run(work())
    assert (tasks.get("FOR_TASKS"), tasks.get("FOR_REWARDS")) == ("t", None)
    assert (scorers.get("FOR_TASKS"), scorers.get("FOR_REWARDS")) == (None, "r")
