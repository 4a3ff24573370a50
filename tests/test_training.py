"""`rollart train` refuses what it would otherwise ignore; its history is whole after a kill at any moment."""

import asyncio
import errno
import json
import os
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from msgspec.json import encode as json_encode

from rollart.config.load import build_job
from rollart.config.settings import WeightSettings
from rollart.control.coordinator import Coordinator
from rollart.errors import JobError, JobStopped
from rollart.events import schema
from rollart.events.log import EventLog, Reader, read_events
from rollart.events.schema import Event
from rollart.launch.checks import check_supported
from rollart.launch.real import stores_before
from rollart.launch.rundir import add_control, alone, newest_run, summary_again, trained_s, write_summary
from rollart.launch.training import LoggedFacts, complete_log, drive_real, harmless
from rollart.report.fold import SummaryFold
from rollart.report.summary import Failure, Play, Progress
from rollart.store.journal import FileJournal
from rollart.workers.setup import StoreSetup
from tests.contracts.trainer import checkpoint, empty_batch
from tests.control.scene import NoWorld
from tests.events import some
from tests.summaries import summary_with

JOB = {
    "name": "real",
    "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake"}],
    "pools": [{"name": "cpu", "engines": {"count": 1}}, {"name": "environments", "slots": 8}],
}


def test_a_group_that_was_reopened_after_the_checkpoint_that_holds_it_is_not_forgotten() -> None:
    """Killed while it resumes, the run finds such a group in its checkpoint, and may drop it before it is admitted."""
    held = {"ready": [], "open": ["g7"]}
    admitted = some(schema.Admit, group="g7", task="lake/1")
    summary = summary_with(
        some(schema.Run, tasks={"lake": some(schema.TaskFacts, share=1.0)}),
        admitted,
        some(schema.Checkpoint, step=1, **held),
        some(schema.Killed),
        some(schema.Resumed, step=1, checkpoint=1, **held),
        some(schema.Checkpoint, step=1, **held),
        admitted,
        some(schema.Killed),
        some(schema.Resumed, step=1, checkpoint=1, **held),
        some(schema.Group, group="g7", task="lake/1", how="surplus"),
    )
    assert (summary.groups.admitted, summary.groups.surplus, summary.groups.open) == (1, 1, 0)


PAIR_ON_CUDA = {"device": "cuda:0", "share": 0.48, "memory": 0.5, "prefill": {"share": 0.5, "memory": 0.3}}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"pools": [{"name": "cpu", "engines": {"most": 2}, "slots": 8}]}, "pools.cpu.engines.most"),
        ({"pools": [{"name": "cpu", "engines": {"gpus": 2}, "slots": 8}]}, "pools.cpu.engines.gpus"),
        ({"train": {"type": "single", "gpus": 2}}, "train.gpus"),
        ({"train": {"cores": [4096]}}, "train.cores"),
        ({"pools": [{"name": "cpu", "engines": {"cores": [4096]}, "slots": 8}]}, "pools.cpu.engines.cores"),
        (
            {"pools": [{"name": "cpu", "engines": {"type": "sglang"}, "slots": 8}], "train": {"lora": {}}},
            "train.lora",
        ),
        (
            {
                "pools": [{"name": "cpu", "engines": {"type": "vllm", "keep_kv": True}, "slots": 8}],
                "train": {"lora": {}},
            },
            "pools.cpu.engines.keep_kv",
        ),
        (
            {"pools": [{"name": "cpu", "engines": {"type": "vllm", "keep_kv": True, "prefill": {}}, "slots": 8}]},
            "pools.cpu.engines.keep_kv",
        ),
        *(
            ({"pools": [{"name": "cpu", "engines": engines, "slots": 8}]}, f"pools.cpu.engines.{key}")
            for engines, key in (
                ({"type": "sglang", "prefill": {}}, "prefill"),
                ({"prefill": {"workers": 2}}, "prefill.workers"),
                ({"prefill": {"decoders": 2}}, "prefill.decoders"),
                ({"prefill": {"gpus": 2}}, "prefill.gpus"),
                ({"prefill": {}, "keep_kv": True}, "keep_kv"),
                ({"prefill": {}, "draft_tokens": 4}, "prefill"),
            )
        ),
        (
            {
                "pools": [
                    {"name": "cpu", "engines": {"count": 1}, "slots": 8},
                    {"name": "other", "engines": {"prefill": {"pool": "cpu"}}},
                ]
            },
            "pools.other.engines.prefill.pool",
        ),
        (
            {
                "pools": [
                    {"name": "cpu", "engines": {"count": 1}, "slots": 8, "isolation": "inline"},
                    {"name": "environments", "slots": 8},
                ]
            },
            "tasks.0.isolation",
        ),
    ],
)
def test_a_setting_that_train_does_not_have_yet_is_refused_by_its_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(JobError, match=f"^{key}: "):
        check_supported(build_job({**JOB, **change}))


@pytest.mark.parametrize(
    ("agent", "change", "problem"),
    [
        ("nowhere:Mine", {}, "tasks.0.agent.use: nowhere:Mine: no module nowhere was found"),
        ("rollart.types:Status", {}, "tasks.0.agent.use: rollart.types:Status has no `async def play"),
        ({"command": ["no-such-program"]}, {}, "tasks.0.agent.command: no-such-program is not a program"),
        (
            {"function": "a:solve"},
            {"pools": [{"name": "cpu", "engines": {}, "slots": 8, "isolation": "inline"}]},
            "tasks.0.agent: a program does not run in RollArt's own process",
        ),
        ({"function": "a:solve"}, {"cluster": {"type": "ray"}}, "endpoint.host: 127.0.0.1 cannot be reached from"),
    ],
)
def test_an_agent_that_cannot_play_is_refused_before_the_run(
    agent: object, change: dict[str, object], problem: str
) -> None:
    raw = {**JOB, "tasks": [{"name": "lake", "use": "rollart.tasks.frozen_lake", "agent": agent}], **change}
    with pytest.raises(JobError) as caught:
        check_supported(build_job(raw))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"train": {"type": "fsdp2", "gpus": 2}},
        {"weights": {"type": "files"}},
        {"weights": {"type": "files"}, "pools": [{"name": "cpu", "engines": {"type": "vllm"}, "slots": 8}]},
        {"pools": [{"name": "cpu", "engines": {"type": "sglang"}, "slots": 8}]},
        {"pools": [{"name": "cpu", "engines": {"type": "vllm", "keep_kv": True}, "slots": 8}]},
        {"pools": [{"name": "cpu", "engines": {"type": "vllm"}, "slots": 8}], "train": {"lora": {}}},
        {"pools": [{"name": "cpu", "engines": {"prefill": {}}, "slots": 8}]},
        {"pools": [{"name": "cpu", "engines": PAIR_ON_CUDA, "slots": 8}], "cluster": {"type": "local"}},
    ],
)
def test_what_train_has_is_let_through(change: dict[str, object]) -> None:
    check_supported(build_job({**JOB, **change}))


@pytest.mark.parametrize(
    ("engines", "text"),
    [
        (
            {"type": "vllm", "cores": [0]},
            r"^pools\.0\.engines\.cores: has an effect only with engines\.type embedded; change",
        ),
        (
            {"type": "sglang", "keep_kv": True},
            r"^pools\.0\.engines\.keep_kv: has an effect only with engines\.type embedded or vllm",
        ),
        (
            {"type": "vllm", "step_tokens": 64},
            r"^pools\.0\.engines\.step_tokens: has an effect only with engines\.type embedded",
        ),
        (
            {"step_tokens": 255, "max_batch": 256},
            r"^pools\.0\.engines\.step_tokens: 255 is less than one token for each request",
        ),
        (
            {"python": "/usr/bin/python3"},
            r"^pools\.0\.engines\.python: has an effect only with engines\.type vllm or sglang",
        ),
        (
            {"type": "vllm", "url": "http://h:1", "count": 2},
            r"^pools\.0\.engines\.url: names one server; set count to 1",
        ),
        (
            {"type": "vllm", "url": "http://h:1", "prefill": {}},
            r"^pools\.0\.engines\.prefill: has an effect only with a server that is",
        ),
        (
            {"type": "vllm", "url": "http://h:1", "args": ["-x"]},
            r"^pools\.0\.engines\.args: has an effect only with a server that is",
        ),
        (
            {"prefill": {"connector": "x"}},
            r"^pools\.0\.engines\.prefill\.connector: has an effect only with engines\.type vllm",
        ),
        ({"type": "vllm", "prefill": {"memory": 0.2}}, r"^pools\.0\.engines\.prefill\.memory: is of embedded engines"),
        ({"type": "vllm", "prefill": {"share": 0.2}}, r"^pools\.0\.engines\.prefill\.share: is for embedded engines"),
        ({"prefill": {"memory": 0.2}}, r"^pools\.0\.engines\.prefill\.memory: is a share of a GPU's memory; on a CPU"),
        ({**PAIR_ON_CUDA, "share": None}, r"^pools\.0\.engines\.prefill\.share: .* set it and engines\.share"),
        ({**PAIR_ON_CUDA, "memory": 0.8}, r"^pools\.0\.engines\.prefill\.memory: 0\.3 beside 0\.8 to decode"),
        ({**PAIR_ON_CUDA, "memory": None, "kv_tokens": 64}, r"^pools\.0\.engines\.prefill\.memory: beside kv_tokens"),
    ],
)
def test_a_setting_that_its_kind_of_engine_does_not_read_is_refused(engines: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        build_job({**JOB, "pools": [{"name": "cpu", "engines": engines, "slots": 8}]})


def test_a_path_for_weights_that_are_no_files_is_refused() -> None:
    with pytest.raises(JobError, match=r"^weights\.path: has an effect only with weights\.type files"):
        build_job({**JOB, "weights": {"path": "/mnt/weights"}})


def completed(tmp_path: Path, *known: Event) -> list[Event]:
    """What is added to the events of a run that knows these, over a journal of checkpoint 1 and batches 1 and 2."""
    journal = FileJournal(tmp_path / "journal")
    for step in (1, 2):
        journal.write_batch(empty_batch(step))
    journal.commit(checkpoint(1))
    path = tmp_path / "events.jsonl"
    log = EventLog(lambda: 0.0, path)
    for event in known:
        log.emit(copy(event))
    log.flush()
    heard = LoggedFacts()
    for event in read_events(path):
        heard.read(event)
    complete_log(log, heard, journal)
    log.close()
    return [structs.replace(event, n=-1, t=-1.0) for event in read_events(path)][len(known) :]


COMMITTED = schema.Checkpoint(step=1, ready=[], open=["g7"])
WRITTEN = [schema.Written(step=1), schema.Written(step=2)]


def test_what_the_journal_knows_and_the_events_do_not_is_said_first(tmp_path: Path) -> None:
    assert completed(tmp_path / "all", COMMITTED, *WRITTEN) == []
    assert completed(tmp_path / "batch", COMMITTED, WRITTEN[0]) == [WRITTEN[1]]
    assert completed(tmp_path / "checkpoint", *WRITTEN) == [COMMITTED]
    other = schema.Checkpoint(step=1, ready=[], open=["g8"])
    assert completed(tmp_path / "older", other, *WRITTEN) == [COMMITTED]


RUN = some(schema.Run, t=0.0, tasks={"a": some(schema.TaskFacts, share=1.0)})
BATCH = schema.Batch(t=1.0, step=1, serving=1, groups=["g7"], tasks=["a/7"], born=[0], tokens=9)


@pytest.mark.parametrize(("was_written", "trained"), [(True, 1), (False, 0)])
def test_a_batch_that_was_formed_and_not_written_never_was(was_written: bool, trained: int) -> None:
    summary = SummaryFold()
    events: list[Event] = [
        schema.Admit(t=1.0, group="g7", task="a/7", serving=0),
        schema.Checkpoint(t=1.0, step=1, ready=["g7"], open=[]),
        BATCH,
        *([schema.Written(t=1.0, step=1)] if was_written else []),
        schema.Killed(t=1.0),
        schema.Resumed(t=1.0, step=1 + was_written, checkpoint=1, ready=["g7"], open=[], out=[]),
    ]
    for event in [RUN, *events]:
        summary.read(event)
    groups = summary.result().groups
    assert (groups.trained, groups.open, groups.trained_twice) == (trained, 1 - trained, 0)
    if not was_written:
        summary.read(structs.replace(BATCH, t=2.0))
        groups = summary.result().groups
        assert (groups.trained, groups.trained_twice) == (1, 0)


@pytest.mark.parametrize(
    ("ends", "restarts"),
    [
        ([], 1),
        ([schema.Interrupted(t=1.0, step=1)], 0),
        ([schema.Stopped(t=1.0, reason="at once", user=True)], 0),
    ],
)
def test_only_a_killed_coordinator_counts_as_a_restart(ends: list[Event], restarts: int) -> None:
    summary = SummaryFold()
    for event in [RUN, *ends, schema.Killed(t=2.0)]:
        summary.read(event)
    result = summary.result()
    assert (result.restarts.coordinator, result.failures["coordinator"].count) == (restarts, restarts)


def test_the_newest_unfinished_run_of_a_job_is_resumed(tmp_path: Path) -> None:
    for number, (name, state, trains) in enumerate(
        [("a", "interrupted", True), ("a", "", True), ("a", "finished", True), ("b", "", True), ("a", "", False)]
    ):
        out = tmp_path / f"run-{number}"
        (out / "journal").mkdir(parents=True)
        (out / "job.yaml").write_text(f"name: {name}\n")
        (out / "events.jsonl").touch()
        os.utime(out / "events.jsonl", (number, number))
        if state:
            (out / "summary.json").write_text(f'{{"state": "{state}"}}')
        if trains:
            (out / "journal" / "checkpoint").touch()
    assert newest_run("a", tmp_path) == tmp_path / "run-1"
    assert newest_run("b", tmp_path) == tmp_path / "run-3"
    with pytest.raises(JobError, match=r"--resume: no unfinished run of 'c' in .*; give its directory"):
        newest_run("c", tmp_path)


def test_a_run_without_events_comes_after_all_others(tmp_path: Path) -> None:
    for name in ("bare", "whole"):
        (tmp_path / name / "journal").mkdir(parents=True)
        (tmp_path / name / "job.yaml").write_text("name: a\n")
        (tmp_path / name / "journal" / "checkpoint").touch()
    assert newest_run("a", tmp_path).parent == tmp_path
    (tmp_path / "whole" / "events.jsonl").touch()
    assert newest_run("a", tmp_path) == tmp_path / "whole"


def test_a_run_directory_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(JobError, match="still running"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_a_watcher_that_breaks_is_told_of_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(event: Event) -> None:
        raise KeyError("no such task")

    read = harmless(broken)
    for _ in range(3):
        read(schema.Killed())
    assert capsys.readouterr().err.count("the run goes on: KeyError") == 1


def test_failures_are_counted_and_their_first_reasons_kept() -> None:
    summary = SummaryFold()
    for number in range(30):
        summary.read(schema.WorkerLost(t=0.0, worker="env-1", reason=f"signal {number % 7}" + "x" * 1000))
    failures = summary.result().failures
    assert failures["worker"].count == 30
    assert len(failures["worker"].reasons) == 5
    assert max(map(len, failures["worker"].reasons)) < 500
    assert failures["engine"] == Failure(count=0, reasons=[])


def test_a_run_knows_where_its_earlier_lives_left_weights(tmp_path: Path) -> None:
    first, second, third = (
        StoreSetup(weights=WeightSettings(), run_id=f"job-{number}", model="m") for number in (1, 2, 3)
    )
    assert stores_before(tmp_path, first) == []
    assert stores_before(tmp_path, second) == [first]
    assert stores_before(tmp_path, third) == [first, second]


def test_the_token_of_a_store_is_not_written_down(tmp_path: Path) -> None:
    setup = StoreSetup(weights=WeightSettings(type="tcp"), run_id="job-1", model="m", token="secret")
    stores_before(tmp_path, setup)
    assert all("secret" not in path.read_text() for path in tmp_path.iterdir())
    assert "secret" not in repr(setup)


def test_a_control_is_written_beside_before_and_after(tmp_path: Path) -> None:
    greedy = Progress(before=0.0, after=0.8, rate=True, episodes=4, scored=4)
    row = Progress(before=0.1, after=0.9, rate=True, episodes=4, scored=4, greedy=greedy)
    write_summary(tmp_path, summary_with(time_s=12.5, eval={"lake": row}))
    assert trained_s(tmp_path) == 12.5
    play = Play(episodes=4, scored=4, reward=0.2, std=0.0, rate=True, versions=[0, 0])
    add_control(tmp_path, {"lake": {"sampled": play, "greedy": structs.replace(play, reward=0.3)}})
    written = json.loads((tmp_path / "summary.json").read_text())["eval"]["lake"]
    assert (written["control"], written["greedy"]["control"]) == (0.2, 0.3)
    assert (written["before"], written["after"]) == (0.1, 0.9)


def test_a_run_without_a_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"has no summary .*; give the run directory of a finished job"):
        trained_s(tmp_path)


def test_a_summary_that_finds_no_room_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = summary_with(state="interrupted")
    (tmp_path / "events.jsonl").touch()
    write_summary(tmp_path, before)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollart.append.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, summary_with(state="finished"))
    assert sorted((path.name for path in tmp_path.iterdir()), reverse=True) == ["summary.json", "events.jsonl"]
    assert summary_again(tmp_path) == before


@pytest.mark.parametrize(("ends", "state"), [([], "running"), ([schema.Finished(t=2.0, steps=1)], "finished")])
def test_a_summary_that_is_not_whole_is_made_again_from_the_events(
    tmp_path: Path, ends: list[Event], state: str
) -> None:
    torn, other = tmp_path / "torn", tmp_path / "other"
    for out in (torn, other):
        (out / "journal").mkdir(parents=True)
        (out / "journal" / "checkpoint").touch()
        (out / "job.yaml").write_text(f"name: {out.name}\n")
        (out / "events.jsonl").write_bytes(b"".join(json_encode(event) + b"\n" for event in [RUN, *ends]))
    (torn / "summary.json").write_text('{"state": "fin')
    assert summary_again(torn).state == state
    assert newest_run("other", tmp_path) == other, "one such file is no other run's trouble"
    if state == "finished":
        with pytest.raises(JobError, match="no unfinished run"):
            newest_run("torn", tmp_path)
    else:
        assert newest_run("torn", tmp_path) == torn
    with pytest.raises(JobError, match=r"summary\.json: is not whole; `rollart show .*torn --json"):
        trained_s(torn)


def test_a_world_that_cannot_be_made_is_refused_and_no_run_that_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise JobError("weights.path: no lock can be had")

    monkeypatch.setattr("rollart.launch.training.real_world", refuse)
    with pytest.raises(JobError, match="no lock"):
        asyncio.run(drive_real(build_job(JOB), tmp_path, Coordinator.run, resume=None, watch=None))
    assert [type(event) for event in read_events(tmp_path / "events.jsonl")] == [schema.Run]


def test_why_a_run_stopped_is_known_before_its_workers_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending them may take long, or be cut short."""
    known: list[str] = []

    async def work(coordinator: Coordinator) -> None:
        raise JobStopped("it came so far")

    async def close() -> None:
        known.append(summaries[0].result().reason)

    summaries: list[SummaryFold] = []

    def watch(summary: SummaryFold, waits: object) -> Reader:
        summaries.append(summary)
        return lambda event: None

    real = SimpleNamespace(world=NoWorld(), close=close)
    monkeypatch.setattr("rollart.launch.training.real_world", lambda *args, **more: real)
    asyncio.run(drive_real(build_job(JOB), tmp_path, work, resume=None, watch=watch))
    assert known == ["it came so far"]
