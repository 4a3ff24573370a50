"""Writes docs/job.md, the job file reference, from the settings classes in rollart/config/.

The meaning of a key is the docstring below its field, read from the source. Run by `make docs`;
`tests/test_docs.py` fails when the page is out of date.
"""

import ast
import inspect
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import rollart.config.job
import rollart.config.settings
import rollart.config.sim
from rollart.config.changes import UNDECIDED, Acts, Fixed, rule_of
from rollart.config.job import Job
from rollart.config.paths import OnDisk, settings_in
from rollart.config.settings import MODES, RolloutSettings, Settings, Spread

PAGE = Path(__file__).resolve().parent.parent / "docs" / "job.md"

EXAMPLE = """\
name: first
model: {path: models/tiny, context_tokens: 512}
tasks:
  - {name: frozen_lake, use: rollart.tasks.frozen_lake, max_turns: 12, max_tokens: 8}
pools:
  - {name: cpu, engines: {count: 1}}
  - {name: environments, slots: 256, isolation: inline}
sim: {model: qwen3-0.6b, tasks: {frozen_lake: {prompt_tokens: 60, observation_tokens: 30, answer_tokens: 4}}}
"""

INTRO = f"""\
# The job file

Made from `rollart/config/` by `make docs`; do not edit it here.

A job file is YAML. A small one names itself, a model, one task, a pool with engines and a pool with environment slots;
everything else has a default:

```yaml
{EXAMPLE}```

As `first.yaml`, it runs here:

```
rollart model tiny models/tiny
rollart check first.yaml
rollart train first.yaml
```

`rollart sim first.yaml` needs neither the model nor the task's code, and alone reads the last line.

`rollart check JOB` reads a job and says what is wrong with it ([operate](operate.md)). A key that is not listed here,
or one given twice, is refused. Numbers must be finite. Exit code 2 means that the job is wrong; nothing was started or
written.

## Paths

A relative path in a job file is relative to the file, one in an override to the current directory. The job that a run
directory keeps, and the one that `rollart check` prints, hold absolute paths.

Where a model is named, `owner/name` is one on the Hugging Face hub, unless there is a folder `owner`;
`owner/name@REVISION` is a branch, tag or commit of it. It is downloaded before the start, with its progress, or found
in huggingface_hub's cache (`HF_HOME`; `HF_TOKEN` for those that ask for one). Without a network: run `hf download
owner/name` where there is one and bring the cache, or give a directory. The run directory's job holds the directory of
the commit, so a run that is resumed keeps it. Run here from a cache alone: this machine reaches no hub.

## Overrides

Any number of `key=value`, before or after the job and the options, with the names of the file. List items go by
position or by name. The value is YAML, and the last one wins:

```
rollart sim jobs/rollart.yaml rollout.staleness=2 tasks.0.group_size=4 tasks.maths.weight=2 "rewards={{workers: 8}}"
```

## On resume

`rollart train --resume` takes a changed job file and overrides. The column "on resume" says what may change: `at once`;
`from the next step` (steps that are replayed from the journal are trained as they were); `fixed` keys are refused with
the reason. See [train](train.md).

## Modes

`mode` fills these keys of `rollout`. A key that the job or an override gives wins over its mode; but `sync`,
`sync+` and `one-off` are named after their bound, and another `staleness` beside them is refused.
"""

NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One settings class and the place in the job where it belongs."""

    title: str
    settings: type[BaseModel]
    rule: Acts | Fixed = UNDECIDED
    """Whether a resumed run may change its keys, where they do not say it themselves."""


def places(settings: type[BaseModel], path: str = "", rule: Acts | Fixed = UNDECIDED) -> Iterator[Section]:
    """Every settings class below this one, once per place, parents first."""
    yield Section(title=path, settings=settings, rule=rule)
    for key, field in settings.model_fields.items():
        inner = settings_in(field.annotation)
        if inner is not None:
            yield from places(inner, f"{path}.{key}" if path else key, rule_of(field, rule))


def sections() -> list[Section]:
    """The classes in reading order. One used at several places is titled by its own name, and comes last."""
    found = list(places(Job))
    uses = Counter(section.settings for section in found)
    single = [section for section in found if uses[section.settings] == 1]
    shared = sorted({settings for settings, count in uses.items() if count > 1}, key=lambda settings: settings.__name__)
    return single + [Section(title=settings.__name__, settings=settings) for settings in shared]


def field_meanings(*modules: types.ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring below the field."""
    found: dict[tuple[str, str], str] = {}
    for node in (node for module in modules for node in ast.parse(inspect.getsource(module)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[node.name, name] = inspect.cleandoc(text).replace("\n", " ")
    return found


def bounds(metadata: Sequence[Any]) -> str:
    """`, at least 1` and the like, from the constraints of a field."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "pattern": "that matches"}
    found = []
    for constraint in metadata:
        if isinstance(constraint, FieldInfo):
            found.append(bounds(constraint.metadata))
        for attribute, word in words.items():
            limit = getattr(constraint, attribute, None)
            if limit is not None:
                found.append(f" {word} `{limit}`" if attribute == "pattern" else f" {word} {limit:g}")
        if getattr(constraint, "min_length", None):
            found.append(", not empty")
    return ",".join(part for part in found if part).replace(",,", ",")


def type_text(annotation: Any, metadata: Sequence[Any], links: dict[type[BaseModel], str]) -> str:
    """An annotation in words."""
    inner = [argument for argument in get_args(annotation) if argument is not types.NoneType]
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(inner[0], inner[1:], links)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument, metadata, links) for argument in inner)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list of {type_text(inner[0], (), links)}{bounds(metadata)}"
    if origin is tuple:
        return f"list of {len(inner)}: " + ", ".join(type_text(argument, (), links) for argument in inner)
    if origin is dict:
        return f"mapping from name to {type_text(inner[1], (), links)}"
    if annotation in links:
        return links[annotation]
    on_disk = next((part.value for part in metadata if isinstance(part, OnDisk)), None)
    return (on_disk or NAMES[annotation]) + bounds(metadata)


def default_text(field: FieldInfo) -> str:
    """The default as it would stand in a job file."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case Spread():
            return f"`{value.mean:g}`"
        case Settings():
            return "its defaults"
        case None:
            return "none"
        case "":
            return "empty"
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:g}`"
        case tuple():
            return f"`{list(value)}`"
        case _:
            return f"`{value}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def section_text(section: Section, meanings: dict[tuple[str, str], str], links: dict[type[BaseModel], str]) -> str:
    rows = []
    for key, field in section.settings.model_fields.items():
        default = default_text(field)
        if section.settings is RolloutSettings and key in MODES["rollart"]:
            default = "by `mode`"
        meaning = meanings.get((section.settings.__name__, key), "")
        inner = settings_in(field.annotation)
        if not meaning and inner is not None and inner is not Spread:
            meaning = summary_of(inner)
        kind = type_text(field.annotation, field.metadata, links)
        rows.append([f"`{key}`", kind, default, resume_text(field, section), meaning])
    title = f"`{section.title}`" if section.title else "All keys"
    notes = [
        summary_of(section.settings),
        "A plain number `n` stands for `{mean: n}`." if section.settings is Spread else "",
    ]
    note = " ".join(note for note in notes if note)
    header = ["key", "type", "default", "on resume", "meaning"]
    return f"## {title}\n\n" + (f"{note}\n\n" if note else "") + table(header, rows)


def resume_text(field: FieldInfo, section: Section) -> str:
    """Whether `--resume` may change a key."""
    if settings_in(field.annotation) not in (None, Spread):
        return ""  # its own keys say it
    rule = rule_of(field, section.rule)
    if rule is UNDECIDED:
        return ""  # of a class that is used at several places
    return rule.value if isinstance(rule, Acts) else "fixed"


def summary_of(settings: type[BaseModel]) -> str:
    """The class docstring, if it has its own."""
    return inspect.cleandoc(settings.__dict__.get("__doc__") or "").replace("\n", " ")


def render() -> str:
    """The whole page."""
    found = sections()
    meanings = field_meanings(rollart.config.settings, rollart.config.sim, rollart.config.job)
    links = {
        section.settings: f"[{section.title}](#{section.title.lower().replace('.', '')})"
        for section in found
        if section.title
    }
    keys = list(MODES["rollart"])
    modes = table(
        ["mode", *(f"`{key}`" for key in keys)], [[f"`{m}`", *(f"`{MODES[m][k]}`" for k in keys)] for m in MODES]
    )
    return "\n".join([INTRO, modes, *(section_text(section, meanings, links) for section in found)])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
