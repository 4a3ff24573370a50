"""What a pool is predicted to need: more for more work, less with more engines, and as the simulator finds it."""

from dataclasses import replace

import pytest

from rollart.hardware import HARDWARE, MODELS, Disaggregated, kv_capacity_tokens
from rollart.policy.prediction import NEVER_S, PoolSpeed, forecast
from rollart.policy.profile import TaskProfile

COMPUTE = PoolSpeed(
    name="compute", hardware=HARDWARE["h800"], model=MODELS["qwen3-8b"], engines=2, gpus=1, max_batch=256
)
BANDWIDTH = replace(COMPUTE, name="bandwidth", hardware=HARDWARE["h20"], engines=4)


def profile(turns: float, prompt: float, observation: float, answer: float, spread: float = 0.3) -> TaskProfile:
    """A task of which every trajectory has the same turns."""
    prompts = sum(prompt + number * (observation + answer) for number in range(round(turns)))
    new = prompt + (turns - 1) * observation
    return TaskProfile(
        prompt_tokens=prompts,
        new_tokens=new,
        cached_tokens=prompts - new,
        prefill_tokens=new,
        decode_tokens=turns * answer,
        decode_squares=(turns * answer) ** 2 * (1 + spread**2),
        turns=turns,
        context_tokens=prompts / turns + answer,
        elsewhere_s=1.0,
        trajectories=100,
    )


PREFILL_HEAVY = profile(12, 3000, 2000, 60)
DECODE_HEAVY = profile(2, 300, 150, 2500)


def period_s(pool: PoolSpeed, one: TaskProfile, count: float = 32.0, members: int = 4, ahead: float = 1.5) -> float:
    return forecast(pool, {"a": count}, {"a": one}, {"a": members}, ahead).period_s


def test_each_kind_of_task_is_faster_on_its_kind_of_hardware_at_equal_price() -> None:
    cheap = BANDWIDTH.with_engines(6)
    assert period_s(COMPUTE, PREFILL_HEAVY, 16.0) < 0.9 * period_s(cheap, PREFILL_HEAVY, 16.0)
    assert period_s(cheap, DECODE_HEAVY, 128.0) < 0.9 * period_s(COMPUTE, DECODE_HEAVY, 128.0)


@pytest.mark.parametrize("pool", [COMPUTE, BANDWIDTH])
@pytest.mark.parametrize("one", [PREFILL_HEAVY, DECODE_HEAVY])
def test_more_work_takes_longer_and_more_engines_are_faster(pool: PoolSpeed, one: TaskProfile) -> None:
    assert period_s(pool, one, 64.0) > period_s(pool, one, 32.0) > period_s(pool, one, 8.0)
    assert period_s(pool.with_engines(8), one) < period_s(pool, one)
    both = forecast(pool, {"a": 16.0, "b": 16.0}, {"a": one, "b": one}, {"a": 4, "b": 4}, 1.5)
    assert both.period_s == pytest.approx(period_s(pool, one, 32.0), rel=0.02), "two halves are one whole"


def test_tokens_are_cheaper_in_a_batch() -> None:
    assert period_s(BANDWIDTH, DECODE_HEAVY, 64.0) < 1.8 * period_s(BANDWIDTH, DECODE_HEAVY, 32.0)


def test_caches_that_do_not_fit_are_paid_for() -> None:
    """The same work with four times the context: without the caches it is prefilled over and over."""
    wide = replace(PREFILL_HEAVY, context_tokens=4 * PREFILL_HEAVY.context_tokens)
    assert period_s(COMPUTE, wide, 16.0) > 2 * period_s(COMPUTE, PREFILL_HEAVY, 16.0)
    uncached = replace(PREFILL_HEAVY, cached_tokens=0.0)
    assert period_s(COMPUTE, uncached, 16.0) > 1.3 * period_s(COMPUTE, PREFILL_HEAVY, 16.0), "an engine without a cache"


def test_caches_that_the_job_bounds_are_planned_for_as_such() -> None:
    room = kv_capacity_tokens(COMPUTE.model, COMPUTE.hardware, 1)
    fits = round(0.7 * 2 * room / PREFILL_HEAVY.context_tokens)
    bounded = replace(COMPUTE, kv_tokens=room // 2)
    assert period_s(bounded, PREFILL_HEAVY, fits) > 2 * period_s(COMPUTE, PREFILL_HEAVY, fits)
    assert period_s(replace(COMPUTE, kv_tokens=2 * room), PREFILL_HEAVY, fits) == period_s(COMPUTE, PREFILL_HEAVY, fits)


def test_caches_of_all_that_may_be_alive_must_fit_beside_each_other() -> None:
    """Two steps' worth may be alive. While they fit, the time grows as the work does; beyond, far faster."""
    room = 2 * kv_capacity_tokens(COMPUTE.model, COMPUTE.hardware, 1)
    fits = 0.7 * room / PREFILL_HEAVY.context_tokens
    assert period_s(COMPUTE, PREFILL_HEAVY, fits) < 1.5 * period_s(COMPUTE, PREFILL_HEAVY, fits / 1.4)
    assert period_s(COMPUTE, PREFILL_HEAVY, 1.7 * fits) > 3 * period_s(COMPUTE, PREFILL_HEAVY, fits)


def test_a_pool_whose_caches_fit_only_while_it_is_fast_takes_the_mean_of_its_two_periods() -> None:
    """While trajectories are short, few live and their caches fit; once they do not, all take long, and many live. The
    simulator's steps swing likewise (docs/evaluation.md, "A plan for the paper's GPUs")."""
    room = 2 * kv_capacity_tokens(COMPUTE.model, COMPUTE.hardware, 1)
    full = 0.95 * room / PREFILL_HEAVY.context_tokens
    fast_s, slow_s = period_s(COMPUTE, PREFILL_HEAVY, 0.7 * full), period_s(COMPUTE, PREFILL_HEAVY, 1.5 * full)
    assert 1.6 * fast_s < period_s(COMPUTE, PREFILL_HEAVY, full) < 0.7 * slow_s


def test_caches_are_computed_anew_after_every_swap() -> None:
    """One context more for each swap in a trajectory's life; nearly all that this pool has to do is prefill."""
    prefill_s = BANDWIDTH.costs.prefill_token_s(PREFILL_HEAVY.context_tokens)
    once_s = 32.0 / BANDWIDTH.engines * PREFILL_HEAVY.new_tokens * prefill_s
    again_s = 32.0 / BANDWIDTH.engines * PREFILL_HEAVY.context_tokens * prefill_s
    assert once_s + again_s < period_s(BANDWIDTH, PREFILL_HEAVY, 32.0) < once_s + 2 * again_s


def test_a_group_waits_for_its_slowest_member() -> None:
    uneven = replace(DECODE_HEAVY, decode_squares=DECODE_HEAVY.decode_tokens**2 * 2)
    assert period_s(BANDWIDTH, uneven) > 1.2 * period_s(BANDWIDTH, DECODE_HEAVY)
    assert period_s(BANDWIDTH, uneven, members=16) > period_s(BANDWIDTH, uneven, members=4)


def test_a_looser_bound_lets_long_trajectories_take_longer() -> None:
    slow = replace(DECODE_HEAVY, elsewhere_s=300.0)
    assert period_s(BANDWIDTH, slow, 8.0, ahead=3.5) < 0.6 * period_s(BANDWIDTH, slow, 8.0, ahead=1.5)


def test_a_pool_without_engines_never_finishes_and_one_without_work_at_once() -> None:
    assert period_s(COMPUTE.with_engines(0), DECODE_HEAVY) == NEVER_S
    assert forecast(COMPUTE, {"a": 0.0}, {"a": DECODE_HEAVY}, {"a": 4}, 1.5).period_s == 0.0


def test_prefill_apart_is_on_the_other_hardware() -> None:
    apart = replace(BANDWIDTH, disaggregated=Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9))
    assert period_s(apart, PREFILL_HEAVY) < 0.7 * period_s(BANDWIDTH, PREFILL_HEAVY)
    thin = replace(BANDWIDTH, disaggregated=Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=0.05e9))
    assert period_s(thin, PREFILL_HEAVY) > 1.5 * period_s(apart, PREFILL_HEAVY)


def test_more_prefill_or_decode_workers_help_the_work_that_lacks_them() -> None:
    def apart(workers: int, decoders: int) -> PoolSpeed:
        of = Disaggregated(hardware=HARDWARE["h800"], gpus=1, workers=workers, decoders=decoders, link_bytes_per_s=25e9)
        return replace(BANDWIDTH, disaggregated=of)

    assert period_s(apart(2, 1), UNCACHED) < 0.7 * period_s(apart(1, 1), UNCACHED)
    assert period_s(apart(2, 1), DECODE_HEAVY) > 0.95 * period_s(apart(1, 1), DECODE_HEAVY)
    assert period_s(apart(1, 2), DECODE_HEAVY, 128.0) < 0.9 * period_s(apart(1, 1), DECODE_HEAVY, 128.0)


APART = replace(
    BANDWIDTH, name="apart", disaggregated=Disaggregated(hardware=HARDWARE["h800"], gpus=1, link_bytes_per_s=25e9)
)
UNCACHED = replace(PREFILL_HEAVY, cached_tokens=0.0)


@pytest.mark.parametrize(
    ("pool", "tasks", "period_s", "trajectory_s"),
    [
        (COMPUTE, {"a": PREFILL_HEAVY}, 26.691, {"a": 24.0806}),
        (COMPUTE, {"a": DECODE_HEAVY}, 43.1021, {"a": 47.6009}),
        (COMPUTE, {"a": PREFILL_HEAVY, "b": DECODE_HEAVY}, 56.6584, {"a": 11.377, "b": 62.6404}),
        (COMPUTE, {"a": UNCACHED}, 96.8484, {"a": 84.1626}),
        (BANDWIDTH, {"a": PREFILL_HEAVY}, 72.2929, {"a": 79.9434}),
        (BANDWIDTH, {"a": PREFILL_HEAVY, "b": DECODE_HEAVY}, 73.6761, {"a": 44.8538, "b": 80.0967}),
        (APART, {"a": PREFILL_HEAVY, "b": DECODE_HEAVY}, 34.3339, {"a": 7.99368, "b": 37.9289}),
        (APART, {"a": UNCACHED}, 50.9805, {"a": 55.8978}),
    ],
)
def test_a_prediction_changes_on_purpose_only(
    pool: PoolSpeed, tasks: dict[str, TaskProfile], period_s: float, trajectory_s: dict[str, float]
) -> None:
    """The figures of docs/affinity.md were made with a predictor that says this."""
    found = forecast(pool, dict.fromkeys(tasks, 24.0), tasks, dict.fromkeys(tasks, 4), 1.5)
    assert found.period_s == pytest.approx(period_s, rel=1e-4)
    assert found.trajectory_s == pytest.approx(trajectory_s, rel=1e-4)
