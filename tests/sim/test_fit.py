"""`rollart sim fit` on a simulated run finds the settings that run was made with."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.config.settings import Spread
from rollart.config.sim import SimTaskSettings
from rollart.errors import JobError
from rollart.events import schema
from rollart.hardware import HARDWARE, MODELS, Runtime, engine_costs
from rollart.launch.simulation import simulate
from rollart.sim.curve import fit_curve
from rollart.sim.fit import Fit, as_yaml, fit_runs, spread_of
from rollart.sim.steps import GenerateCall, fit_reports, fit_steps
from rollart.types import StepSums
from tests.events import some

TASK = {
    "turns": 4,
    "prompt_tokens": {"kind": "normal", "mean": 60, "sigma": 20, "low": 20},
    "observation_tokens": {"kind": "normal", "mean": 20, "sigma": 5, "low": 5},
    "answer_tokens": {"kind": "normal", "mean": 30, "sigma": 10, "low": 8},
    "reset_s": 0.05,
    "step_s": {"kind": "normal", "mean": 0.4, "sigma": 0.1},
    "reward_s": 0.01,
    "success": 0.5,
    "success_gain": 0.0,
}
ENGINE = {"step_s": 4e-3, "sequence_s": 2e-4, "kv_token_s": 1e-6, "prefill_token_s": 5e-5}


def job(mode: str, affinity: str = "cpu", **sim: Any) -> Job:
    """With affinity `auto` engines say what their steps had in them."""
    settings = {
        "model": "qwen3-0.6b",
        "tasks": {"game": TASK},
        "engine": {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 0.006, "measured": {"cpu": ENGINE}},
        "train": {"fixed_s": 0.3, "token_s": 1e-4, "save_s": 0.1},
        "links": {"push_gb_s": 30.0, "pull_gb_s": 100.0},
    }
    return build_job(
        {
            "name": "fitted",
            "mode": mode,
            "tasks": [{"name": "game", "group_size": 8, "max_turns": 8, "max_tokens": 256, "affinity": affinity}],
            "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
            "pools": [{"name": "cpu", "engines": {"count": 1}}, {"name": "environments", "slots": 128}],
            "train": {"steps": 8},
            "checkpoint": {"every": 100},
            "sim": {**settings, **sim},
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fit") / "sync+"
    assert simulate(job("sync+"), out).summary.state == "finished"
    return out


@pytest.fixture(scope="module")
def profile(run: Path) -> dict[str, Any]:
    return fit_runs([run]).profile()


def test_the_task_is_found_again(profile: dict[str, Any]) -> None:
    found = profile["tasks"]["game"]
    assert found["turns"] == {"mean": 4.0}
    assert found["prompt_tokens"]["mean"] == pytest.approx(60, rel=0.1)
    assert found["observation_tokens"]["mean"] == pytest.approx(20, rel=0.1)
    assert found["observation_tokens"]["sigma"] == pytest.approx(5, rel=0.2)
    assert found["answer_tokens"]["mean"] == pytest.approx(30, rel=0.1)
    assert found["reset_s"] == {"mean": 0.05}
    assert found["step_s"]["kind"] == "normal"
    assert found["step_s"]["mean"] == pytest.approx(0.4, rel=0.05)
    assert found["step_s"]["sigma"] == pytest.approx(0.1, rel=0.15)
    assert found["reward_s"] == {"mean": 0.01}
    assert found["success"] == pytest.approx(0.5, abs=0.1)


def test_a_task_of_one_turn_shows_its_steps_by_when_its_rewards_are_asked_for(tmp_path: Path) -> None:
    simulate(job("sync+", tasks={"game": {**TASK, "turns": 1}}), tmp_path / "run")
    fitted: Any = fit_runs([tmp_path / "run"]).profile()["tasks"]
    assert fitted["game"]["step_s"]["mean"] == pytest.approx(0.4, rel=0.05)


def test_a_rise_of_success_is_found_again(tmp_path: Path) -> None:
    rising: dict[str, Any] = {**TASK, "success": 0.2, "success_gain": 0.6, "success_steps": 15.0}
    learning = job("sync+", tasks={"game": rising})
    simulate(build_job({**learning.model_dump(mode="json"), "train": {"steps": 60}}), tmp_path / "run")
    fit = fit_runs([tmp_path / "run"])
    found: Any = fit.profile()["tasks"]
    found = found["game"]
    sim = SimTaskSettings(**rising)
    fitted = SimTaskSettings(**{key: found[key] for key in ("success", "success_gain", "success_steps")})
    for version in (0, 10, 30, 60):
        assert fitted.chance(version) == pytest.approx(sim.chance(version), abs=0.08)
    assert "guess" in as_yaml(fit, ["run"])
    quality: Any = fit.quality()["success"]
    assert quality["game"]["version"] == 59


def test_rewards_that_rise_no_more_than_chance_does_are_a_constant(profile: dict[str, Any]) -> None:
    assert profile["tasks"]["game"]["success_gain"] == 0.0
    assert "success_steps" not in profile["tasks"]["game"]
    few = [(version, 0.0 if version < 4 else 1.0) for version in range(8)]
    assert fit_curve(few).success_gain == 0.0, "eight groups say nothing"
    many = [(version, min(1.0, version / 20)) for version in range(24)]
    assert fit_curve(many).success_gain > 0.5


def test_the_engine_is_found_again(profile: dict[str, Any]) -> None:
    engine = profile["engine"]
    found = engine["measured"]["cpu"]
    for count in (1, 30):
        expected_s = ENGINE["step_s"] + count * (ENGINE["sequence_s"] + 120 * ENGINE["kv_token_s"])
        predicted_s = found["step_s"] + count * (found["sequence_s"] + 120 * found["kv_token_s"])
        assert predicted_s == pytest.approx(expected_s, rel=0.1)
    assert found["prefill_token_s"] == pytest.approx(ENGINE["prefill_token_s"], rel=0.5), "groups share their prompts"
    assert engine["call_s"] == pytest.approx(0.006, abs=0.004)


REPORTED = {**ENGINE, "prompt_step_s": 2e-3}


def test_what_engines_report_of_their_steps_is_taken_at_its_word(tmp_path: Path) -> None:
    """Prompts and answers all alike, contexts that grow with the batch: call times cannot tell these costs apart."""
    alike = {**TASK, "prompt_tokens": 40, "observation_tokens": 12, "answer_tokens": 30}
    settings = {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 6e-3, "measured": {"cpu": REPORTED}}
    simulate(job("sync+", "auto", engine=settings, tasks={"game": alike}), tmp_path / "run")
    fit = fit_runs([tmp_path / "run"])
    engine: Any = fit.profile()["engine"]
    for key, value in REPORTED.items():
        assert engine["measured"]["cpu"][key] == pytest.approx(value, rel=0.02), key
    assert engine["call_s"] == pytest.approx(6e-3, rel=0.2), "answers of one length, and still it is told"
    quality: Any = fit.quality()["engines"]
    everything, *kinds = quality["cpu"]["steps"]
    assert everything["what"] == "all"
    assert everything["median_error"] < 1e-3
    assert any(row["what"].startswith("no prompts, batch ") for row in kinds)


@pytest.mark.parametrize("bound", [1, 3])
def test_engines_that_report_are_predicted_with_more_in_them_than_was_seen(bound: int, tmp_path: Path) -> None:
    """Fitted on policy, where a step's groups are there; predicted with four times as many."""
    settings = {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 6e-3, "measured": {"cpu": REPORTED}}
    simulate(job("sync+", "auto", engine=settings), tmp_path / "run")
    profile = fit_runs([tmp_path / "run"]).profile()
    large = job("rollart", "auto", engine=settings).model_dump(mode="json")
    large["rollout"] = {"groups_per_step": 8, "zero_variance": "keep", "staleness": bound}
    true_s = simulate(build_job(large)).summary.step_time_s.mean
    assert simulate(build_job({**large, "sim": profile})).summary.step_time_s.mean == pytest.approx(true_s, rel=0.05)


GPU = {"step_s": 1.2e-3, "sequence_s": 1e-5, "kv_token_s": 4e-8, "prefill_token_s": 4.4e-6, "launch_s": 0.018}
"""A step without prompts is a graph; of any other the host starts the kernels one by one."""


def on_a_gpu(mode: str, **engine: Any) -> Job:
    long = {"kind": "normal", "mean": 3000, "sigma": 500, "low": 500}
    task = {**TASK, "prompt_tokens": long, "observation_tokens": 60, "answer_tokens": 40}
    settings = {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 5e-3, "measured": {"cpu": {**GPU, **engine}}}
    return job(mode, "auto", engine=settings, tasks={"game": task}, train={"fixed_s": 0.1, "token_s": 1e-6})


def test_steps_whose_kernels_are_started_one_by_one_have_a_least_time(tmp_path: Path) -> None:
    simulate(on_a_gpu("sync+"), tmp_path / "run")
    fit = fit_runs([tmp_path / "run"])
    found: Any = fit.profile()["engine"]
    for key, value in GPU.items():
        assert found["measured"]["cpu"][key] == pytest.approx(value, rel=0.03), key
    assert "prompt_step_s" not in found["measured"]["cpu"]
    steps: Any = fit.quality()["engines"]
    assert max(row["p90_error"] for row in steps["cpu"]["steps"]) < 0.02
    assert any("tokens of prompts" in row["what"] for row in steps["cpu"]["steps"])
    assert "steps of cpu: milliseconds for a step" in as_yaml(fit, ["run"])


def test_steps_that_all_have_prompts_are_fitted() -> None:
    """Nothing then tells a step that waits for the host from one that does not."""
    call = GenerateCall(engine="e", pool="p", sent_s=0.0, said_s=2.0, tokens=100, prefill=500, prompt=500, whole=True)
    reports = [StepSums(10.0, 80.0, 4e4, 10.0, 5000.0 + 10 * n, 0.0, 0.2 + 1e-4 * (n % 3)) for n in range(40)]
    cost = fit_steps([call] * 10, reports)
    assert cost.steps[0].error < 0.01


def test_prompts_too_short_to_take_longer_are_priced_by_the_hardware(tmp_path: Path) -> None:
    """Or a long one would be for nothing."""
    short = {**TASK, "prompt_tokens": 60, "observation_tokens": 60, "answer_tokens": 40}
    sim = on_a_gpu("sync+").model_dump(mode="json")["sim"]
    raw = {**on_a_gpu("sync+").model_dump(mode="json"), "sim": {**sim, "tasks": {"game": short}}}
    raw["pools"][0]["hardware"] = "h200"
    raw["pools"][0]["engines"]["share"] = 0.5
    raw["pools"][0]["engines"]["device"] = "cuda:0"
    simulate(build_job(raw), tmp_path / "run")
    found: Any = fit_runs([tmp_path / "run"]).profile()["engine"]
    assert found["measured"]["cpu"]["launch_s"] == pytest.approx(GPU["launch_s"], rel=0.03)
    whole = engine_costs(MODELS["qwen3-0.6b"], HARDWARE["h200"], 1, Runtime(step_s=0, layer_s=0, sequence_s=0))
    assert found["measured"]["cpu"]["prefill_token_s"] == pytest.approx(2 * whole.prefill_token_s(0.0), rel=0.5)


@pytest.mark.parametrize("mode", ["sync", "rollart"])
def test_the_other_modes_are_predicted_on_a_gpu(mode: str, tmp_path: Path) -> None:
    """Where the calls alone, of engines that do not say what their steps had in them, mislead."""
    simulate(on_a_gpu("sync+"), tmp_path / "run")
    fit = fit_runs([tmp_path / "run"])
    true_s = simulate(on_a_gpu(mode)).summary.step_time_s.mean
    raw = on_a_gpu(mode).model_dump(mode="json")
    assert simulate(build_job({**raw, "sim": fit.profile()})).summary.step_time_s.mean == pytest.approx(
        true_s, rel=0.03
    )
    fit.reports.clear()
    assert simulate(build_job({**raw, "sim": fit.profile()})).summary.step_time_s.mean != pytest.approx(
        true_s, rel=0.06
    )


def test_the_first_steps_can_be_left_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where kernels are compiled in them: everything takes a second more."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "job.yaml").write_bytes((run / "job.yaml").read_bytes())
    late_s, steps = 0.0, 0
    with (slow / "events.jsonl").open("w") as file:
        for line in (run / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if steps < 3 and event["e"] in ("said", "pushed", "swap.end", "reward"):
                late_s += 0.05
            if steps < 3 and event["e"] == "step.end":
                event["train_s"] += 1.0
                late_s += 1.0
            steps += event["e"] == "step.end"
            file.write(json.dumps({**event, "t": event["t"] + late_s}) + "\n")
    plain, skipped, misled = (fit_runs([path], skip) for path, skip in ((run, 3), (slow, 3), (slow, 0)))
    for part in ("train", "engine"):
        assert skipped.profile()[part] != misled.profile()[part]
    assert skipped.profile()["train"] == plain.profile()["train"]
    assert skipped.profile()["links"] == pytest.approx(plain.profile()["links"], rel=1e-3)
    assert skipped.profile()["engine"]["measured"]["cpu"] == pytest.approx(
        plain.profile()["engine"]["measured"]["cpu"], rel=0.02
    )
    assert main(["sim", "fit", str(slow), "--skip", "3"]) == 0
    assert "--skip 3" in capsys.readouterr().out
    assert main(["sim", "fit", str(slow), "--skip", "8"]) == 2
    assert "after the first 8 (--skip)" in capsys.readouterr().err
    assert main(["sim", "jobs/sync.yaml", "--skip", "3"]) == 2
    assert "with fit only" in capsys.readouterr().err


def test_an_engine_that_was_started_again_reports_from_nothing() -> None:
    fit = Fit(job("sync+"))
    fit.read(some(schema.Start, id="g0.0.0", task="game/0"))
    fit.read(some(schema.Send, id="g0.0.0/0", engine="cpu-0", pool="cpu"))
    for event in (32.0, 64.0, schema.EngineDown, 80.0, 120.0, schema.Started, 150.0, 200.0):
        if isinstance(event, float):
            sums = [event, 2 * event, 0.0, 0.0, 0.0, 0.0, 0.01 * event]
            fit.read(some(schema.EngineWorked, engine="cpu-0", decode=sums, mixed=[0.0] * 7, prefill=[0.0] * 7))
        else:
            fit.read(some(schema.Starting))
            fit.read(some(event, engine="cpu-0") if event is schema.EngineDown else some(event))
    assert [sums.steps for sums in fit.reports["cpu"]] == [32.0, 40.0, 50.0], "the first report of each process is left"


def test_costs_are_found_again_in_reports_alone() -> None:
    reports = []
    for step in range(60):
        sequences, cached, prompts = 60 - step, (60 - step) * (200 + step), int(step < 6)
        tokens, seconds = prompts * (500 + 100 * step), 2e-3 + (60 - step + prompts) * 1e-5 + cached * 4e-8
        reports.append(StepSums(1, sequences, cached, prompts, tokens, 0, seconds + tokens * 2e-5 + prompts * 5e-4))
    found = fit_reports(reports)
    costs = [found.step_s, found.sequence_s, found.kv_token_s, found.prefill_token_s, found.prompt_step_s]
    assert costs == pytest.approx([2e-3, 1e-5, 4e-8, 2e-5, 5e-4], rel=0.01)
    assert found.error < 1e-3


def test_prompts_alike_do_not_make_their_tokens_dear(tmp_path: Path) -> None:
    """A call costs by itself; a run whose prompts are all alike cannot tell, and must not lay it on the tokens."""
    row_s = 1e-5
    engine = {"step_s": 8e-4, "sequence_s": row_s, "kv_token_s": 5e-7, "prefill_token_s": row_s}
    settings = {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 6e-4, "measured": {"cpu": engine}}
    alike = {**TASK, "prompt_tokens": 14, "observation_tokens": 12, "answer_tokens": 30}
    simulate(job("sync+", engine=settings, tasks={"game": alike}), tmp_path / "run")
    found = fit_runs([tmp_path / "run"]).profile()["engine"]["measured"]["cpu"]
    assert found["prefill_token_s"] < 1.2 * row_s
    assert row_s < found["sequence_s"] < 3 * row_s, "what a call costs is with the rows, neither lost nor all of it"


def test_calls_that_waited_for_something_else_move_little() -> None:
    """Such as the first use of a kernel: one call in four took three times as long."""
    calls = [
        GenerateCall(
            engine="e",
            pool="gpu",
            sent_s=10.0 * number,
            said_s=10.0 * number + 0.001 * tokens * (3 if number % 4 == 0 else 1),
            tokens=tokens,
            prefill=1,
            prompt=20,
            whole=True,
        )
        for number, tokens in enumerate(100 + 37 * number % 200 for number in range(80))
    ]
    cost = fit_steps(calls)
    one_s = cost.step_s + cost.sequence_s + cost.kv_token_s * 120
    assert one_s + cost.call_s / 200 == pytest.approx(0.001, rel=0.03)


def test_prompts_that_are_alike_are_priced_where_calls_meet_different_numbers_of_them(tmp_path: Path) -> None:
    """As on a GPU, where a prompt token costs far less than one more sequence, and a step with a prompt more than one
    without."""
    engine = {"step_s": 1.2e-3, "sequence_s": 0.0, "kv_token_s": 4e-8, "prefill_token_s": 2e-5}
    alike = {**TASK, "prompt_tokens": 500, "observation_tokens": 500, "answer_tokens": 60}
    settings = {"start_s": 3.0, "load_gb_s": 40.0, "call_s": 0.0, "measured": {"cpu": engine}}
    simulate(job("sync+", engine=settings, tasks={"game": alike}), tmp_path / "run")
    found = fit_runs([tmp_path / "run"]).profile()["engine"]["measured"]["cpu"]
    assert found["prefill_token_s"] == pytest.approx(2e-5, rel=0.25)


def test_training_and_weights_are_found_again(profile: dict[str, Any]) -> None:
    assert profile["train"]["save_s"] == pytest.approx(0.1, rel=0.01)
    tokens = 32 * (60 + 3 * 20 + 4 * 30)
    predicted_s = profile["train"]["fixed_s"] + tokens * profile["train"]["token_s"]
    assert predicted_s == pytest.approx(0.3 + tokens * 1e-4, rel=0.05)
    assert profile["links"]["push_gb_s"] == pytest.approx(30, rel=0.05)
    swap_s = 1 / profile["engine"]["load_gb_s"]
    assert swap_s == pytest.approx(1 / 40 + 1 / 100, rel=0.3)


@pytest.mark.parametrize("mode", ["sync", "sync+", "one-off", "areal", "rollart"])
def test_the_profile_of_one_mode_predicts_the_others(mode: str, profile: dict[str, Any]) -> None:
    true_s = simulate(job(mode)).summary.step_time_s.mean
    raw = job(mode).model_dump(mode="json")
    assert simulate(build_job({**raw, "sim": profile})).summary.step_time_s.mean == pytest.approx(true_s, rel=0.1)


def test_residuals_say_how_far_what_was_fitted_is_from_what_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By batch and context, for prefill, training and transfers; in the profile itself, as notes that YAML ignores."""
    assert main(["sim", "fit", str(run), "--json"]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    everything, *rows = quality["engines"]["cpu"]["residuals"]
    assert (everything["what"], everything["count"]) == ("all", 8 * 32 * 4)
    by_batch = [row for row in rows if row["what"].startswith("batch ")]
    assert len(by_batch) >= 3
    assert 0.9 * everything["count"] <= sum(row["count"] for row in by_batch) <= everything["count"]
    for row in [everything, *by_batch]:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.15)
        assert abs(row["bias"]) <= row["median_error"] <= row["p90_error"] < 0.5
    assert quality["train"]["count"] == 7
    assert quality["train"]["median_error"] < 0.01
    assert {"push", "pull", "swap"} < quality.keys()
    assert main(["sim", "fit", str(run)]) == 0
    text = capsys.readouterr().out
    assert "#   all: " in text
    assert "# train: " in text
    assert build_job({**job("rollart").model_dump(mode="json"), "sim": yaml.safe_load(text)})


def test_an_engine_that_is_not_linear_shows_it() -> None:
    """Half the calls take twice as long as the others beside the same: nothing linear explains both."""
    calls = [
        GenerateCall(
            engine="e", pool="p", sent_s=10.0 * n, said_s=10.0 * n + 1.0 + n % 2, tokens=10, prompt=20, whole=True
        )
        for n in range(40)
    ]
    everything = fit_steps(calls).residuals[0]
    assert everything.count == 40
    assert everything.worst > 0.3


def test_the_command_writes_a_profile_that_a_job_can_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.yaml"
    assert main(["sim", "fit", str(run), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert yaml.safe_load(out.read_text()) == printed["profile"]
    assert printed["quality"]["engines"]["cpu"]["calls"] == 8 * 32 * 4
    raw = job("rollart").model_dump(mode="json")
    assert build_job({**raw, "sim": {"profile": "profile.yaml"}}, near=tmp_path).sim.engine.measured


@pytest.mark.parametrize("rewards", [{"type": "local"}, {"type": "http", "url": "http://127.0.0.1:1"}])
def test_a_job_may_name_the_profile_of_a_run_with_cold_rewards(rewards: dict[str, str], tmp_path: Path) -> None:
    """Workers of this machine also take time to start, but the simulator has them warm: a job refuses the key."""
    raw = {**job("sync+").model_dump(mode="json"), "rewards": rewards}
    simulate(build_job(raw), tmp_path / "run")
    fit = fit_runs([tmp_path / "run"])
    fit.read(some(schema.Reward, t=0.0, id="another", s=99.0, cold_s=98.0, value=1.0))
    found = build_job({**raw, "sim": fit.profile()}).sim.reward.cold_start_s
    assert found > 0.5 if rewards["type"] == "http" else found == 0.5


def test_a_run_in_lockstep_is_refused(tmp_path: Path) -> None:
    simulate(job("sync"), tmp_path / "sync")
    with pytest.raises(JobError, match="environments waited for each other"):
        fit_runs([tmp_path / "sync"])


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "fit", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["sim", "fit"]) == 2
    assert "no run is named" in capsys.readouterr().err


def test_a_distribution_is_named_by_its_shape() -> None:
    assert spread_of([3.0, 3.0, 3.001]).kind == "constant"
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]).kind == "normal"
    true = Spread(kind="normal", mean=0.2, sigma=0.15)
    cut_at_zero = spread_of([true.value((share + 0.5) / 1000) for share in range(1000)])
    assert (cut_at_zero.mean, cut_at_zero.sigma) == pytest.approx((0.2, 0.15), rel=0.02)
    long_tailed = spread_of([1.0] * 50 + [2.0] * 10 + [30.0])
    assert (long_tailed.kind, long_tailed.high) == ("lognormal", 30.0)


def test_a_train_step_is_prolonged_by_the_calls_answered_meanwhile() -> None:
    busy = job("rollart", train={"fixed_s": 2.0, "token_s": 0.0, "call_s": 0.01})
    idle = job("sync+", train={"fixed_s": 2.0, "token_s": 0.0, "call_s": 0.01})
    assert (
        simulate(idle).summary.step_time_s
        == simulate(job("sync+", train={"fixed_s": 2.0, "token_s": 0.0})).summary.step_time_s
    )
    without = job("rollart", train={"fixed_s": 2.0, "token_s": 0.0})
    assert simulate(busy).summary.step_time_s.p50 > simulate(without).summary.step_time_s.p50 + 0.5


def test_steps_full_of_prompts_are_priced_by_their_tokens() -> None:
    """Or a step with a few tokens of a prompt would cost as much as one that is full of them."""
    reports = [StepSums(1, 0, 0, 4, tokens, 0, 0.34) for tokens in (16384, 15000, 14000, 13500, 13000)]
    for step in range(1, 160):
        batch = 80 - step // 2
        reports.append(StepSums(1, batch, batch * (900 + step), 0, 0, 0, 3.7e-3 + batch * (900 + step) * 6e-8))
    found = fit_reports(reports)
    assert (found.prompt_step_s, found.launch_s) == (0.0, 0.0)
    assert found.prefill_token_s == pytest.approx(2.4e-5, rel=0.1)
