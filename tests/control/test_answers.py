"""Answers of engines that cannot be believed: each ends its own attempt, is counted, and reaches no batch."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from rollart.events import schema
from rollart.policy.answers import MAX_REFUSED
from rollart.report.fold import SummaryFold
from rollart.report.summary import Failure
from rollart.types import Completion, GenerateRequest, Span, WeightManifest
from tests.control.scene import Played, Scene, ScriptedEngine, scene_job

BAD = "g1.1.0"
"""The attempt whose first answer is bad."""


def _logprobs(value: float) -> dict[str, object]:
    return {"logprobs": np.array([-0.5, value, -0.5], dtype=np.float32)}


WAYS: dict[str, tuple[dict[str, object], str]] = {
    "nan": (_logprobs(np.nan), "a log-probability that is not a finite number"),
    "minus infinity": (_logprobs(-np.inf), "a log-probability that is not a finite number"),
    "infinity": (_logprobs(np.inf), "a log-probability that is not a finite number"),
    "above 0": (_logprobs(0.25), "a log-probability of 0.25, above 0"),
    "backwards": ({"spans": (Span(0, 1), Span(1, 1), Span(0, 1))}, "sampled under version 0 after 1"),
    "older than before": ({"spans": (Span(-1, 3),)}, "sampled under version -1 after 0"),
    "a negative span": ({"spans": (Span(0, 4), Span(0, -1))}, "a span of -1 tokens"),
    "too few spans": ({"spans": (Span(0, 2),)}, "3 tokens, 3 log-probabilities and spans for 2"),
    "too few log-probabilities": ({"logprobs": np.zeros(2, dtype=np.float32)}, "3 tokens, 2 log-probabilities"),
}


def failures(played: Played) -> dict[str, Failure]:
    summary = SummaryFold()
    for event in played.events:
        summary.read(event)
    return summary.result().failures


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_answer_ends_its_attempt_and_nothing_else(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    changed, said = WAYS[way]

    class Wrong(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            answer = await super().generate(request)
            return replace(answer, **changed) if request.session == BAD else answer  # type: ignore[arg-type]

    monkeypatch.setattr("tests.control.scene.ScriptedEngine", Wrong)
    scene = Scene()
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    end = played.one(schema.End, id=BAD)
    assert end.status == "failed"
    assert end.reason.startswith("AnswerError: ")
    assert said in end.reason
    assert said in played.one(schema.Refused).reason
    assert failures(played)["answer"].count == 1
    assert not played.of(schema.EngineDown)
    trained = [str(sample.trajectory) for batch in scene.journal.all.values() for sample in batch.samples]
    assert BAD not in trained
    assert "g1.1.1" in trained, "the member was played again"


def test_a_hair_above_0_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rounds(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            answer = await super().generate(request)
            return replace(answer, logprobs=np.full_like(answer.logprobs, 1e-6))

    monkeypatch.setattr("tests.control.scene.ScriptedEngine", Rounds)
    played = Scene().play()
    assert played.finished
    assert not played.of(schema.Refused)


def test_an_engine_that_gives_bad_answers_only_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad answer is no reason to give an engine up; nothing but bad ones is."""

    class Broken(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            answer = await super().generate(request)
            first_life = self is self.scene.engines["fast-0"][0]
            return replace(answer, logprobs=answer.logprobs * np.nan) if first_life else answer

    monkeypatch.setattr("tests.control.scene.ScriptedEngine", Broken)
    scene = Scene(scene_job(limits__attempts=9))
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert f"{MAX_REFUSED} answers in a row could not be believed" in played.one(schema.EngineDown).reason
    assert len(played.of(schema.Refused, engine="fast-0")) == MAX_REFUSED


def test_a_good_answer_forgives_the_bad_ones_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, int] = {}

    class EverySecond(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            answer = await super().generate(request)
            count = answers[self.spec.id] = answers.get(self.spec.id, 0) + 1
            return replace(answer, logprobs=answer.logprobs * np.nan) if count % 2 else answer

    monkeypatch.setattr("tests.control.scene.ScriptedEngine", EverySecond)
    played = Scene(scene_job(limits__attempts=50, train__steps=8), turns=1).play()
    assert played.finished, played.error
    assert len(played.of(schema.Refused)) > 2 * MAX_REFUSED
    assert not played.of(schema.EngineDown)


def test_a_trajectory_goes_on_under_the_last_version_of_an_answer_that_a_rolling_swap_cut() -> None:
    """Its second turn must not go to an engine that the swap has not reached yet."""
    scene = Scene(
        scene_job(
            train__steps=8,
            rollout={"groups_per_step": 2, "staleness": 3, "rolling": 1},
            tasks=[{"name": "a", "group_size": 2, "max_turns": 4, "max_tokens": 64}],
        ),
        answer_tokens=lambda request: 60,
        step_s=0.1,
        turns=4,
    )

    async def slow_second(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine.spec.id == "fast-1":
            await asyncio.sleep(20.0)

    scene.on_swap = slow_second
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    calls = {(said.request.session, said.request.turn): said for said in scene.said}
    cut = [said for said in scene.said if said.versions[0] != said.versions[-1]]
    followed = [(said, after) for said in cut if (after := calls.get((said.request.session, said.request.turn + 1)))]
    assert followed
    for said, after in followed:
        assert after.request.min_version == said.versions[-1]
        assert after.versions[0] >= said.versions[-1]
