"""`rollart show`: what the model said, in the terminal, as JSON and as JSON lines; and a run's table again."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.launch.books import RunResult
from rollart.launch.simulation import simulate
from rollart.records.format import FOLDER
from rollart.records.recorder import FileRecorder
from rollart.report.reading import episode, show_trajectory, visible
from rollart.report.show import show_summary
from rollart.report.summary import Play
from rollart.types import Message, Observation, Task, TurnNote
from tests.contracts.recorder import batch, played, trajectory
from tests.summaries import summary_with
from tests.test_docs_pages import tiny_job
from tests.test_training import JOB


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six attempts: two trained on, one of a filtered group, one open, one failed, one of an evaluation."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "events.jsonl").write_bytes(b"")
    recorder = FileRecorder(tmp_path / FOLDER)
    for group, member, reward in (("g1", 0, 1.0), ("g1", 1, -0.5), ("g2", 0, 0.5), ("g3", 0, 0.25), ("g4", 0, None)):
        recorder.played(played(group, member, reward=reward))
    held_out = played("eval0-sampled-maths")
    object.__setattr__(held_out, "evaluation", True)
    recorder.played(held_out)
    recorder.ended("g2", "filtered")
    recorder.trained(batch(5, ("g1", [trajectory("g1", 0), trajectory("g1", 1)])))
    recorder.close()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["show", *map(str, words)]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return orjson.loads(said(capsys, *words, "--json"))


def test_a_trajectory_is_read_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, run, "g1.0.0")
    order = [
        "g1.0.0  maths/7  done  reward 1 (found 0.9, brevity 0.1)",
        "trained on in step 5, advantage +1.000",
        "7 tokens in 2 turns, versions 3 to 4",
        "waiting for engines 0.75, generating 2.25, environment 0.75, waiting for a reward slot 0.50, reward 0.25",
        "--- turn 0: fast-1 (pool fast), version 3, 4 tokens (stop)",
        "[system] Add.",
        "[user] 2+3?",
        "[assistant] calc",
        "reward 0.25",
        "--- turn 1: fast-1 (pool fast), version 3 to 4, 3 tokens",
        "[tool] 5",
        "[assistant] 5",
        "--- after the last answer",
        "[user] Right.",
    ]
    at = 0
    for line in order:
        at = text.replace("\n", " ").find(line, at)
        assert at >= 0, f"{line!r} is not there, or not in its place: {text}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--list"], ["eval0-sampled-maths.0.0", "g4.0.0", "g3.0.0", "g2.0.0", "g1.1.0", "g1.0.0"]),
        (["--order", "worst"], ["g1.1.0", "g3.0.0", "g2.0.0", "g1.0.0", "eval0-sampled-maths.0.0"]),
        (["--order", "failed"], ["g4.0.0"]),
        (["--limit", "1"], ["eval0-sampled-maths.0.0"]),
        (["--reward", "0.25:0.5"], ["g3.0.0", "g2.0.0"]),
        (["--reward", ":0"], ["g1.1.0"]),
        (["--reward=-0.5"], ["g1.1.0"]),
        (["--status", "failed"], ["g4.0.0"]),
        (["--task", "lake"], []),
        (["--version", "4", "--limit", "1"], ["eval0-sampled-maths.0.0"]),
        (["--version", "5"], []),
        (["g1"], ["g1.1.0", "g1.0.0"]),
    ],
)
def test_a_listing_has_what_was_asked_for_in_order(
    run: Path, words: list[str], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["id"] for row in as_json(capsys, run, *words)] == found
    text = said(capsys, run, *words)
    at = [text.find(f"\n{name} ") for name in found]
    assert -1 not in at, text
    assert at == sorted(at)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("worst", "g1.1.0"),
        ("best", "g1.0.0"),
        ("failed", "g4.0.0"),
        ("newest", "eval0-sampled-maths.0.0"),
    ],
)
def test_the_first_in_an_order_is_read_at_once(
    run: Path, word: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, run, word)["id"] == found


def test_json_has_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = as_json(capsys, run, "g1.0.0")
    assert whole["turns"][1]["tokens"] == [200, 201, 202]
    assert whole["turns"][1]["versions"] == [3, 4, 4]
    assert whole["turns"][1]["logprobs"] == pytest.approx([-0.2, -0.201, -0.202])
    assert whole["turns"][0]["shown"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
    assert (whole["fate"], whole["step"], whole["advantage"], whole["reward"]) == ("trained", 5, 1.0, 1.0)
    assert whole["left"] == [{"role": "user", "content": "Right."}]


def test_what_became_of_each_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, run, "--list")
    for name, short, words in (
        ("g1.1.0", "step 5, -1.00", "trained on in step 5, advantage -1.000"),
        ("g2.0.0", "no: filtered", "not trained on: its group ended as filtered"),
        ("g3.0.0", "no: open", "its group is open"),
        ("g4.0.0", "no: open: EnvError: env.step: broke", "its group is open: EnvError: env.step: broke"),
        ("eval0-sampled-maths.0.0", "no: eval", "held-out, not trained on"),
    ):
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert line.rstrip().endswith(short)
        assert words in said(capsys, run, name)


def test_an_export_is_json_lines(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "good.jsonl"
    said(capsys, run, "--reward", "0.25:", "--export", file)
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == ["g1.0.0", "g2.0.0", "g3.0.0", "eval0-sampled-maths.0.0"]
    assert all(row["turns"][0]["text"] == "calc" for row in rows)
    assert main(["show", str(run), "--export", str(file)]) == 2
    assert "exists" in capsys.readouterr().err


def test_what_is_not_there_is_an_error_that_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        ([run, "g99"], "g99: no such trajectory or group"),
        ([run, "worst", "--task", "lake"], "worst: no trajectory matches"),
        ([run / "nowhere", "g1"], "give a run directory"),
        ([run / "nowhere"], "give a run directory"),
    ):
        assert main(["show", *map(str, words)]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", str(run), "--reward", "1:0"])
    assert "0.5:1" in capsys.readouterr().err


def test_a_run_without_trajectories_says_who_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"")
    assert main(["show", str(tmp_path), "--list"]) == 2
    assert "trajectories.keep" in capsys.readouterr().err


def test_a_terminal_never_obeys_what_a_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    whole = episode(
        Task(id="t/0", domain="t", index=0),
        [Observation(messages=(Message(role="user", content="\x1b[2J[bold]a\tb"),)), Observation(done=True)],
        ["\x07" + "x" * 3000],
        who="the scripted player",
        reward=1.0,
        parts={},
    )
    show_trajectory(whole)
    text = capsys.readouterr().out
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\\x1b[2J[bold]a" in text
    assert "more characters (--full shows them)" in text
    show_trajectory(whole, full=True)
    assert capsys.readouterr().out.count("x") > 2999
    assert visible("é\n") == "é\n"


def test_a_finished_runs_table_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    result = simulate(tiny_job(), out)
    show_summary(result.summary, out)
    table = capsys.readouterr().out
    assert said(capsys, out) == table
    assert as_json(capsys, out) == orjson.loads((out / "summary.json").read_bytes())
    (out / "summary.json").unlink()
    assert said(capsys, out) == table, "from the events alone"


def test_the_table_of_a_run_that_was_killed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    simulate(build_job({**tiny_job().model_dump(mode="json"), "train": {"steps": 2}}), out)
    (out / "summary.json").unlink()
    lines = (out / "events.jsonl").read_bytes().splitlines(keepends=True)
    (out / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"torn')
    assert "it has not said how it ended" in said(capsys, out)


def test_an_answer_nobody_was_given_is_shown_by_its_prompt(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent of its own may show the model what the environment never said."""
    whole = played("own")
    object.__setattr__(whole, "notes", (TurnNote("fast", 0.0, (), ""), whole.notes[1]))
    recorder = FileRecorder(tmp_path / "b" / FOLDER)
    recorder.played(whole)
    recorder.close()
    (tmp_path / "b" / "events.jsonl").write_bytes(b"")
    assert "(3 tokens of prompt)" in said(capsys, tmp_path / "b", "own")


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_an_evaluation_shows_its_worst_episode(
    keep: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(job: Job, out: Path, **_: object) -> RunResult:
        if job.trajectories.keep:
            recorder = FileRecorder(out / FOLDER)
            for member, reward in enumerate((0.5, -1.0, None)):
                recorder.played(played("eval0-sampled-maths", member, reward=reward))
            recorder.close()
        play = Play(episodes=3, scored=2, reward=-0.25, std=0.75, rate=False, versions=[0, 0])
        summary = summary_with(state="finished", evaluations={"eval0": {"maths": {"sampled": play}}})
        return RunResult(summary=summary, violations=[], deadlock=False, faults={})

    monkeypatch.setattr("rollart.launch.training.evaluate", evaluate)
    job = tmp_path / "job.yaml"
    job.write_bytes(orjson.dumps({**JOB, "trajectories": {"keep": keep}}))  # JSON is YAML
    assert main(["eval", str(job), "--out", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert ("eval0-sampled-maths.1.0  maths/7" in text) == (keep > 0)
    assert ("[assistant] calc" in text) == (keep > 0)
    assert main(["eval", str(job), "--out", str(tmp_path / "again"), "--json"]) == 0
    assert list(orjson.loads(capsys.readouterr().out)) == ["model", "tasks"]


def test_an_evaluation_without_a_score_ends_with_a_failed_episode_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Play(episodes=1, scored=0, reward=None, std=None, rate=False, failed=1, reason="1 x no room", versions=[])

    def evaluate(job: Job, out: Path, **_: object) -> RunResult:
        recorder = FileRecorder(out / FOLDER)
        recorder.played(played("eval0-sampled-maths", 0, reward=None))
        recorder.close()
        summary = summary_with(state="finished", evaluations={"eval0": {"maths": {"sampled": row}}})
        return RunResult(summary=summary, violations=[], deadlock=False, faults={})

    monkeypatch.setattr("rollart.launch.training.evaluate", evaluate)
    job = tmp_path / "job.yaml"
    job.write_bytes(orjson.dumps(JOB))
    assert main(["eval", str(job), "--out", str(tmp_path / "run")]) == 1
    text = capsys.readouterr().out
    assert "task 'maths': 1 of 1 episodes failed, most often 1 x no room" in text
    assert "eval0-sampled-maths.0.0  maths/7  failed" in text
    assert main(["eval", str(job), "--out", str(tmp_path / "again"), "--json"]) == 1
