"""Rewards for a model that is seldom right: where all members of a group earn the same, there is nothing to learn from.

Each is one of a task's rewards, beside the task's own or in its place: see jobs/sources.yaml.
"""

import re

from rollart.tasks.api import Episode

ACTIONS = {"list", "read", "search", "edit", "test", "submit"}


def near(episode: Episode) -> float:
    """1 for the right number, less the further the last one that was said is from it, 0 for none."""
    payload = episode.task.payload
    wanted = float(payload["answers"][0] if "answers" in payload else payload["secret"])
    said = re.findall(r"\d{1,9}", "\n".join(turn.text for turn in episode.turns))
    return 1 / (1 + abs(float(said[-1]) - wanted) / 10) if said else 0.0


def in_brackets(episode: Episode) -> float:
    """The share of answers with a number in square brackets; one without brackets counts half."""
    worth = (
        1.0 if re.search(r"\[\d+\]", turn.text) else 0.5 * bool(re.search(r"\d", turn.text)) for turn in episode.turns
    )
    return sum(worth) / max(1, len(episode.turns))


def names_actions(episode: Episode) -> float:
    """The share of code_repair's actions that the answers name at all."""
    said = {word for turn in episode.turns for word in re.findall(r"[a-z]+", turn.text.lower())}
    return len(said & ACTIONS) / len(ACTIONS)
