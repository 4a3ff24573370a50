"""An observation as msgpack values and back."""

import math
from collections.abc import Mapping
from typing import Any

from rollart.types import Message, Observation


def observation_to_wire(observation: Observation) -> dict[str, Any]:
    return {
        "messages": [[message.role, message.content] for message in observation.messages],
        "reward": float(observation.reward),
        "done": bool(observation.done),
        "truncated": bool(observation.truncated),
        "fresh": bool(observation.fresh),
        "info": dict(observation.info),
    }


def observation_from_wire(value: Any) -> Observation:
    """Raises ValueError for anything that is not an observation."""
    try:
        if not isinstance(value["info"], Mapping) or not math.isfinite(value["reward"]):
            raise ValueError("its info is no mapping, or its reward no finite number")
        return Observation(
            messages=tuple(Message(role=str(role), content=str(content)) for role, content in value["messages"]),
            reward=float(value["reward"]),
            done=bool(value["done"]),
            truncated=bool(value["truncated"]),
            fresh=bool(value["fresh"]),
            info=value["info"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not an observation: {error}") from error
