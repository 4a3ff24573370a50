"""`rollart task check`: each fault is found and said, and only that one."""

import json
from pathlib import Path

import pytest

from rollart.cli import main
from rollart.tasks.check import check_task
from tests.tasks.test_load import ECHO

STEP = "return observe(reward=float(action.strip() == self.word), done=True)"
DRAW = 'return {"word": str(rng.randint(0, 999))}'

FAULTS = {
    "not deterministic": (STEP, "import random; return observe(reward=random.random(), done=True)"),
    "did not end within": (STEP, "return 'again'"),
    "has no text": ('return f"Say {self.word}."', "return ''"),
    "finite number": (STEP, "return observe(reward=float('nan'), done=True)"),
    "step(action) returned NoneType": (STEP, "pass"),
    "step(action) raised KeyError: 'x'": (STEP, "raise KeyError('x')"),
    "did not return within": (STEP, "import time; time.sleep(60)"),
    "over at reset()": ('return f"Say {self.word}."', "return observe(done=True)"),
    "differs between two task sets": (DRAW, 'import random; return {"word": str(random.random())}'),
    "seed changes nothing": (DRAW, 'self.i = getattr(self, "i", 0) + 1; return {"word": str(self.i)}'),
    "not made of JSON values": (DRAW, 'return {"word": str(rng.randint(0, 999)), "more": (1, 2)}'),
    "also training problems": (
        "    def environment",
        "    def held_out(self, index): return self.task(index)\n    def environment",
    ),
    "prints to stdout": (STEP, f"print('hello'); {STEP}"),
    "scripted player fails": ('return task.payload["word"]', 'return rng.choice([task.payload["word"], "", "x"])'),
    "earns no more than": ('return task.payload["word"]', 'return "wrong"'),
    "no scripted player": ("def scripted", "def clever"),
    "is slow": (STEP, f"import time; time.sleep(0.06); {STEP}"),
    "score(episode): the reward function": ("class Echo(", "def score(episode): return None\n\nclass Echo("),
    "gives another reward": (
        "class Echo(",
        "import itertools\nn = itertools.count()\ndef score(episode): return next(n)\n\nclass Echo(",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_found(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.tasks.check.SLOW_STEP_S", 0.05)
    good, bad = FAULTS[fault]
    assert good in ECHO
    path = tmp_path / "broken.py"
    path.write_text(ECHO.replace(good, bad))
    findings = check_task(str(path), call_limit_s=1.0).findings
    assert any(fault in finding.text for finding in findings), findings
    assert len(findings) <= 2


def test_a_sound_file_has_no_findings(tmp_path: Path) -> None:
    path = tmp_path / "sound.py"
    path.write_text(ECHO)
    assert check_task(str(path)).findings == []
    path = tmp_path / "sound_async.py"
    path.write_text(ECHO.replace("def reset", "async def reset").replace("def step", "async def step"))
    assert check_task(str(path)).findings == []


def test_steps_after_done(tmp_path: Path) -> None:
    path = tmp_path / "ghost.py"
    path.write_text(
        ECHO.replace(STEP, f"self.n = getattr(self, 'n', 0) + 1\n        if self.n > 1: return 'more'\n        {STEP}")
    )
    assert ["after done goes on" in finding.text for finding in check_task(str(path)).findings] == [True]


def test_a_missing_file_is_one_finding() -> None:
    assert [finding.level for finding in check_task("no_such_file.py").findings] == ["error"]


def test_one_episode_comes_with_the_check(tmp_path: Path) -> None:
    path = tmp_path / "sound.py"
    path.write_text(ECHO + "\n\ndef score(episode): return {'said': episode.reward, 'more': 0.5}\n")
    play = check_task(str(path)).example
    assert play is not None
    assert play.who == "the scripted player"
    assert play.actions == [play.task.payload["word"]]
    assert (play.reward, play.parts) == (1.5, {"said": 1.0, "more": 0.5})


def test_the_episode_that_broke_is_the_one_to_look_at(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(ECHO.replace(STEP, "raise KeyError('x')"))
    play = check_task(str(path)).example
    assert play is not None
    assert (len(play.observations), len(play.actions), play.ended, play.reward) == (1, 1, False, None)


def test_the_command_shows_the_episode_and_then_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "sound.py"
    path.write_text(ECHO)
    assert main(["task", "check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the scripted player  sound/0  done  reward 1\n--- turn 0\n[user] Say " in said
    assert said.endswith("nothing is wrong with it\n")
    path = tmp_path / "broken.py"
    path.write_text(ECHO.replace(STEP, "raise KeyError('x')"))
    assert main(["task", "check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "broken off  no reward\n--- turn 0\n[user] Say " in said
    assert said.splitlines()[-1].startswith("error: step(action) raised KeyError")


@pytest.mark.parametrize(
    ("bad", "how"),
    [
        ("import os; os._exit(3)", "(exit code 3)"),
        ("import os; os._exit(0)", "(exit code 0)"),
        ("import os; os.kill(os.getpid(), 11)", "(signal SIGSEGV)"),
    ],
)
def test_a_task_that_ends_its_process_is_told(
    bad: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deadly.py").write_text(ECHO.replace(STEP, bad))
    assert main(["task", "check", str(tmp_path / "deadly.py")]) == 1
    assert capsys.readouterr().out.startswith(f"error: step(action) ended its process {how}")
    assert main(["task", "check", str(tmp_path / "deadly.py"), "--json"]) == 1
    assert [finding["level"] for finding in json.loads(capsys.readouterr().out)] == ["error"]


def test_a_file_that_ends_its_process_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(0)")
    assert main(["task", "check", str(tmp_path / "deadly.py")]) == 1
    assert capsys.readouterr().out.startswith("error: loading it ended its process (exit code 0)")
