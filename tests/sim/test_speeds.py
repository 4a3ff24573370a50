"""Affinity learns how fast engines really are: on the virtual clock, where the table of one pool is wrong."""

import statistics
from itertools import pairwise
from pathlib import Path

import msgspec
import orjson
import pytest

from rollart.cli import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.events import schema
from rollart.events.log import read_events
from rollart.hardware import HARDWARE, MODELS, RUNTIMES, engine_costs
from rollart.launch.simulation import simulate
from rollart.policy import speeds

TABLE = engine_costs(MODELS["qwen3-8b"], HARDWARE["h800"], 1, RUNTIMES["embedded"])


def really(prefill: float) -> dict[str, float]:
    """The costs of `sim.engine.measured` for an engine whose prefill takes so many times what the table says."""
    return {
        "step_s": TABLE.fixed_s + TABLE.dense_read_s,
        "sequence_s": TABLE.sequence_s,
        "kv_token_s": TABLE.kv_token_s,
        "prefill_token_s": prefill * TABLE.prefill_token_s(4000.0),
    }


def job(prefill: float = 3.0, affinity: str = "auto") -> Job:
    """A prefill-heavy and a decode-heavy task, two pools of the same hardware. The first has slow prefill in truth."""
    return build_job(
        {
            "name": "wrong",
            "tasks": [
                {"name": "game", "group_size": 4, "max_turns": 20, "affinity": affinity},
                {"name": "maths", "group_size": 4, "max_tokens": 8192, "affinity": affinity},
            ],
            "rollout": {"groups_per_step": 8, "zero_variance": "keep"},
            "pools": [
                {"name": "one", "hardware": "h800", "engines": {"count": 1}},
                {"name": "two", "hardware": "h800", "engines": {"count": 1}},
                {"name": "environments", "slots": 512},
            ],
            "train": {"steps": 14},
            "sim": {
                "tasks": {
                    "game": {"turns": 6, "prompt_tokens": 3000, "observation_tokens": 2500, "answer_tokens": 20},
                    "maths": {"turns": 1, "prompt_tokens": 200, "answer_tokens": 1500},
                },
                "engine": {"measured": {"one": really(prefill)}},
                "train": {"step_s": 1.0},
                "links": {"push_gb_s": 100.0, "pull_gb_s": 100.0},
            },
        }
    )


def looks(out: Path) -> list[schema.Affinity]:
    return [event for event in read_events(out / "events.jsonl") if isinstance(event, schema.Affinity)]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speeds") / "learnt"
    assert simulate(job(), out).summary.state == "finished"
    return out


def test_tasks_move_off_a_pool_whose_table_is_wrong_and_stay_where_nothing_is_learnt(
    learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "ENOUGH", 1 << 60)
    simulate(job(), tmp_path / "not")
    wise, unwise = looks(learnt)[-1], looks(tmp_path / "not")[-1]
    assert wise.plan["game"]["two"] > 0.75
    assert wise.plan["maths"]["one"] > 0.75
    assert unwise.plan["game"] == unwise.plan["maths"] == {"one": 0.5, "two": 0.5}
    step_s = [
        statistics.median(event.t - before.t for before, event in pairwise(ends(out)))
        for out in (learnt, tmp_path / "not")
    ]
    assert step_s[0] < 0.8 * step_s[1]


def ends(out: Path) -> list[schema.StepEnd]:
    return [event for event in read_events(out / "events.jsonl") if isinstance(event, schema.StepEnd)]


def test_the_factors_are_those_of_the_engines(learnt: Path) -> None:
    one, two = (looks(learnt)[-1].speeds[pool] for pool in ("one", "two"))
    assert one.prefill is not None
    assert one.decode is not None
    assert two.prefill is not None
    assert two.decode is not None
    # Attention over long prompts is in the table, and not in the costs that `really` can say.
    assert one.prefill.factor == pytest.approx(3.0, rel=0.15)
    assert one.prefill.measured_s == pytest.approx(really(3.0)["prefill_token_s"], rel=0.05)
    assert [rate.factor for rate in (one.decode, two.prefill, two.decode)] == pytest.approx([1.0] * 3, abs=0.02)
    assert all(rate.believed for rate in (one.prefill, one.decode, two.prefill, two.decode))
    assert any("one is measured to take" in look.reason for look in looks(learnt))


def test_nothing_is_learnt_nor_written_where_all_is_declared(tmp_path: Path) -> None:
    simulate(job(affinity="one"), tmp_path / "run")
    assert b'"speeds"' not in (tmp_path / "run" / "events.jsonl").read_bytes()


def test_the_same_run_learns_the_same(learnt: Path, tmp_path: Path) -> None:
    simulate(job(), tmp_path / "again")
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == (learnt / "events.jsonl").read_bytes()


def test_explain_shows_the_table_the_measurement_the_factor_and_the_evidence(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(learnt), "--json"]) == 0
    shown = orjson.loads(capsys.readouterr().out)["speeds"]
    last = looks(learnt)[-1].speeds
    assert shown == msgspec.to_builtins(last)
    assert main(["explain", str(learnt)]) == 0
    text = capsys.readouterr().out
    rate = last["one"].prefill
    assert rate is not None
    assert f"{rate.measured_s * 1e6:.3g} measured: {rate.factor:.2f} times as long ({rate.windows} windows" in text
