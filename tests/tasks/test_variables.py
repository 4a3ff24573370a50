"""Processes that run user code get what programs need of our environment, and nothing that may be a secret."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.config.settings import RewardSettings
from rollart.envs.isolated import IsolatedEnvHost
from rollart.envs.process import ProcessEnvHost
from rollart.errors import JobError
from rollart.launch.checks import check_supported
from rollart.launch.worker import env_host
from rollart.rewards.local import LocalRewards
from rollart.workers.pool import ProcessPool
from rollart.workers.sandbox import missing
from rollart.workers.variables import for_children

SECRETS = {
    "WANDB_API_KEY": "w",
    "HF_TOKEN": "h",
    "AWS_SECRET_ACCESS_KEY": "a",
    "ROLLART_REWARD_TOKEN": "r",
    "ROLLART_ENGINE_TOKEN": "e",
    "ROLLART_SERVER_TOKEN": "s",
    "DATABASE_URL": "postgres://user:password@host",
    "https_proxy": "http://user:password@proxy",
    "PYTHON_INDEX_TOKEN": "p",
    "CUDA_REGISTRY_PASSWORD": "c",
}
NEEDED = {
    "PATH": "/bin",
    "HOME": "/root",
    "LANG": "C",
    "LC_ALL": "C",
    "TMPDIR": "/tmp",
    "PYTHONHASHSEED": "1",
    "LD_LIBRARY_PATH": "/lib",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HOME": "/hf",
    "HF_HUB_OFFLINE": "1",
}


def test_what_programs_need_and_nothing_else() -> None:
    assert for_children(SECRETS | NEEDED, []) == NEEDED


def test_what_the_job_names_is_given_whatever_it_is_called() -> None:
    found = for_children(SECRETS | NEEDED, ["WANDB_API_KEY", "NOT_SET"])
    assert found == NEEDED | {"WANDB_API_KEY": "w"}


def given(pool: ProcessPool, names: list[str]) -> dict[str, str]:
    """The variables of a child that was really started."""

    async def work() -> dict[str, str]:
        child = await pool.acquire()
        assert child.pid is not None
        raw = environment_of(child.pid)
        pool.release(child)
        await pool.close()
        return raw

    found = asyncio.run(asyncio.wait_for(work(), 60))
    return {name: found[name] for name in names if name in found}


def environment_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("kind", ["environments", "rewards"])
@pytest.mark.parametrize("named", [[], ["WANDB_API_KEY"]])
def test_a_child_is_started_with_no_secret(
    kind: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    async def pool() -> ProcessPool:
        if kind == "environments":
            uses = {"lake": "rollart.tasks.frozen_lake"}
            return ProcessEnvHost(uses, slots=1, log_dir=tmp_path, variables=named).pool
        return LocalRewards(RewardSettings(workers=1, environment=tuple(named)), {}, str, tmp_path).pool

    found = given(asyncio.run(pool()), [*SECRETS, "PATH"])
    assert sorted(found) == sorted([*named, "PATH"])


@pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}")
def test_tasks_share_the_processes_of_isolation_process_and_a_sandbox_sees_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = job()
    boxed = {"name": "boxed", "use": "rollart.tasks.frozen_lake", "isolation": "sandbox", "environment": ["BOX_KEY"]}
    made = build_job({**raw, "tasks": [*raw["tasks"], boxed]})
    seen = {"lake": ["A_KEY", "LAKE_KEY"], "other": ["A_KEY", "LAKE_KEY"], "boxed": ["BOX_KEY"]}
    every = ["A_KEY", "BOX_KEY", "LAKE_KEY"]
    for name in every:
        monkeypatch.setenv(name, "1")
    for name, names in seen.items():
        isolations = {task.name: made.isolation(task) for task in made.tasks}
        host = env_host(made, isolations, {}, slots=1, log_dir=tmp_path)
        assert isinstance(host, IsolatedEnvHost)
        own = host.by_domain[name]
        assert isinstance(own, ProcessEnvHost)
        assert sorted(given(own.pool, every)) == names


def job(isolation: str = "process", **rewards: object) -> dict[str, Any]:
    task = {"name": "lake", "use": "rollart.tasks.frozen_lake", "affinity": "cpu", "environment": ["LAKE_KEY"]}
    other = {**task, "name": "other", "environment": ["A_KEY"]}
    return {
        "name": "named",
        "tasks": [task, other],
        "pools": [{"name": "cpu", "engines": {}, "slots": 4, "isolation": isolation}],
        "rewards": rewards,
    }


def test_a_job_names_what_its_environments_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_KEY", "1")
    with pytest.raises(JobError, match=r"tasks\.1\.environment: A_KEY is not set here; set it"):
        check_supported(build_job(job()))
    monkeypatch.setenv("A_KEY", "1")
    check_supported(build_job(job()))
    with pytest.raises(JobError, match=r"rewards\.environment: R_KEY is not set here"):
        check_supported(build_job(job(environment=["R_KEY"])))


def test_names_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(JobError, match=r"tasks\.0\.environment: environments of isolation inline run in this process"):
        check_supported(build_job(job("inline")))
    with pytest.raises(JobError, match=r"rewards\.environment: has an effect only with type local"):
        build_job(job(type="http", url="http://127.0.0.1:1", environment=["R_KEY"]))
    with pytest.raises(JobError, match=r"environment"):
        build_job({**job(), "rewards": {"environment": ["A=b"]}})
