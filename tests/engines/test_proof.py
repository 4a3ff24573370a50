"""The proof of a swap, as a decision: who ignores a reload is caught, who is only rounding is not.

Noise is that of a vLLM server in bfloat16 (docs/vllm.md; `benchmarks/probe_noise.py` measures it). Its errors of
neighbouring tokens are alike, here too.
"""

import numpy as np
import pytest

from rollart.engines.proof import PRECISIONS, ProofResult, Proven, Values, judge

NUM_TOKENS = 2016
NOISE = 0.024
"""Server against trainer, root mean square, as measured."""
STEP = 0.005
LIKENESS = 0.3
"""Correlation of neighbouring tokens' errors: so much that a change's share of noise is what was measured."""
PRECISION = PRECISIONS["bfloat16"]


class Trainer:
    """Log-probabilities that move by STEP a step: each in a direction of its own, or all the way in one."""

    def __init__(self, seed: int, *, straight: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.logprobs: Values = -7.0 + self.rng.normal(size=NUM_TOKENS)
        self.direction = self.rng.normal(size=NUM_TOKENS) if straight else None

    def step(self, size: float = STEP) -> Values:
        direction = self.rng.normal(size=NUM_TOKENS) if self.direction is None else self.direction
        self.logprobs = self.logprobs + size * direction
        return self.logprobs

    def rounding(self) -> Values:
        """What a version's numbers are off by in another process: new with each version."""
        plain = self.rng.normal(size=NUM_TOKENS + 1)
        alike: Values = LIKENESS * plain[:-1] + np.sqrt(1 - LIKENESS**2) * plain[1:]
        alike *= NOISE
        return alike


def judged(version: int, answer: Values, expected: Values, state: Proven | None) -> ProofResult:
    return judge(version, answer.tolist(), expected.tolist(), state, PRECISION)


@pytest.mark.parametrize("straight", [False, True])
def test_a_thousand_honest_swaps_raise_no_alarm(straight: bool) -> None:
    trainer, state = Trainer(0, straight=straight), None
    doubts = []
    for version in range(1, 1001):
        expected = trainer.step()
        verdict = judged(version, expected + trainer.rounding(), expected, state)
        assert not verdict.wrong
        assert not verdict.stuck, version
        state = verdict.state
        doubts.append(state.doubt)
    assert max(doubts) < 8, "far from an alarm"
    assert state is not None
    assert state.sure > 990


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("good_swaps", [0, 1, 50])
@pytest.mark.parametrize("jitter", [0.0, 0.002, 0.012])
def test_a_server_that_ignores_reloads_is_caught_within_three_swaps(seed: int, good_swaps: int, jitter: float) -> None:
    """From the start, or stuck after some good ones; its answers the same to the bit, nearly, or half of its noise."""
    trainer, state = Trainer(seed), None
    answer = trainer.logprobs + trainer.rounding()
    for version in range(1, good_swaps + 1):
        expected = trainer.step()
        answer = expected + trainer.rounding()
        verdict = judged(version, answer, expected, state)
        assert not verdict.stuck
        state = verdict.state
    caught = 0
    for swap in range(1, 4):
        expected = trainer.step()
        verdict = judged(good_swaps + swap, answer + jitter * trainer.rng.normal(size=NUM_TOKENS), expected, state)
        state = verdict.state
        if verdict.stuck:
            caught = swap
            break
    assert 1 <= caught <= 3
    assert verdict.state.sure <= good_swaps + 1


def test_a_server_that_loads_only_a_part_is_caught() -> None:
    """It follows by a third of each step: some of its tensors are not reloaded."""
    trainer, state = Trainer(3, straight=True), None
    start = trainer.logprobs
    for version in range(1, 30):
        expected = trainer.step()
        verdict = judged(version, start + (expected - start) / 3 + trainer.rounding(), expected, state)
        if verdict.stuck:
            break
        state = verdict.state
    assert verdict.stuck
    assert not verdict.wrong


def test_steps_that_move_nothing_raise_no_doubt() -> None:
    """The same weights again and again, and the same answers to the bit."""
    trainer, state = Trainer(4), None
    answer = trainer.logprobs + trainer.rounding()
    for version in range(1, 200):
        verdict = judged(version, answer, trainer.logprobs, state)
        assert (verdict.stuck, verdict.wrong, verdict.state.doubt) == (False, False, 0.0)
        state = verdict.state


def test_steps_below_what_the_server_can_show_raise_no_alarm() -> None:
    """Its bfloat16 weights stay as they are for some swaps, then move by all that was missed."""
    trainer, state = Trainer(5, straight=True), None
    answer = trainer.logprobs + trainer.rounding()
    for version in range(1, 1001):
        expected = trainer.step(1e-4)
        if version % 10 == 0:
            answer = expected + trainer.rounding()
        verdict = judged(version, answer, expected, state)
        assert not verdict.stuck
        state = verdict.state


def test_other_weights_are_wrong_at_once() -> None:
    one, other = Trainer(6), Trainer(7)
    verdict = judged(1, one.logprobs, other.logprobs, None)
    assert verdict.wrong
    assert verdict.off > 1


@pytest.mark.parametrize("answer", [[], [-1.0] * 3, [float("nan")] * NUM_TOKENS])
def test_what_cannot_be_compared_is_wrong(answer: list[float]) -> None:
    verdict = judge(1, answer, [-1.0] * NUM_TOKENS, None, PRECISION)
    assert verdict.wrong
    assert verdict.off == float("inf")


def test_in_float32_much_smaller_steps_are_seen() -> None:
    trainer = Trainer(9)
    before = trainer.logprobs
    first = judge(1, before.tolist(), before.tolist(), None, PRECISIONS["float32"])
    after = trainer.step(5e-5)
    assert judge(2, before.tolist(), after.tolist(), first.state, PRECISIONS["float32"]).stuck
    assert not judge(2, after.tolist(), after.tolist(), first.state, PRECISIONS["float32"]).stuck
