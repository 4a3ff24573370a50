"""`rollart reward replay`: the dead letters of a run are asked about again. Nothing of the run is changed."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rollart.config.job import Job
from rollart.config.load import build_job, read_yaml
from rollart.config.settings import RewardSettings
from rollart.errors import JobError, RewardError
from rollart.launch.real import JUDGE_TOKEN
from rollart.launch.resume import JOB
from rollart.policy.redundancy import backoff_s
from rollart.rewards.function import TOKEN_VARIABLE
from rollart.rewards.http import HttpRewards
from rollart.rewards.judge import HttpJudge, JudgeRewards
from rollart.rewards.letters import FILE, Letter, read_letters
from rollart.rewards.local import LocalRewards
from rollart.tasks.api import Episode
from rollart.tasks.load import reward_of
from rollart.types import Score, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One letter, asked about again."""

    id: str
    """Of the attempt."""
    task: str
    """Name and number."""
    reward: str
    """Its name among the rewards of its task; empty where it is the job's."""
    failed: str
    """Why it failed in the run."""
    earned: float | None = None
    """What it would have earned, times the reward's `weight`; null where it still fails."""
    parts: Mapping[str, float] = field(default_factory=dict)
    fails: str = ""
    """Why it still fails."""


class _Backend(Protocol):
    async def score_episode(self, episode: Episode, /) -> Score: ...

    async def close(self) -> None: ...


def replay(run: Path, *, url: str | None = None, local: bool = False) -> list[Replayed]:
    """Ask whom the job asked; or a function, or a judge's endpoint, at `url`; or reward functions here (`local`).

    Raises JobError where there is nothing to read, or a reward cannot be asked so."""
    job = build_job(read_yaml(run / JOB, "RUN", "give a run directory, such as runs/NAME-TIME"))
    path = run / FILE
    letters = list(read_letters(path)) if path.exists() else []
    places = {(letter.episode.task.domain, letter.reward) for letter in letters}
    asked = {place: _elsewhere(_settings(job, *place), url, local=local) for place in sorted(places)}
    with tempfile.TemporaryDirectory(prefix="rollart-replay-") as logs:
        return asyncio.run(_replay(job, letters, asked, Path(logs)))


def _settings(job: Job, task: str, reward: str) -> RewardSettings:
    if not reward:
        return job.rewards
    own = [each for one in job.tasks if one.name == task for each in one.rewards if each.label == reward]
    if not own:
        raise JobError(f"RUN: a dead letter is of reward {reward!r} of task {task!r}, which the job does not have")
    return own[0]


def _elsewhere(settings: RewardSettings, url: str | None, *, local: bool) -> RewardSettings:
    """These settings with another one to ask."""
    if settings.type == "judge":
        if local:
            raise JobError("--local: a judge is no function that runs here; give --url with an endpoint of its model")
        if url is None and settings.pool is not None:
            raise JobError(
                f"RUN: the judge of pool {settings.pool} ended with its job; give --url with an endpoint of its model"
            )
        change = {} if url is None else {"url": url, "pool": None, "model": settings.model or settings.pool}
        return settings.model_copy(update=change)
    if local:
        return settings.model_copy(update={"type": "local", "url": None})
    return settings if url is None else settings.model_copy(update={"type": "http", "url": url})


async def _replay(
    job: Job, letters: list[Letter], asked: Mapping[tuple[str, str], RewardSettings], logs: Path
) -> list[Replayed]:
    functions = {task.name: reward_of(task.use) for task in job.tasks}
    backends = {place: _backend(settings, place[0], functions, logs) for place, settings in asked.items()}
    places = {place: asyncio.Semaphore(settings.at_once) for place, settings in asked.items()}

    async def one(letter: Letter) -> Replayed:
        place = (letter.episode.task.domain, letter.reward)
        told = Replayed(id=letter.episode.id, task=letter.episode.task.id, reward=letter.reward, failed=letter.reason)
        try:
            async with places[place]:
                score = await _asked(backends[place], asked[place], letter.episode)
        except RewardError as error:
            return replace(told, fails=str(error))
        return replace(told, earned=asked[place].weight * score.value, parts=score.parts)

    try:
        return list(await asyncio.gather(*map(one, letters)))
    finally:
        for backend in backends.values():
            await backend.close()


async def _asked(backend: _Backend, settings: RewardSettings, episode: Episode) -> Score:
    """With the job's retries. Raises RewardError."""
    tries = 1
    while True:
        try:
            return await backend.score_episode(episode)
        except RewardError as error:
            if tries > settings.retries or not error.retryable:
                raise
        await asyncio.sleep(backoff_s(settings.backoff_s, tries))
        tries += 1


def _backend(settings: RewardSettings, task: str, functions: Mapping[str, str], logs: Path) -> _Backend:
    match settings.type:
        case "http":
            return HttpRewards(settings, _no_tokens, os.environ.get(TOKEN_VARIABLE))
        case "judge":
            return JudgeRewards(settings, _no_tokens, HttpJudge(settings, os.environ.get(JUDGE_TOKEN)))
        case "local":
            return LocalRewards(settings, {task: settings.function or functions[task]}, _no_tokens, logs)


def _no_tokens(tokens: Tokens) -> str:
    raise AssertionError("a letter holds text")
