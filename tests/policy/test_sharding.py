"""How the rollout is divided between shards."""

import pytest

from rollart.policy.sharding import ShardView, least_loaded, part, part_of


@pytest.mark.parametrize("amount", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_each_has_as_many_as_any_other_or_one_more(amount: int, shards: int) -> None:
    parts = [part(range(amount), number, shards) for number in range(shards)]
    assert sorted(one for own in parts for one in own) == list(range(amount))
    assert [len(own) for own in parts] == [part_of(amount, number, shards) for number in range(shards)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_group_goes_where_the_fewest_of_its_pool_are() -> None:
    shards = [ShardView(number, up=True, pools=frozenset("ab")) for number in range(3)]
    shards[0].groups.update(a=1)
    shards[1].groups.update(b=5)
    shards[2].groups.update(a=1, b=1)
    found = least_loaded(shards, "a")
    assert found is shards[1], "it has the most groups, but none of this pool"
    shards[1].up = False
    assert least_loaded(shards, "a") is shards[0], "as many of the pool, and fewer in all"
    assert least_loaded([shards[1]], "a") is None


def test_a_shard_without_an_engine_of_the_pool_is_the_last_choice() -> None:
    has, lacks = ShardView(0, up=True, pools=frozenset("ab")), ShardView(1, up=True, pools=frozenset("b"))
    has.groups.update(a=9)
    assert least_loaded([has, lacks], "a") is has
    assert least_loaded([has, lacks], "b") is lacks
    has.up = False
    assert least_loaded([has, lacks], "a") is lacks, "it has engines that may stand in"
