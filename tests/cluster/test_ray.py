"""A real Ray cluster of five nodes on this machine: placement by pool, and what a lost node does to a job.

Every node is a raylet of its own with workers of its own, told apart by custom resources; a killed node is a killed
raylet. Of the two engine pools `compute` has embedded engines, and `bandwidth` vLLM servers where a test says so: those
take a minute to start. What one machine cannot show is a network between them.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import read_events
from rollart.events.schema import Event
from rollart.launch.books import RunResult
from rollart.launch.training import train
from tests.cluster.small import raw_job
from tests.vllm_python import PYTHON, ROOT, needs_vllm, none_left_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STEPS = 400
"""More than any test waits for: each stops its job when it has seen what it wants."""
MAX_S = 600
CPUS = {"h800": 1, "h20": 2, "environments": 3}
"""One engine; one and the trainer; two environment workers and the trainer."""
EMBEDDED: dict[str, Any] = {"hardware": "h20", "engines": {"kv_tokens": 16384, "max_batch": 64}}
VLLM: dict[str, Any] = {
    "hardware": "cpu",  # so it asks for no GPU
    "resource": "h20",
    "engines": {"type": "vllm", "python": PYTHON, "max_batch": 64},
}
"""What the pool `bandwidth` may be."""
ROOMS: dict[str, Any] = {"slots": 32, "slots_per_worker": 16}


class FiveNodes:
    """Head, two compute, one bandwidth, one for environments."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
        self.nodes: list[tuple[str, Any]] = []
        for kind in ("h800", "h800", "h20", "environments"):
            self.add(kind)

    def add(self, kind: str) -> Any:
        node = self.cluster.add_node(num_cpus=CPUS[kind], resources={kind: 1}, object_store_memory=80_000_000)
        self.nodes.append((kind, node))
        return node

    def kill(self, kind: str, *, newest: bool = False, node: str | None = None) -> None:
        """Kill one node of a kind, or the one of this id, without a word to anybody."""
        among = [pair for pair in self.nodes if pair[0] == kind and node in (None, pair[1].node_id)]
        found = among[-1 if newest else 0]
        self.nodes.remove(found)
        self.cluster.remove_node(found[1], allow_graceful=False)

    def kinds(self) -> dict[str, str]:
        return {node.node_id: kind for kind, node in self.nodes}

    def whole(self) -> None:
        """As at the start, whatever a test left."""
        for kind, wanted in (("h800", 2), ("h20", 1), ("environments", 1)):
            there = [pair for pair in self.nodes if pair[0] == kind]
            for _ in there[wanted:]:
                self.kill(kind)
            for _ in range(wanted - len(there)):
                self.add(kind)
        self.cluster.wait_for_nodes(timeout=60)  # Ray takes a while to believe that a node is dead


@pytest.fixture(scope="module")
def all_nodes() -> Iterator[FiveNodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB; workers have the environment of their node
    five = FiveNodes()
    yield five
    five.cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def nodes(all_nodes: FiveNodes) -> FiveNodes:
    all_nodes.whole()
    return all_nodes


def five_node_job(
    nodes: FiveNodes,
    raw: Mapping[str, Any],
    tmp_path: Path,
    *,
    most: int | None = None,
    bandwidth: Mapping[str, Any] = EMBEDDED,
    rooms: Mapping[str, Any] = ROOMS,
    **settings: Any,
) -> Job:
    """A job of two tasks, each on a pool of its own; the trainer beside the engines of the second pool."""
    embedded = EMBEDDED["engines"]
    wanted: dict[str, Any] = {
        "tasks": [
            {**task, "affinity": pool} for task, pool in zip(raw["tasks"], ("compute", "bandwidth"), strict=True)
        ],
        "pools": [
            {"name": "compute", "hardware": "h800", "engines": {**embedded, "count": 2, "most": most}},
            {"name": "bandwidth", **bandwidth},
            {"name": "environments", "resource": "environments", **rooms},
        ],
        "train": {**raw["train"], "pool": "bandwidth", "steps": STEPS},
        "weights": {"type": "files", "path": str(tmp_path / "weights"), "bucket_mb": 16},
        "cluster": {"type": "ray", "address": nodes.cluster.address, "wait_s": 20},
    }
    return build_job({**raw, **wanted, **settings})


def unhurried(model: Path) -> dict[str, Any]:
    """The small job with slow environments: at full speed it leaves a server no core to start again on."""
    raw = raw_job(model)
    return {**raw, "tasks": [{**task, "latency": 0.5} for task in raw["tasks"]]}


class Script:
    """Reads a run as it happens: does each deed when its moment has come, and at last stops the job."""

    def __init__(self, *deeds: tuple[Callable[[Event], bool], Callable[[], object]]) -> None:
        self._deeds = list(deeds)
        self._alarm = threading.Timer(MAX_S, self.stop)
        self._alarm.start()

    def read(self, event: Event) -> None:
        if self._deeds and self._deeds[0][0](event):
            self._deeds.pop(0)[1]()  # here, on the coordinator's own thread: Ray starts nodes on no other

    @staticmethod
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def end(self) -> None:
        self._alarm.cancel()
        assert not self._deeds, "the run was over before everything was seen"


def step(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, schema.StepEnd) and event.version >= number


def seen(kind: type[Event]) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind)


def up(engine: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, schema.EngineUp) and event.engine == engine


def both(*moments: Callable[[Event], bool]) -> Callable[[Event], bool]:
    """In whatever order."""
    left = list(moments)

    def read(event: Event) -> bool:
        left[:] = [moment for moment in left if not moment(event)]
        return not left

    return read


def steps(count: int) -> Callable[[Event], bool]:
    """So many steps from when this is first asked."""
    left = count

    def read(event: Event) -> bool:
        nonlocal left
        left -= int(isinstance(event, schema.StepEnd))
        return left <= 0

    return read


def nothing() -> None:
    """The moment itself was what was waited for."""


def play(job: Job, out: Path, *deeds: tuple[Callable[[Event], bool], Callable[[], object]]) -> list[Event]:
    """Run it; the promises hold, nothing is lost. Returns the events."""
    script = Script(*deeds)
    result: RunResult = train(job, out, watch=lambda summary, waits: script.read)
    script.end()
    assert result.summary.state == "interrupted", result.summary.reason
    kept(result)
    return list(read_events(out / "events.jsonl"))


def kept(result: RunResult) -> None:
    """No promise is broken, no group is lost, none trained on twice."""
    assert result.violations == []
    assert (result.summary.groups.lost, result.summary.groups.trained_twice) == (0, 0)


def placed(out: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (out / "logs" / "placed.jsonl").read_bytes().splitlines()]


def elsewhere(events: list[Event]) -> list[Event]:
    """Requests that ran on another pool than wanted, with no reason recorded."""
    return [
        event for event in events if isinstance(event, schema.Send) and event.pool != event.want and not event.fallback
    ]


def served(out: Path, engine: str) -> int:
    """The requests that a vLLM server itself says it has answered."""
    return (out / "logs" / f"{engine}-vllm.log").read_text().count('"POST /v1/completions HTTP/1.1" 200')


@needs_vllm
def test_every_worker_and_request_of_the_quickstart_is_where_its_pool_says(
    nodes: FiveNodes, model: Path, tmp_path: Path
) -> None:
    """The quickstart, shortened, with embedded engines in one pool and a vLLM server in the other."""
    raw = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
    slots = next(pool["slots"] for pool in raw["pools"] if "slots" in pool)
    job = five_node_job(
        nodes,
        raw,
        tmp_path,
        bandwidth=VLLM,
        rooms={"slots": slots, "slots_per_worker": slots // 2, "isolation": "inline"},
        model={**raw["model"], "path": str(model)},
        train={**raw["train"], "pool": "bandwidth", "steps": 3},
        evaluation={**raw["evaluation"], "every": 3, "episodes": 8},
    )

    result = train(job, tmp_path / "run")

    assert (result.summary.state, result.summary.steps) == ("finished", 3), result.summary.reason
    kept(result)
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    kinds = nodes.kinds()
    where = {
        (row["worker"].rpartition("-")[0] or row["worker"], kinds[row["node"]]) for row in placed(tmp_path / "run")
    }
    assert where == {
        ("compute", "h800"),
        ("bandwidth", "h20"),
        ("trainer", "h20"),
        ("environments-env", "environments"),
    }
    assert len({row["node"] for row in placed(tmp_path / "run") if row["worker"].startswith("compute")}) == 2
    sends = [event for event in events if isinstance(event, schema.Send)]
    tasks = {event.id: event.task.partition("/")[0] for event in events if isinstance(event, schema.Start)}
    landed = Counter((tasks[event.id.rpartition("/")[0]], event.want, event.engine) for event in sends)
    assert set(landed) == {
        ("lake", "compute", "compute-0"),
        ("lake", "compute", "compute-1"),
        ("maths", "bandwidth", "bandwidth-0"),
    }
    assert not any(event.fallback for event in sends)
    assert served(tmp_path / "run", "bandwidth-0") >= landed["maths", "bandwidth", "bandwidth-0"]
    swaps = {(event.engine, event.version) for event in events if isinstance(event, schema.EngineSwap)}
    assert swaps >= {("bandwidth-0", 1), ("bandwidth-0", 2)}, "each with the log-probabilities of its probe"
    none_left_in(tmp_path)


@pytest.mark.parametrize(
    ("kind", "pool", "bandwidth", "fallbacks"),
    [
        pytest.param("h800", "compute", EMBEDDED, set(), id="embedded, one of two"),
        pytest.param(
            *("h20", "bandwidth", VLLM, {"pool bandwidth has no engine up"}), id="vllm, the only one", marks=needs_vllm
        ),
    ],
)
def test_a_lost_node_costs_time_only_and_its_pool_heals(
    nodes: FiveNodes,
    model: Path,
    tmp_path: Path,
    kind: str,
    pool: str,
    bandwidth: Mapping[str, Any],
    fallbacks: set[str],
) -> None:
    raw = unhurried(model)
    trainer = {**raw["train"], "pool": "environments", "steps": STEPS}
    job = five_node_job(nodes, raw, tmp_path, bandwidth=bandwidth, train=trainer)
    no_room = f"it needs 1 CPU on a machine with the resource '{kind}', and no machine had room for 20 s"

    events = play(
        job,
        tmp_path / "run",
        (step(2), nothing),
        (lambda event: isinstance(event, schema.Send) and event.pool == pool, lambda: nodes.kill(kind)),
        (lambda event: isinstance(event, schema.EngineRetry) and no_room in event.reason, lambda: nodes.add(kind)),
        (seen(schema.EngineUp), nothing),
        (steps(2), Script.stop),
    )

    down = next(event for event in events if isinstance(event, schema.EngineDown))
    back = next(event for event in events if isinstance(event, schema.EngineUp))
    engine = down.engine
    assert engine == back.engine
    assert engine.startswith(f"{pool}-")
    lost = [event.id for event in events if isinstance(event, schema.Lost)]
    again = {event.id for event in events if isinstance(event, schema.Send) and event.n > down.n}
    assert lost
    assert set(lost) <= again, "each request that the node held was sent again"
    meanwhile = [event for event in events if down.n < event.n < back.n]
    assert sum(isinstance(event, schema.StepEnd) for event in meanwhile) >= 1, "the job went on without it"
    assert not any(isinstance(event, schema.Send) and event.engine == engine for event in meanwhile)
    assert any(isinstance(event, schema.Said) and event.engine == engine and event.n > back.n for event in events)
    assert {event.fallback for event in events if isinstance(event, schema.Send) and event.fallback} == fallbacks
    assert elsewhere(events) == []
    none_left_in(tmp_path)


@pytest.mark.parametrize(
    "bandwidth", [pytest.param(EMBEDDED, id="embedded"), pytest.param(VLLM, id="vllm", marks=needs_vllm)]
)
def test_the_only_trainer_node_is_lost_and_training_resumes(
    nodes: FiveNodes, model: Path, tmp_path: Path, bandwidth: Mapping[str, Any]
) -> None:
    """With it goes the only engine of a pool: its requests fall back, with the reason, until a node returns."""
    job = five_node_job(nodes, unhurried(model), tmp_path, bandwidth=bandwidth, checkpoint={"every": 3})

    events = play(
        job,
        tmp_path / "run",
        (step(5), lambda: nodes.kill("h20")),
        (lambda event: isinstance(event, schema.Send) and bool(event.fallback), lambda: nodes.add("h20")),
        (both(seen(schema.TrainerUp), up("bandwidth-0")), nothing),
        (steps(2), Script.stop),
    )

    down = next(event for event in events if isinstance(event, schema.TrainerDown))
    back = next(event for event in events if isinstance(event, schema.TrainerUp))
    checkpoint = [event.step for event in events if isinstance(event, schema.Checkpoint) and event.n < down.n][-1]
    replayed = [event.step for event in events if isinstance(event, schema.Replay)]
    assert replayed == list(range(checkpoint, back.version)), "from the checkpoint to where it was, once"
    fallbacks = [event for event in events if isinstance(event, schema.Send) and event.pool != event.want]
    assert {event.fallback for event in fallbacks} == {"pool bandwidth has no engine up"}
    assert elsewhere(events) == []
    none_left_in(tmp_path)


def test_the_ranks_of_a_trainer_are_on_several_nodes_and_one_of_these_is_lost(
    nodes: FiveNodes, model: Path, tmp_path: Path
) -> None:
    raw = unhurried(model)
    job = five_node_job(
        nodes,
        raw,
        tmp_path,
        tasks=[{**task, "affinity": "bandwidth"} for task in raw["tasks"]],
        pools=[
            {"name": "bandwidth", **EMBEDDED},
            {"name": "trainers", "hardware": "h800"},
            {"name": "environments", "resource": "environments", **ROOMS},
        ],
        train={**raw["train"], "pool": "trainers", "type": "fsdp2", "gpus": 2, "steps": STEPS},
        checkpoint={"every": 3},
    )
    kinds = nodes.kinds()

    def node_of(worker: str) -> str:
        return next(one["node"] for one in placed(tmp_path / "run") if one["worker"] == worker)

    def again() -> None:
        nodes.add("h800")
        kinds.update(nodes.kinds())

    events = play(
        job,
        tmp_path / "run",
        (step(5), lambda: nodes.kill("h800", node=node_of("rank-1"))),
        (seen(schema.TrainerDown), again),
        (seen(schema.TrainerUp), nothing),
        (steps(2), Script.stop),
    )

    workers = [one for one in placed(tmp_path / "run") if one["worker"].startswith(("trainer", "rank-"))]
    assert [one["worker"] for one in workers] == ["trainer", "rank-0", "rank-1"] * 2
    lives = [one for one in workers if one["worker"] != "trainer"]
    for life in (lives[:2], lives[2:]):
        assert len({one["node"] for one in life}) == 2, "a node has room for one"
        assert {kinds[one["node"]] for one in life} == {"h800"}
    down = next(event for event in events if isinstance(event, schema.TrainerDown))
    assert "rank-1: its actor is lost" in down.reason
    assert elsewhere(events) == []
    none_left_in(tmp_path)


def test_a_lost_environment_node_ends_only_what_ran_there(nodes: FiveNodes, model: Path, tmp_path: Path) -> None:
    job = five_node_job(nodes, raw_job(model), tmp_path)

    events = play(
        job,
        tmp_path / "run",
        (step(2), lambda: nodes.kill("environments")),
        (
            lambda event: isinstance(event, schema.End) and event.status == "failed",
            lambda: nodes.add("environments"),
        ),
        (steps(4), Script.stop),
    )

    failed = [event.reason for event in events if isinstance(event, schema.End) and event.status == "failed"]
    assert failed
    assert all("its actor is lost" in reason for reason in failed)


def test_a_pool_grows_and_shrinks_with_its_nodes(nodes: FiveNodes, model: Path, tmp_path: Path) -> None:
    job = five_node_job(nodes, raw_job(model), tmp_path, most=3)

    events = play(
        job,
        tmp_path / "run",
        (step(2), lambda: nodes.add("h800")),
        (up("compute-2"), nothing),
        (steps(3), lambda: nodes.kill("h800", newest=True)),
        (seen(schema.EngineDown), nothing),
        (steps(3), Script.stop),
    )

    joined = next(event for event in events if isinstance(event, schema.EngineUp))
    left = next(event for event in events if isinstance(event, schema.EngineDown))
    assert left.engine == "compute-2"
    served = [event.n for event in events if isinstance(event, schema.Said) and event.engine == "compute-2"]
    assert served
    assert joined.n < min(served)
    assert max(served) < left.n


def test_a_job_that_does_not_fit_is_refused_by_pool(
    nodes: FiveNodes, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = five_node_job(nodes, raw_job(model), tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    three = {**EMBEDDED, "engines": {"count": 3}}

    with pytest.raises(JobError, match=r"Pool bandwidth, rollout: 2 of 3 workers placed") as refused:
        train(five_node_job(nodes, raw_job(model), tmp_path, bandwidth=three), tmp_path / "run")
    assert "Pool bandwidth, train: 0 of 1 workers placed" in str(refused.value)
    assert "Pool compute" not in str(refused.value)
    assert not (tmp_path / "run").exists()

    assert main(["pools", str(file), "--json"]) == 0
    shown = orjson.loads(capsys.readouterr().out)
    assert len(shown["nodes"]) == 5
    assert shown["missing"] == []
    assert main(["pools", str(file), "pools.bandwidth.resource=nowhere", "--json"]) == 1
    shown = orjson.loads(capsys.readouterr().out)
    assert shown["fallbacks"] == {"bandwidth": "compute"}
    assert "no machine has the resource 'nowhere'" in shown["missing"][0]
