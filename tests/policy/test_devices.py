"""Who gets which GPU, for machines of a given number of them."""

from rollart.policy.devices import DeviceDemand, assign


def wants(worker: str, own: int = 0, named: tuple[int, ...] = ()) -> DeviceDemand:
    return DeviceDemand(worker=worker, key=f"key.{worker}", own=own, named=named)


def test_a_device_of_ones_own_is_nobody_elses() -> None:
    demands = [wants("a", 2), wants("b", named=(1,)), wants("c", 1), wants("d", named=(1,)), wants("e", 3)]
    found = assign(demands, [str(number) for number in range(8)])
    assert found.missing == ()
    assert found.own == {"a": ("0", "2"), "c": ("3",), "e": ("4", "5", "6")}
    assert found.shared == {"b": ("1",), "d": ("1",)}
    own = [device for devices in found.own.values() for device in devices]
    assert len(own) == len(set(own))


def test_what_there_is_not_is_said_and_nobody_gets_a_part() -> None:
    found = assign([wants("a", 2), wants("b", 2), wants("c", named=(5,))], ["x", "y", "z"])
    assert found.own == {}
    assert len(found.missing) == 2
    assert found.missing[0].startswith("key.c: c would use cuda:5, and this machine has 3 GPUs, cuda:0 to cuda:2")
    assert found.missing[1].startswith("key.a, key.b: 4 GPUs are asked for (a 2, b 2), and this machine has 3;")


def test_no_gpus_and_nobody_who_wants_one() -> None:
    assert assign([], []).missing == ()
    assert assign([wants("a", named=(0,))], []).missing[0].endswith("this machine has 0 GPUs; name cpu")
