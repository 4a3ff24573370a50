"""Asks a task set for a task. User code: whatever it raises or returns is that task's failure, and nobody else's."""

from collections.abc import Mapping

import orjson

from rollart.errors import TaskError, boundary
from rollart.ports import TaskSet
from rollart.types import Task

_AS_KEPT = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
"""What the journal can keep of a payload, and no more."""


def draw(task_set: TaskSet, domain: str, index: int, *, held_out: bool = False) -> Task:
    """The task at this position. Raises TaskError."""
    where = f"{'held_out' if held_out else 'task'}({index})"
    with boundary(TaskError, where):
        try:
            task = task_set.held_out(index) if held_out else task_set.task(index)
        except SystemExit as error:
            raise TaskError(f"{where}: SystemExit: {error}") from error
        wrong = _wrong(task, domain, index)
    if wrong:
        raise TaskError(f"{where}: returned {wrong}")
    return task


def _wrong(task: object, domain: str, index: int) -> str:
    """What is wrong with what a task set returned; empty where nothing is."""
    if not isinstance(task, Task):
        return f"a {type(task).__name__}, not a Task"
    if task.domain != domain:
        return f"a task of the domain {task.domain!r}; give it domain=self.domain, which is {domain!r}"
    if not isinstance(task.id, str) or not task.id.startswith(f"{domain}/"):
        return f"a task with the id {task.id!r}; ids are {domain}/ and something that no other task has"
    if task.index != index:
        return f"a task with the index {task.index!r} for {index}; give it the index it was asked for"
    if not isinstance(task.payload, Mapping):
        return f"a payload that is a {type(task.payload).__name__}; give a dict of JSON values"
    try:
        orjson.dumps(dict(task.payload), option=_AS_KEPT)
    except TypeError as error:
        return f"a payload that is not made of JSON values ({error})"
    return ""
