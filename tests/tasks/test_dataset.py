"""Datasets: every row once an epoch, the user's own split, templates, rewards by name, what is said of mistakes."""

import csv
import datetime
import decimal
import json
import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import JobError
from rollart.tasks import answers
from rollart.tasks.api import Episode, EpisodeTurn, TaskSet
from rollart.tasks.check import check_task
from rollart.tasks.dataset import score
from rollart.tasks.load import load_task_set
from rollart.tasks.order import shuffled
from rollart.types import Task

USE = "rollart.tasks.dataset"
ROWS = [
    {"question": f"What is {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}", "part": "ab"[n % 5 == 0]}
    for n in range(1000, 1100)
]


def jsonl(path: Path, rows: Sequence[Any] = ROWS) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def written(kind: str, folder: Path) -> str:
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            return jsonl(path)
        case "csv" | "tsv":
            with path.open("w", newline="", encoding="utf-8-sig" if kind == "csv" else "utf-8") as file:
                out = csv.DictWriter(file, ["question", "answer", "part"], delimiter="\t" if kind == "tsv" else ",")
                out.writeheader()
                out.writerows(ROWS)
        case "parquet":
            pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
        case "saved":
            pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path)
    return str(path)


def load(file: str, seed: int = 0, **more: Any) -> TaskSet:
    args = {"path": file, "prompt": "question", "answer": "answer", "answer_pattern": "#### (.+)"} | more
    made = load_task_set(USE, args, seed=seed, domain="d")
    made.prepare()
    return made


def questions(draw: Any, indices: range) -> list[str]:
    return [draw(index).payload["messages"][-1]["content"] for index in indices]


def said(task: Task, text: str) -> Any:
    return score(
        Episode(id="e", status="done", task=task, turns=(EpisodeTurn(context="", text=text, tokens=1, reward=0.0),))
    )


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "saved"])
def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(kind: str, tmp_path: Path) -> None:
    tasks = load(written(kind, tmp_path), held_out=0)
    first, second = questions(tasks.task, range(100)), questions(tasks.task, range(100, 200))
    assert sorted(first) == sorted(second) == sorted(row["question"] for row in ROWS)
    assert first != second
    assert first != [row["question"] for row in ROWS]
    assert questions(load(written(kind, tmp_path), seed=1, held_out=0).task, range(100)) != first
    assert tasks.task(3).payload["answers"] == [str(2 * int(first[3].split()[2]))]
    assert tasks.task(3).id != tasks.task(103).id
    in_order = load(written(kind, tmp_path), held_out=0, shuffle=False)
    assert questions(in_order.task, range(100)) == [row["question"] for row in ROWS]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 256, 1000])
def test_an_order_is_a_permutation(count: int) -> None:
    assert sorted(shuffled(position, count, "k") for position in range(count)) == list(range(count))


def test_orders_look_random() -> None:
    """Of 400 orders of three things, each of the six comes about as often: 66.7 each, standard deviation 7.5."""
    orders = [tuple(shuffled(position, 3, str(key)) for position in range(3)) for key in range(400)]
    assert len(set(orders)) == 6
    assert all(35 < orders.count(order) < 100 for order in set(orders))


def test_the_users_own_split_is_kept(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl")
    wanted = {part: sorted(row["question"] for row in ROWS if row["part"] == part) for part in "ab"}
    by_column = load(path, split="part=a", held_out="part=b")
    assert sorted(questions(by_column.task, range(80))) == wanted["a"]
    assert sorted(questions(by_column.held_out, range(20))) == wanted["b"]
    other = jsonl(tmp_path / "test.jsonl", [row for row in ROWS if row["part"] == "b"])
    by_file = load(path, held_out=other)
    assert sorted(questions(by_file.task, range(100))) == sorted(row["question"] for row in ROWS)
    assert sorted(questions(by_file.held_out, range(20))) == wanted["b"]
    datasets = pytest.importorskip("datasets")
    parts = {"train": "a", "test": "b"}
    both = {
        name: datasets.Dataset.from_list([row for row in ROWS if row["part"] == part]) for name, part in parts.items()
    }
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    by_name = load(str(tmp_path / "both"), held_out="test")
    assert sorted(questions(by_name.task, range(80))) == wanted["a"]
    assert sorted(questions(by_name.held_out, range(20))) == wanted["b"]
    with pytest.raises(JobError, match=r"^tasks.args.held_out: .* has no split 'dev'; it has train, test$"):
        load(str(tmp_path / "both"), held_out="dev")


def test_without_a_split_of_the_users_the_question_decides(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS, *ROWS[3:]])
    parts = [
        (set(questions(t.task, range(200))), set(questions(t.held_out, range(200))))
        for t in (load(path, s) for s in (0, 7))
    ]
    assert parts[0] == parts[1]
    assert 2 <= len(parts[0][1]) <= 25
    assert not parts[0][0] & parts[0][1]


def test_a_template_a_system_message_and_messages(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "rows.jsonl", [{"q": "1+1", "a": [2, "two"], "chat": [{"role": "user", "content": "hi"}]}] * 3
    )
    args = {"path": path, "answer": "a", "held_out": 0, "keep": ["q"]}
    task = load_task_set(USE, {**args, "prompt": "{q} in \\boxed{{}}?", "system": "Be brief."}, domain="d").task(0)
    told = load_task_set(USE, {**args, "prompt": "q", "system": "It is {q}, {{so}}."}, domain="d").task(0)
    assert told.payload["messages"][0] == {"role": "system", "content": "It is 1+1, {so}."}
    with pytest.raises(JobError, match=r"^tasks\.args\.system: there is no column 'z'"):
        load_task_set(USE, {**args, "prompt": "q", "system": "{z}"}, domain="d").prepare()
    assert task.payload["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1 in \\boxed{}?"},
    ]
    assert task.payload["answers"] == ["2", "two"]
    assert task.payload["columns"] == {"q": "1+1"}
    assert [said(task, text) for text in (" 2\n", "two", "three")] == [1.0, 1.0, 0.0]
    chat = load_task_set(USE, {**args, "prompt": "chat"}, domain="d")
    observation: Any = chat.environment(chat.task(0)).reset()
    assert [(one.role, one.content) for one in observation.messages] == [("user", "hi")]


@pytest.mark.parametrize(
    ("reward", "answers_of_row", "right", "wrong"),
    [
        ("exact", ["blue"], [" blue\n"], ["Blue", "blue.", ""]),
        (
            "regex",
            ["1234"],
            ["so 5\n#### 1,234", "#### 1234.0", "#### $1234."],
            ["1234", "#### 12", "#### 1234 #### 5"],
        ),
        ("choice", ["B"], ["B", "(B)", "A? No: **B**", "B. I am sure."], ["A", "Because", "b", "B? C", ""]),
        ("math_verify", ["1/2"], ["\\boxed{0.5}", "so $x = \\frac{2}{4}$", "0.5"], ["\\boxed{0.51}", "no", ""]),
        ("math_verify", ["\\frac{1}{2}"], ["\\boxed{\\frac12}"], ["\\boxed{2}"]),
    ],
)
def test_rewards_by_name(reward: str, answers_of_row: list[str], right: list[str], wrong: list[str]) -> None:
    if reward == "math_verify":
        pytest.importorskip("math_verify")
    judge = answers.JUDGES[reward]
    pattern = "[A-D]" if reward == "choice" else "#### *(\\S+)"
    assert [text for text in right if not judge(text, answers_of_row, pattern)] == []
    assert [text for text in wrong if judge(text, answers_of_row, pattern)] == []


@pytest.mark.parametrize("answer", ["blue", 1, "1", "B"])
def test_choices_are_listed_and_their_answer_is_a_letter(answer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"q": "The sky?", "options": ["red", "blue"], "a": answer}] * 3)
    args = {
        "path": path,
        "prompt": "{q}\n{options}",
        "answer": "a",
        "choices": "options",
        "reward": "choice",
        "held_out": 0,
    }
    task = load_task_set(USE, args, domain="d").task(0)
    assert task.payload["messages"][0]["content"] == "The sky?\nA. red\nB. blue"
    assert task.payload["answers"] == ["B"]
    assert said(task, "B. I am sure.") == 1.0, "I is none of the choices"


def test_labels_of_the_datasets_own_are_read(tmp_path: Path) -> None:
    row = {"q": "The sky?", "options": {"text": ["red", "blue"], "label": ["1", "2"]}, "a": "2"}
    path = jsonl(tmp_path / "rows.jsonl", [row])
    args = {
        "path": path,
        "prompt": "{q} {options}",
        "answer": "a",
        "choices": "options",
        "reward": "choice",
        "held_out": 0,
    }
    assert load_task_set(USE, args, domain="d").task(0).payload["answers"] == ["B"]


def test_a_reward_of_the_users_own_sees_the_columns_it_asked_for(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def near(episode):\n    return {'kept': float(episode.task.payload['columns']['part'] in episode.answer)}\n"
    )
    tasks = load(jsonl(tmp_path / "rows.jsonl"), reward=f"{own}:near", keep=["part"])
    task = tasks.task(0)
    assert said(task, f"it is {task.payload['columns']['part']}") == {"kept": 1.0}
    with pytest.raises(JobError, match="has no far"):
        load(jsonl(tmp_path / "rows.jsonl"), reward=f"{own}:far")


def test_the_check_is_silent_and_the_solution_wins(tmp_path: Path) -> None:
    args = {
        "path": jsonl(tmp_path / "rows.jsonl"),
        **{"prompt": "question", "answer": "answer", "answer_pattern": "#### (.+)"},
        **{"reward": "regex", "pattern": "#### *(.+)"},
    }
    assert check_task(USE, args).findings == []
    tasks = load_task_set(USE, args)
    assert said(tasks.warmup(0), tasks.scripted(tasks.warmup(0), [], random.Random(0))) == 1.0


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"path": "nowhere.jsonl"}, "path: there is no file nowhere.jsonl; correct the path"),
    ({"prompt": "qestion"}, "prompt: there is no column 'qestion'; there are question, answer, part"),
    ({"prompt": "{question} {x}"}, "prompt: there is no column 'x'; .* a bracket that is no column is written {{"),
    ({"answer": ""}, "answer: missing; exact compares with it"),
    ({"reward": "regex"}, "pattern: missing; reward regex needs it"),
    ({"pattern": "x"}, "pattern: has an effect only with reward: regex"),
    ({"reward": "regex", "pattern": "("}, "pattern: '\\(' is not a regular expression"),
    ({"reward": "equal"}, "reward: 'equal' is not known; one of exact, regex, choice, math_verify"),
    ({"held_out": 1.5}, "held_out: 1.5 is no share of the rows"),
    ({"held_out": "test"}, "held_out: .*rows.jsonl is a file and has no split 'test'; give a share"),
    ({"held_out": "part=z"}, "held_out: no row has 'z' in the column 'part'"),
    ({"shuffle": "perhaps"}, "shuffle: 'perhaps' does not fit: input should be a valid boolean"),
    (
        {"promt": "question"},
        "promt: rollart.tasks.dataset has no such argument, did you mean 'prompt'\\?; it takes path,",
    ),
    ({"answer_pattern": "= (z+)"}, "path: .*rows.jsonl, row 1: the answer_pattern finds nothing in the answer '1000"),
    ({"split": "test"}, "split: .*rows.jsonl is a file and has no split 'test'; give rows of it by a column"),
    ({"prompt": "Solve {this"}, "prompt: 'Solve {this' has no column in it, so all rows would ask the same"),
    ({"prompt": {"question": None}}, "prompt: .* a valid string \\(in YAML, one that begins with # or { is written in"),
    ({"answer_pattern": None}, "answer_pattern: None does not fit: .* \\(in YAML, one that begins with #"),
    ({"reward": "nowhere.py:near"}, "reward: there is no file .*nowhere.py; correct the path"),
    (
        {"reward": "nowhere:near"},
        "reward: nowhere:near: no module nowhere was found; give a module or the path of a .py",
    ),
    ({"reward": "json:load_it"}, "reward: json:load_it: json has no load_it; did you mean load"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_fix(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"^tasks.args.{message}"):
        load(jsonl(tmp_path / "rows.jsonl"), **args)


ONE = '{"question": "1+1?", "answer": "2", "options": ["1", "2"]}\n'
CHOICE = {"reward": "choice", "choices": "options"}
BAD_FILES: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("jsonl", b"", {}, r" has no rows; give one that has"),
    ("jsonl", b"no json\n", {}, r", row 1: is not JSON \(.*; give one JSON object a line"),
    ("jsonl", b"[1, 2]\n", {}, r", row 1: is a list, not an object; give one JSON object a line"),
    ("jsonl", b'{"question": "2?"}\n', {}, r"there is no column 'answer'; there are question"),
    ("jsonl", ONE.encode() + b'{"question": "2?"}\n', {}, r", row 2: there is no 'answer' in it; correct the rows, or"),
    ("jsonl", ONE.encode() + b'{"question": "2?", "answer": null}\n', {}, r", row 2: 'answer' is null; correct"),
    ("jsonl", b'{"question": null, "answer": "2"}\n' * 3, {}, r"row 1: 'question' is null \(3 of the first 3 rows are"),
    ("jsonl", b'{"question": " ", "answer": "2"}\n', {}, r", row 1: the prompt is empty"),
    ("jsonl", b'{"question": "2?", "answer": []}\n', {}, r", row 1: the answer is empty"),
    (
        "jsonl",
        b'{"question": "caf\xe9", "answer": "2"}\n',
        {},
        r", row 1: is not UTF-8, .* \(.*, byte 0xe9\); give one",
    ),
    (
        "jsonl",
        ONE.encode(),
        {"keep": ["part"]},
        r"there is no column 'part'; there are question, answer, options",
    ),
    ("csv", b"", {}, r" has no rows below its header; give one that has"),
    (
        "csv",
        b"question;answer\n1?;2\n",
        {},
        r" has one column, 'question;answer': its values seem to be separated by ';'",
    ),
    ("csv", b"question,answer\n1?,2,3\n", {}, r", row 1: has 3 values for 2 columns \(one with ',' or a line's end"),
    ("csv", b"question,answer\n1?,\n", {}, r", row 1: the answer is empty"),
    ("csv", b"caf\xe9,answer\n1?,2\n", {}, r": its header is not UTF-8; save the file as UTF-8"),
    (
        "csv",
        b"question,answer,options\n1?,1,1 or 2\n",
        CHOICE,
        r", row 1: the choices in 'options' are '1 or 2': no list",
    ),
    (
        "jsonl",
        ONE.replace('["1", "2"]', "5").encode(),
        CHOICE,
        r", row 1: the choices in 'options' are '5': no list of",
    ),
    (
        "jsonl",
        ONE.replace('["1", "2"]', '{"a": []}').encode(),
        CHOICE,
        r", row 1: the choices .*: no list of two or more",
    ),
    (
        "jsonl",
        ONE.replace('["1", "2"]', '{"text": ["1", "2"], "label": ["x"]}').encode(),
        CHOICE,
        r", row 1: the choices have 2 texts and 1 labels",
    ),
    ("jsonl", ONE.replace('"2",', '"C",').encode(), CHOICE, r", row 1: the answer 'C' is neither one of the choices"),
    ("csv", b"question,answer,answer\n1?,2,3\n", {}, r" has several columns 'answer'; rename all but one"),
    (
        "jsonl",
        b'{"question": {"text": "1?", "lang": "en"}, "answer": "2"}\n',
        {},
        r", row 1: 'question' is an object with text, lang; name one of these, as question\.NAME",
    ),
    (
        "jsonl",
        b'{"question": "1?", "answer": [{"text": "2"}]}\n',
        {},
        r", row 1: it has an object with text where a text or a number should be",
    ),
    ("jsonl", b'{"question": "1?", "answer": NaN}\n', {}, r", row 1: 'answer' is null"),
    ("jsonl", ONE.encode(), {"answer": "options.5"}, r", row 1: there is no 'options\.5' in it"),
    ("parquet", b"junk", {}, r" is not Parquet"),
    ("json", b"[]", {}, r" is none of .jsonl, .csv, .tsv and .parquet; unpack or convert it"),
]


@pytest.mark.parametrize(("kind", "content", "args", "message"), BAD_FILES)
def test_what_is_wrong_with_a_file_is_said_before_the_run(
    kind: str, content: bytes, args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(content)
    given = {"path": str(path), "prompt": "question", "answer": "answer", "held_out": 0}
    with pytest.raises(JobError, match=rf"^tasks\.args\.\w+: .*{message}") as caught:
        load_task_set(USE, given | args).prepare()
    assert str(caught.value).count(str(path)) <= 1


@pytest.mark.parametrize(("kind", "text"), [("jsonl", ONE), ("csv", "question,answer\r\n1+1?,2\r\n")])
def test_a_byte_order_mark_is_no_part_of_a_row(kind: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_text(text, encoding="utf-8-sig")
    assert questions(load(str(path), held_out=0, answer_pattern="").task, range(1)) == ["1+1?"]


def test_what_is_inside_a_column_has_a_name_too(tmp_path: Path) -> None:
    """As datasets have it: SQuAD's answers, messages of a chat."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {
        "asked": {"text": "1+1?", "tags": ["sum", "easy"]},
        "answers": {"text": ["2", "two"], "start": [1, 2]},
        "when": datetime.datetime(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    args = {"path": str(tmp_path / "rows.parquet"), "held_out": 0, "answer": "answers.text"}
    args |= {"prompt": "{asked.text} {asked.tags.1} {asked.tags}", "keep": ["when", "price", "asked.tags"]}
    task = load_task_set(USE, args, domain="d").task(0)
    assert task.payload["messages"][0]["content"] == '1+1? easy ["sum", "easy"]'
    assert task.payload["answers"] == ["2", "two"]
    assert task.payload["columns"] == {"when": "2026-01-02 00:00:00", "price": "1.50", "asked.tags": ["sum", "easy"]}


def test_a_column_that_json_cannot_hold_is_not_kept(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.Table.from_pylist([{"q": "1+1?", "a": 2.0, "picture": b"PNG"}]), tmp_path / "rows.parquet")
    args = {"path": str(tmp_path / "rows.parquet"), "held_out": 0, "prompt": "q", "answer": "a"}
    assert load_task_set(USE, args, domain="d").task(0).payload["answers"] == ["2"], "a float, for pandas' sake"
    with pytest.raises(JobError, match=r"row 1: 'picture' holds a value of type bytes, which JSON cannot; leave it"):
        load_task_set(USE, {**args, "keep": ["picture"]}).prepare()


def test_what_a_model_thinks_is_no_answer(tmp_path: Path) -> None:
    tasks = load(jsonl(tmp_path / "rows.jsonl", [{"question": "1+1?", "answer": "#### 2"}]), held_out=0)
    assert said(tasks.task(0), "<think>\nIs it 3?\n</think>\n\n2") == 1.0
    assert said(tasks.task(0), "<think>2") == 0.0


def test_a_few_broken_rows_are_passed_over_and_more_are_refused(tmp_path: Path) -> None:
    path = Path(jsonl(tmp_path / "rows.jsonl", ROWS))
    path.write_text("{broken\n\n" + path.read_text())
    path.write_text(ONE.replace("2", "#### 2") + path.read_text())
    tasks = load(str(path), held_out=0, shuffle=False)
    with pytest.raises(ValueError, match="row 2: is not JSON"):
        tasks.task(1)
    assert questions(tasks.task, range(2, 5)) == [row["question"] for row in ROWS[:3]]
    with pytest.raises(JobError, match=r"row 2: is not JSON .*; correct that row, or take it out"):
        load(str(path))
    path.write_text(path.read_text() + "[]\n")
    with pytest.raises(
        JobError, match=r"row 2: is not JSON .* \(2 of the first 103 rows are wrong\); correct the rows"
    ):
        load(str(path), held_out=0)


def test_environments_never_open_the_file_and_a_large_one_is_not_held(tmp_path: Path) -> None:
    long = "x" * 20_000
    path = Path(jsonl(tmp_path / "rows.jsonl", ({"q": f"{n} {long}", "a": str(n)} for n in range(4000))))  # type: ignore[arg-type]
    args = {"path": str(path), "prompt": "q", "answer": "a", "held_out": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tasks = load_task_set(USE, args, domain="d")
    task = tasks.task(5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000, "KB, of a file of 80 MB"
    path.unlink()
    elsewhere: Any = load_task_set(USE, args, domain="d").environment(task)
    assert elsewhere.reset().messages[0].content == task.payload["messages"][0]["content"]
