"""What a file of trajectories says, row by row: each a msgpack list, the kind first. See `rollart.records.format`."""

from collections.abc import Sequence

import msgspec

FORMAT = 1
TIMES = ("started_s", "ended_s", "open_s", "reset_s", "wait_s", "generate_s", "env_s", "queue_s", "reward_s")


class LifeRow(msgspec.Struct, array_like=True, tag="life"):
    format: int
    life: int


class Dropped(msgspec.Struct, array_like=True, tag="dropped"):
    count: int


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    group: str
    how: str


class TrainedGroup(msgspec.Struct, array_like=True):
    id: str
    members: list[str]
    advantages: Sequence[float]


class Trained(msgspec.Struct, array_like=True, tag="trained"):
    step: int
    groups: list[TrainedGroup]


class AttemptRow(msgspec.Struct, array_like=True, tag="played"):
    """One attempt. `group`, `task`, `domain`, `status` and `reason` are positions in `texts`."""

    id: str
    group: int
    task: int
    domain: int
    evaluation: bool
    status: int
    reason: int
    reward: float | None
    parts: dict[str, float]
    born: int | None
    newest: int | None
    turns: int
    tokens: int
    times: bytes
    """`TIMES`, as float64."""
    first: int
    """Where its sampled tokens begin."""
    numbers: list[int | bool]
    """Of each turn: context, tokens, fresh, finish, engine, pool, prefill, cached, text, spans, messages shown; then
    the spans, then role and content of each message. At the end the messages that were left."""
    rewards: bytes
    """Of each turn, as float64."""
    seconds: bytes
    """Of each turn, as float32: waited, generated, in the environment."""


Row = LifeRow | Dropped | Ended | Trained | AttemptRow
