"""Reads a run's trajectories: joins what became of each, finds those that were asked for, and unpacks them.

Fates are known only later than the trajectories, so files are gone through twice: once for the heads and the fates,
and once more for the bodies of what was chosen.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollart.errors import JobError
from rollart.records.format import FOLDER, FORMAT, HEAD, TEXTS, TIMES, ReadFrame, files_of, frames_of, unpacked_tokens
from rollart.types import NO_LOGPROBS, NO_TOKENS, Logprobs, Message, Tokens

ORDERS = ("newest", "worst", "best", "longest", "failed")
Key = tuple[int, str]
"""Life and id: held-out episodes of a killed run are played again under the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One attempt, without its turns."""

    id: str
    life: int
    """How often the run had been started before it was played."""
    group: str
    task: str
    domain: str
    evaluation: bool
    status: str
    reason: str
    reward: float | None
    parts: Mapping[str, float]
    born: int | None
    newest: int | None
    """Versions of its first and its last sampled token."""
    turns: int
    tokens: int
    """Sampled."""
    times: Mapping[str, float]
    """`started_s`, `ended_s` on the run's clock; `open_s`, `reset_s`, `wait_s` (for an engine), `generate_s`, `env_s`,
    `queue_s` (for a reward slot), `reward_s`."""
    fate: str = "open"
    """`trained`, `eval`, how its group ended (`filtered`, `stale`, `failed`, `surplus`), `unused` (its group was
    trained without it), `restart` (lost with a killed coordinator), or `open`."""
    step: int | None = None
    """That it was trained in."""
    advantage: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "life": self.life,
            "group": self.group,
            "task": self.task,
            "domain": self.domain,
            "eval": self.evaluation,
            "status": self.status,
            "reason": self.reason,
            "reward": self.reward,
            "parts": dict(self.parts),
            "advantage": self.advantage,
            "fate": self.fate,
            "step": self.step,
            "born": self.born,
            "newest": self.newest,
            "tokens": self.tokens,
            **self.times,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """One turn as it is read again."""

    shown: tuple[Message, ...]
    text: str
    reward: float
    fresh: bool = False
    context: Tokens = field(default_factory=lambda: NO_TOKENS)
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    logprobs: Logprobs = field(default_factory=lambda: NO_LOGPROBS)
    spans: tuple[tuple[int, int], ...] = ()
    """Versions, and how many tokens each sampled."""
    finish: str = ""
    engine: str = ""
    pool: str = ""
    wait_s: float = 0.0
    generate_s: float = 0.0
    env_s: float = 0.0
    prefill: int = 0
    cached: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "shown": _as_json(self.shown),
            "text": self.text,
            "reward": self.reward,
            "fresh": self.fresh,
            "context": self.context.tolist(),
            "tokens": self.tokens.tolist(),
            "logprobs": [round(value, 7) for value in self.logprobs.tolist()],
            "versions": [version for version, count in self.spans for _ in range(count)],
            "finish": self.finish,
            "engine": self.engine,
            "pool": self.pool,
            "wait_s": self.wait_s,
            "generate_s": self.generate_s,
            "env_s": self.env_s,
            "prefill": self.prefill,
            "cached": self.cached,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTrajectory:
    """One attempt, whole."""

    head: Head
    turns: tuple[ReadTurn, ...]
    left: tuple[Message, ...] = ()
    """What the environment said last."""

    def to_json(self) -> dict[str, Any]:
        turns = [turn.to_json() for turn in self.turns]
        return {**self.head.to_json(), "turns": turns, "left": _as_json(self.left)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to look for; everything where nothing is said."""

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
        """The oldest files went, for `trajectories.total_mb`."""
        self.dropped = 0
        """Finished attempts that could not be kept."""
        self._heads: list[Head] = []
        self._read_heads()

    def find(self, wanted: Wanted, order: str = "newest", most: int | None = None) -> list[Head]:
        """Those that were asked for, in this order."""
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
                chosen = [(left.pop((life, row[1])), row) for row in frame.rows if _is_in(row, life, left)]
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
        heads: dict[Key, dict[str, Any]] = {}
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
                        case ["played", *_]:
                            heads[(life, row[1])] = _named(row, frame.texts)
                        case ["ended", group, how]:
                            ended[group] = (how, life)
                        case ["trained", step, groups]:
                            for group, members, values in groups:
                                trained.setdefault(group, (step, life))
                                advantages |= {name: (step, value) for name, value in zip(members, values, strict=True)}
                        case ["dropped", count]:
                            self.dropped += count
        for (life, name), head in heads.items():
            group, step, advantage = head["group"], None, None
            if head["eval"]:
                fate = "eval"
            elif name in advantages:
                fate = "trained"
                step, advantage = advantages[name]
            elif group in trained:
                fate = "unused" if trained[group][1] == life else "restart"
            elif group in ended and ended[group][1] >= life:
                fate = ended[group][0]
            else:
                fate = "open" if life == newest_life else "restart"
            self._heads.append(_head(head, life, fate, step, advantage))


def pick(archive: Archive, wanted: Wanted, name: str | None, order: str | None) -> list[Head]:
    """Those that were asked for: all of `wanted`, or of these the first in an order, or one by its name, or a group."""
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
    """The frames of a file with the life they were written in. None where it went since, as the oldest may."""
    life = 0
    for frame in frames_of(path) if path.exists() else ():
        if frame.rows and frame.rows[0][0] == "life":
            _, written, life = frame.rows[0]
            if written != FORMAT:
                raise JobError(f"{path}: written in format {written}, this version of rollart reads {FORMAT}")
        yield life, frame


def _is_in(row: Sequence[Any], life: int, wanted: Mapping[Key, Head]) -> bool:
    return row[0] == "played" and (life, row[1]) in wanted


def _named(row: Sequence[Any], texts: Sequence[str]) -> dict[str, Any]:
    """A played row without its turns, by names."""
    named = dict(zip(HEAD, row[1:], strict=False))
    times = dict(zip(TIMES, struct.unpack(f"<{len(TIMES)}d", row[len(HEAD) + 1]), strict=True))
    return {name: texts[value] if name in TEXTS else value for name, value in named.items()} | times


def _head(row: Mapping[str, Any], life: int, fate: str, step: int | None, advantage: float | None) -> Head:
    return Head(
        id=row["id"],
        life=life,
        group=row["group"],
        task=row["task"],
        domain=row["domain"],
        evaluation=row["eval"],
        status=row["status"],
        reason=row["reason"],
        reward=row["reward"],
        parts=row["parts"],
        born=row["born"],
        newest=row["newest"],
        turns=row["turns"],
        tokens=row["tokens"],
        times={name: round(row[name], 6) for name in TIMES},
        fate=fate,
        step=step,
        advantage=advantage,
    )


def _whole(frame: ReadFrame, chosen: Sequence[tuple[Head, Sequence[Any]]]) -> Iterator[ReadTrajectory]:
    """These rows of a frame, with their turns."""
    lengths, packed = frame.contexts
    pieces = np.split(unpacked_tokens(packed), np.cumsum(lengths)[:-1]) if lengths else []
    tokens = unpacked_tokens(frame.tokens)
    logprobs = np.frombuffer(frame.logprobs, dtype="<f4").astype(np.float32)
    for head, row in chosen:
        at, raw_numbers, raw_rewards, raw_seconds = row[len(HEAD) + 2 :]
        numbers = iter(raw_numbers)
        rewards = struct.unpack(f"<{head.turns}d", raw_rewards)
        seconds = struct.unpack(f"<{3 * head.turns}f", raw_seconds)
        turns: list[ReadTurn] = []
        for number, reward in enumerate(rewards):
            context, count, fresh, finish, engine, pool, prefill, cached, text, spans, shown = islice(numbers, 11)
            wait_s, generate_s, env_s = (round(value, 6) for value in seconds[3 * number : 3 * number + 3])
            turns.append(
                ReadTurn(
                    spans=tuple(_pairs(numbers, spans)),
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


def _as_json(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
