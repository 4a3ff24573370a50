"""Every key of a job is read by something that its backend runs, or refused: found by recording, not by listing.

A job of each backend, and of each value of each `type`, is put together as `rollart sim` and `rollart train` do it,
while every read of a setting is noted with who read it. What is not read there is set to other values, one key at a
time: then it is read, or the job is refused by that key.

What counts as read: in the simulator, all that runs. In a real run, what builds workers, hosts and readers, and the
control plane (whose reads are taken from a simulated run of the same job: it is the same code). What only reports or
places does not count, since a worker would not know of it.
"""

import asyncio
import copy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import MagicMock

import pytest
from pydantic import BaseModel

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.paths import OnDisk
from rollart.config.settings import Settings
from rollart.errors import EngineError, JobError, JobStopped
from rollart.types import EngineSpec, TrajectoryId
from rollart.workers.sandbox import missing
from rollart.workers.setup import WorkerSetup

Reads = dict[str, set[str]]
"""Key -> who read it, as `module.function`."""

REAL_ONLY = (
    *(
        "model.path",
        "model.chat_template",
        "model.chat_template_args",
        "tasks.N.use",
        "tasks.N.args",
        "tasks.N.latency",
        "pools.N.resource",
        "pools.N.slots_per_worker",
    ),
    *(
        "pools.N.isolation",
        "tasks.N.isolation",
        "tasks.N.sandbox",
        "tasks.N.container",
        "tasks.N.warm",
        "rewards.url",
        "rewards.concurrency",
        "rewards.hedge",
        "tasks.N.environment",
        "tasks.N.agent",
        "endpoint",
        "rewards.environment",
        "weights.type",
        "weights.path",
        "weights.address",
        "weights.bind",
        "weights.delta",
        "weights.master",
        "weights.metadata",
        "weights.protocol",
        "weights.devices",
        "weights.segment_mb",
        "pools.N.site",
        "cluster",
    ),
    *("checkpoint.keep", "track", "trajectories", "pools.N.engines.kv_tokens", "pools.N.engines.step_tokens"),
    *("pools.N.engines.memory", "pools.N.engines.stage", "pools.N.engines.share"),
    *("pools.N.engines.keep_kv", "pools.N.engines.draft_tokens", "pools.N.engines.device", "pools.N.engines.threads"),
    *("pools.N.engines.cores", "pools.N.engines.python", "pools.N.engines.url", "pools.N.engines.dtype"),
    *("pools.N.engines.args", "pools.N.engines.prefill.connector", "pools.N.engines.prefill.memory"),
)
"""What `rollart sim` does not read, by prefix; of `train` it reads what is in SIMULATED_TRAINER."""
SIMULATED_TRAINER = ("pool", "gpus", "steps", "algorithm", "advantage")
AT_LOADING = ("sim.profile", "sim.chaos.variants")
"""Read when a job is loaded or a plan is made; they are tested there."""
SIM_ONLY = ("sim",)
"""What `rollart train` does not read, by prefix."""

PLACED = (
    *("name", "mode", "pools.N.name", "pools.N.hardware", "pools.N.cost", "pools.N.engines.count", "tasks.N.affinity"),
    "hardware",
    *("train.pool", "tasks.N.weight", "tasks.N.quota", "rewards.cost", "rewards.call_cost"),
    *("pools.N.engines.prefill.link_gb_s", "pools.N.engines.share", "train.share"),
)
"""Keys of a real run that only say where and how much: who places, shares or reports reads them, and rightly so."""
RAY_PLACED = ("pools.N.resource", "pools.N.slots_per_worker", "pools.N.engines.most")
ATTACHED = ("pools.N.engines.gpus", "pools.N.engines.max_batch")
"""Of a server that runs already they only say what it is, to who places and counts."""
RAY_ELSEWHERE = ("tasks.N.latency", "cluster.check")
"""On Ray: of the wrapper of all hosts, as no environment is opened here; and what `tests/test_resources.py` shows."""

REPORTS = ("rollart.launch.driver.facts", "rollart.report.show", "rollart.launch.checks")
PLACES = ("rollart.launch.pools", "rollart.launch.resources")

SITUATIONS: dict[str, dict[str, Any]] = {
    "rollout.max_short_batches": {"rollout.refill_factor": 0.5, "rollout.groups_per_step": 4, "train.steps": 8}
    | {f"sim.tasks.{task}.success": 0.05 for task in "ab"}
    | {f"sim.tasks.{task}.success_gain": 0.0 for task in "ab"},
}
"""Where a key is read only when something happens: what makes it happen."""

VALUES: dict[str, list[Any]] = {
    "name": ["other"],
    "tasks.N.name": ["c"],
    "pools.N.name": ["q"],
    "pools.N.hardware": ["h800"],
    "pools.N.engines.prefill": [{}],
    "pools.N.engines.prefill.pool": ["t"],
    "sim.model": ["qwen3-8b"],
}
"""Other values of keys for which none can be made up from the type."""


# --- recording ------------------------------------------------------------------------------------------------------


def walk(value: Any, path: str = "") -> Iterator[tuple[BaseModel, str]]:
    """Every settings object of a job and where it stands."""
    if isinstance(value, BaseModel):
        yield value, path
        for key in type(value).model_fields:
            yield from walk(value.__dict__[key], f"{path}.{key}" if path else key)
    elif isinstance(value, tuple | dict):
        items: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
        for at, inner in items.items():
            yield from walk(inner, f"{path}.{at}")


COPIED = ("__iter__", "__copy__", "model_copy")
"""What reads all keys of some settings at once."""


@contextmanager
def recording(job: Job) -> Iterator[Reads]:
    """Notes who reads which key of this job. A property of the settings counts for who asked it."""
    places = {id(settings): (settings, path) for settings, path in walk(job)}
    reads: Reads = {}

    def note(settings: Settings, name: str) -> Any:
        if name in type(settings).model_fields and id(settings) in places:
            path = places[id(settings)][1]
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals.get("__name__", "").startswith(("rollart.config", "pydantic")):
                frame = frame.f_back
            who = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
            reads.setdefault(f"{path}.{name}" if path else name, set()).add(who)
        elif name == "__dict__" and id(settings) in places and sys._getframe(1).f_code.co_name in COPIED:
            for key in type(settings).model_fields:
                reads.setdefault(f"{places[id(settings)][1]}.{key}", set()).add("iteration")
        return object.__getattribute__(settings, name)

    Settings.__getattribute__ = note  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del Settings.__getattribute__


# --- the backends ---------------------------------------------------------------------------------------------------


def simulated(job: Job) -> Reads:
    from rollart.launch.simulation import simulate
    from rollart.sim.faults import draw_plan

    with recording(job) as reads:
        draw_plan(job.sim.chaos, 0)
        simulate(job)
    return reads


def real(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """A real run is put together, and one environment asked for; its workers are built and train in this process."""
    from rollart.launch import training
    from rollart.launch.checks import check_supported
    from rollart.launch.real import real_world

    check_supported(job)
    folder.mkdir(parents=True)
    worlds: list[Any] = []

    def keep(*arguments: Any, **named: Any) -> Any:
        worlds.append(real_world(*arguments, **named))
        return worlds[0]

    async def play() -> None:
        world = worlds[0].world
        env = await world.rollout.host.open(world.task_sets["a"].task(0), TrajectoryId("check", 0, 0))
        await env.reset()
        await env.step("up")
        await env.close()

    async def work(coordinator: object) -> None:
        ways = [asyncio.ensure_future(play()), asyncio.ensure_future(asked.wait())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        raise JobStopped("enough was seen")

    asked = asyncio.Event()
    with monkeypatch.context() as patch, recording(job) as reads:
        patch.setattr("rollart.launch.training.real_world", keep)
        patch.setitem(sys.modules, "rollart.cluster.ray", ray_stub(asked))
        patch.setitem(sys.modules, "wandb", MagicMock())
        asyncio.run(training.drive_real(job, folder, work, resume=None, watch=None))
        asyncio.run(build_workers(job, folder, patch))
    return reads


async def build_workers(job: Job, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """As their processes do it, an engine of each pool and the trainer, which then trains on a batch."""
    from rollart.launch import worker
    from rollart.store.open import new_store
    from rollart.train.settings import TrainerSettings
    from rollart.train.single import SingleTrainer
    from tests.train.samples import make_batch, random_samples

    setup = WorkerSetup(job=job, out=folder, store=new_store(job, folder))
    specs = [EngineSpec(id=p.name, pool=p.name, type="", hardware="cpu", gpus=1) for p in job.engine_pools]
    patch.setattr("os.sched_setaffinity", lambda *_: None)
    patch.setattr("rollart.engines.launch.ServerProcess", NoServer)
    patch.setattr("rollart.store.host.HostUser.start", lambda user: None)  # it would serve until this process ends
    patch.setattr("rollart.store.host.HostUser.wait", lambda user: 0)
    patch.setattr("rollart.store.host.HostUser.watch", lambda user: None)
    patch.setattr(worker, "Process", NoRank)
    rooms = [p.name for p in job.pools if p.slots and job.cluster.type == "ray"]
    for own in (*map(setup.engine, specs), *(setup.environments(name, name) for name in rooms), setup):
        patch.setattr(WorkerSetup, "model_validate_json", lambda body, own=own: own)  # the job that is watched
        with suppress(Exception):  # what a value breaks there, it was read for
            made = await worker.start("")
            await made.close()
    with suppress(Exception):
        SingleTrainer(TrainerSettings(job=job, out=folder)).train_step(make_batch(0, random_samples(0, 4)))


class NoServer:
    """An inference server that does not start."""

    def __init__(self, *arguments: object) -> None: ...

    async def ready(self, *arguments: object) -> None:
        raise EngineError("not here")

    async def stop(self) -> None: ...


class NoRank(NoServer):
    pid = None

    async def start(self, body: str) -> None: ...


def ray_stub(asked: asyncio.Event) -> types.ModuleType:
    """A cluster that is asked for a worker and never has one."""

    class RayCluster:
        def __init__(self, *arguments: object, **settings: object) -> None: ...

        async def worker(self, *arguments: object) -> None:
            asked.set()
            await asyncio.get_running_loop().create_future()

        async def close(self) -> None: ...

    module = types.ModuleType("rollart.cluster.ray")
    module.RayCluster = RayCluster  # type: ignore[attr-defined]
    return module


def counted(reads: Reads, *, on_ray: bool) -> set[str]:
    """Keys of a real run that someone reads who acts on them."""
    found = set()
    for key, readers in reads.items():
        placed = matches(key, PLACED) or (on_ray and matches(key, RAY_PLACED))
        idle = REPORTS if placed else (*REPORTS, *PLACES)
        if placed or any(not reader.startswith(idle) for reader in readers):
            found.add(key)
    return found


# --- jobs -----------------------------------------------------------------------------------------------------------

SMALL = {"turns": 2, "prompt_tokens": 40, "observation_tokens": 10, "answer_tokens": 4}
TAILS = {"reset_tail": 0.5, "step_tail": 0.5, "call_mb": 1.0, "reward_mb": 1.0, "image_gb": 0.1}
BASE: dict[str, Any] = {
    "name": "keys",
    "model": {"path": "MODEL", "context_tokens": 512},
    "tasks": [
        {"name": "a", "use": "rollart.tasks.frozen_lake", "max_tokens": 8, "latency": {"kind": "uniform", "mean": 0.0}},
        {"name": "b", "use": "rollart.tasks.frozen_lake", "max_tokens": 8},
    ],
    "rollout": {"groups_per_step": 2},
    "pools": [
        {"name": "p", "engines": {"max_batch": 8}, "slots": 32, "isolation": "inline"},
        {"name": "t", "slots": 32, "isolation": "inline"},
    ],
    "train": {"steps": 2},
    "cluster": {"type": "inline"},
    "evaluation": {"every": 2, "episodes": 1, "greedy": True},
    "sim": {
        "model": "qwen3-0.6b",
        "tasks": {
            "a": {
                **{key: {"kind": "uniform", "mean": value} for key, value in SMALL.items()},
                **TAILS,
                "shift": {"after_s": 100.0, "turns": {"kind": "uniform", "mean": 2}},
            },
            "b": {**SMALL, **TAILS},
        },
        "engine": {"start_s": 0},
        "links": {"calls_gb_s": 1.0},
        "control": {"call_s": 0.001},
        "faults": [{"kind": kind, "swap": 1} for kind in ("env_slow", "engine_restart", "trainer_during")],
    },
}
HTTP = {"type": "http", "url": "http://127.0.0.1:8080"}
SIMULATED: dict[str, dict[str, Any]] = {
    "local rewards": {},
    "http rewards": {"rewards": HTTP, "sim.reward": {"quota": 4, "others_per_s": 0.1}},
    "prefill apart": {"pools.0.engines.prefill": {}},
    "measured": {"sim.engine.measured": {"p": {"step_s": 0.01, "prefill_token_s": 0.001}}},
}
VLLM = {"pools.0.engines": {"type": "vllm"}, "weights": {"type": "files"}}
REAL: dict[str, dict[str, Any]] = {
    "inline": {},
    "sandbox": {"tasks.0.isolation": "sandbox"},
    "local": {"cluster": {"type": "local"}},
    "ray": {"cluster": {"type": "ray", "address": "auto"}},
    "http rewards": {"rewards": HTTP},
    "files": {"weights": {"type": "files"}},
    "tcp": {"weights": {"type": "tcp"}},
    "mooncake": {"weights": {"type": "mooncake", "master": "127.0.0.1:9"}},
    "fsdp2": {"train": {"steps": 2, "type": "fsdp2", "gpus": 2}},
    "vllm": VLLM,
    "vllm, prefill apart": {**VLLM, "pools.0.engines": {"type": "vllm", "prefill": {}}},
    "prefill apart": {"pools.0.engines": {"prefill": {}}},
    "vllm, attached": {**VLLM, "pools.0.engines": {"type": "vllm", "url": "http://127.0.0.1:8000"}},
    "sglang": {**VLLM, "pools.0.engines": {"type": "sglang"}},
}


def with_values(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy with these keys, by their paths, set."""
    raw = copy.deepcopy(raw)
    for path, value in values.items():
        at: Any = raw
        *parents, last = path.split(".")
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
        at[int(last) if isinstance(at, list) else last] = copy.deepcopy(value)
    return raw


def leaves(job: Job) -> Iterator[tuple[str, list[Any]]]:
    """Every key that holds a value, with other values that it might hold."""
    for settings, path in walk(job):
        for name, field in type(settings).model_fields.items():
            value = settings.__dict__[name]
            if not any(True for _ in walk(value)) and value != {}:
                key = f"{path}.{name}" if path else name
                made = VALUES.get(general(key)) or others(field.annotation, field.metadata, value)
                yield key, [other for other in made if other != value]


def others(annotation: Any, metadata: list[Any], value: Any) -> list[Any]:
    kind, inner = get_origin(annotation), [part for part in get_args(annotation) if part is not type(None)]
    if kind is Annotated:
        return others(inner[0], inner[1:], value)
    if kind is Literal:
        return inner
    if kind in (types.UnionType, Union, tuple) and len(inner) in (1, 2):
        made = others(inner[0], metadata, None if kind is tuple else value)
        return [[one] for one in made] if kind is tuple else made
    if any(isinstance(part, OnDisk) for part in metadata):
        return ["/nowhere"]
    if annotation is bool:
        return [not value]
    if annotation is int:
        return [(value or 0) + 1, (value or 0) + 2, max(1, (value or 0) // 2)]
    if annotation is float:
        return [(value or 0) + 0.5, (value or 1) / 2, (value or 0) + 1e9]
    return ["other"] if annotation is str else []


def general(key: str) -> str:
    """`tasks.0.use` -> `tasks.N.use`; names of simulated tasks and pools likewise."""
    parts = ["N" if part.isdigit() else part for part in key.split(".")]
    for section in (["sim", "tasks"], ["sim", "engine", "measured"]):
        if parts[: len(section)] == section and len(parts) > len(section):
            parts[len(section)] = "N"
    return ".".join(parts)


def matches(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(general(key) == prefix or general(key).startswith(f"{prefix}.") for prefix in prefixes)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from rollart_recipes.tiny import save, tiny_model, tiny_tokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    save(tiny_model(len(tokenizer)), path)
    return path


# --- the test -------------------------------------------------------------------------------------------------------


def unread(raw: dict[str, Any], read_of: Any, passed: Any) -> list[str]:
    """Keys that are accepted and that nothing reads, with the value that was accepted."""
    base = build_job(raw)
    raw = base.model_dump(mode="json")
    read = read_of(base)
    found = []
    faults = {general(key) for key in read if key.startswith("sim.faults.")}  # each kind reads what it needs
    for key, values in leaves(base):
        if key in read or passed(key) or general(key) in faults:
            continue
        refusals: list[str] = []
        for value in values:
            changed = with_values(raw, {**SITUATIONS.get(general(key), {}), key: value})
            try:
                job = build_job(changed)
                read_now = read_of(job)
            except JobError as error:
                refusals.append(str(error))
                continue
            if key not in read_now:
                found.append(f"{key}={value!r} is accepted and not read")
            break
        else:
            whole, _, name = key.rpartition(".")  # a spread may be refused as a whole
            if not any(
                (name in said.partition(": ")[0] and "does not fit" not in said)
                or said.startswith(f"{whole}: has an effect only")
                for said in refusals
            ):
                found.append(f"{key}: no other value could be tried: {refusals or 'add one to VALUES'}")
    return found


@pytest.mark.parametrize("scenario", SIMULATED)
def test_the_simulator_reads_every_key_of_its_own(scenario: str) -> None:
    def passed(key: str) -> bool:
        real_train = key.startswith("train.") and key.split(".")[1] not in SIMULATED_TRAINER
        return real_train or matches(key, (*REAL_ONLY, *AT_LOADING))

    raw = with_values(BASE, SIMULATED[scenario])
    assert not (found := unread(raw, lambda job: set(simulated(job)), passed)), "\n".join(found)


@pytest.mark.parametrize("scenario", REAL)
def test_a_real_run_reads_every_key_of_its_own(
    scenario: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scenario == "sandbox" and missing():
        pytest.skip(f"sandbox {missing()}")
    numbers = iter(range(10_000))

    def read_of(job: Job) -> set[str]:
        own = counted(real(job, tmp_path / str(next(numbers)), monkeypatch), on_ray=job.cluster.type == "ray")
        control = {key for key, who in simulated(job).items() if any(one.startswith("rollart.control") for one in who)}
        return own | control

    raw = with_values(BASE, {**REAL[scenario], "model.path": str(model)})
    only_said = {"ray": RAY_ELSEWHERE, "vllm, attached": ATTACHED}
    not_here = (*SIM_ONLY, *only_said.get(scenario, ()))
    assert not (found := unread(raw, read_of, lambda key: matches(key, not_here))), "\n".join(found)
