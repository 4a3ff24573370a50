"""`rollart plan` and `rollart sim --sweep`: what they find is what the simulator finds."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import main
from rollart.config.load import build_job, load_job
from rollart.errors import JobError
from rollart.launch.plan import make_plan
from rollart.launch.sweep import run_sweep
from rollart.report.charts import bars

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
    settings: dict[str, Any] = {"budget": None, "goal": "step-time", "best": 2, "seeds": 1, "workers": 1} | changes
    return make_plan(build_job(JOB), pools, progress=lambda _: None, **settings)


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


def test_a_sweep_runs_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    report = run_sweep(path, ("train.steps=2",), ["rollout.staleness=1,2", "train.gpus=1,4"])
    assert [row.changes for row in report.rows] == [
        [f"rollout.staleness={bound}", f"train.gpus={gpus}"] for bound in (1, 2) for gpus in (1, 4)
    ]
    assert report.rows[0].step_s > report.rows[1].step_s
    with pytest.raises(JobError, match="key=a,b,c"):
        run_sweep(path, (), ["rollout.staleness"])
    with pytest.raises(JobError, match="unknown key"):
        run_sweep(path, (), ["rollout.stalenes=1"])


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
