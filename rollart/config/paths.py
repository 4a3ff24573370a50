"""Which keys of a job name something on disk, and from where a relative path counts.

A key says it in its type, as `Place`, `Model`, `Program`, `Code`, `Template` or `Arguments`. A job file's paths are
relative to the file, an override's to the current directory; a job that was read holds absolute paths only, and so does
the one in a run directory. (A model's id on the hub stays one until the job is started.)
"""

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel

from rollart.types import ParsedJson


class OnDisk(Enum):
    """How the text of a key is read; the value is what docs/job.md calls it."""

    PLACE = "path"
    MODEL = "path or hub id"
    """A path, unless it has the form of a hub id and not even its first folder is there."""
    PROGRAM = "program or its path"
    """A path where it has a slash; else looked up as the shell would."""
    CODE = "module or path"
    """A path where it names a `.py` file, with or without `:name`."""
    TEMPLATE = "path or text"
    """A path where it has no bracket in it, which every template has."""
    ARGUMENT = "mapping"
    """Any values of a task set's own. A text below it is a path where it begins with `./`, `../` or `~/`, or is one
    word that ends like the file of a task or of a dataset."""

    def absolute(self, text: str, base: Path) -> str:
        name = ""
        if self in (OnDisk.CODE, OnDisk.ARGUMENT):
            file, colon, after = text.rpartition(":")
            if colon and file.endswith(".py"):
                text, name = file, f":{after}"
        is_path = {
            OnDisk.PLACE: bool(text),
            OnDisk.MODEL: bool(text) and (not hub_id(text) or os.path.isdir(base / text.partition("/")[0])),
            OnDisk.PROGRAM: "/" in text,
            OnDisk.CODE: text.endswith(".py"),
            OnDisk.TEMPLATE: bool(text) and "{" not in text,
            OnDisk.ARGUMENT: bool(ARGUMENT_PATH.fullmatch(text)),
        }[self]
        return os.path.abspath(base / os.path.expanduser(text)) + name if is_path else text + name


ARGUMENT_PATH = re.compile(r"(\.\.?|~)/.*|[^\s{}:]+\.(py|jsonl|csv|tsv|parquet)", re.DOTALL)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)

Place = Annotated[str, OnDisk.PLACE]
Model = Annotated[str, OnDisk.MODEL]
Program = Annotated[str, OnDisk.PROGRAM]
Code = Annotated[str, OnDisk.CODE]
Template = Annotated[str, OnDisk.TEMPLATE]
Arguments = Annotated[ParsedJson, OnDisk.ARGUMENT]


def hub_id(text: str) -> bool:
    """Whether this may be a model's name on the hub: `owner/name`, with or without `@revision`."""
    return HUB_ID.fullmatch(text) is not None


def located(data: Any, annotation: Any, base: Path) -> Any:
    """Plain data of this type with its paths made absolute. What does not fit the type is left for it to refuse."""
    if isinstance(data, str):
        kind = _kind_in(annotation)
        return kind.absolute(data, base) if kind else data
    if isinstance(data, list | tuple):
        return [located(item, annotation, base) for item in data]
    settings = settings_in(annotation)
    if isinstance(data, Mapping) and _kind_in(annotation) is OnDisk.ARGUMENT:
        return {key: located(value, annotation, base) for key, value in data.items()}
    if not isinstance(data, Mapping) or settings is None:
        return data
    fields = settings.model_fields
    return {
        key: located(value, (fields[key].annotation, *fields[key].metadata), base) if key in fields else value
        for key, value in data.items()
    }


def settings_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation such as `tuple[TaskSettings, ...] | None`."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in _inside(annotation) if (found := settings_in(inner))), None)


def _kind_in(annotation: Any) -> OnDisk | None:
    if isinstance(annotation, OnDisk):
        return annotation
    return next((found for inner in _inside(annotation) if (found := _kind_in(inner))), None)


def _inside(annotation: Any) -> tuple[Any, ...]:
    return annotation if isinstance(annotation, tuple) else get_args(annotation)
