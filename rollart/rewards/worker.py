"""The reward worker: one process, one function call at a time. Started by `local.py`, never by hand."""

from collections.abc import Mapping
from typing import Any

from rollart.workers import child


def start(setup: Mapping[str, Any]) -> child.Handler:
    """The handler of score requests. Functions are loaded when their first episode arrives."""
    from rollart.rewards.wire import reward_to_json
    from rollart.tasks.api import Episode
    from rollart.tasks.load import RewardFunction, load_reward

    names: Mapping[str, str] = setup["functions"]
    functions: dict[str, RewardFunction] = {}

    def handle(request: Mapping[str, Any]) -> Any:
        episode = Episode.from_json(request)
        name = names[episode.task.domain]
        if name not in functions:
            functions[name] = load_reward(name)
        returned = functions[name](episode)
        try:
            return reward_to_json(returned)
        except ValueError as error:
            return {"nonsense": str(error)}

    return handle


if __name__ == "__main__":
    child.serve(start)
