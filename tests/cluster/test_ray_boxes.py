"""Environments in sandboxes and containers on the machines of a real Ray cluster: they play there, get out of nothing,
and where no machine can make one the job stops and says so."""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch.training import train
from rollart.workers.sandbox import missing
from tests.cluster.small import raw_job
from tests.envs.test_container import PYTHON_PLACES, Runtime, skeleton_image

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"sandbox {missing()}"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ESCAPES = Path(__file__).parents[1] / "envs" / "escape_tasks.py"
GATEWAY = Path(__file__).parents[1] / "gateway"
STOPS_S = 60.0
BOUNDS = {"memory_mb": 192, "processes": 24, "tmp_mb": 8, "output_mb": 2, "cpu_s": 5}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head, a machine for engine and trainer, one for environments; and one for environments without bubblewrap."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    store = 80_000_000
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": store})
    cluster.add_node(num_cpus=2, resources={"engines": 1}, object_store_memory=store)
    cluster.add_node(num_cpus=2, resources={"boxes": 1}, object_store_memory=store)
    bare = path_without("bwrap")
    cluster.add_node(num_cpus=2, resources={"bare": 1}, object_store_memory=store, env_vars={"PATH": bare})
    yield cluster.address
    cluster.shutdown()  # type: ignore[no-untyped-call]


def path_without(program: str) -> str:
    """The search path, less the folders that have this program."""
    found = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in found if shutil.which(program, path=folder) is None)


def boxed_job(address: str, model: Path, tmp_path: Path, kind: str, task: dict[str, Any], **settings: Any) -> Job:
    """A game in the worker's own process, and a task in sandboxes."""
    raw = raw_job(model)
    del raw["sim"]
    wanted: dict[str, Any] = {
        "tasks": [raw["tasks"][0], {"group_size": 2, "max_turns": 2, "max_tokens": 4, "isolation": "sandbox", **task}],
        "rollout": {"groups_per_step": 4, "zero_variance": "keep", "share_tolerance": 1.0},
        "pools": [
            {**raw["pools"][0], "resource": "engines"},
            {"name": "environments", "resource": kind, "slots": 8, "slots_per_worker": 4, "isolation": "inline"},
        ],
        "weights": {"type": "files", "path": str(tmp_path / "weights"), "bucket_mb": 16},
        "cluster": {"type": "ray", "address": address, "wait_s": 90},
    }
    return build_job({**raw, **wanted, **settings})


def test_a_sandboxed_task_trains_on_the_machines_of_its_pool(address: str, model: Path, tmp_path: Path) -> None:
    maths = {"name": "maths", "use": "rollart.tasks.calculator_math", "sandbox": BOUNDS, "warm": 1}
    result = train(boxed_job(address, model, tmp_path, "boxes", maths), tmp_path / "run")
    summary = result.summary
    assert (summary.state, summary.steps, summary.reason) == ("finished", 3, "")
    assert result.violations == []
    assert all(task.trained_share > 0 for task in summary.tasks.values())
    assert summary.tasks["maths"].failed_at == {}


def test_nothing_gets_out_of_a_sandbox_there_and_the_others_go_on(address: str, model: Path, tmp_path: Path) -> None:
    plays_badly(address, model, tmp_path, {"name": "bad", "use": str(ESCAPES), "sandbox": BOUNDS, "warm": 1})


def plays_badly(address: str, model: Path, tmp_path: Path, bad: dict[str, Any]) -> None:
    """Its task file is one that the machine gets from the coordinator, or finds under the same path."""
    bad = {**bad, "limits": {"step_s": 15.0}}
    limits = {"backoff_s": 0.05, "attempts": 2, "task_failures": 20}
    job = boxed_job(address, model, tmp_path, "boxes", bad, limits=limits)
    result = train(job, tmp_path / "run")
    assert result.summary.state == "finished", result.summary.reason
    assert (result.violations, result.summary.groups.lost) == ([], 0)
    ends = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, schema.End)]
    tried = [event for event in ends if event.task.startswith("bad/") and event.status not in ("aborted", "stale")]
    assert len(tried) >= 4
    assert {event.reward for event in tried if event.status == "done"} <= {0.0}, "something got out"
    assert set(result.summary.tasks["bad"].failed_at) <= {"env.step limit", "env.step crash", "env.step timeout"}
    assert result.summary.tasks["lake"].failed_at == {}


def test_a_sandboxed_agent_there_reaches_its_endpoint_and_nothing_else(
    address: str, model: Path, tmp_path: Path
) -> None:
    task = {"name": "talk", "use": str(GATEWAY / "talk_tasks.py"), "sandbox": {"memory_mb": 1024}}
    talks(address, model, tmp_path, task)


def talks(address: str, model: Path, tmp_path: Path, task: dict[str, Any]) -> None:
    """The agent looks for a network and for other sockets first; its file is one that the machine finds, or gets."""
    pytest.importorskip("openai")
    agent = {"function": f"{GATEWAY / 'some_agents.py'}:solve_in_a_box"}
    talk: dict[str, Any] = {**task, "max_turns": 2, "max_tokens": 8, "agent": agent}
    job = boxed_job(address, model, tmp_path, "boxes", talk, endpoint={"host": address.partition(":")[0]})
    before = sockets()
    result = train(job, tmp_path / "run")
    summary = result.summary
    assert (summary.state, result.violations) == ("finished", []), summary.reason
    assert summary.tasks["talk"].failed_at == {}, summary.tasks["talk"].reasons
    assert summary.tasks["talk"].trained > 0
    assert sockets() <= before, "its directory is left behind"


def sockets() -> set[Path]:
    """Directories of endpoints on this machine: other jobs may have left some."""
    return set(Path(tempfile.gettempdir()).glob("rollart-endpoint-[!r]*"))


@pytest.fixture(scope="module", params=["podman", "runc"])
def container(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The key of a task: an image whose Python is this machine's, put in by `sandbox.read`."""
    runtime: Runtime = request.param
    if os.geteuid() != 0 or shutil.which(runtime) is None:
        pytest.skip(f"needs {runtime}, and root")
    with tempfile.TemporaryDirectory(prefix="rollart-") as folder, skeleton_image(runtime, Path(folder)) as image:
        yield {"runtime": runtime, "image": image, "python": sys.executable}


def contained(container: dict[str, str], **task: Any) -> dict[str, Any]:
    places = [str(place) for place in PYTHON_PLACES]
    return {**task, "isolation": "container", "container": container, "sandbox": {**BOUNDS, "read": places}, "warm": 1}


def test_a_task_in_containers_trains_on_the_machines_of_its_pool(
    address: str, model: Path, tmp_path: Path, container: dict[str, str]
) -> None:
    maths = contained(container, name="maths", use="rollart.tasks.calculator_math")
    result = train(boxed_job(address, model, tmp_path, "boxes", maths), tmp_path / "run")
    summary = result.summary
    assert (summary.state, summary.steps, summary.reason) == ("finished", 3, "")
    assert result.violations == []
    assert all(task.trained_share > 0 for task in summary.tasks.values())
    assert summary.tasks["maths"].failed_at == {}


def test_nothing_gets_out_of_a_container_there_and_the_others_go_on(
    address: str, model: Path, tmp_path: Path, container: dict[str, str]
) -> None:
    plays_badly(address, model, tmp_path, contained(container, name="bad", use=str(ESCAPES)))


def test_an_agent_in_a_container_there_reaches_its_endpoint_and_nothing_else(
    address: str, model: Path, tmp_path: Path, container: dict[str, str]
) -> None:
    task = contained(container, name="talk", use=str(GATEWAY / "talk_tasks.py"))
    talks(address, model, tmp_path, {**task, "sandbox": {**task["sandbox"], "memory_mb": 1024}})


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"isolation": "sandbox"}, "isolation: sandbox needs bwrap"),
        (
            {"isolation": "container", "container": {"image": "img", "runtime": "podman"}},
            "container.runtime: podman is not on this machine; install it (apt-get install podman)",
        ),
    ],
)
def test_where_no_machine_can_make_the_box_the_job_stops_at_once_and_says_why(
    task: dict[str, Any], said: str, address: str, model: Path, tmp_path: Path
) -> None:
    maths = {"name": "maths", "use": "rollart.tasks.calculator_math", **task}
    began_s = time.monotonic()
    result = train(boxed_job(address, model, tmp_path, "bare", maths), tmp_path / "run")
    assert (result.summary.state, result.violations) == ("stopped", [])
    assert result.summary.reason.startswith("no machine can have environments: environments-env-")
    assert f"task maths on {socket.gethostname()}: {said}" in result.summary.reason
    assert time.monotonic() - began_s < STOPS_S
