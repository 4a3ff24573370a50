"""Whole jobs on the virtual clock: determinism, the staleness matrix, the five modes, the shares."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollart.config.job import Job
from rollart.config.load import load_job
from rollart.config.settings import MODES
from rollart.events import schema
from rollart.events.log import read_events
from rollart.launch import chaos
from rollart.launch.books import RunResult
from rollart.launch.chaos import plan_job
from rollart.launch.pools import build_affinity, kv_bound
from rollart.launch.simulation import simulate
from rollart.report.summary import Summary
from rollart.sim.faults import draw_plan

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "chaos.yaml"
MODES_JOB = ROOT / "jobs" / "modes.yaml"
SMALL = ("train.steps=6", "checkpoint.every=3")


def job(*overrides: str) -> Job:
    return load_job(JOB, [*SMALL, *overrides])


def with_faults(one: Job, seed: int) -> Job:
    return one.model_copy(update={"sim": one.sim.model_copy(update={"faults": draw_plan(one.sim.chaos, seed)})})


def finished(result: RunResult) -> Summary:
    assert result.summary.state == "finished", result.summary.reason
    assert result.violations == []
    assert not result.deadlock
    assert result.summary.groups.lost == 0
    assert result.summary.groups.trained_twice == 0
    return result.summary


def test_a_bound_on_an_engines_cache_holds_in_the_simulator_and_for_affinity() -> None:
    """48 trajectories of about 2,700 tokens, and room for two."""
    tokens = "sim.tasks={digits: {turns: 4, prompt_tokens: 1000, observation_tokens: 500, answer_tokens: 32}}"
    changes = ["mode=sync+", "train.steps=3", "model.context_tokens=4096", "pools.0.hardware=h20", tokens]
    free, bounded = (load_job(MODES_JOB, [*changes, f"pools.0.engines.kv_tokens={room}"]) for room in (65_536, 6000))
    assert build_affinity(bounded, bounded.sim.shape).pools[0].costs.kv_tokens == 6000
    assert kv_bound(load_job(MODES_JOB).pools[0]) == 65_536
    assert kv_bound(load_job(ROOT / "jobs" / "sim_3072.yaml").pools[0]) is None, "as much as there is memory for"
    busy_s = [
        one.pools["cpu"].utilisation * one.time_s for one in (finished(simulate(job, None)) for job in (free, bounded))
    ]
    assert busy_s[1] > 1.3 * busy_s[0], "prompts are computed again"


def test_a_trainer_that_skips_groups_of_equal_rewards_takes_no_time_for_them(tmp_path: Path) -> None:
    """None succeeds."""
    played = "prompt_tokens: 40, observation_tokens: 20, answer_tokens: 4, success: 0.0, success_gain: 0.0"
    hopeless = f"sim.tasks={{digits: {{{played}}}}}"
    tokens = {}
    for how in ("skip", "keep"):
        one = load_job(MODES_JOB, ["mode=sync+", "train.steps=2", hopeless, f"rollout.zero_variance={how}"])
        finished(simulate(one, tmp_path / how))
        ends = [event for event in read_events(tmp_path / how / "events.jsonl") if isinstance(event, schema.StepEnd)]
        tokens[how] = sum(event.metrics["perf/tokens"] or 0.0 for event in ends)
    assert tokens["skip"] == 0 < tokens["keep"]


# --- determinism --------------------------------------------------------------------------------------------------


def sim_in_a_process(out: Path, cwd: Path, hash_seed: str, seed: int, **extra: str) -> bytes:
    environment = {**os.environ, **extra, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    overrides = [
        "train.steps=4",
        f"seed={seed}",
        "sim.faults=[{kind: engine_death, swap: 2}, {kind: env_hang, at_s: 20}]",
    ]
    subprocess.run(
        [sys.executable, "-m", "rollart.cli", "sim", str(JOB), *overrides, "--out", str(out)],
        cwd=cwd,
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return (out / "events.jsonl").read_bytes()


def test_the_same_job_and_seed_write_the_same_bytes_whatever_surrounds_them(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = sim_in_a_process(tmp_path / "first", ROOT, "1", 5)
    second = sim_in_a_process(tmp_path / "second", elsewhere, "4242", 5, ROLLART_X="1", TZ="Asia/Tokyo", LANG="C")
    assert len(first) > 100_000
    assert first == second
    another = sim_in_a_process(tmp_path / "another", ROOT, "1", 6)
    assert another != first


def test_a_run_directory_holds_what_the_run_came_to(tmp_path: Path) -> None:
    said: list[str] = []
    result = simulate(job(), tmp_path / "run", progress=said.append)
    summary = finished(result)
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event.n for event in events] == list(range(len(events)))
    assert sum(isinstance(event, schema.StepEnd) for event in events) == summary.steps == 6
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6
    assert load_job(tmp_path / "run" / "job.yaml") == job()


# --- the staleness matrix -----------------------------------------------------------------------------------------

MATRIX = [
    pytest.param(0, ("mode=sync+",), id="0-between_batches"),
    *(
        pytest.param(bound, (f"rollout.staleness={bound}", *overrides), id=f"{bound}-{name}")
        for bound in (1, 3)
        for name, overrides in (
            ("after_batch", ()),
            ("when_published", ("rollout.swap=when_published",)),
            ("rolling", ("rollout.rolling=2",)),
        )
    ),
]


@pytest.mark.parametrize("faults", [None, 11], ids=["quiet", "faults"])
@pytest.mark.parametrize(("bound", "overrides"), MATRIX)
def test_nothing_older_than_the_bound_is_trained_on(
    bound: int, overrides: tuple[str, ...], faults: int | None, tmp_path: Path
) -> None:
    one = job("train.steps=8", *overrides)
    if faults is not None:
        one = with_faults(one, faults + bound)
    result = simulate(one, tmp_path / "run")
    summary = finished(result)
    staleness = summary.staleness
    assert staleness.max <= bound
    assert staleness.max_steps <= bound + 1
    if bound == 0:
        assert set(staleness.histogram) == {"0"}
        return
    assert staleness.in_flight_over_swaps > 0
    if faults is None:
        assert trained_on_across_a_swap(tmp_path / "run" / "events.jsonl"), "work in flight over a swap is trained on"


def trained_on_across_a_swap(path: Path) -> set[str]:
    """Groups that were trained on and have a trajectory whose tokens are of two versions."""
    versions: dict[str, set[int]] = {}
    trained: set[str] = set()
    members: dict[str, list[str]] = {}
    for event in read_events(path):
        match event:
            case schema.Said():
                session = event.id.rpartition("/")[0]
                versions.setdefault(session, set()).update(version for version, _ in event.spans)
            case schema.Ready():
                members[event.group] = event.members
            case schema.Batch():
                trained.update(event.groups)
    return {group for group in trained if any(len(versions[member]) > 1 for member in members[group])}


SLOW_GAME = ("sim.tasks.game.step_s={kind: lognormal, mean: 6, sigma: 1, high: 40}",)


def test_checking_the_bound_only_at_the_start_lets_older_work_through() -> None:
    areal = simulate(job("mode=areal", "train.steps=10", "tasks.0.weight=1", *SLOW_GAME)).summary
    assert areal.state == "finished"
    assert areal.staleness.bound == 1
    assert areal.staleness.max > 1


def test_the_same_job_with_the_bound_kept_live_keeps_it() -> None:
    summary = finished(simulate(job("train.steps=10", "tasks.0.weight=1", "rollout.swap=when_published", *SLOW_GAME)))
    assert summary.staleness.max <= 1


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("faults", [None, 3], ids=["quiet", "faults"])
def test_each_mode_finishes_and_keeps_its_promises(mode: str, faults: int | None) -> None:
    one = job(f"mode={mode}")
    summary = finished(simulate(one if faults is None else with_faults(one, faults)))
    assert (summary.mode, summary.steps) == (mode, 6)


def test_the_shares_hold_at_consumption_though_one_task_is_slow() -> None:
    slow = "sim.tasks.game.step_s={kind: lognormal, mean: 8, sigma: 1, high: 40}"
    summary = finished(simulate(job("train.steps=12", "rollout.staleness=3", slow)))
    for name, share in (("game", 2 / 3), ("maths", 1 / 3)):
        assert summary.tasks[name].trained_share == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_task_that_turns_out_to_need_another_pool_is_moved_there_and_its_trajectories_follow(
    tmp_path: Path, seed: int
) -> None:
    """`game` decodes much, `maths` prefills much: each ends on the hardware that is good at it. So much that no draw of
    theirs decides: with answers of 300 tokens both on `compute` are predicted within 5 % of this."""
    measured = (
        f"seed={seed}",
        "tasks.0={name: game, group_size: 4, max_turns: 12, max_tokens: 2048}",
        "tasks.1={name: maths, group_size: 4, max_turns: 4}",
        "sim.tasks.game.answer_tokens=900",
        'pools.2.judge={listen: "127.0.0.1:8123"}',
        "pools.0.engines.count=2",
        "sim.tasks.maths.prompt_tokens=20000",
        "sim.tasks.maths.answer_tokens=20",
        "limits.generate_s=1000",
        "rollout.staleness=3",
    )
    finished(simulate(job(*measured), tmp_path / "run"))
    looks = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, schema.Affinity)]
    assert [event.moves for event in looks if event.moves]
    assert looks[-1].plan == {"game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    starts = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, schema.Start)]
    where = {event.task.split("/")[0]: event.pool for event in starts}
    assert where == {"game": "bandwidth", "maths": "compute"}


def test_the_members_of_a_group_stay_together_whatever_the_shares(tmp_path: Path) -> None:
    auto = ("tasks.0.affinity=auto", "tasks.1.affinity=auto")
    finished(simulate(job(*auto), tmp_path / "run"))
    pools: dict[str, set[str]] = {}
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        if isinstance(event, schema.Start):
            pools.setdefault(event.id.split(".")[0], set()).add(event.pool)
    assert {len(names) for names in pools.values()} == {1}
    assert {name for names in pools.values() for name in names} == {"compute", "bandwidth"}


def test_a_task_can_change_in_the_middle_of_a_run(tmp_path: Path) -> None:
    shift = "sim.tasks.game.shift={after_s: 60, answer_tokens: 77}"
    finished(simulate(job("train.steps=8", "sim.tasks.game.answer_tokens=33", shift), tmp_path / "run"))
    sent: dict[str, float] = {}
    game: set[str] = set()
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        if isinstance(event, schema.Start) and event.task.startswith("game"):
            game.add(event.id)
        elif isinstance(event, schema.Send):
            sent[event.id] = event.t
        elif isinstance(event, schema.Said) and event.id.rpartition("/")[0] in game:
            assert event.tokens == (77 if sent[event.id] >= 60 else 33)
    assert min(sent.values()) < 60 < max(sent.values())


@pytest.mark.parametrize("seed", [0, 7, 22, 35])
def test_drawn_fault_plans_break_no_promise(seed: int) -> None:
    finished(simulate(plan_job(JOB, SMALL, seed)))


def test_environments_that_fail_and_hang_by_themselves_are_lived_with() -> None:
    broken = ("sim.tasks.game.failure=0.1", "sim.tasks.maths.hang=0.03")
    summary = finished(simulate(job(*broken)))
    assert summary.trajectories["failed"] > 0


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_slow_tail_is_lived_with(call: str) -> None:
    finished(simulate(job(f"sim.tasks.game.{call}_tail=0.1", f"sim.tasks.game.{call}_tail_s=50")))


def test_a_killed_coordinator_still_counts_every_step_it_made() -> None:
    faults = "sim.faults=[{kind: coordinator_restart, swap: 2, delay_s: 6}]"
    summary = finished(simulate(job(faults)))
    assert summary.restarts.coordinator == 1
    assert summary.steps == 6


@pytest.mark.parametrize("seed", [913, 3681, 7049])
def test_plans_that_once_broke_a_promise(seed: int) -> None:
    """A task back while much of it is alive; two outages of one task that overlap; a trainer lost in a repair."""
    finished(simulate(plan_job(JOB, (), seed)))


def test_a_plan_that_loops_for_ever_is_ended_and_one_that_was_paused_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PLAN_LIMIT_S", 0.2)
    before = signal.getsignal(signal.SIGPROF)

    def loops(*_: object) -> None:
        while True:
            pass

    def paused(*_: object) -> None:
        time.sleep(0.5)
        raise ValueError("after the pause")

    try:
        for run, text in ((loops, "0.2 CPU seconds: an endless loop"), (paused, "after the pause")):
            monkeypatch.setattr(chaos, "plan_job", lambda *_: None)
            monkeypatch.setattr(chaos, "simulate", run)
            row = chaos.run_plan((JOB, (), 0, None))
            assert row.counts == {"violations": 1}
            assert text in row.text
    finally:
        signal.signal(signal.SIGPROF, before)


def test_where_transfers_block_a_step_takes_them_as_well() -> None:
    """The push takes 4 s and the pull as long; without overlap all stands still for both."""
    settings = ("mode=areal", "train.steps=8", "sim.links.push_gb_s=4", "sim.links.pull_gb_s=4")
    free, blocked = (
        finished(simulate(job(*settings, f"sim.links.blocking={blocking}"))) for blocking in ("false", "true")
    )
    assert blocked.weights.exposed_s > free.weights.exposed_s + 3.0
    assert blocked.step_time_s.p50 > free.step_time_s.p50 + 2.5


def test_engines_that_pull_at_once_share_what_the_store_gives() -> None:
    alone, shared = (
        finished(simulate(job("mode=sync+", "train.steps=3", "sim.links.pull_gb_s=8", *more)))
        for more in ((), ("sim.links.shared_pull_gb_s=10",))
    )
    assert shared.weights.pull_s == pytest.approx(4 * alone.weights.pull_s, rel=0.01), "five engines, 2 GB/s each"


LONG_TAIL = ("sim.tasks.maths.answer_tokens={kind: lognormal, mean: 1500, sigma: 1.2}", "train.steps=12")


def test_late_groups_are_aborted_or_waited_for_and_the_bound_holds_for_both() -> None:
    aborted = finished(simulate(job(*LONG_TAIL)))
    waited = finished(simulate(job(*LONG_TAIL, "rollout.late=wait")))
    assert aborted.groups.stale > 0
    assert waited.groups.stale == 0
    assert waited.staleness.max == waited.staleness.bound == 1
