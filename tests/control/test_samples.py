"""Tokens in, tokens out: what is trained on is exactly what the engine saw; and advantages, by hand."""

import asyncio

import numpy as np
import pytest

from rollart.control.render import Prefix, delta
from rollart.control.samples import advantages, zero_variance
from rollart.ports import Env
from rollart.train.samples import filled, flatten
from rollart.types import Completion, Finish, Group, Observation, Span, Task, TrajectoryId
from tests.control.invariant import check_first_invariant
from tests.control.scene import Scene, ScriptedEnv, Words, scene_job


def test_a_sample_is_exactly_what_the_engine_saw_and_its_mask_what_it_said() -> None:
    scene = Scene(turns=3)
    assert scene.play().finished
    samples = check_first_invariant(scene)
    assert len(samples) == 3 * 2 * 2
    assert len({token for sample in samples for token in sample.tokens[sample.mask].tolist()}) == len(samples) * 9


def test_it_is_so_across_swaps_in_the_middle_of_an_answer() -> None:
    scene = Scene(scene_job(train__steps=6), answer_tokens=lambda request: 40)
    scene.job = scene.job.model_copy(
        update={"tasks": (scene.job.tasks[0].model_copy(update={"max_tokens": 64}),)},
    )
    assert scene.play().finished
    samples = check_first_invariant(scene)
    assert any(len(set(sample.versions[sample.mask].tolist())) > 1 for sample in samples)


class Forgetful(ScriptedEnv):
    """Rewrites its history at the second and at the fourth answer."""

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(1.0)
        self.done_turns += 1
        if self.done_turns == 6:
            return Observation(done=True)
        return self.says(f"turn {self.done_turns}", fresh=self.done_turns in (2, 4))


def test_a_rewritten_history_gives_one_sample_for_each_prefix() -> None:
    scene = Scene(scene_job(train__steps=2))

    async def forgetful(task: Task, trajectory: TrajectoryId) -> Env:
        return Forgetful(scene, task, trajectory)

    scene.on_open = forgetful
    assert scene.play().finished
    samples = check_first_invariant(scene)
    assert len(samples) == 2 * 2 * 2 * 3
    for sample in samples:
        starts = (sample.tokens == 1).sum()
        assert starts == 1, "one beginning-of-prefix mark in each sample"
        assert sample.mask.sum() == 6


def test_only_the_new_tokens_are_rendered_after_the_first_turn() -> None:
    observation = ScriptedEnv.says("hi")
    tokens, fresh = delta(Words(), observation, None)
    assert (tokens[0], fresh) == (1, True)
    answer = Completion(
        tokens=np.array([1001], dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        spans=(Span(0, 1),),
        finish=Finish.STOP,
        engine="e",
    )
    tokens, fresh = delta(Words(), observation, answer)
    assert (tokens[0], fresh) == (2, False)
    prefix = Prefix().extended(tokens, fresh=False).answered(answer).extended(tokens, fresh=True)
    assert (len(prefix.pieces), prefix.length) == (1, 3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # rewards 1, 0, 0, 3: mean 1, population standard deviation sqrt(6 / 4)
        ("grpo", [0.0, -1 / 1.5**0.5, -1 / 1.5**0.5, 2 / 1.5**0.5]),
        ("dr_grpo", [0.0, -1.0, -1.0, 2.0]),
        ("rloo", [1 - 3 / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]),
    ],
)
def test_advantages_by_hand(kind: str, expected: list[float]) -> None:
    assert advantages([1.0, 0.0, 0.0, 3.0], kind) == pytest.approx(expected, abs=1e-5)


def test_an_unknown_advantage_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="unknown advantage"):
        advantages([0.0, 1.0], "best_of_n")


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_the_advantage_of_the_job_is_what_the_samples_carry(kind: str) -> None:
    scene = Scene(scene_job(train__steps=1, train__advantage=kind))
    assert scene.play().finished
    batch = scene.journal.all[0]
    by_member = dict(zip(("g0.0.0", "g0.1.0"), advantages([0.0, 1.0], kind), strict=True))
    of_group = [sample for sample in batch.samples if sample.trajectory.group == "g0"]
    assert len(of_group) == 2
    for sample in of_group:
        assert sample.advantages[sample.mask] == pytest.approx(by_member[str(sample.trajectory)])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("members", [3, 6, 7])
def test_equal_rewards_leave_no_advantage_not_even_by_rounding(kind: str, members: int) -> None:
    assert advantages([0.1] * members, kind) == (0.0,) * members


def test_zero_variance_means_nothing_to_compare() -> None:
    assert zero_variance([0.3, 0.3, 0.3])
    assert not zero_variance([0.3, 0.3, 0.30001])


def test_a_group_without_members_has_no_samples() -> None:
    task = Task(id="a/0", domain="a", index=0)
    assert flatten(Group(id="g", task=task, members=(), born=0, advantages=())) == []


def test_groups_without_variance_may_be_passed_over() -> None:
    scene = Scene(
        scene_job(train__steps=1, rollout={"groups_per_step": 2, "zero_variance": "skip"}),
        reward=lambda trajectory: float(trajectory.id.member) if trajectory.id.group == "g0" else 1.0,
    )
    assert scene.play().finished
    batch = scene.journal.all[0]
    assert [group.id for group in batch.groups] == ["g0", "g1"], "both count"
    assert {sample.trajectory.group for sample in filled(batch).samples} == {"g0", "g1"}
    assert {sample.trajectory.group for sample in filled(batch, skip_zero_variance=True).samples} == {"g0"}
