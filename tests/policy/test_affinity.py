"""Which pool suits which task: measured, for the whole mix, with hysteresis."""

import itertools
import random

import pytest

from rollart.hardware import HARDWARE, MODELS
from rollart.policy import affinity
from rollart.policy.affinity import MEMORY, REPLAN_EVERY, UNKNOWN, Affinity, PoolSpeed, TaskProfile, assign, finish_s


def pool(name: str, hardware: str, engines: int = 1) -> PoolSpeed:
    return PoolSpeed(
        name=name, hardware=HARDWARE[hardware], model=MODELS["qwen3-8b"], engines=engines, gpus=1, max_batch=256
    )


COMPUTE, BANDWIDTH = pool("compute", "h800", 2), pool("bandwidth", "h20", 2)
PREFILL_HEAVY = TaskProfile(prefill_tokens=50_000, decode_tokens=500, context_tokens=20_000)
DECODE_HEAVY = TaskProfile(prefill_tokens=300, decode_tokens=8_000, context_tokens=8_000)


def test_the_first_trajectories_count_evenly_and_later_ones_by_memory() -> None:
    profile = UNKNOWN
    for tokens in (100, 200, 300):
        profile = profile.seen(tokens, 2 * tokens, 3 * tokens)
    assert (profile.prefill_tokens, profile.decode_tokens, profile.context_tokens) == pytest.approx((200, 400, 600))
    for _ in range(50):
        profile = profile.seen(200, 400, 600)
    assert profile.seen(1200, 400, 600).prefill_tokens == pytest.approx(200 + MEMORY * 1000)
    assert profile.trajectories == 53


def test_prefill_heavy_tasks_are_faster_on_compute_and_decode_heavy_ones_on_bandwidth() -> None:
    assert COMPUTE.trajectory_s(PREFILL_HEAVY) < BANDWIDTH.trajectory_s(PREFILL_HEAVY)
    assert BANDWIDTH.trajectory_s(DECODE_HEAVY) < COMPUTE.trajectory_s(DECODE_HEAVY)


def times_of(profiles: dict[str, TaskProfile], pools: list[PoolSpeed]) -> dict[tuple[str, str], float]:
    return {(task, one.name): one.trajectory_s(profile) for task, profile in profiles.items() for one in pools}


@pytest.mark.parametrize("seed", range(12))
def test_the_assignment_is_the_one_under_which_the_busiest_pool_is_done_first(seed: int) -> None:
    rng = random.Random(seed)
    pools = [COMPUTE, BANDWIDTH, pool("old", "a100", 3)]
    profiles = {
        f"t{number}": TaskProfile(
            prefill_tokens=rng.uniform(100, 50_000),
            decode_tokens=rng.uniform(10, 8_000),
            context_tokens=rng.uniform(500, 20_000),
        )
        for number in range(5)
    }
    demand = {task: rng.uniform(1, 100) for task in profiles}
    fixed = {"t0": "old"} if seed % 2 else {}
    engines = {one.name: one.engines for one in pools}
    times = times_of(profiles, pools)
    best = min(
        finish_s(dict(zip(profiles, chosen, strict=True)), demand, times, engines)
        for chosen in itertools.product(engines, repeat=5)
        if not fixed or chosen[0] == "old"
    )
    found = assign(profiles, demand, pools, fixed)
    assert finish_s(found, demand, times, engines) == best
    assert set(found) == set(profiles)
    assert not fixed or found["t0"] == "old"


def test_with_many_tasks_one_at_a_time_is_moved_until_none_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    pools = [COMPUTE, BANDWIDTH]
    profiles = {
        f"t{number}": TaskProfile(
            prefill_tokens=rng.uniform(100, 50_000), decode_tokens=rng.uniform(10, 8_000), context_tokens=5_000
        )
        for number in range(9)
    }
    demand = {task: rng.uniform(1, 100) for task in profiles}
    engines = {one.name: one.engines for one in pools}
    times = times_of(profiles, pools)
    optimum = finish_s(assign(profiles, demand, pools, {}), demand, times, engines)
    monkeypatch.setattr(affinity, "EXHAUSTIVE", 100)
    found = assign(profiles, demand, pools, {"t3": "compute"})
    assert found["t3"] == "compute"
    found = assign(profiles, demand, pools, {})
    value = finish_s(found, demand, times, engines)
    assert value[0] <= 1.15 * optimum[0], "near the optimum"
    for task, name in itertools.product(profiles, engines):
        assert finish_s({**found, task: name}, demand, times, engines) >= value


ORDER = {"compute": ["compute", "bandwidth"], "bandwidth": ["bandwidth", "compute"]}


def two_tasks(game: str = "auto", maths: str = "auto") -> Affinity:
    return Affinity({"game": game, "maths": maths}, {"game": 32.0, "maths": 32.0}, [COMPUTE, BANDWIDTH], ORDER)


def feed(one: Affinity, task: str, profile: TaskProfile, times: int) -> list[dict[str, str]]:
    moves = [
        one.seen(task, int(profile.prefill_tokens), int(profile.decode_tokens), int(profile.context_tokens))
        for _ in range(times)
    ]
    return [move for move in moves if move]


def test_tasks_move_to_the_pool_that_suits_them_once_they_are_measured() -> None:
    one = two_tasks()
    before = dict(one.pool_of)
    left, right = ("game", "maths") if before["game"] == "bandwidth" else ("maths", "game")
    moved: dict[str, str] = {}
    for _ in range(4):
        for move in feed(one, left, PREFILL_HEAVY, REPLAN_EVERY) + feed(one, right, DECODE_HEAVY, REPLAN_EVERY):
            moved |= move
    assert one.pool_of == {left: "compute", right: "bandwidth"}
    assert one.order(left) == ("compute", "bandwidth")
    assert one.order(right) == ("bandwidth", "compute")
    assert moved == one.pool_of, "and each move was told"
    assert one.explain()[left]["compute"] == COMPUTE.trajectory_s(one.profiles[left])


def test_the_assignment_is_looked_at_once_in_so_many_trajectories() -> None:
    one = two_tasks()
    one.pool_of = {"game": "bandwidth", "maths": "compute"}
    one.profiles = {"game": PREFILL_HEAVY, "maths": DECODE_HEAVY}
    assert feed(one, "game", PREFILL_HEAVY, REPLAN_EVERY - 1) == []
    assert feed(one, "game", PREFILL_HEAVY, 1) == [{"game": "compute", "maths": "bandwidth"}]


def test_a_small_gain_does_not_move_a_task() -> None:
    """Two pools alike but for one part in twenty: not worth the caches."""
    slower = PoolSpeed(
        name="slower", hardware=HARDWARE["h800"], model=MODELS["qwen3-8b"], engines=20, gpus=1, max_batch=256
    )
    faster = PoolSpeed(
        name="faster", hardware=HARDWARE["h800"], model=MODELS["qwen3-8b"], engines=21, gpus=1, max_batch=256
    )
    one = Affinity({"game": "auto"}, {"game": 32.0}, [slower, faster], {"slower": ["slower"], "faster": ["faster"]})
    assert one.pool_of == {"game": "faster"}
    one.pool_of = {"game": "slower"}
    assert feed(one, "game", PREFILL_HEAVY, 3 * REPLAN_EVERY) == []
    assert one.pool_of == {"game": "slower"}


def test_declared_tasks_stay_where_the_user_wants_them() -> None:
    one = two_tasks(game="bandwidth", maths="compute")
    assert feed(one, "game", PREFILL_HEAVY, 3 * REPLAN_EVERY) == []
    assert one.pool_of == {"game": "bandwidth", "maths": "compute"}
    half = two_tasks(game="bandwidth")
    feed(half, "game", PREFILL_HEAVY, 3 * REPLAN_EVERY)
    feed(half, "maths", DECODE_HEAVY, 3 * REPLAN_EVERY)
    assert half.pool_of["game"] == "bandwidth"


def test_with_one_pool_there_is_nothing_to_move() -> None:
    one = Affinity({"game": "auto"}, {"game": 1.0}, [COMPUTE], {"compute": ["compute"]})
    assert feed(one, "game", DECODE_HEAVY, 3 * REPLAN_EVERY) == []
