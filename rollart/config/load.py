"""From a job file to a checked job. `load_job` is the only way in.

It reads the YAML, applies `key=value` overrides, makes paths absolute, fills in the bundle of the chosen mode, and says
what is wrong in one line, with the nearest valid key.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rollart.config.job import Job, nearest
from rollart.config.paths import Arguments, Code, located, settings_in
from rollart.config.settings import MODES, TaskSettings
from rollart.errors import JobError
from rollart.types import ParsedJson

ALIASES = {
    "lr": ("learning_rate", "step_size"),
    "steps": ("max_steps", "num_steps", "total_steps", "train_steps", "iterations"),
    "grad_clip": ("max_grad_norm", "gradient_clipping", "clip_grad"),
    "kl_coef": ("beta", "kl_beta", "kl_loss_coef", "kl_penalty"),
    "eps_high": ("epsilon_high", "clip_higher", "clip_ratio_high"),
    "eps_low": ("epsilon", "epsilon_low", "clip_range", "clip_ratio", "clip_ratio_low", "cliprange"),
    "algorithm": ("loss_type", "adv_estimator"),
    "updates_per_step": ("ppo_epochs", "num_iterations", "mini_batches"),
    "microbatch_tokens": ("micro_batch_size", "per_device_train_batch_size", "max_token_len"),
    "weight_cap": ("tis_imp_ratio_cap", "importance_cap"),
    "weight_level": ("importance_sampling_level", "rollout_is"),
    "over_cap": ("tis_mode", "icepop"),
    "reference": ("ref_model", "reference_model"),
    "group_size": ("num_generations", "rollout_n", "samples_per_prompt", "n_samples"),
    "groups_per_step": ("batch_size", "train_batch_size", "rollout_batch_size", "prompts_per_step"),
    "staleness": ("max_staleness", "off_policy_steps", "max_off_policy_steps", "async_level", "max_head_offpolicyness"),
    "max_tokens": ("max_new_tokens", "max_completion_length", "max_response_length", "response_length"),
    "context_tokens": ("max_seq_len", "max_model_len", "max_length", "context_length"),
    "path": ("model_name", "model_name_or_path", "model_path", "pretrained"),
    "gpus": ("tensor_parallel_size", "tp", "tp_size", "num_gpus"),
    "count": ("replicas", "num_engines", "num_workers"),
    "slots": ("num_envs", "env_num"),
    "every": ("save_steps", "save_freq", "eval_steps", "test_freq", "eval_every", "save_every", "interval"),
    "use": ("module", "env", "import_path"),
    "max_batch": ("max_num_seqs", "max_running_requests"),
}
"""Key -> what other libraries call it. A hint only: none of these is read."""


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply overrides, check it. Raises JobError with one message that names key and fix."""
    raw = read_yaml(path, "", "give the path of a job file, such as jobs/rollart.yaml")
    return build_job(with_overrides(located(raw, Job, Path.cwd() / path.parent), overrides))


def task_named(word: str, given: Sequence[str] = ()) -> TaskSettings:
    """One task as commands take it; of a job without a task's name, the first."""
    return tasks_named(word, given)[0]


def tasks_named(word: str, given: Sequence[str] = ()) -> tuple[TaskSettings, ...]:
    """Tasks as commands take them: JOB.yaml (all its tasks), JOB.yaml:NAME, or what `use` takes; `given` are arguments,
    as name=value, with paths relative to the current directory. Raises JobError."""
    file, colon, name = word.rpartition(":")
    file, name = (file, name) if colon and file.endswith((".yaml", ".yml")) else (word, "")
    args = located(with_overrides({}, given), Arguments, Path.cwd())
    if not file.endswith((".yaml", ".yml")):
        stem = word.partition(":")[0].rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
        return (TaskSettings(name=stem or "task", use=located(word, Code, Path.cwd()), args=args),)
    job = load_job(Path(file))
    found = [task for task in job.tasks if name in ("", task.name)]
    if not found:
        raise JobError(f"{word}: {file} has no task {name!r}; it has {', '.join(task.name for task in job.tasks)}")
    return tuple(task.model_copy(update={"args": {**task.args, **args}}) for task in found)


def read_yaml(path: Path, key: str, fix: str) -> ParsedJson:
    """Plain data of a job or a part of one. `key` names the path. Raises JobError, with the line."""
    place = f"{key}: {path}" if key else f"{path}:"
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise JobError(f"{place} is not text; {fix}") from None
    except OSError as error:
        raise JobError(f"{place} cannot be read ({error.strerror}); {fix}") from None


def with_overrides(raw: ParsedJson, overrides: Sequence[str]) -> ParsedJson:
    """Plain data of a job with these keys changed."""
    changed = copy.deepcopy(dict(raw))
    for override in overrides:
        _apply(changed, override)
    return changed


def build_job(raw: ParsedJson, near: Path | None = None) -> Job:
    """A checked job from plain data. `near` is what relative paths are relative to: else the current directory."""
    data = located(raw, Job, near or Path.cwd())
    mode = data.get("mode", "rollart")
    if isinstance(mode, str) and mode in MODES:
        given = data.get("rollout") or {}
        if isinstance(given, Mapping):
            data["rollout"] = {**MODES[mode], **given}
    sim = data.get("sim")
    if isinstance(sim, Mapping) and isinstance(sim.get("profile"), str):
        fix = "give the path of a YAML file, in a job file relative to it, in an override to the current directory"
        loaded = read_yaml(Path(sim["profile"]), "sim.profile", fix)
        data["sim"] = {**_merge(_of_its_tasks(loaded, data), sim), "profile": None}  # it is all here now
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise JobError(_explain(error)) from None


def _of_its_tasks(profile: ParsedJson, job: ParsedJson) -> ParsedJson:
    """A profile may describe more tasks than a job has."""
    tasks, wanted = profile.get("tasks"), job.get("tasks")
    if not isinstance(tasks, Mapping) or not isinstance(wanted, list):
        return profile
    names = [task.get("name") for task in wanted if isinstance(task, Mapping)]
    return {**profile, "tasks": {name: task for name, task in tasks.items() if name in names}}


def warnings(job: Job) -> list[str]:
    """What is allowed and still unlikely to be wanted."""
    found: list[str] = []
    batches_alive = job.slots / job.rollout.groups_per_step
    weights = sum(task.weight for task in job.tasks if task.quota is None)
    free_groups = job.rollout.groups_per_step - sum(task.quota or 0 for task in job.tasks)
    members = batches_alive * sum(
        (task.group_size + job.rollout.spare_members) * (task.quota or free_groups * task.weight / weights)
        for task in job.tasks
    )
    slots = sum(pool.slots or 0 for pool in job.pools)
    if slots < members:
        found.append(
            f"pools: {slots} environment slots for about {members:.0f} trajectories alive at a time; the rest wait "
            "for a slot and age meanwhile. Raise slots, or lower rollout.groups_per_step"
        )
    if job.rollout.recheck != "live":
        found.append(
            f"rollout.recheck: {job.rollout.recheck!r} lets trajectories grow older than the bound in flight; "
            "the summary shows by how much"
        )
    for position, task in enumerate(job.tasks):
        if task.temperature == 0:
            found.append(
                f"tasks.{position}.temperature: 0 makes all members of a group alike; nothing will be learnt from them"
            )
        elif task.top_p < 1 or task.top_k:
            found.append(
                f"tasks.{position}.{'top_p' if task.top_p < 1 else 'top_k'}: answers are sampled from a part of the "
                "distribution, but training learns from log-probabilities of the full one, as if they came from it, "
                "which biases the gradient; remove it unless that is wanted"
            )
        if task.name not in job.sim.tasks and job.sim.tasks:
            found.append(f"sim.tasks: {task.name!r} is not described, so it behaves by the defaults in `rollart sim`")
    own_range = None in (job.train.eps_low, job.train.eps_high)
    if job.train.algorithm == "gspo" and job.train.correction == "bypass" and own_range:
        found.append(
            "train.correction: with bypass the rounding of engines alone passes the narrow clip range of gspo; set "
            "train.correction to decoupled and train.updates_per_step to 2 or more"
        )
    if job.checkpoint.every > job.train.steps:
        found.append(
            f"checkpoint.every: {job.checkpoint.every} is more than train.steps {job.train.steps}; "
            "a crash replays everything since the start"
        )
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice; YAML would drop the first one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def parse(text: str, where: str) -> ParsedJson:
    """Plain data of a job. Raises JobError with the line."""
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise JobError(
            f"{where}{line}: not valid YAML ({problem}); check the indentation and the quotes there"
        ) from None
    if not isinstance(raw, dict):
        raise JobError(f"{where}: a job file is a mapping of keys, such as `name: my-job`; this one is not")
    return raw


def _apply(raw: ParsedJson, override: str) -> None:
    """`rollout.staleness=2`, `tasks.0.group_size=4`: the same names as in the file."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise JobError(f"override {override!r}: write it as key=value, such as rollout.staleness=2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise JobError(f"override {key}: {text!r} is not a YAML value; quote it") from None
    if "#" in text and (value is None or (isinstance(value, str) and text.startswith(value))):
        value = text.strip()  # no comment: nobody writes one on a command line
    at: Any = raw
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        here = ".".join(parents[: depth + 1])
        if isinstance(at, list):
            at = at[_index(at, part, override)]
        elif isinstance(at, dict):
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        if not isinstance(at, dict | list):
            raise JobError(f"override {key}: {here} is a single value in the job, and has no keys below it")
    if isinstance(at, list):
        at[_index(at, last, override)] = value
    else:
        at[last] = value


def _index(items: list[Any], part: str, override: str) -> int:
    if part.isdigit() and int(part) < len(items):
        return int(part)
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == part:
            return position
    raise JobError(
        f"override {override!r}: {part!r} is neither a position (0 to {len(items) - 1}) nor a name in that list"
    )


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> ParsedJson:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _explain(error: ValidationError) -> str:
    """The first problem, in words: `key: what is wrong; the fix`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    given = first.get("input")
    match first["type"]:
        case "extra_forbidden":
            valid = _keys_at(first["loc"][:-1])
            return f"{key}: unknown key{_hint(str(first['loc'][-1]), valid)}; valid here: {', '.join(valid)}"
        case "missing":
            return f"{key}: missing; add it (see docs/job.md for what it means)"
        case "value_error":
            text = re.sub(r"^Value error, ", "", first["msg"])
            return f"{key}{text}" if text.startswith(".") else text  # said by settings that stand at many places
        case "literal_error":
            options = str(first.get("ctx", {}).get("expected", "")).replace("'", "")
            near = nearest(str(given), [option.strip() for option in re.split(r",| or ", options)])
            return f"{key}: {given!r} is not one of {options}{near.rstrip('?')}"
        case "model_type" | "dict_type":
            return f"{key}: {given!r} is not a mapping; write it as {{key: value}}"
        case "tuple_type" | "list_type":
            return f"{key}: {given!r} is not a list; write it as [{given}], with commas between several"
        case _:
            return (
                f"{key}: {given!r} does not fit: {first['msg'][0].lower()}{first['msg'][1:]}; change it to such a value"
            )


def _hint(word: str, valid: Sequence[str]) -> str:
    """The key that was meant: by another library's name for it, by its spelling, or of another section."""
    plain = word.lower().replace("-", "_")
    meant = [key for key, names in ALIASES.items() if plain in (key, *names)]
    here = [key for key in meant if key in valid]
    if here:
        return f", did you mean {here[0]!r}?"
    if near := nearest(word, valid):
        return near
    elsewhere = [place for key in dict.fromkeys([plain, *meant]) for place in _places(key)]
    return f", did you mean {elsewhere[0]!r}?" if len(elsewhere) == 1 else ""


def _places(key: str) -> list[str]:
    """The sections of a job, by name, that have this key."""
    sections = ((name, settings_in(field.annotation)) for name, field in Job.model_fields.items() if name != "sim")
    return [f"{name}.{key}" for name, settings in sections if settings and key in settings.model_fields]


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are valid at this place of a job."""
    at: type[BaseModel] | None = Job
    for part in location:
        if at is not None and isinstance(part, str) and part in at.model_fields:
            at = settings_in(at.model_fields[part].annotation)
    return list(at.model_fields) if at is not None else []
