"""A dataset as a task set: one question a row, one answer, a reward by name. `use: rollart.tasks.dataset`, and no code.

    args: {path: gsm8k.jsonl, prompt: question, answer: answer, answer_pattern: "#### (.+)",
           reward: regex, pattern: "#### *(-?[0-9.,]+)", held_out: gsm8k_test.jsonl}

Every row is drawn once in an epoch, in an order that follows from the job's seed and the epoch. Rows are read where
tasks are drawn; environments and rewards get all they need in the task, and never open the file.
"""

import contextlib
import datetime
import decimal
import hashlib
import json
import random
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollart.chat import spoken
from rollart.errors import JobError, install
from rollart.tasks.answers import JUDGES, extracted, letter, letters
from rollart.tasks.api import Environment, Episode, Reward, Split, TaskSet, observe
from rollart.tasks.load import load_reward
from rollart.tasks.order import shuffled
from rollart.tasks.rows import Row, Rows, open_rows
from rollart.types import Json, JsonObject, Message, Observation, Payload, Task

NAME = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")
"""In a template: a column, or a bracket that is meant as one."""
FILE = re.compile(r"\.(jsonl|csv|tsv|parquet)$")
TRIED_ROWS = 1000
"""Of each part, before the run: what is wrong with a dataset is mostly wrong with its first rows."""
BAD_SHARE = 0.01
"""Of the rows that are tried: as few as these may be wrong, and are passed over when they are drawn."""


class Question(Environment):
    """The prompt, and one answer to it. What that is worth, `score` says."""

    def __init__(self, messages: Sequence[Mapping[str, str]]) -> None:
        self._messages = messages

    def reset(self) -> Observation:
        return Observation(messages=tuple(Message(role=one["role"], content=one["content"]) for one in self._messages))

    def step(self, action: str) -> Observation:
        return observe(done=True)


class Dataset(TaskSet):
    """Rows of a file, of a Hugging Face dataset, or of one on the hub."""

    quick = True

    def __init__(
        self,
        *,
        path: str,
        prompt: str,
        answer: str = "",
        reward: str = "exact",
        pattern: str = "",
        answer_pattern: str = "",
        choices: str = "",
        solution: str = "",
        system: str = "",
        keep: list[str] | None = None,
        split: str = "",
        held_out: str | float = 0.1,
        config: str = "",
        shuffle: bool = True,
        seed: int = 0,
        domain: str = "",
    ) -> None:
        super().__init__(seed=seed, domain=domain)
        _refuse(reward, answer=answer, pattern=pattern, choices=choices)
        if "{" in prompt and not _columns_in(prompt):
            raise JobError(
                f"tasks.args.prompt: {prompt!r} has no column in it, so all rows would ask the same; name one "
                "in brackets, as {question}"
            )
        for name, text in (("pattern", pattern), ("answer_pattern", answer_pattern)):
            try:
                re.compile(text)
            except re.error as error:
                raise JobError(
                    f"tasks.args.{name}: {text!r} is not a regular expression ({error}); correct it"
                ) from None
        if not isinstance(held_out, str) and not 0 <= held_out < 1:
            raise JobError(f"tasks.args.held_out: {held_out} is no share of the rows; give one from 0 to below 1")
        self._path, self._config, self._splits = path, config, (split, held_out)
        self._prompt, self._answer, self._solution, self._system = prompt, answer, solution, system
        self._reward, self._pattern, self._answer_pattern = reward, pattern, answer_pattern
        self._choices, self._keep = choices, keep or []
        self._shuffle = shuffle
        self._tables: dict[Split, _Part] = {}

    def prepare(self) -> None:
        """Open it, and make one problem of each part. Raises JobError."""
        if self._reward == "math_verify":
            try:
                import math_verify  # noqa: F401
            except ModuleNotFoundError:
                raise JobError(f"tasks.args.reward: math_verify needs math-verify: {install('datasets')}") from None
        elif self._reward not in JUDGES:
            try:
                load_reward(self._reward)
            except JobError as error:
                raise JobError(f"tasks.args.reward: {error}") from None
        for part in self._parts().values():
            if len(part.numbers):
                _known_columns(self, part.rows.columns)
                self._try(part)

    def draw(self, rng: random.Random) -> Payload:
        """Any training row: what order they have, `task` knows."""
        part = self._parts()["train"]
        return self._asked(part, rng.randrange(len(part.numbers)))

    def environment(self, task: Task) -> Question:
        return Question(task.payload["messages"])

    def key(self, payload: Payload) -> Any:
        return payload["messages"]

    def scripted(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """The row's solution."""
        solution = task.payload.get("solution")
        if solution is None:
            raise NotImplementedError
        return str(solution)

    def novice(self, task: Task, observations: Sequence[str], rng: random.Random) -> str:
        """As often as not the solution of another row: the form of an answer, and not how to find it."""
        other = self._at("train", "novice", rng.randrange(1 << 20), task.id) if rng.random() < 0.5 else task
        return self.scripted(other, observations, rng)

    def warmup(self, index: int) -> Task:
        """Rows to warm a model up on are training rows: the split is the user's own."""
        return self._at("train", "warmup", index, f"{self.domain}/warmup/{index}")

    def _task(self, split: Split, index: int, task_id: str) -> Task:
        return self._at(split, split, index, task_id)

    def _at(self, part: Split, purpose: str, index: int, task_id: str) -> Task:
        found = self._parts()[part]
        count = len(found.numbers)
        if not count:
            named = "training" if part == "train" else "held-out"
            raise JobError(
                f"tasks.args.held_out: {self._splits[1]!r} leaves no {named} rows of {self._path}; give another share, "
                "rows by a column (column=value), or a file of their own"
            )
        epoch, position = divmod(index, count)
        if self._shuffle:
            position = shuffled(position, count, f"{self.seed}/{self.domain}/{purpose}/{epoch}")
        rng = random.Random(f"{self.seed}/{self.domain}/{purpose}/{index}")
        payload = self._asked(found, position)
        return Task(id=task_id, domain=self.domain, index=index, payload=payload, seed=rng.getrandbits(31))

    def _parts(self) -> "dict[Split, _Part]":
        """The training and the held-out rows: opened when the first one is asked for."""
        if not self._tables:
            split, held_out = self._splits
            name, column, value = _condition(split)
            if name:
                _refuse_word(self._path, "split", name)
            rows = open_rows(self._path, key="path", split=name, split_key="split", config=self._config)
            train = _Part(rows, _matching(rows, "split", column, value))
            if not isinstance(held_out, str):
                self._tables = self._by_hash(train, held_out)
                return self._tables
            name, column, value = _condition(held_out)
            if FILE.search(name):
                others = open_rows(name, key="held_out")
            elif not name:
                others = rows
            else:
                _refuse_word(self._path, "held_out", name)
                others = open_rows(self._path, key="path", split=name, split_key="held_out", config=self._config)
            self._tables = {"train": train, "held_out": _Part(others, _matching(others, "held_out", column, value))}
        return self._tables

    def _by_hash(self, every: "_Part", share: float) -> "dict[Split, _Part]":
        """By the question itself: rows that ask the same fall on the same side, whatever the seed."""
        train, held_out = array("Q"), array("Q")
        if not share:
            return {"train": every, "held_out": _Part(every.rows, held_out)}
        _known_columns(self, every.rows.columns)
        for number in every.numbers:
            row = _whole(every.rows, number)
            try:
                asked = _value(self._prompt, row)
            except ValueError:  # said when it is tried, or drawn
                asked = number
            digest = hashlib.sha256(json.dumps(asked, default=str).encode()).digest()
            (held_out if int.from_bytes(digest[:8], "big") < share * 2**64 else train).append(number)
        return {"train": _Part(every.rows, train), "held_out": _Part(every.rows, held_out)}

    def _try(self, part: "_Part") -> None:
        """Raises JobError where more than a few of its rows cannot be asked, or answered."""
        tried, wrong = min(len(part.numbers), TRIED_ROWS), []
        for position in range(tried):
            try:
                self._asked(part, position)
            except ValueError as error:
                wrong.append(str(error))
        if len(wrong) > BAD_SHARE * tried:
            more = f" ({len(wrong)} of the first {tried} rows are wrong)" if len(wrong) > 1 else ""
            raise JobError(f"tasks.args.path: {wrong[0]}{more}; correct the rows, or the arguments")

    def _asked(self, part: "_Part", position: int) -> JsonObject:
        """Raises ValueError that names the row."""
        row = part.row(position)
        try:
            return self._payload(row)
        except ValueError as error:
            raise ValueError(f"{part.rows.name}, row {part.numbers[position] + 1}: {error}") from None

    def _payload(self, row: Row) -> JsonObject:
        options, labels = self._options(row)
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters(len(options)), options, strict=True))
        row = {**row, self._choices: listed} if self._choices else row
        payload: dict[str, Json] = {"messages": self._messages(row), "reward": self._reward}
        if self._reward == "choice":
            payload["pattern"] = f"[{letters(len(options))[0]}-{letters(len(options))[-1]}]"
        elif self._pattern:
            payload["pattern"] = self._pattern
        if self._answer:
            raw = _value(self._answer, row)
            every = [_said_as(one) for one in (raw if isinstance(raw, list) else [raw])]
            answers = [self._one_answer(one, options, labels) for one in every]
            if not answers or not all(one.strip() for one in answers):
                raise ValueError("the answer is empty")
            payload["answers"] = answers
            payload["solution"] = self._right_reply(every[0], answers[0])
        if self._solution:
            payload["solution"] = str(_value(self._solution, row))
        if self._keep:
            payload["columns"] = {name: _kept(row, name) for name in self._keep}
        return payload

    def _messages(self, row: Row) -> list[dict[str, str]]:
        prompt = _value(self._prompt, row)
        if isinstance(prompt, list):
            try:
                messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in prompt]
            except (KeyError, TypeError):
                raise ValueError("the prompt is a list, but not one of messages with role and content") from None
        else:
            messages = [{"role": "user", "content": str(prompt)}]
        if not any(one["content"].strip() for one in messages):
            raise ValueError("the prompt is empty")
        system = _filled(self._system, row)
        return [*([{"role": "system", "content": system}] if system else []), *messages]

    def _options(self, row: Row) -> tuple[list[str], list[str]]:
        """The choices, and what the dataset calls them: a list (in CSV as JSON), or `{text: [...], label: [...]}`."""
        if not self._choices:
            return [], []
        given = _column(row, self._choices)
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                given = json.loads(given)
        texts, labels = (given.get("text"), given.get("label")) if isinstance(given, Mapping) else (given, None)
        if not isinstance(texts, list) or len(texts) < 2:
            raise ValueError(
                f"the choices in {self._choices!r} are {str(given)[:80]!r}: no list of two or more (in a text: as "
                "JSON) and not {text: [...], label: [...]}"
            )
        options = [str(one) for one in texts]
        named = letters(len(options)) if labels is None else [str(one) for one in labels]
        if len(named) != len(options):
            raise ValueError(f"the choices have {len(options)} texts and {len(named)} labels")
        return options, named

    def _one_answer(self, raw: str, options: Sequence[str], labels: Sequence[str]) -> str:
        if self._reward == "choice":
            return letter(raw, options, labels)
        if not self._answer_pattern:
            return raw
        found = extracted(self._answer_pattern, raw)
        if found is None:
            raise ValueError(f"the answer_pattern finds nothing in the answer {raw[:80]!r}")
        return found

    def _right_reply(self, raw: str, answer: str) -> str:
        """One that earns the reward, as far as is known: the answer column itself where the pattern reads it."""
        if self._reward == "regex" and extracted(self._pattern, raw) is not None:
            return raw
        return f"\\boxed{{{answer}}}" if self._reward == "math_verify" else answer


def score(episode: Episode) -> Reward:
    """What the task's own reward says of the last answer, without its thoughts."""
    payload = episode.task.payload
    judge = JUDGES.get(payload["reward"])
    if judge is None:
        return load_reward(payload["reward"])(episode)
    return float(judge(spoken(episode.answer), payload["answers"], payload.get("pattern", "")))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a table, by number."""

    rows: Rows
    numbers: "range | array[int]"

    def row(self, position: int) -> Row:
        return self.rows[self.numbers[position]]


def _refuse(reward: str, *, answer: str, pattern: str, choices: str) -> None:
    if reward not in JUDGES and ":" not in reward:
        raise JobError(
            f"tasks.args.reward: {reward!r} is not known; one of {', '.join(JUDGES)}, or a function of yours, as "
            "module:function or file.py:function"
        )
    if reward in JUDGES and not answer:
        raise JobError(f"tasks.args.answer: missing; {reward} compares with it: name the column that holds it")
    for name, given, needed in (("pattern", pattern, "regex"), ("choices", choices, "choice")):
        if reward == needed and not given:
            raise JobError(f"tasks.args.{name}: missing; reward {reward} needs it")
    if pattern and reward != "regex":
        raise JobError("tasks.args.pattern: has an effect only with reward: regex; change that, or remove it")


def _known_columns(dataset: Dataset, columns: Sequence[str]) -> None:
    system = dataset._system if "{" in dataset._system else ""
    texts = {"prompt": dataset._prompt, "answer": dataset._answer, "solution": dataset._solution, "system": system}
    for name, text in texts.items():
        for column in _columns_in(text):
            _refuse_column(name, column, columns)
    for name, column in (("choices", dataset._choices), *(("keep", one) for one in dataset._keep)):
        if column:
            _refuse_column(name, column, columns)


def _refuse_column(argument: str, column: str, columns: Sequence[str]) -> None:
    if column not in columns and column.partition(".")[0] not in columns:
        text = argument in ("prompt", "answer", "solution", "system")
        template = "; a bracket that is no column is written {{ or }}" if text else ""
        raise JobError(
            f"tasks.args.{argument}: there is no column {column!r}; there are {', '.join(columns)}{template}"
        )


def _columns_in(text: str) -> list[str]:
    """Those that a template names, or the one whose name this is."""
    if "{" not in text:
        return [text] if text else []
    return [found.group(1) for found in NAME.finditer(text) if found.group(1)]


def _value(text: str, row: Row) -> Any:
    """The column of this name, or the template with its columns filled in. Raises ValueError."""
    if "{" not in text:
        found = _column(row, text)
        if isinstance(found, Mapping):
            raise ValueError(f"{text!r} is an object with {', '.join(found)}; name one of these, as {text}.NAME")
        return found
    return _filled(text, row)


def _filled(text: str, row: Row) -> str:
    """With its columns. Raises ValueError."""

    def filled(found: "re.Match[str]") -> str:
        name = found.group(1)
        if name is None:
            return found.group()[0]
        value = _column(row, name)
        return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else _said_as(value)

    return NAME.sub(filled, text)


def _said_as(value: Any) -> str:
    """A value as a model would say it: whole numbers are often kept as floats, since others in the column are none.
    Raises ValueError."""
    if isinstance(value, Mapping):
        raise ValueError(f"it has an object with {', '.join(value)} where a text or a number should be")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _column(row: Row, name: str, *, null: bool = False) -> Any:
    """Of this row; `a.b` is what is called b, or has that position, in the column a. Raises ValueError where there is
    none, or nothing in it."""
    found: Any = row
    for part in [name] if name in row else name.split("."):
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            raise ValueError(f"there is no {name!r} in it")
    if (found is None or found != found) and not null:  # NaN is what some tools write for null
        raise ValueError(f"{name!r} is null")
    return found


def _kept(row: Row, name: str) -> Json:
    """As JSON: dates and decimals as texts. Raises ValueError."""

    def text(value: object) -> str:
        if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
            return str(value)
        raise TypeError(type(value).__name__)

    try:
        kept: Json = json.loads(json.dumps(_column(row, name, null=True), default=text))
    except TypeError as error:
        raise ValueError(f"{name!r} holds a value of type {error}, which JSON cannot; leave it out of keep") from None
    return kept


def _condition(split: str) -> tuple[str, str, str]:
    """The name of a split or file, or the column and the value that its rows have."""
    column, equals, value = split.partition("=")
    return ("", column, value) if equals else (split, "", "")


def _matching(rows: Rows, argument: str, column: str, value: str) -> "range | array[int]":
    if not column:
        return range(len(rows))
    _refuse_column(argument, column, rows.columns)
    numbers = array("Q", (number for number in range(len(rows)) if str(_whole(rows, number).get(column)) == value))
    if not numbers:
        raise JobError(f"tasks.args.{argument}: no row has {value!r} in the column {column!r}; correct it")
    return numbers


def _whole(rows: Rows, number: int) -> Row:
    """A row that is read while all are."""
    try:
        return rows[number]
    except ValueError as error:
        raise JobError(f"tasks.args.path: {error}; correct that row, or take it out") from None


def _refuse_word(path: str, argument: Literal["split", "held_out"], word: str) -> None:
    if FILE.search(path):
        other = "a share (0.1), another file, or " if argument == "held_out" else ""
        raise JobError(
            f"tasks.args.{argument}: {path} is a file and has no split {word!r}; give {other}rows of it by a column, "
            "as column=value"
        )
