"""`rollart plan` and `rollart sim --sweep`: what they find is what the simulator finds."""

import copy
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import main
from rollart.config.load import build_job, load_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.launch.plan import make_plan
from rollart.launch.simulation import simulate
from rollart.launch.splits import Splits, read_limits
from rollart.launch.sweep import run_sweep
from rollart.launch.trials import at_half
from rollart.report.charts import bars
from rollart.report.reports import PlanReport, Played
from rollart.types import ParsedJson

JOB: dict[str, Any] = {
    "name": "planned",
    "tasks": [
        {"name": "game", "group_size": 4, "max_turns": 12},
        {"name": "maths", "group_size": 4, "max_turns": 4, "max_tokens": 4096},
    ],
    "rollout": {"groups_per_step": 8, "zero_variance": "keep"},
    "pools": [
        {"name": "compute", "hardware": "h800", "engines": {"type": "vllm", "count": 6}},
        {"name": "bandwidth", "hardware": "h20", "engines": {"type": "vllm", "count": 2}},
        {"name": "trainers", "hardware": "h800"},
        {"name": "environments", "slots": 256},
    ],
    "train": {"pool": "trainers", "gpus": 2, "steps": 3},
    "sim": {
        "links": {"push_gb_s": 50, "pull_gb_s": 50},
        "train": {"fixed_s": 0.1},
        "tasks": {
            "game": {"turns": 8, "prompt_tokens": 3000, "observation_tokens": 2000, "answer_tokens": 30, "step_s": 0.1},
            "maths": {"turns": 1, "answer_tokens": 2500, "step_s": 0.1},
        },
    },
}


def plan(pools: str = "h800=0..8,h20=0..4", **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "budget": None,
        "goal": "step-time",
        "best": 2,
        "seeds": 1,
        "workers": 1,
        "settings": (),
    }
    raw = changes.pop("raw", JOB)
    return make_plan(build_job(raw), pools, **{"progress": lambda _: None, **defaults, **changes})


def test_a_split_at_least_as_good_as_the_job_s_is_found_within_the_limits() -> None:
    report = plan()
    best = report.best[0]
    assert best.step_s < 0.9 * report.as_it_is.step_s, "two GPUs train, six roll out: training is what a step takes"
    assert report.as_it_is.bottleneck == "training"
    assert best.train_gpus > 2
    assert best.train_gpus + best.pools["compute"] <= 8
    assert best.pools["bandwidth"] <= 4
    job = build_job(report.job)
    assert job.train.gpus == best.train_gpus
    assert {pool.name: pool.engines.count for pool in job.engine_pools if pool.engines} == {
        name: gpus for name, gpus in best.pools.items() if gpus
    }


def test_a_budget_is_kept_and_one_that_nothing_fits_is_refused() -> None:
    report = plan(budget=12.0, best=1)
    assert report.best[0].price <= 12.0
    with pytest.raises(JobError, match="no split"):
        plan(budget=1.0)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ("h800=8", "says nothing of h20"),
        ("h800=0..8,h20=4..2", "low..high"),
        ("h900=1", "kinds"),
        ("h800=8,h20=4,a100=2", "no pool of the job has a100"),
    ],
)
def test_pools_that_do_not_fit_the_job_are_refused(pools: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        plan(pools)


def test_a_mode_in_which_things_take_turns_is_refused() -> None:
    with pytest.raises(JobError, match="take turns"):
        make_plan(
            build_job({**JOB, "mode": "sync+"}),
            "h800=8,h20=4",
            budget=None,
            goal="cost",
            best=1,
            seeds=1,
            workers=1,
            progress=lambda _: None,
        )


def test_the_job_that_is_written_is_the_one_that_was_simulated() -> None:
    report = plan(seeds=2, best=1, settings=("spares", "bucket"))
    best = report.best[0]
    for run in best.played:
        ends: list[float] = []
        job = build_job({**report.job, "seed": run.seed, "train": {**report.job["train"], "steps": 9}})
        simulate(job, ends=ends)
        assert run.step_s == pytest.approx((ends[-1] - ends[2]) / 6, abs=0.01)
    tried = {(one.what, one.value) for one in report.tried}
    assert tried == {
        ("rollout.spare_groups", "1"),
        ("rollout.spare_members", "1"),
        ("rollout.spare_members", "2"),
        ("weights.bucket_mb", "256"),
        ("weights.bucket_mb", "4096"),
    }
    assert report.runs == 1 * 2 + 2 + 5 + 2 * sum(one.kept for one in report.tried)


def changed(**tasks: Any) -> dict[str, Any]:
    """The job, its tasks otherwise."""
    raw: dict[str, Any] = copy.deepcopy(JOB)
    for name, settings in tasks.items():
        raw["sim"]["tasks"][name] |= settings
    return raw


def kept(report: PlanReport) -> list[str]:
    return [one.what for one in report.tried if one.kept]


def test_the_job_s_own_split_is_among_the_best_where_it_fits() -> None:
    """Here the predicted best is slower than it: environments are what a step takes, and no pool matters."""
    raw = changed(game={"step_s": 20.0}, maths={"step_s": 20.0})
    report = plan(raw=raw, best=1)
    assert report.as_it_is in report.best
    assert report.best[0].step_s <= report.as_it_is.step_s
    report = plan("h800=0..7,h20=0..4", raw=raw, best=1)
    assert report.as_it_is not in report.best, "it has eight H800"


def test_a_larger_bound_is_found_where_slow_environments_hold_up_a_step() -> None:
    report = plan(raw=changed(game={"step_s": 20.0}, maths={"step_s": 20.0}), best=1, seeds=2, settings=("bound",))
    assert kept(report) == ["rollout.staleness"]
    best, before = report.best[:2]
    assert (best.bound, build_job(report.job).rollout.staleness) == (3, 3)
    assert best.step_s < 0.8 * before.step_s
    assert best.age > before.age + 1
    assert {one.value.split(",")[0] for one in report.tried} == {"2", "3"}


def test_spares_are_found_where_resets_fail() -> None:
    """And nothing is left out by them: answers are equally long."""
    tail = {"reset_tail": 0.15, "reset_tail_s": 400.0, "answer_tokens": 50}
    report = plan(raw=changed(game=tail, maths=tail), best=1, seeds=2, settings=("spares",))
    assert kept(report) == ["rollout.spare_members"]
    assert build_job(report.job).rollout.spare_members == report.best[0].settings["rollout.spare_members"] >= 1
    assert report.best[0].step_s < 0.5 * report.best[1].step_s


def test_spares_that_leave_out_long_answers_are_shown_and_not_kept() -> None:
    long = {"kind": "lognormal", "mean": 2500, "sigma": 0.8, "high": 4000}
    report = plan(raw=changed(maths={"answer_tokens": long}), best=1, settings=("spares",))
    members = [one for one in report.tried if one.what == "rollout.spare_members"]
    assert min(one.tokens for one in members) < 0.95
    assert max(one.gain for one in members) > 0.05
    assert kept(report) == []


def test_buckets_are_found_that_let_a_pull_begin_while_the_push_goes_on() -> None:
    raw = changed(maths={"answer_tokens": 200}) | {"weights": {"bucket_mb": 8192}}
    raw["sim"]["links"] = {"push_gb_s": 0.3, "pull_gb_s": 0.3}
    report = plan(raw=raw, best=1, seeds=2, settings=("bucket",))
    assert report.best[0].settings == {"weights.bucket_mb": 2048}
    assert build_job(report.job).weights.bucket_mb == 2048
    assert report.best[0].step_s < 0.9 * report.best[1].step_s


def test_tasks_that_name_the_wrong_pool_are_moved() -> None:
    raw = changed()
    raw["tasks"][0]["affinity"], raw["tasks"][1]["affinity"] = "bandwidth", "compute"
    report = plan("h800=8,h20=4", raw=raw, best=1, seeds=2, settings=("affinity",))
    assert kept(report) == ["tasks.affinity"]
    best, before = report.best[:2]
    assert report.as_it_is.affinity == {"game": {"bandwidth": 1.0}, "maths": {"compute": 1.0}}
    assert best.affinity == {"game": {"compute": 1.0}, "maths": {"bandwidth": 1.0}}
    assert best.step_s < 0.9 * before.step_s


def test_prefill_workers_are_found_where_prompts_hold_up_answers() -> None:
    game = {"prompt_tokens": 20000, "observation_tokens": 3000, "answer_tokens": 300}
    report = plan(
        "h800=0..16,h20=0..8", raw=changed(game=game, maths={"prompt_tokens": 8000}), best=1, settings=("prefill",)
    )
    assert kept(report) == ["prefill"]
    best, before = report.best[:2]
    assert best.apart is not None
    assert best.step_s < 0.9 * before.step_s
    pools = {pool.name: pool.engines for pool in build_job(report.job).engine_pools if pool.engines}
    prefill = pools[best.apart.decode].prefill
    assert prefill is not None
    assert (prefill.pool, prefill.workers, prefill.decoders) == (
        best.apart.prefill,
        best.apart.workers,
        best.apart.decoders,
    )
    used = dict.fromkeys(best.pools, 0)
    for name, engines in pools.items():
        used[name] += engines.count * engines.decode_gpus
        if engines.prefill:
            used[best.apart.prefill] += engines.count * engines.prefill.workers * engines.prefill.gpus
    assert all(used[name] <= gpus for name, gpus in best.pools.items()), "no more GPUs than before"


def test_the_time_to_a_score_is_what_a_run_to_it_takes() -> None:
    """Groups that all earned the same are dropped, and old ones teach less."""
    raw = changed() | {"rollout": {"groups_per_step": 8}}
    raw["sim"]["train"]["age_discount"] = 0.2
    report = plan(raw=raw, best=1, goal="time-to-score", score=0.5)
    found = report.best[0]
    assert report.score_steps == pytest.approx(50 * math.log(1 / (1 - 0.2 / 0.5)), abs=0.1)
    job = build_job({**report.job, "train": {**report.job["train"], "steps": 60}})
    assert job.sim.tasks["game"].success == 0.3, "of the job to run nothing is changed that the plan did not choose"
    ends: list[float] = []
    come: list[float] = []

    def listen(log: EventLog) -> None:
        def read(event: Event) -> None:
            assert isinstance(event, schema.Batch)
            worth = statistics.fmean(max(0.0, 1 - 0.2 * (event.step - born)) for born in event.born)
            come.append(worth + (come[-1] if come else 0.0))

        log.read_by(read, schema.Batch)

    simulate(job, ends=ends, watch=listen)
    reached_s = next(end for end, steps in zip(ends, come, strict=True) if steps >= report.score_steps) - ends[0]
    assert found.value("time-to-score") == pytest.approx(reached_s, rel=0.05), "what starts it aside"


def test_in_the_middle_of_the_way_success_goes_on_from_where_it_is() -> None:
    job = build_job(changed())
    half = build_job(at_half(job, 30.0))
    for task, now in job.sim.tasks.items():
        for steps in (0.0, 5.0, 100.0):
            assert half.sim.tasks[task].chance(steps) == pytest.approx(now.chance(15.0 + steps))


def test_a_change_is_kept_where_it_gains_with_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up runs: more spares gain with both seeds, larger buckets with the first alone."""

    class Made:
        runs = 0

        def play(self, jobs: Sequence[tuple[str, ParsedJson]], seeds: Sequence[int]) -> list[list[Played]]:
            return [[self._one(raw, seed) for seed in seeds] for _, raw in jobs]

        def _one(self, raw: ParsedJson, seed: int) -> Played:
            job = build_job(raw)
            step_s = 100.0 - 5.0 * job.rollout.spare_members
            if job.weights.bucket_mb == 4096:
                step_s += (-20.0, 20.0)[seed]
            return Played(seed=seed, step_s=step_s, waits=0.0, age=1.0, wasted=0.0, tokens=10.0)

    @contextmanager
    def made(workers: int, score_steps: float | None, say: object) -> Iterator[Made]:
        yield Made()

    monkeypatch.setattr("rollart.launch.plan.trials", made)
    report = plan(best=1, seeds=2, settings=("spares", "bucket"))
    gains = {(one.what, one.value): one.gain for one in report.tried}
    assert gains["weights.bucket_mb", "4096"] == 0.2
    assert [(one.what, one.value) for one in report.tried if one.kept] == [("rollout.spare_members", "2")]
    assert report.best[0].settings == {"rollout.spare_members": 2}


def test_what_old_trajectories_teach_less_is_weighed_against_shorter_steps() -> None:
    raw = changed(game={"step_s": 20.0}, maths={"step_s": 20.0})
    found = {}
    for discount in (0.0, 0.2):
        raw["sim"]["train"]["age_discount"] = discount
        report = plan(raw=raw, best=1, goal="time-to-score", score=0.5, settings=("bound",))
        found[discount] = report.best[0].bound
    assert found == {0.0: 3, 0.2: 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"goal": "time-to-score"}, "--score"),
        ({"score": 0.5}, "--score"),
        ({"goal": "time-to-score", "score": 0.9}, "come to 0.80"),
        ({"goal": "time-to-score", "score": 0.3}, "begin at 0.30"),
        ({"settings": ("bounds",)}, "'bounds'.*bound,affinity"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        plan(**changes)


def test_measured_engines_are_predicted_as_they_are_simulated() -> None:
    """Ten times as slow as the table has them; the other pool's settings go with it where it gets no GPU."""
    raw = changed()
    slow = {"step_s": 0.1, "sequence_s": 1e-4, "prefill_token_s": 1e-4}
    raw["sim"]["engine"] = {"measured": {"compute": slow, "bandwidth": slow}}
    report = plan("h800=8,h20=0..4", raw=raw, best=2)
    by_hardware = plan("h800=8,h20=0..4", best=2)
    assert report.as_it_is.rollout_s > 3 * by_hardware.as_it_is.rollout_s
    assert report.as_it_is.rollout_s == pytest.approx(report.as_it_is.step_s, rel=0.4)
    alone = plan("h800=8,h20=0", raw=raw, best=1)
    assert list(build_job(alone.job).sim.engine.measured) == ["compute"]


def test_splits_that_other_settings_forbid_are_not_tried() -> None:
    raw = changed() | {"rollout": {"groups_per_step": 8, "zero_variance": "keep", "rolling": 6}}
    job = build_job(plan(raw=raw, best=3).job)
    assert sum(engines.count for _, engines in job.engines) > 6


def test_groups_that_are_dropped_count_as_work_to_be_done() -> None:
    """All members fail in 0.9^4 = 66 % of the groups, so a step takes three times the rollout."""
    raw = changed(game={"success": 0.1}, maths={"success": 0.1}) | {"rollout": {"groups_per_step": 128}}
    kept = raw | {"rollout": {"groups_per_step": 128, "zero_variance": "keep"}}
    splits = [
        Splits(job, read_limits(job, "h800=8,h20=4"), None, "cost").own_split() for job in map(build_job, (kept, raw))
    ]
    assert splits[1].rollout_s > 2 * splits[0].rollout_s
    assert splits[1].other_s == splits[0].other_s


def test_the_command_writes_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "best.yaml"
    path.write_text(yaml.safe_dump(JOB))
    words = ["plan", str(path), "--pools", "h800=8,h20=4", "--best", "1", "--seeds", "1", "--workers", "1"]
    assert main([*words, "--try", "bucket", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "weights.bucket_mb" in shown
    assert "the job's" in shown
    assert main(["sim", str(out), "train.steps=2", "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    assert main([*words, "--try", "none", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tried"], report["goal"], report["score"]) == ([], "step-time", None)


def test_a_sweep_runs_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    report = run_sweep(path, ("train.steps=2",), ["rollout.staleness=1,2", "train.gpus=1,4"])
    assert [row.changes for row in report.rows] == [
        [f"rollout.staleness={bound}", f"train.gpus={gpus}"] for bound in (1, 2) for gpus in (1, 4)
    ]
    assert report.rows[0].step_s > report.rows[1].step_s
    for bad in ("rollout.staleness", "rollout.staleness=1,,2", "=1,2"):
        with pytest.raises(JobError, match="key=a,b,c"):
            run_sweep(path, (), [bad])
    with pytest.raises(JobError, match=r"rollout\.staleness: is given twice"):
        run_sweep(path, (), ["rollout.staleness=1,2", "rollout.staleness=3"])
    with pytest.raises(JobError, match="unknown key"):
        run_sweep(path, (), ["rollout.stalenes=1"])


def test_a_swept_value_may_have_commas(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    spreads = ["{kind: normal, mean: 8, sigma: 1}", "{mean: 2}"]
    report = run_sweep(path, ("train.steps=1",), [f"sim.tasks.game.turns={', '.join(spreads)}"])
    assert [row.changes for row in report.rows] == [[f"sim.tasks.game.turns={spread}"] for spread in spreads]


def test_what_cannot_be_written_is_said_before_long_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    nowhere = str(tmp_path / "missing" / "file")
    for words, said in (
        (["sim", "--sweep", "train.gpus=1,2", "--plot", nowhere], "--plot"),
        (["sim", "--sweep", "train.gpus=1,2", "--plot", str(tmp_path)], "--plot"),
        (["sim", "--sweep", "train.gpus=1,2", "--out", str(tmp_path / "runs")], "--out"),
        (["plan", "--pools", "h800=8,h20=4", "--out", nowhere], "--out"),
        (["sim", "--sweep", "train.gpus=1,2", "--chaos", "2"], "--chaos"),
    ):
        command, *rest = words
        assert main([command, str(path), *rest]) == 2
        assert said in capsys.readouterr().err


def test_the_command_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "job.yaml", tmp_path / "plot.svg"
    path.write_text(yaml.safe_dump(JOB))
    assert (
        main(["sim", str(path), "train.steps=2", "--sweep", "train.gpus=1,2", "--plot", str(plot), "--workers", "1"])
        == 0
    )
    assert "train.gpus=2" in capsys.readouterr().out
    assert plot.read_text().count("<rect") == 2 + 1 + 1
    assert main(["sim", str(path), "--plot", str(plot)]) == 2


def test_bars_are_as_long_as_their_values() -> None:
    drawn = bars("t", ["a", "b"], {"one": [1.0, 2.0]})
    short, long = (float(width) for width in re.findall(r'<rect x="250" y="\d+" width="([\d.]+)"', drawn)[-2:])
    assert long == pytest.approx(2 * short)
    assert "&lt;" in bars("<t>", ["a"], {"one": [1.0]})


def test_a_profile_may_describe_more_tasks_than_the_job_has(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text("tasks: {game: {turns: 3}, other: {turns: 5}}\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, "sim": {"profile": "profile.yaml"}}))
    assert list(load_job(path).sim.tasks) == ["game"]
    path.write_text(yaml.safe_dump({**JOB, "sim": {"tasks": {"other": {"turns": 5}}}}))
    with pytest.raises(JobError, match="other"):
        load_job(path)
