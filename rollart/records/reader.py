"""Reads a run's trajectories: joins each with its fate, finds those that match, and unpacks them.

A fate is written after its trajectory, so files are read twice: once for heads and fates, and once for the bodies of
those that were chosen.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollart.errors import JobError
from rollart.records.format import FOLDER, ReadFrame, files_of, frames_of, unpacked_tokens
from rollart.records.rows import FORMAT, TIMES, AttemptRow, Dropped, Ended, LifeRow, Trained
from rollart.types import NO_LOGPROBS, NO_TOKENS, Logprobs, Message, Tokens

ORDERS = ("newest", "worst", "best", "longest", "failed")
Key = tuple[int, str]
"""Life and id: held-out episodes of a killed run are played again under the same id."""


class Head(msgspec.Struct, frozen=True, kw_only=True, rename={"evaluation": "eval"}):
    """One attempt, without its turns."""

    id: str
    life: int = 0
    """How often the run had been started before."""
    group: str
    task: str
    domain: str
    evaluation: bool = False
    status: str
    reason: str = ""
    reward: float | None
    parts: Mapping[str, float]
    advantage: float | None = None
    fate: str = "open"
    """`trained`, `eval`, how its group ended (`filtered`, `stale`, `failed`, `surplus`), `unused` (its group was
    trained without it), `restart` (lost with a killed coordinator), or `open`."""
    step: int | None = None
    """That it was trained in."""
    born: int | None = None
    newest: int | None = None
    """Versions of its first and its last sampled token."""
    turns: int
    tokens: int = 0
    """Sampled."""
    times: Mapping[str, float] = {}
    """`started_s`, `ended_s` on the run's clock; `open_s`, `reset_s`, `wait_s` (for an engine), `generate_s`, `env_s`,
    `queue_s` (for a reward slot), `reward_s`."""

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = msgspec.to_builtins(self)
        del fields["turns"], fields["times"]
        return {**fields, **self.times}


class ReadTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as it is read again."""

    shown: tuple[Message, ...]
    text: str
    reward: float
    fresh: bool = False
    context: Tokens = msgspec.field(default_factory=lambda: NO_TOKENS)
    tokens: Tokens = msgspec.field(default_factory=lambda: NO_TOKENS)
    logprobs: Logprobs = msgspec.field(default_factory=lambda: NO_LOGPROBS)
    versions: Tokens = msgspec.field(default_factory=lambda: NO_TOKENS)
    """Of the weights that sampled each token."""
    finish: str = ""
    engine: str = ""
    pool: str = ""
    wait_s: float = 0.0
    generate_s: float = 0.0
    env_s: float = 0.0
    prefill: int = 0
    cached: int = 0


class ReadTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, whole."""

    head: Head
    turns: tuple[ReadTurn, ...]
    left: tuple[Message, ...] = ()
    """What the environment said last."""

    def to_json(self) -> dict[str, object]:
        turns = [{**msgspec.to_builtins(turn, enc_hook=_as_list), "shown": _as_kept(turn.shown)} for turn in self.turns]
        return {**self.head.to_json(), "turns": turns, "left": _as_kept(self.left)}


def _as_kept(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Of messages a record has the role and the text."""
    return [{"role": message.role, "content": message.content} for message in messages]


def _as_list(array: Any) -> list[float]:
    """A numpy array for JSON. Log-probabilities are float32: more digits would be noise."""
    return [round(value, 7) for value in array.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """What to look for. A field that is not given matches everything."""

    name: str | None = None
    """Of an attempt, or of a group."""
    task: str | None = None
    """A task set's name, or one task's id."""
    status: str | None = None
    reward: tuple[float, float] | None = None
    """From and to, both included."""
    version: int | None = None
    """Some of its tokens were sampled under it."""

    def takes(self, head: Head) -> bool:
        if self.name is not None and self.name not in (head.id, head.group):
            return False
        if self.task is not None and self.task not in (head.domain, head.task):
            return False
        if self.status is not None and self.status != head.status:
            return False
        if self.reward is not None and (head.reward is None or not self.reward[0] <= head.reward <= self.reward[1]):
            return False
        return self.version is None or (
            head.born is not None and head.newest is not None and head.born <= self.version <= head.newest
        )


class Archive:
    """The trajectories of one run directory. Raises JobError where there are none."""

    def __init__(self, run_dir: Path) -> None:
        self._files = files_of(run_dir / FOLDER)
        if not self._files:
            raise JobError(
                f"{run_dir / FOLDER}: no trajectories are there; `rollart train` and `rollart eval` keep them where "
                "trajectories.keep is above 0, `rollart sim` keeps none"
            )
        self.first_is_gone = int(self._files[0].stem) > 0
        """The oldest files were deleted, for `trajectories.total_mb`."""
        self.dropped = 0
        """Finished attempts that could not be kept."""
        self._heads: list[Head] = []
        self._read_heads()

    def find(self, wanted: TrajectoryFilter, order: str = "newest", most: int | None = None) -> list[Head]:
        """Those that match, in this order."""
        found = [head for head in self._heads if wanted.takes(head)]
        match order:
            case "worst" | "best":
                scored = [head for head in found if head.reward is not None]
                found = sorted(scored, key=lambda head: head.reward or 0.0, reverse=order == "best")
            case "longest":
                found.sort(key=lambda head: head.tokens, reverse=True)
            case "failed":
                found = [head for head in reversed(found) if head.status == "failed"]
            case _:
                found.reverse()
        return found[:most]

    def whole(self, heads: Sequence[Head]) -> Iterator[ReadTrajectory]:
        """These with their turns, in the order of the files."""
        left = {(head.life, head.id): head for head in heads}
        for path in self._files:
            for life, frame in _frames(path):
                rows = [row for row in frame.rows if isinstance(row, AttemptRow) and (life, row.id) in left]
                chosen = [(left.pop((life, row.id)), row) for row in rows]
                if chosen:
                    yield from _whole(frame, chosen)
                if not left:
                    return

    def one(self, head: Head) -> ReadTrajectory:
        found = next(self.whole([head]), None)
        if found is None:
            raise JobError(f"{head.id}: its file has gone since, for trajectories.total_mb; raise it to keep more")
        return found

    def _read_heads(self) -> None:
        heads: dict[Key, Head] = {}
        ended: dict[str, tuple[str, int]] = {}
        """By group: how, and the life that said so. A group that a resumed run opens again may end once more."""
        trained: dict[str, tuple[int, int]] = {}
        """By group: step, and the life that said so first. A resumed run says again the steps that it makes again."""
        advantages: dict[str, tuple[int, float]] = {}
        """By attempt: step and advantage."""
        newest_life = 0
        for path in self._files:
            for life, frame in _frames(path):
                newest_life = max(newest_life, life)
                for row in frame.rows:
                    match row:
                        case AttemptRow():
                            heads[life, row.id] = _head(row, frame.texts, life)
                        case Ended():
                            ended[row.group] = (row.how, life)
                        case Trained():
                            for group in row.groups:
                                trained.setdefault(group.id, (row.step, life))
                                steps = ((row.step, value) for value in group.advantages)
                                advantages.update(zip(group.members, steps, strict=True))
                        case Dropped():
                            self.dropped += row.count
        for head in heads.values():
            step, advantage = None, None
            if head.evaluation:
                fate = "eval"
            elif head.id in advantages:
                fate = "trained"
                step, advantage = advantages[head.id]
            elif head.group in trained:
                fate = "unused" if trained[head.group][1] == head.life else "restart"
            elif head.group in ended and ended[head.group][1] >= head.life:
                fate = ended[head.group][0]
            else:
                fate = "open" if head.life == newest_life else "restart"
            self._heads.append(msgspec.structs.replace(head, fate=fate, step=step, advantage=advantage))


def pick(archive: Archive, wanted: TrajectoryFilter, name: str | None, order: str | None) -> list[Head]:
    """All that match `wanted`; or the first of these in an order; or one by its name; or a group."""
    if name is None or name in ORDERS:
        found = archive.find(wanted, name or order or "newest", 1 if name else None)
        if not found and name is not None:
            raise JobError(f"{name}: no trajectory matches; rollart show RUN --list shows those that are there")
        return found
    found = archive.find(replace(wanted, name=name), order or "newest")
    exact = [head for head in found if head.id == name]
    if not found:
        raise JobError(
            f"{name}: no such trajectory or group is kept, or it does not match; rollart show RUN --list shows "
            "those that are"
        )
    return exact[:1] or found  # of the lives of a run, the last


def _frames(path: Path) -> Iterator[tuple[int, ReadFrame]]:
    """The frames of a file, each with the life it was written in. None where the file was deleted meanwhile."""
    life = 0
    for frame in frames_of(path) if path.exists() else ():
        match frame.rows:
            case [LifeRow() as first, *_]:
                life = first.life
                if first.format != FORMAT:
                    raise JobError(f"{path}: written in format {first.format}, this version of rollart reads {FORMAT}")
        yield life, frame


def _head(row: AttemptRow, texts: Sequence[str], life: int) -> Head:
    times = struct.unpack(f"<{len(TIMES)}d", row.times)
    return Head(
        id=row.id,
        life=life,
        group=texts[row.group],
        task=texts[row.task],
        domain=texts[row.domain],
        evaluation=row.evaluation,
        status=texts[row.status],
        reason=texts[row.reason],
        reward=row.reward,
        parts=row.parts,
        born=row.born,
        newest=row.newest,
        turns=row.turns,
        tokens=row.tokens,
        times={name: round(seconds, 6) for name, seconds in zip(TIMES, times, strict=True)},
    )


def _whole(frame: ReadFrame, chosen: Sequence[tuple[Head, AttemptRow]]) -> Iterator[ReadTrajectory]:
    """These rows of a frame, with their turns."""
    lengths, packed = frame.contexts
    pieces = np.split(unpacked_tokens(packed), np.cumsum(lengths)[:-1]) if lengths else []
    tokens = unpacked_tokens(frame.tokens)
    logprobs = np.frombuffer(frame.logprobs, dtype="<f4").astype(np.float32)
    for head, row in chosen:
        at, numbers = row.first, iter(row.numbers)
        rewards = struct.unpack(f"<{head.turns}d", row.rewards)
        seconds = struct.unpack(f"<{3 * head.turns}f", row.seconds)
        turns: list[ReadTurn] = []
        for number, reward in enumerate(rewards):
            context, count, fresh, finish, engine, pool, prefill, cached, text, spans, shown = islice(numbers, 11)
            wait_s, generate_s, env_s = (round(value, 6) for value in seconds[3 * number : 3 * number + 3])
            turns.append(
                ReadTurn(
                    versions=_versions(_pairs(numbers, spans)),
                    shown=_messages(_pairs(numbers, shown), frame.texts),
                    text=frame.texts[text],
                    reward=reward,
                    fresh=bool(fresh),
                    context=pieces[context],
                    tokens=tokens[at : at + count],
                    logprobs=logprobs[at : at + count],
                    finish=frame.texts[finish],
                    engine=frame.texts[engine],
                    pool=frame.texts[pool],
                    wait_s=wait_s,
                    generate_s=generate_s,
                    env_s=env_s,
                    prefill=prefill,
                    cached=cached,
                )
            )
            at += count
        rest = list(numbers)
        yield ReadTrajectory(
            head=head, turns=tuple(turns), left=_messages(_pairs(iter(rest), len(rest) // 2), frame.texts)
        )


def _pairs(numbers: Iterator[int], count: int) -> list[tuple[int, int]]:
    return [(next(numbers), next(numbers)) for _ in range(count)]


def _messages(places: Sequence[tuple[int, int]], texts: Sequence[str]) -> tuple[Message, ...]:
    return tuple(Message(role=texts[role], content=texts[content]) for role, content in places)


def _versions(spans: Sequence[tuple[int, int]]) -> Tokens:
    """One for each token."""
    return np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(np.int32)
