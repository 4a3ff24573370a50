"""Values cross between our processes unchanged; junk is a ValueError and nothing else."""

import contextlib
import enum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollart.types as types
from rollart.types import BreakerState, Bucket, Finish, MixState, Span, Status, TrajectoryId
from rollart.workers.wire import ENUMS, FIELDS, RECORDS, pack, unpack

TOKENS = np.array([3, 1, 2], dtype=np.int32)
TASK = types.Task(id="a/7", domain="a", index=7, payload={"q": "2 + 3", "n": [1, 2.5, None, True]}, seed=4)
COMPLETION = types.Completion(
    tokens=TOKENS,
    logprobs=np.array([-0.1, -2.0, -0.5], dtype=np.float32),
    spans=(Span(0, 2), Span(1, 1)),
    finish=Finish.LENGTH,
    engine="e",
    busy_s=0.25,
)
TRAJECTORY = types.Trajectory(
    id=TrajectoryId("g1", 2, 3),
    task=TASK,
    turns=(types.Turn(context=TOKENS, fresh=True, completion=COMPLETION, reward=1.0),),
    status=Status.DONE,
    born=0,
    oldest=None,
    reward=0.5,
    reward_parts={"right": 0.5},
)
GROUP = types.Group(id="g1", task=TASK, members=(TRAJECTORY,), born=0, advantages=(0.5,))
SAMPLE = types.Sample(
    trajectory=TRAJECTORY.id,
    domain="a",
    tokens=TOKENS,
    mask=np.array([False, True, True]),
    logprobs=np.zeros(3, dtype=np.float32),
    versions=np.array([-1, 0, 0], dtype=np.int32),
    advantages=np.zeros(3, dtype=np.float32),
)
SAMPLING = types.Sampling(stop=("x", "y"), seed=None)
MANIFEST = types.WeightManifest(
    version=3,
    buckets=(Bucket("v3/0", 12, "crc32:0"),),
)
TOOL = types.Tool(name="add", description="Add.", parameters="{}")
CALL = types.ToolCall(id="c", name="add", arguments="{}")
NOTE = types.TurnNote(pool="p", waited_s=0.5, shown=(types.Message(role="user", content="x"),), text="a")
VALUES: list[Any] = [
    TASK,
    TRAJECTORY.id,
    types.Message(role="user", content="hé\n"),
    TOOL,
    CALL,
    types.ChatRequest(
        messages=(types.Message(role="tool", content="x", tool_call_id="c"),), tools=(TOOL,), stop=("x",)
    ),
    types.ChatAnswer(
        message=types.Message(role="assistant", content="", reasoning="hm", tool_calls=(CALL,)),
        completion=COMPLETION,
        prompt_tokens=3,
        pieces=("a",),
    ),
    types.Endpoint("http://127.0.0.1:1/v1", "key"),
    types.Program(command=("a", "b")),
    types.Observation(messages=(types.Message(role="user", content="x"),), tools=(TOOL,), reward=-1.5, info={"a": 1}),
    SAMPLING,
    types.GenerateRequest(
        id="x/0", session="x", domain="a", turn=0, prompt=(TOKENS, TOKENS), prompt_tokens=6, sampling=SAMPLING
    ),
    Span(1, 2),
    types.StepSums(1.0, 2.0, 3.0),
    types.EngineWork(types.StepSums(1.0), types.StepSums(), types.StepSums(seconds=0.5)),
    COMPLETION,
    TRAJECTORY.turns[0],
    TRAJECTORY,
    types.Score(value=1.0, parts={"a": 1.0}),
    GROUP,
    SAMPLE,
    types.Batch(step=4, serving=3, groups=(GROUP,), samples=(SAMPLE,)),
    types.SetAside(TRAJECTORY.id, "not finite"),
    types.StepResult(version=5, metrics={"loss": 0.5}, set_aside=(types.SetAside(TRAJECTORY.id, "not finite"),)),
    NOTE,
    types.Played(trajectory=TRAJECTORY, notes=(NOTE,), evaluation=True),
    MANIFEST.buckets[0],
    MANIFEST,
    types.SwapReport(version=3, pulled=types.Pulled(0.1, 5)),
    types.Pulled(0.5, 7, 0.25),
    types.EngineSpec(id="e", pool="p", type="embedded", hardware="cpu", gpus=1),
    types.EngineView(id="e", pool="p"),
    types.OpenGroup(id="g1", task=TASK),
    types.Probe(tokens=(1, 2), logprobs=(-0.5,)),
    types.Needs(resource="h20", cpus=1.0, gpus=0.0),
    types.Node(name="n", resources={"CPU": 2.0}, taken_on_trust=False),
    BreakerState(2, True, 1),
    MixState(3, (1, 2), 4, ()),
    types.Checkpoint(
        step=1,
        trainer="ref",
        breakers={"a": BreakerState(2, True, 1)},
        mix={"a": MixState(3, (1, 2), 4, ())},
        ready=(GROUP,),
        open=(),
        next_group=2,
        incarnation=0,
    ),
]


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if isinstance(one, np.ndarray):
        return bool(
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if type(one) in FIELDS:
        return all(same(getattr(one, name), getattr(other, name)) for name in FIELDS[type(one)])
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def test_there_is_an_example_of_every_type() -> None:
    ours = {name for name, kind in RECORDS.items() if kind.__module__ == types.__name__}  # others may be allowed too
    assert {type(value).__name__ for value in VALUES} == ours
    assert {Status, Finish} == set(ENUMS.values()) - {enum.StrEnum}


@pytest.mark.parametrize("value", [pytest.param(value, id=type(value).__name__) for value in VALUES])
def test_every_type_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@pytest.mark.parametrize("value", [*Status, *Finish])
def test_enums_come_back_as_themselves(value: enum.Enum) -> None:
    assert unpack(pack(value)) is value


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
DTYPES = st.sampled_from(
    ["|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", ">i4", ">u2", ">f4"]
)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape))).astype(dtype).reshape(shape),
    DTYPES,
    st.lists(st.integers(0, 4), max_size=3),
)
TREES = st.recursive(
    SCALARS | ARRAYS | st.sampled_from(VALUES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_of_values_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_random_bytes_are_a_value_error_or_plain_data(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        unpack(body)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VALUES), st.data())
def test_a_damaged_message_is_a_value_error_or_another_message(value: Any, data: st.DataObject) -> None:
    body = bytearray(pack(value))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        unpack(bytes(body))


@pytest.mark.parametrize("value", [pytest.param(value, id=type(value).__name__) for value in VALUES])
def test_a_message_cut_short_is_a_value_error(value: Any) -> None:
    body = pack(value)
    for end in {0, 1, len(body) // 2, len(body) - 1}:
        with pytest.raises(ValueError, match=r"."):
            unpack(body[:end])
    with pytest.raises(ValueError, match=r"."):
        unpack(body + b"\x00")


def marked(kind: bytes, content: Any) -> bytes:
    packed: bytes = msgpack.packb({kind: content})
    return packed


NONSENSE = {
    "no such record": marked(b"r", ["Popen", "ls"]),
    "too many fields": marked(b"r", ["Span", 1, 2, 3]),
    "a field is missing": marked(b"r", ["Span", 1]),
    "record without fields": marked(b"r", ["Span"]),
    "record of nothing": marked(b"r", []),
    "record is a number": marked(b"r", 7),
    "record name is a list": marked(b"r", [["Span"], 1, 2]),
    "no such enum": marked(b"e", ["Signals", 9]),
    "no such member": marked(b"e", ["Status", "well"]),
    "objects": marked(b"a", ["|O", [1], b"12345678"]),
    "a structure": marked(b"a", ["i4,i4", [1], b"12345678"]),
    "dtype is a mapping": marked(b"a", [{"names": ["a"]}, [1], b"12345678"]),
    "too few bytes": marked(b"a", ["<i4", [3], b"1234"]),
    "a shape beyond all bounds": marked(b"a", ["<i4", [2**62, 2**62], b"1234"]),
    "a shape of text": marked(b"a", ["<i4", "ab", b"1234"]),
    "bytes are text": marked(b"a", ["<i4", [1], "1234"]),
    "unknown kind": marked(b"x", []),
    "tuple of nothing": marked(b"t", None),
    "an extension": msgpack.packb(msgpack.ExtType(9, b"")),
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in NONSENSE.items()])
def test_nonsense_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(body)


def test_a_message_nested_without_end_is_a_value_error() -> None:
    body = msgpack.packb(1)
    for _ in range(2000):
        body = b"\x81\xc4\x01t\x91" + body
    with pytest.raises(ValueError, match=r"."):
        unpack(body)


@pytest.mark.parametrize("value", [object(), {1, 2}, 3j, np.array([object()]), np.array(["a"]), Exception("x")])
def test_what_may_not_cross_is_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="may not cross"):
        pack([value])


def test_numpy_scalars_become_plain_numbers() -> None:
    assert same(unpack(pack([np.float32(0.5), np.int64(3), np.bool_(True)])), [0.5, 3, True])


def test_every_record_knows_its_fields() -> None:
    assert all(hasattr(kind, "_fields") or kind in FIELDS for kind in RECORDS.values())
