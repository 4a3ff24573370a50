"""What a real run of a job needs, looked at before anything is written or started.

`problems` gives one line for each thing that is wrong: the key, the value, the fix. It loads task sets and the
tokenizer, opens environments in a process of their own, asks the reward's address, and looks at devices and disks; the
model's weights are not read.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollart.config.job import Job
from rollart.config.settings import (
    EngineSettings,
    JudgeSettings,
    ModelSettings,
    PoolSettings,
    PrefillSettings,
    RewardSettings,
    TaskSettings,
)
from rollart.config.shapes import experts_in, saved_params, shape_of, usual_names
from rollart.control.draw import draw
from rollart.errors import BoundaryError, JobError, WeightError, install
from rollart.launch.hub import with_models_here
from rollart.launch.resources import kind_of, refuse_unplaceable
from rollart.ports import EnvHost
from rollart.report.trackers import check_trackers
from rollart.types import ParsedJson, Task, TrajectoryId
from rollart.workers.variables import for_children

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rollart.control.env_manager import Agent
    from rollart.envs.service import ClosableHost
    from rollart.model.tokenizer import ChatTokenizer
    from rollart.tasks.api import TaskSet

T = TypeVar("T")

FIRST_PROMPTS = 3
"""Environments of each task that are opened. One of them may fail, or begin with too long a prompt; not all."""
RESET_S = 60.0
"""How long an environment may take to show its first prompt before it is left unseen."""
TRIAL_S = 60.0
"""How long a task set may take to be loaded and drawn from in a process of its own, before it is in this one."""
RUN_BYTES = 64_000_000
"""Room for events, metrics and logs, without which no run begins."""
WEIGHT_VERSIONS = 2
"""That a weight store holds at a time, at least."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHARED_MEMORY = Path("/dev/shm")
WEIGHT_FILES = ("*.safetensors", "*.bin")


def for_the_simulator(job: Job) -> bool:
    """Whether a job names nothing that a real run would need."""
    return not job.model.path and not any(task.use for task in job.tasks)


def refuse_start(job: Job, out: Path, *, trains: bool = True, resume: bool = False) -> None:
    """Raises JobError with a line for each problem."""
    found = problems(job, out, trains=trains, resume=resume)
    if found:
        raise JobError("\n".join(found))


def problems(job: Job, out: Path | None, *, trains: bool = True, resume: bool = False) -> list[str]:
    """All that keeps this job from being started for real, with `out` as its run directory. None: that is not known."""
    found: list[str] = []

    def look(check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except (JobError, BoundaryError) as error:
            found.append(" ".join(str(error).split()))
            return None

    writable = out is not None and (resume or look(_try_out, out))
    for check in (check_trackers, _refuse_pythons, _refuse_weights, refuse_functions):
        look(check, job)
    found += unsupported(job)
    look(partial(refuse_unplaceable, trains=trains), job)
    for place, reward in job.asked_rewards.items():
        look(_refuse_reward, place, reward)
    evaluates = not trains or job.evaluation.first or job.evaluation.every > 0
    sets = {task.name: look(_task_set, job, position, evaluates) for position, task in enumerate(job.tasks)}
    here = look(with_models_here, job)
    job = here or job
    for pool in job.judge_pools if here else ():
        look(_refuse_judge, pool)
    if trains and here:
        look(_refuse_reference, job)
        look(_refuse_adapter, job)
    model = look(_model, job) if here else None
    params = look(_saved_params, job) if model is not None else None
    if model is not None:
        for check in (refuse_long_contexts, refuse_mixtures_on_servers, partial(_refuse_architecture, trains=trains)):
            look(check, job)
        if params is not None:
            look(_refuse_shape, job)
        tokenizer = look(_tokenizer, job)
        if tokenizer is not None and job.cluster.type != "ray":  # there, environments run on other machines
            found += _prompt_problems(
                job, {name: one for name, one in sets.items() if one is not None}, tokenizer, evaluates=evaluates
            )
    trained = (params or 0) if trains and job.train.lora is None else 0
    for room in _rooms(job, out if writable else None, trained, resume=resume):
        look(_refuse_full_disk, room)
    return found


# --- the job itself --------------------------------------------------------------------------------------------------


def check_supported(job: Job) -> None:
    """Raises JobError for the first key that `rollart train` would ignore, or that this machine cannot serve."""
    for problem in unsupported(job):
        raise JobError(problem)


def unsupported(job: Job) -> Iterator[str]:
    """One line for each such key."""
    for pool, engines in job.all_engines:
        yield from _engine_problems(job, pool, engines)
        yield from _prefill_problems(job, pool, engines)
    for key, cores, device in [
        *((f"pools.{pool.name}.engines", engines.cores, engines.device) for pool, engines in job.all_engines),
        ("train", job.train.cores, job.train.device),
    ]:
        most = (os.cpu_count() or 1) - 1
        if cores and max(cores) > most:
            yield f"{key}.cores: {list(cores)} are not all on this machine, which has 0 to {most}; name those"
        kind, colon, number = device.partition(":")  # which GPUs there are is checked with the placement
        if kind not in ("cpu", "cuda", "mps", "xpu") or (colon and not number.isdigit()):
            yield f"{key}.device: {device!r} is not a device; write cpu, cuda, or such as cuda:0"
    yield from _variable_problems(job)
    yield from _agent_problems(job)
    if job.train.type == "single" and job.train.gpus > 1:
        yield f"train.gpus: {job.train.gpus}, but train.type single uses one; set train.type=fsdp2, or train.gpus=1"
    yield from _colocation_problems(job)
    yield from _isolation_problems(job)


def _colocation_problems(job: Job) -> Iterator[str]:
    """What takes turns on one device names that device."""
    if not job.train.colocated:
        return
    if job.cluster.type == "ray":
        yield "train.colocated: on Ray each worker has devices of its own; set cluster.type to local, or remove it"
    device = job.train.device
    for pool, engines in job.engines:
        if engines.device != device or (device != "cpu" and ":" not in device):
            yield (
                f"train.colocated: engines of pool {pool.name!r} have device {engines.device}, the trainer {device}; "
                "name one for both, as engines.device=cuda:0 and train.device=cuda:0"
            )


def _engine_problems(job: Job, pool: PoolSettings, engines: EngineSettings) -> Iterator[str]:
    key, cluster, server = f"pools.{pool.name}.engines", job.cluster.type, engines.type != "embedded"
    adapters = job.train.lora is not None and pool.judge is None
    if not server and engines.gpus > 1:
        yield (
            f"{key}.gpus: {engines.gpus}, but an embedded engine computes on one device; set it to 1 and raise "
            "engines.count, or set engines.type to vllm or sglang"
        )
    if engines.parallel == "expert":
        yield (
            f"{key}.parallel: expert is simulated; leave it out, and give a server its own flags, as args: "
            "[--enable-expert-parallel]"
        )
    if engines.type == "sglang" and adapters:
        yield (
            f"train.lora: sglang engines (pool {pool.name!r}) are not given adapters yet; set engines.type to vllm or "
            "embedded, or remove train.lora"
        )
    if engines.most is not None and cluster != "ray":
        yield f"{key}.most: no machine joins a cluster of type {cluster}; set cluster.type to ray, or remove it"
    if server and engines.device != "cpu" and cluster != "local":
        yield (
            f"{key}.device: a cluster of type {cluster} gives a server no device by number; remove it, or set "
            "cluster.type to local"
        )
    if server and engines.device != "cpu" and pool.hardware == "cpu":
        yield (
            f"{key}.device: {engines.device}, but the pool's hardware is cpu, where a server computes on none; "
            "remove it, or name the hardware"
        )
    if engines.type == "vllm" and adapters and engines.keep_kv:
        yield (f"{key}.keep_kv: a request to vLLM keeps the adapter that it began with; remove it, or train.lora")
    if engines.prefill is not None and engines.keep_kv:
        yield f"{key}.keep_kv: engines that prefill apart cannot keep what is in flight; remove it, or engines.prefill"


def _prefill_problems(job: Job, pool: PoolSettings, engines: EngineSettings) -> Iterator[str]:
    key, other = f"pools.{pool.name}.engines.prefill", job.prefill_pool(pool)
    if other is not None and engines.type == "sglang":
        yield (
            f"{key}: sglang engines cannot prefill apart; set engines.type to embedded or vllm, remove it, or use "
            "`rollart sim`"
        )
    elif engines.prefill is not None and engines.type == "embedded":
        yield from _pair_problems(key, pool, engines, engines.prefill)
    elif other is not None and job.cluster.type == "ray" and kind_of(other) != kind_of(pool):
        yield (
            f"{key}.pool: all workers of an engine run on one machine, and pool {other.name!r} has others than "
            f"{pool.name!r}; remove it, or use `rollart sim`"
        )


def _pair_problems(key: str, pool: PoolSettings, engines: EngineSettings, prefill: PrefillSettings) -> Iterator[str]:
    """An embedded engine's prefill and decode are two processes on one device."""
    for name, many in (("workers", prefill.workers), ("decoders", prefill.decoders), ("gpus", prefill.gpus)):
        if many > 1:
            yield (
                f"{key}.{name}: {many}, but an embedded engine prefills in one process and decodes in one, on one "
                "device; set it to 1 and raise engines.count, or set engines.type to vllm"
            )
    if prefill.pool not in (None, pool.name):
        yield f"{key}.pool: embedded engines prefill on the device that decodes; remove it, or use `rollart sim`"
    if engines.draft_tokens:
        yield f"{key}: beside draft_tokens; no tokens are guessed where prefill is apart, remove one of them"


def _isolation_problems(job: Job) -> Iterator[str]:
    """On Ray each pool has its own, and each machine is asked when its worker starts."""
    if job.cluster.type == "ray":
        return
    undecided = [f"tasks.{position}" for position, task in enumerate(job.tasks) if task.isolation is None]
    if undecided and len({pool.isolation for pool in job.pools if pool.slots}) > 1:
        yield f"{undecided[0]}.isolation: the pools with slots say different things; say it here, or make them equal"
    from rollart.launch.worker import no_box

    for position, task in enumerate(job.tasks):
        if why := no_box(task, job.isolation(task)):
            yield f"tasks.{position}.{why}"


def _variable_problems(job: Job) -> Iterator[str]:
    """On Ray, environments have the variables of their machines; rewards are computed here."""
    asked = {f"tasks.{position}.environment": task.environment for position, task in enumerate(job.tasks)}
    for position, task in enumerate(job.tasks):
        key = f"tasks.{position}.environment"
        if task.environment and all(job.isolation(task, pool) == "inline" for pool in job.pools if pool.slots):
            yield (
                f"{key}: environments of isolation inline run in this process, and see all its variables; remove it, "
                "or set isolation to process"
            )
    scoring = {f"{place}.environment": reward.environment for place, reward in job.asked_rewards.items()}
    here = {**(asked if job.cluster.type != "ray" else {}), **scoring}
    for key, name in ((key, name) for key, names in here.items() for name in names):
        if name not in os.environ:
            yield f"{key}: {name} is not set here; set it (export {name}=...), or remove it"


def _agent_problems(job: Job) -> Iterator[str]:
    from importlib.util import find_spec

    on_ray = job.cluster.type == "ray"
    for position, task in enumerate(job.tasks):
        key, agent = f"tasks.{position}.agent", task.agent
        if agent is None:
            continue
        if agent.use:
            try:
                agent_class(agent.use)
            except JobError as error:
                yield f"{key}.use: {error}"
            continue
        isolations = {job.isolation(task, pool) for pool in job.pools if pool.slots}
        if find_spec("aiohttp") is None:
            yield f"{key}: the endpoint needs aiohttp: {install('agents')}"
        if "inline" in isolations:
            yield f"{key}: a program does not run in RollArt's own process; set isolation to process or sandbox"
        if on_ray and job.endpoint.host in LOOPBACK:
            yield (
                f"endpoint.host: {job.endpoint.host} cannot be reached from the machines of the cluster, where task "
                f"{task.name!r} has its agent; give an address of this machine that they reach"
            )
        if agent.command and not on_ray and shutil.which(agent.command[0]) is None:
            yield f"{key}.command: {agent.command[0]} is not a program that can be run here; install it, or correct it"


def refuse_functions(job: Job) -> None:
    """Agents' functions that cannot be loaded: tried in a process of its own, since an agent library may be large."""
    code = "import sys; from rollart.tasks.load import load_function; load_function(sys.argv[1])"
    for position, task in enumerate(job.tasks if job.cluster.type != "ray" else ()):
        if task.agent is None or not task.agent.function:
            continue
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = for_children(os.environ, task.environment) | {"PYTHONPATH": paths}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, task.agent.function],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TRIAL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode:
            *_, last = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
            raise JobError(f"tasks.{position}.agent.function: {last.removeprefix('rollart.errors.JobError: ')}")


def agent_class(use: str) -> "Callable[[], Agent]":
    """Raises JobError where it is none."""
    from rollart.tasks.load import load_function

    found = load_function(use, "agent class", "MyAgent")
    if not asyncio.iscoroutinefunction(getattr(found, "play", None)):
        raise JobError(f"{use} has no `async def play(self, session)`; give it one, or name another class")
    return found


def refuse_long_contexts(job: Job) -> None:
    """A trajectory that outgrows its engine fails, where one that reaches `model.context_tokens` is truncated."""
    asked = job.model.context_tokens
    config = _model_config(job)
    most = config.get("max_position_embeddings")
    if most and asked > most:
        raise JobError(
            f"model.context_tokens: {asked} is more than the {most} positions of {job.model.path}; "
            f"set model.context_tokens={most} or less"
        )
    for pool, engines in job.engines:
        bound = engines.kv_tokens or (engines.cpu_kv_tokens if engines.device == "cpu" else asked)
        if engines.type == "embedded" and asked > bound:
            raise JobError(
                f"model.context_tokens: {asked} is more than pools.{pool.name}.engines.kv_tokens {bound}, "
                "where one trajectory must fit; lower context_tokens, or raise kv_tokens"
            )


def _model_config(job: Job) -> ParsedJson:
    """As its library wrote it, under the names that most models use."""
    return usual_names(json.loads((Path(job.model.path) / "config.json").read_text()))


def refuse_mixtures_on_servers(job: Job) -> None:
    """What SGLang reads of a mixture could not be tried; vLLM's own names are proven."""
    if any(engines.type == "sglang" for _, engines in job.engines) and experts_in(_model_config(job)).num:
        raise JobError(
            f"model.path: {job.model.path} is a mixture of experts, which was not tried with sglang engines; give "
            "another model, or set engines.type to vllm or embedded"
        )


# --- the model ------------------------------------------------------------------------------------------------------


def _model(job: Job) -> Path:
    """A directory with weights and the config of a causal language model. `_refuse_architecture` looks closer."""
    path = Path(job.model.path)
    if not job.model.path:
        raise JobError(
            "model.path: missing; name a Hugging Face directory, such as one that `rollart model tiny` makes"
        )
    if not (path / "config.json").is_file():
        raise JobError(
            f"model.path: {path} is not a Hugging Face directory (it has no config.json); "
            f"make one with: rollart model tiny {path}"
        )
    _causal_config("model.path", path)
    return path


def _causal_config(key: str, path: Path) -> "PreTrainedConfig":
    """Of a causal language model whose weights are there."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the boundary to transformers, which raises whatever a config's own code does
        raise JobError(f"{key}: {path}/config.json: {_one_line(error)}; give another model") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise JobError(f"{key}: {path} is a {config.model_type}, no causal language model; give one that is")
    if not any(True for pattern in WEIGHT_FILES for _ in path.glob(pattern)):
        raise JobError(f"{key}: {path} holds no weights (*.safetensors); bring them, or give another model")
    return config


def _refuse_architecture(job: Job, *, trains: bool) -> None:
    """What the trainer or an embedded engine would compute wrongly: tried on a reduced model, without the weights.
    And what the sharded trainer cannot shard."""
    from transformers import AutoConfig

    from rollart.engines.embedded.steps import prove_steps_architecture, refuse_windows
    from rollart.model.network import prove_packed_architecture

    config = AutoConfig.from_pretrained(job.model.path, local_files_only=True)
    try:
        prove_packed_architecture(config)
        embedded = [engines for _, engines in job.engines if engines.type == "embedded"]
        if embedded:
            prove_steps_architecture(config)
        if any(engines.device.startswith("cuda") for engines in embedded):
            refuse_windows(config, job.model.context_tokens)
        if trains:
            _refuse_for_the_trainer(job, config)
    except JobError as error:
        raise JobError(f"model.path: {job.model.path}: {error}") from None


def _refuse_for_the_trainer(job: Job, config: "PreTrainedConfig") -> None:
    from rollart.model.network import empty_model, prove_packed_architecture

    prove_packed_architecture(config)
    if job.train.type == "fsdp2":
        empty_model(config)


def _saved_params(job: Job) -> int:
    try:
        return saved_params(Path(job.model.path))
    except JobError as error:
        raise JobError(f"model.path: {error}") from None


def _refuse_shape(job: Job) -> None:
    try:
        shape_of(Path(job.model.path))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise JobError(
            f"model.path: the config.json of {job.model.path} does not say the model's size as we read it "
            f"({type(error).__name__}: {error}); give another model"
        ) from None


def _refuse_reference(job: Job) -> None:
    reference = job.train.reference
    if reference is None:
        return
    instead = "name another, or remove it to take the KL to model.path"
    if not (Path(reference) / "config.json").exists():
        raise JobError(
            f"train.reference: {reference} is not a Hugging Face directory (it has no config.json); {instead}"
        )
    config = _causal_config("train.reference", Path(reference))
    try:
        _refuse_for_the_trainer(job, config)
    except JobError as error:
        raise JobError(f"train.reference: {reference}: {error}") from None


def _refuse_adapter(job: Job) -> None:
    given = job.train.lora.adapter if job.train.lora is not None else None
    if given is not None and not (Path(given) / "adapter_config.json").exists():
        raise JobError(
            f"train.lora.adapter: {given} holds no adapters (it has no adapter_config.json); give a directory that "
            "peft has written, or remove it to begin with new ones"
        )


def _tokenizer(job: Job) -> "ChatTokenizer":
    return _tokenizer_of("model.path", job.model)


def _tokenizer_of(key: str, model: ModelSettings | JudgeSettings) -> "ChatTokenizer":
    from rollart.model.tokenizer import ChatTokenizer

    try:
        # raises where there is no tokenizer, or no chat template
        return ChatTokenizer(model.path, model.chat_template, model.chat_template_args)
    except JobError as error:
        raise JobError(str(error).replace("model.", f"{key.rpartition('.')[0]}.", 1)) from None
    except Exception as error:  # the boundary to transformers
        raise JobError(f"{key}: the tokenizer of {model.path}: {_one_line(error)}") from None


# --- tasks ----------------------------------------------------------------------------------------------------------


def _task_set(job: Job, position: int, evaluates: bool) -> "TaskSet":
    from rollart.tasks.load import load_task_set
    from rollart.tasks.trial import fatal_call

    task = job.tasks[position]
    if not task.use:
        raise JobError(f"tasks.{position}.use: missing; name the task set, such as rollart.tasks.frozen_lake")
    fatal = fatal_call(
        task.use, task.args, seed=job.seed, domain=task.name, draws=FIRST_PROMPTS, held_out=evaluates, limit_s=TRIAL_S
    )
    if fatal is not None:
        raise JobError(
            f"tasks.{position}.use: {task.use}: {fatal}, which would end this one too: os._exit, native code that "
            "crashed, or too much memory; let it raise an error instead"
        )
    try:
        task_set = load_task_set(task.use, task.args, seed=job.seed, domain=task.name)
        task_set.prepare()
    except JobError as error:
        key, dot, text = str(error).partition("tasks.")
        raise JobError(f"tasks.{position}.{text if dot and not key else f'use: {error}'}") from None
    return task_set


def _prompt_problems(
    job: Job, sets: "Mapping[str, TaskSet]", tokenizer: "ChatTokenizer", *, evaluates: bool
) -> list[str]:
    """Tasks none of whose first environments, in training or held out, can begin an episode that fits."""
    from rollart.envs.isolated import IsolatedEnvHost
    from rollart.envs.process import ProcessEnvHost
    from rollart.launch.worker import env_host

    async def look() -> list[str]:
        with tempfile.TemporaryDirectory(prefix="rollart-check-") as logs:
            log_dir = Path(logs)
            isolations = {task.name: job.isolation(task) for task in job.tasks if task.name in sets}
            inline = {task.name: task.use for task in job.tasks if isolations.get(task.name) == "inline"}
            apart = {name: isolation for name, isolation in isolations.items() if isolation != "inline"}
            hosts: list[tuple[Sequence[str], ClosableHost]] = []
            if apart:
                hosts.append((list(apart), env_host(job, apart, {}, slots=1, log_dir=log_dir)))
            args = {task.name: task.args for task in job.tasks}
            if inline:  # in a process too; these environments will see all of our variables
                seen = list(os.environ)
                alone = ProcessEnvHost(
                    inline, args=args, slots=1, log_dir=log_dir / "inline", seed=job.seed, variables=seen
                )
                hosts.append((list(inline), alone))
            host = IsolatedEnvHost(hosts)
            try:
                return [
                    f"tasks.{position}: {problem}"
                    for position, task in enumerate(job.tasks)
                    if task.name in sets
                    and (problem := await _first_problem(job, task, sets[task.name], tokenizer, host, evaluates))
                ]
            finally:
                await host.close()

    return asyncio.run(look()) if sets else []


async def _first_problem(
    job: Job,
    task: TaskSettings,
    task_set: "TaskSet",
    tokenizer: "ChatTokenizer",
    host: EnvHost,
    evaluates: bool,
) -> str | None:
    problem = await _prompt_problem(job, task, partial(draw, task_set, task.name), tokenizer, host)
    if problem is None and evaluates:
        held_out = partial(draw, task_set, task.name, held_out=True)
        problem = await _prompt_problem(job, task, held_out, tokenizer, host)
    return problem


async def _prompt_problem(
    job: Job, task: TaskSettings, drawn: Callable[[int], Task], tokenizer: "ChatTokenizer", host: EnvHost
) -> str | None:
    said: list[str] = []
    for index in range(FIRST_PROMPTS):
        try:
            async with asyncio.timeout(min(RESET_S, job.limits.reset_s)):
                length = await _prompt_tokens(drawn(index), tokenizer, host)
        except TimeoutError:
            return None
        except Exception as error:  # the boundary to the task's own code, and to the chat template
            said.append(
                f"{task.name!r} cannot begin an episode ({_one_line(error)}); try `rollart task check {task.use}`"
            )
            continue
        if length < job.model.context_tokens:
            return None
        said.append(
            f"the first prompt of {task.name!r} has {length} tokens, and model.context_tokens "
            f"{job.model.context_tokens} leaves none for an answer; raise context_tokens, or make the prompt shorter"
        )
    return said[0]


async def _prompt_tokens(task: Task, tokenizer: "ChatTokenizer", host: EnvHost) -> int:
    env = await host.open(task, TrajectoryId(group="check", member=task.index, attempt=0))
    try:
        observation = await env.reset()
    finally:
        await env.close()
    return len(tokenizer.render(observation.messages, fresh=True, tools=observation.tools))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, BoundaryError | JobError) and text else f"{type(error).__name__}: {text}"


# --- what is around it ----------------------------------------------------------------------------------------------


def _refuse_judge(pool: PoolSettings) -> None:
    """A judge that its engines could not serve, or that anybody could use."""
    key, judge, engines = f"pools.{pool.name}.judge", pool.judge, pool.engines
    assert judge is not None
    assert engines is not None
    path = Path(judge.path)
    if not (path / "config.json").is_file():
        raise JobError(f"{key}.path: {judge.path!r} is not a Hugging Face directory (it has no config.json); name one")
    config = _causal_config(f"{key}.path", path)
    most = usual_names(json.loads((path / "config.json").read_text())).get("max_position_embeddings")
    if most and judge.context_tokens > most:
        raise JobError(
            f"{key}.context_tokens: {judge.context_tokens} is more than the {most} positions of {path}; lower it"
        )
    if engines.type == "embedded":
        from rollart.engines.embedded.steps import prove_steps_architecture, refuse_windows

        if engines.device == "cpu" and judge.context_tokens > engines.cpu_kv_tokens:
            raise JobError(
                f"{key}.context_tokens: {judge.context_tokens} is more than pools.{pool.name}.engines.kv_tokens "
                f"{engines.cpu_kv_tokens}, where one episode must fit; lower context_tokens, or raise kv_tokens"
            )
        try:
            prove_steps_architecture(config)
            if engines.device.startswith("cuda"):
                refuse_windows(config, judge.context_tokens)
        except JobError as error:
            raise JobError(f"{key}.path: {path}: {error}") from None
    _tokenizer_of(f"{key}.path", judge)
    if judge.listen:
        from importlib.util import find_spec

        from rollart.rewards.connections import is_loopback

        if find_spec("aiohttp") is None:
            raise JobError(f"{key}.listen: needs aiohttp: {install('agents')}")
        if not is_loopback(judge.listen.rpartition(":")[0]) and not os.environ.get("ROLLART_JUDGE_TOKEN"):
            raise JobError(
                f"{key}.listen: {judge.listen} can be reached by others; set ROLLART_JUDGE_TOKEN to a secret that they "
                "must show, or listen on 127.0.0.1"
            )


def _refuse_reward(place: str, reward: RewardSettings) -> None:
    """A function that is not there, or an address where nobody answers."""
    if reward.function is not None:
        from rollart.tasks.load import load_reward

        try:
            load_reward(reward.function)
        except JobError as error:
            raise JobError(f"{place}.function: {error}") from None
    if reward.url is None:
        return
    from rollart.rewards.http import unreachable

    why = unreachable(reward.url)
    if why is not None:
        start = "`rollart reward serve`" if reward.type == "http" else "a server of the model"
        raise JobError(
            f"{place}.url: {reward.url} cannot be reached ({why}); start what answers there, such as {start}, or "
            "correct the address"
        )


def _refuse_pythons(job: Job) -> None:
    """A server's interpreter that is not on this machine. On Ray, servers run on other machines."""
    from rollart.engines.launch import PYTHON_VARIABLES, server_python

    for pool, engines in job.all_engines if job.cluster.type != "ray" else ():
        if engines.type == "embedded" or engines.url is not None:
            continue
        python = server_python(engines.type, engines.python)
        if shutil.which(python) is None:
            source = "" if engines.python else f" (from {PYTHON_VARIABLES[engines.type]})"
            raise JobError(
                f"pools.{pool.name}.engines.python: {python}{source} is not a program that can be run here; name the "
                f"interpreter that has {engines.type}, or install it there"
            )


def _try_out(out: Path) -> bool:
    """Tried, not asked for: a read-only file system lets root write by its permissions."""
    if out.exists() or out.is_symlink():
        raise JobError(f"--out: {out} exists; give a directory that does not, or remove it")
    _try_place("--out", out)
    return True


def _refuse_weights(job: Job) -> None:
    if job.weights.type in ("nccl", "cuda_ipc"):
        _refuse_devices(job)
    if job.weights.type == "mooncake":
        from rollart.store.mooncake_client import refuse_unreachable

        if find_spec("mooncake") is None:
            raise JobError(f"weights.type: mooncake is not installed here; {install('mooncake')}")
        try:
            refuse_unreachable(job.weights.master or "")
        except WeightError as error:
            raise JobError(str(error)) from None
    if job.weights.type == "files" and job.weights.path is not None:
        _try_place("weights.path", Path(job.weights.path))


def _refuse_devices(job: Job) -> None:
    """Where weights go from device to device."""
    kind, trainer = job.weights.type, job.train.device
    engines = {f"pools.{at}.engines": pool.engines for at, pool in enumerate(job.pools) if pool.engines is not None}
    for place, own in engines.items():
        if own.type != "embedded":
            raise JobError(
                f"weights.type: {kind} is for embedded engines, and {place}.type is {own.type}; take shm or tcp"
            )
        if own.stage == "device":
            raise JobError(f"{place}.stage: with weights.type {kind} versions wait on the GPU in any case; remove it")
        if kind == "cuda_ipc" and (own.device != trainer or not trainer.startswith("cuda:") or job.train.gpus > 1):
            raise JobError(
                f"weights.type: cuda_ipc is for one GPU; {place}.device is {own.device} and train.device {trainer} "
                f"({job.train.gpus} of them); name the same for both, as cuda:0, or take nccl or shm"
            )
        if kind == "nccl" and own.prefill is not None:
            raise JobError(
                f"weights.type: nccl gives each GPU one copy, and with {place}.prefill two of its processes ask for "
                "one; take shm or tcp"
            )
        if kind == "nccl" and own.device.partition(":")[0] != trainer.partition(":")[0]:
            raise JobError(
                f"weights.type: nccl is between devices of one kind; {place}.device is {own.device} and train.device "
                f"{trainer}; take shm or tcp"
            )
        if kind == "nccl" and own.device == trainer != "cpu" and ":" in trainer:
            raise JobError(
                f"weights.type: nccl is between GPUs, and {place} shares {trainer} with the trainer; take cuda_ipc"
            )


def _try_place(key: str, place: Path) -> None:
    ground = _ground(place)
    try:
        Path(tempfile.mkdtemp(prefix=".rollart-", dir=ground)).rmdir()
    except OSError as error:
        raise JobError(
            f"{key}: {place} cannot be made in {ground} ({error.strerror}); give a directory that you can write to"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What a job will write to one place."""

    place: Path
    need_bytes: float
    key: str
    fix: str


def _rooms(job: Job, out: Path | None, params: int, *, resume: bool) -> list[_Room]:
    """What the job will hold on each disk at a time, at least. `params`: those trained, 0 where that is unknown."""
    checkpoint = params * (14 if job.train.uses_bf16 else 12)  # weights, two moments, and masters of bfloat16 weights
    kept = 1 if resume else job.checkpoint.keep + 1  # a new one is whole before an old one goes
    rooms: list[_Room] = []
    versions = params * (2 if job.train.uses_bf16 else 4) * WEIGHT_VERSIONS
    if out is not None:
        weights = versions if job.weights.type == "files" and job.weights.path is None else 0
        fix = "free some, give another disk, or lower checkpoint.keep"
        rooms.append(_Room(place=out, need_bytes=RUN_BYTES + kept * checkpoint + weights, key="--out", fix=fix))
    if job.weights.type == "files" and job.weights.path is not None:
        fix = "free some, or set weights.path to another disk"
        rooms.append(_Room(place=Path(job.weights.path), need_bytes=versions, key="weights.path", fix=fix))
    elif job.weights.type in ("shm", "tcp", "mooncake") and job.cluster.type != "ray" and SHARED_MEMORY.exists():
        fix = "enlarge it, or set weights.type to files"
        rooms.append(_Room(place=SHARED_MEMORY, need_bytes=versions, key="weights.type", fix=fix))
    return rooms


def _refuse_full_disk(room: _Room) -> None:
    ground = _ground(room.place)
    free = shutil.disk_usage(ground).free
    if free < room.need_bytes:
        raise JobError(
            f"{room.key}: {ground} has {free / 1e9:.2f} GB free, and this job writes at least "
            f"{room.need_bytes / 1e9:.2f} GB there; {room.fix}"
        )


def _ground(path: Path) -> Path:
    """The nearest directory above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
