"""The reward worker: one process, one function call at a time. Started by `local.py`, never by hand."""

from collections.abc import Mapping

from rollart.rewards.episodes import reward_to_json
from rollart.tasks.api import Episode
from rollart.tasks.load import RewardFunction, load_reward
from rollart.types import JsonObject


class RewardWorker:
    """`names`: by domain. A function is loaded when its first episode arrives."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._functions: dict[str, RewardFunction] = {}

    def score(self, episode: JsonObject) -> JsonObject:
        read = Episode.from_json(episode)
        name = self._names[read.task.domain]
        if name not in self._functions:
            self._functions[name] = load_reward(name)
        returned = self._functions[name](read)
        try:
            return reward_to_json(returned)
        except ValueError as error:
            return {"nonsense": str(error)}
