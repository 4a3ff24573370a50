"""A run goes on with other settings: which may change, from when on, and what a later replay is trained under."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.config.changes import UNDECIDED, Acts, Fixed, differences, rule_of
from rollart.config.job import Job
from rollart.config.load import build_job, load_job
from rollart.config.paths import settings_in
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import EventLog, read_events
from rollart.events.schema import Event
from rollart.launch.driver import facts
from rollart.launch.resume import Resumption, resumption, write_job
from rollart.launch.training import LoggedFacts, tell_changes
from rollart.report.audit import Audit
from rollart.report.fold import SummaryFold
from rollart.store.journal import FileJournal
from tests.contracts.trainer import checkpoint, empty_batch

RAW: dict[str, Any] = {
    "name": "job",
    "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake", "max_tokens": 64}],
    "pools": [
        {"name": "cpu", "hardware": "h20", "cost": 2.0, "engines": {"count": 2}},
        {"name": "rooms", "slots": 8},
    ],
    "train": {"steps": 20, "lr": 0.1},
}


def rules(settings: Any, at: str = "", inherited: Acts | Fixed = UNDECIDED) -> Iterator[tuple[str, Acts | Fixed]]:
    """Every key of a job that has none below it, and whether it may change."""
    for name, field in settings.model_fields.items():
        rule, below = rule_of(field, inherited), settings_in(field.annotation)
        if below is None or name == "latency":
            yield f"{at}{name}", rule
        else:
            yield from rules(below, f"{at}{name}.", rule)


RULES = dict(rules(Job))


def test_every_key_says_whether_a_run_may_change_it() -> None:
    undecided = [key for key, rule in RULES.items() if rule is UNDECIDED]
    assert undecided == [], "mark them Anytime, FromNextStep or Fixed, in rollart/config"


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("train.steps", Acts.NEXT_STEP),
        ("train.lr", Acts.NEXT_STEP),
        ("limits.generate_s", Acts.AT_ONCE),
        ("evaluation.every", Acts.AT_ONCE),
        ("pools.engines.count", Acts.AT_ONCE),
        ("pools.slots", Acts.AT_ONCE),
        ("track.wandb", Acts.AT_ONCE),
        ("checkpoint.every", Acts.AT_ONCE),
        ("tasks.max_tokens", Acts.AT_ONCE),
    ],
)
def test_what_a_user_wants_to_change_may_change(key: str, rule: Acts) -> None:
    assert RULES[key] is rule


@pytest.mark.parametrize(
    "key", ["name", "seed", "mode", "model.path", "tasks.temperature", "tasks.group_size", "rollout.staleness"]
)
def test_what_the_journal_depends_on_is_fixed(key: str) -> None:
    assert isinstance(RULES[key], Fixed)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Stopped with a checkpoint of step 4, and the batches of steps 4 and 5 since."""
    out = tmp_path / "run"
    out.mkdir()
    write_job(out, build_job(RAW))
    journal = FileJournal(out / "journal")
    journal.commit(checkpoint(4))
    for step in (4, 5):
        journal.write_batch(empty_batch(step))
    return out


def changed(resume: Resumption) -> list[str]:
    return [str(change) for change in resume.changes]


def test_a_model_that_was_moved_is_given_by_the_runs_own_job(run: Path) -> None:
    with pytest.raises(JobError, match=r"model\.path: .* only moved, correct its path in RUN/job\.yaml$"):
        resumption(run, overrides=["model.path=/moved"])
    write_job(run, build_job({**RAW, "model": {**RAW.get("model", {}), "path": "/moved"}}))
    assert resumption(run).job.model.path == "/moved"


@pytest.mark.parametrize("name", ["job.yaml", "job-until-00000006.yaml"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: job\ntasks: [\n", "line 3: not valid YAML"),
        (b"- name\n", ": a job file is a mapping of keys"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_a_job_of_a_run_that_cannot_be_read_is_one_line(run: Path, name: str, content: bytes, says: str) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(JobError, match=rf"^(--resume: )?{re.escape(str(run / name))} ?{says}"):
        resumption(run)


def test_a_run_goes_on_as_it_was(run: Path) -> None:
    resume = resumption(run)
    assert (resume.job, resume.changes, resume.step, resume.earlier) == (build_job(RAW), (), 6, ())
    resume.keep()
    assert sorted(path.name for path in run.iterdir()) == ["job.yaml", "journal"]


def test_what_is_changed_acts_after_the_replay(run: Path) -> None:
    resume = resumption(run, overrides=["train.lr=0.5", "train.microbatch_tokens=99", "pools.cpu.engines.count=3"])
    assert changed(resume) == [
        "pools.cpu.engines.count: 2 -> 3",
        "train.lr: 0.1 -> 0.5",
        "train.microbatch_tokens: 4096 -> 99",
    ]
    assert (resume.step, resume.job.train.lr) == (6, 0.5)
    [(until, earlier)] = resume.earlier
    assert until == 6
    assert (earlier.train.lr, earlier.train.microbatch_tokens) == (0.1, 99), "rounding may differ, memory must fit"


def test_a_second_resume_replays_each_step_under_its_own_settings(run: Path) -> None:
    resumption(run, overrides=["train.lr=0.5"]).keep()
    FileJournal(run / "journal").write_batch(empty_batch(6))  # killed at once: the checkpoint is still that of step 4
    again = resumption(run)
    assert (again.changes, again.step, again.job.train.lr) == ((), 7, 0.5)
    assert [(until, job.train.lr) for until, job in again.earlier] == [(6, 0.1)]
    third = resumption(run, overrides=["train.lr=0.7"])
    third.keep()
    assert [(until, job.train.lr) for until, job in third.earlier] == [(6, 0.1), (7, 0.5)]
    assert [(until, job.train.lr) for until, job in resumption(run).earlier] == [(6, 0.1), (7, 0.5)]
    FileJournal(run / "journal").commit(checkpoint(7))
    assert resumption(run).earlier == (), "nothing of theirs will be replayed"


def test_the_jobs_of_a_run_are_kept(run: Path) -> None:
    resumption(run, overrides=["train.lr=0.5"]).keep()
    assert (load_job(run / "job.yaml").train.lr, load_job(run / "job-until-00000006.yaml").train.lr) == (
        0.5,
        0.1,
    )
    resumption(run, overrides=["train.lr=0.6"]).keep()
    assert (load_job(run / "job.yaml").train.lr, load_job(run / "job-until-00000006.yaml").train.lr) == (
        0.6,
        0.1,
    ), "nothing was trained under the one between"
    assert [(until, job.train.lr) for until, job in resumption(run).earlier] == [(6, 0.1)]


def test_a_kill_while_a_change_is_kept_does_no_harm(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(out: Path, job: Job) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rollart.launch.resume.write_job", killed)
        with pytest.raises(KeyboardInterrupt):
            resumption(run, overrides=["train.lr=0.5"]).keep()
    resume = resumption(run)
    assert (resume.changes, resume.job.train.lr) == ((), 0.1)
    assert [(until, job.train.lr) for until, job in resume.earlier] == [(6, 0.1)]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("seed=3", r"seed: 0 -> 3 \(tasks and draws follow from it\)"),
        ("rollout.staleness=2", r"rollout.staleness: 1 -> 2 \(groups under way were admitted under it\)"),
        ("tasks.lake.group_size=4", r"tasks.lake.group_size: 8 -> 4 \(the journal and the open groups hold its tasks"),
        ("tasks.lake.name=sea", r"tasks.lake: .* -> none \("),
        ("train.bf16=true", r"train.bf16: False -> True \(the checkpoint holds"),
        ("train.steps=5", r"^train.steps: 5, but .* has trained 6 already; give 6 or more"),
    ],
)
def test_what_cannot_change_is_refused_by_name_with_the_reason(run: Path, override: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        resumption(run, overrides=[override, "limits.step_s=9"])


def test_a_run_may_get_more_pools_and_lose_some() -> None:
    other = {**RAW, "pools": [RAW["pools"][0], {"name": "more", "slots": 4}]}
    found = differences(build_job(RAW), build_job(other))
    assert [(change.key, change.rule) for change in found] == [
        ("pools.rooms", Acts.AT_ONCE),
        ("pools.more", Acts.AT_ONCE),
    ]


def told(tmp_path: Path, resume: Resumption, known: Job) -> list[schema.Changed]:
    log = EventLog(lambda: 0.0, tmp_path / "events.jsonl")
    log.emit(facts(known, clock="real"))
    log.flush()
    heard = LoggedFacts()
    for event in read_events(tmp_path / "events.jsonl"):
        heard.read(event)
    tell_changes(log, heard, resume)
    log.close()
    said = list(read_events(tmp_path / "events.jsonl"))[1:]
    changes = [event for event in said if isinstance(event, schema.Changed)]
    assert changes == said
    return changes


def test_an_event_says_what_changed_and_none_where_nothing_did(run: Path, tmp_path: Path) -> None:
    resume = resumption(run, overrides=["train.lr=0.5", "pools.cpu.engines.count=3"])
    [event] = told(tmp_path, resume, build_job(RAW))
    assert event.step == 6
    assert event.changes == {"pools.cpu.engines.count": schema.Change(2, 3), "train.lr": schema.Change(0.1, 0.5)}
    assert event.job.pools["cpu"].engines == 3
    (tmp_path / "events.jsonl").unlink()
    assert told(tmp_path, resumption(run), build_job(RAW)) == []


def test_a_change_that_was_kept_and_not_said_is_said_by_the_next_resume(run: Path, tmp_path: Path) -> None:
    resumption(run, overrides=["pools.cpu.engines.count=3"]).keep()
    [event] = told(tmp_path, resumption(run), build_job(RAW))
    assert event.job.pools["cpu"].engines == 3


def test_what_was_reserved_before_and_after_a_change_is_told_apart() -> None:
    before, after = (
        build_job(RAW),
        build_job({**RAW, "pools": [{**RAW["pools"][0], "engines": {"count": 4}}, *[{"name": "rooms", "slots": 8}]]}),
    )
    summary, audit = SummaryFold(), Audit()
    events: list[Event] = [
        facts(before, clock="real"),
        schema.Changed(step=6, changes={}, job=facts(after, clock="real")),
        schema.Warning(text=""),
    ]
    for number, event in enumerate(events):
        event.n, event.t = number, 3600.0 * number
        for reader in (summary.read, audit.read):
            reader(event)
    result = summary.result()
    assert result.cost.pools["cpu"] == pytest.approx(2.0 * (2 + 4))
    assert result.pools["cpu"].engines == 4
    assert result.cost.train == pytest.approx(2 * 2.0)
