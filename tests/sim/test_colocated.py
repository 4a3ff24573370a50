"""Engines and a trainer that take turns on the same GPUs: what changing over takes, and who may."""

from typing import Any

import pytest

from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.launch.checks import unsupported
from rollart.launch.simulation import simulate
from rollart.report.summary import Summary

PARAMS = 8.19e9


def raw(**changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "name": "turns",
        "mode": "sync+",
        "tasks": [{"name": "a", "group_size": 4}],
        "rollout": {"groups_per_step": 4, "zero_variance": "keep"},
        "pools": [{"name": "gpu", "hardware": "h800", "engines": {"count": 4}}, {"name": "envs", "slots": 64}],
        "train": {"colocated": True, "gpus": 4, "steps": 4},
        "sim": {"model": "qwen3-8b", "tasks": {"a": {"turns": 2, "step_s": 0.5}}, "train": {}},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        job[section] = {**job[section], name: value} if name else value
    return job


def played(watch: Any = None, **changes: Any) -> Summary:
    return simulate(build_job(raw(**changes)), watch=watch).summary


def step_s(**sim_train: Any) -> float:
    return played(sim={**raw()["sim"], "train": sim_train}).step_time_s.p50


def test_changing_over_takes_the_state_over_each_gpu_s_link_out_and_in() -> None:
    kept_s = step_s(state_bytes=0.0)
    once_s = 2 * PARAMS * 14 / (25e9 * 4)
    assert step_s() - kept_s == pytest.approx(once_s, rel=0.01)
    assert step_s(state_bytes=28.0) - kept_s == pytest.approx(2 * once_s, rel=0.01), "twice the state, twice the time"
    assert step_s(host_gb_s=50.0) - kept_s == pytest.approx(once_s / 2, rel=0.01)


def test_weights_do_not_travel_over_links() -> None:
    weights = played().weights
    assert weights.push_s == pytest.approx(0.0, abs=1e-3)
    assert weights.exposed_s == pytest.approx(2 * PARAMS / 50e9, rel=0.05), "they are loaded from the host's memory"


def test_engines_stand_still_while_the_trainer_has_their_gpus() -> None:
    """An evaluation would go on beside a step; it is played once engines have the GPUs again."""
    answers: list[float] = []
    steps: list[tuple[float, float]] = []
    begun: list[float] = []

    def read(event: Event) -> None:
        match event:
            case schema.Said():
                answers.append(event.t)
            case schema.StepStart():
                begun.append(event.t)
            case schema.StepEnd():
                steps.append((begun[-1], event.t))

    def watch(log: EventLog) -> None:
        log.read_by(read, schema.Said, schema.StepStart, schema.StepEnd)

    played(watch, evaluation={"every": 1, "episodes": 32}, train={"gpus": 4, "steps": 4, "colocated": True})
    assert not [at_s for at_s in answers for first_s, last_s in steps if first_s + 1e-3 < at_s < last_s]
    answers.clear()
    steps.clear()
    played(watch, evaluation={"every": 1, "episodes": 32}, train={"gpus": 4, "steps": 4})
    assert [at_s for at_s in answers for first_s, last_s in steps if first_s + 1e-3 < at_s < last_s]


def test_the_gpus_are_paid_once() -> None:
    together, apart = played(), played(train={"gpus": 4, "steps": 4})
    an_hour = [3600 * summary.cost.total / summary.time_s for summary in (together, apart)]
    assert an_hour[1] - an_hour[0] == pytest.approx(4 * 2.85, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "rollart"}, "train.colocated: mode 'rollart' trains while engines roll out"),
        ({"mode": "one-off"}, "train.colocated: mode 'one-off'"),
        ({"train__gpus": 5}, "train.gpus: 5 is more than the 4 GPUs"),
        ({"train__pool": "envs"}, "train.colocated: pool 'envs' has no engines"),
        (
            {"pools": [*raw()["pools"], {"name": "more", "hardware": "h20", "engines": {"count": 1}}]},
            "train.colocated: pool 'more' has engines on other GPUs",
        ),
        (
            {"sim__links": {"push_gb_s": 5}},
            "sim.links.push_gb_s: has an effect only with a trainer with GPUs of its own",
        ),
        ({"train__colocated": False, "sim__train": {"host_gb_s": 5}}, "sim.train.host_gb_s: .*train.colocated"),
    ],
)
def test_who_cannot_take_turns_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        build_job(raw(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"colocated": True, "device": "cuda:0"}}, "name one for both"),
        ({"cluster": {"type": "ray"}}, "on Ray each worker has devices of its own"),
    ],
)
def test_a_real_run_takes_turns_on_a_device_that_both_name(changes: dict[str, Any], said: str) -> None:
    job = {**raw(train={"colocated": True}), **changes}
    assert any(said in problem for problem in unsupported(build_job(job)))
    assert not any("colocated" in problem for problem in unsupported(build_job(raw(train={"colocated": True}))))
