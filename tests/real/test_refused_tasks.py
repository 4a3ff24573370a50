"""A real job with a task whose observations the real chat template refuses, or whose problems cannot be drawn."""

from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.launch.training import train
from tests.real.harness import TASKS, job

REFUSING = """
from rollart.tasks.api import Environment, TaskSet, observe

class Narrated(Environment):
    def reset(self):
        return "Say yes."
    def step(self, action):
        return observe("meanwhile", role={role!r})

class NarratedTasks(TaskSet):
    quick = True
    drawn = 0
    def draw(self, rng):
        self.drawn += 1
        if {breaks} and self.drawn > 3:
            raise OSError("the data set is away")
        return {{"number": rng.randrange(10**9)}}
    def environment(self, task):
        return Narrated()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "words"), [(False, "the chat template refuses messages"), (True, "OSError: the data set is away")]
)
def test_the_other_task_is_trained_on_and_the_summary_says_why(
    model: Path, tmp_path: Path, breaks: bool, words: str
) -> None:
    strict = strict_model(model, tmp_path / "model")
    bad = tmp_path / "narrated.py"
    bad.write_text(REFUSING.format(role="narrator", breaks=breaks))
    raw: dict[str, Any] = job(
        strict,
        tasks=[
            {"name": "good", "use": TASKS, "group_size": 4, "max_turns": 3, "max_tokens": 4},
            {"name": "bad", "use": str(bad), "group_size": 2, "max_turns": 3, "max_tokens": 4},
        ],
        rollout={"groups_per_step": 4, "zero_variance": "skip"},
        pools=[
            {"name": "cpu", "engines": {"count": 1, "max_batch": 32, "kv_tokens": 8192}},
            {"name": "environments", "slots": 8, "isolation": "inline"},
        ],
        train={"pool": "cpu", "steps": 3, "lr": 1e-3},
        limits={"backoff_s": 0.05, "attempts": 2},
    )
    result = train(build_job(raw), tmp_path / "run")
    summary = result.summary
    assert summary.state == "finished", summary.reason
    assert result.violations == []
    row = summary.tasks["bad"]
    assert (row.trained, row.taken_out) == (0, 1)
    assert any(words in reason for reason in row.reasons), row.reasons
    assert summary.tasks["good"].trained == 12


def strict_model(model: Path, folder: Path) -> Path:
    """The same model, with a template that knows three roles."""
    import shutil

    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('unknown role ' + message.role) }}{% endif %}{% endfor %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(str(folder))
    return folder
