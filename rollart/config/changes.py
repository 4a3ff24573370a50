"""Which keys of a job `--resume` may change, and how two jobs differ.

A key says it in its type: `Anytime` (acts as soon as the run goes on), `FromNextStep` (steps that are replayed still
use the value they were trained with, so that they give the same weights), or `Fixed` with the reason why it cannot
change. Keys below a section have what the section says, unless they say something else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollart.errors import JobError

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Acts(Enum):
    """When a changed key acts; the value is what docs/job.md calls it."""

    AT_ONCE = "at once"
    NEXT_STEP = "from the next step"


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of a run that stays as it was."""

    reason: str


Anytime = Annotated[T, Acts.AT_ONCE]
FromNextStep = Annotated[T, Acts.NEXT_STEP]

UNDECIDED = Fixed("nothing says that it may change")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that differs. Items of lists go by their names."""

    key: str
    before: Any
    after: Any
    rule: Acts | Fixed

    def acts(self, step: int) -> str:
        """When, in a run whose next step is this one."""
        return f"from step {step} on" if self.rule is Acts.NEXT_STEP else "at once"

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.before)} -> {_text(self.after)}"


def rule_of(field: FieldInfo, inherited: Acts | Fixed = UNDECIDED) -> Acts | Fixed:
    return next((mark for mark in field.metadata if isinstance(mark, Acts | Fixed)), inherited)


def differences(before: Model, after: Model) -> list[Change]:
    """Every key in which the second job differs from the first, in the order of the reference."""
    return list(_differences(before, after, "", UNDECIDED))


def refuse_fixed(changes: Sequence[Change]) -> None:
    """Raises JobError that names each key that cannot change, with the reason."""
    refused = [f"{change} ({change.rule.reason})" for change in changes if isinstance(change.rule, Fixed)]
    if refused:
        raise JobError(
            f"--resume: the run cannot go on with another {'; '.join(refused)}. Take that back, leave the job file out "
            "(rollart train --resume RUN), or start a new run. Where a model or a task was only moved, "
            "correct its path in RUN/job.yaml"
        )


def as_replayed(before: Model, after: Model) -> Model:
    """The second job, with the keys that act from the next step as they are in the first."""
    kept: dict[str, object] = {}
    for name, field in type(after).model_fields.items():
        one, other = getattr(before, name), getattr(after, name)
        if rule_of(field) is Acts.NEXT_STEP:
            kept[name] = one
        elif isinstance(one, BaseModel) and isinstance(other, BaseModel):
            kept[name] = as_replayed(one, other)
    return after.model_copy(update=kept)


def _differences(before: BaseModel, after: BaseModel, at: str, inherited: Acts | Fixed) -> Iterator[Change]:
    for name, field in type(after).model_fields.items():
        yield from _compared(getattr(before, name), getattr(after, name), f"{at}{name}", rule_of(field, inherited))


def _compared(before: Any, after: Any, key: str, rule: Acts | Fixed) -> Iterator[Change]:
    ones, others = _by_name(before), _by_name(after)
    if isinstance(before, BaseModel) and type(before) is type(after):
        yield from _differences(before, after, f"{key}.", rule)
    elif ones is not None and others is not None:
        for name in {**ones, **others}:
            yield from _compared(ones.get(name), others.get(name), f"{key}.{name}", rule)
    elif before != after:
        yield Change(key=key, before=before, after=after, rule=rule)


def _by_name(value: Any) -> Mapping[str, BaseModel] | None:
    """The items of a list of settings that have names."""
    if isinstance(value, tuple) and value and all(getattr(item, "name", None) for item in value):
        return {item.name: item for item in value}
    return None


def plain(value: Any) -> Any:
    """A key's value as it would stand in a job file."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return "none" if value is None else str(plain(value))
