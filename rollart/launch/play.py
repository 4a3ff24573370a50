"""`rollart play`: one episode of a task in the terminal, by hand or with a model. Nothing is trained or written.

The environment runs in a process of its own, as in a job; reward functions are asked here, judges and URLs are not.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.config.settings import TaskSettings
from rollart.control.draw import draw
from rollart.control.scoring import summed
from rollart.envs.process import ProcessEnvHost
from rollart.errors import EnvError, JobError, TaskError
from rollart.report.reading import visible
from rollart.tasks.api import Episode, EpisodeTurn, as_reward, text_of
from rollart.tasks.load import load_reward, load_task_set, reward_of
from rollart.types import Json, JsonObject, Message, Observation, Score, Task, TrajectoryId


@dataclass(slots=True, kw_only=True)
class PlayedEpisode:
    """One episode."""

    task: Task
    turns: list[EpisodeTurn] = field(default_factory=list)
    status: str = "truncated"
    """`done`, or `truncated`: turns ran out, or the player left."""
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


Answer = Callable[[Sequence[Message], bool], str | None]
"""What the player says to these messages (the first ones: true); None: nothing any more."""


def play(
    settings: TaskSettings, answer: Answer, show: Callable[[str], object], *, seed: int, index: int, held_out: bool
) -> PlayedEpisode:
    """Raises JobError where the task cannot be made or drawn."""
    task_set = load_task_set(settings.use, settings.args, seed=seed, domain=settings.name)
    task_set.prepare()
    try:
        task = draw(task_set, settings.name, index, held_out=held_out)
    except TaskError as error:
        raise JobError(f"{settings.use}: {error}") from None
    played = PlayedEpisode(task=task)
    try:
        asyncio.run(_episode(settings, played, answer, show, seed))
    except EnvError as error:
        raise JobError(f"{settings.use}: {error}") from None
    episode = Episode(id=task.id, status=played.status, task=task, turns=tuple(played.turns))
    score = load_reward(reward_of(settings.use))
    if not settings.rewards:
        played.reward, played.parts = as_reward(score(episode))
        return played
    here = [one for one in settings.rewards if one.type == "local"]
    for one in settings.rewards:
        if one not in here:
            show(f"reward {one.label}: not asked for, since a {one.type} is elsewhere")
    scores = [as_reward((load_reward(one.function) if one.function else score)(episode)) for one in here]
    total = summed(here, [Score(value=value, parts=parts) for value, parts in scores])
    played.reward, played.parts = total.value, total.parts
    return played


async def _episode(
    settings: TaskSettings, played: PlayedEpisode, answer: Answer, show: Callable[[str], object], seed: int
) -> None:
    name = settings.name
    with tempfile.TemporaryDirectory(prefix="rollart-play-") as logs:
        host = ProcessEnvHost(
            {name: settings.use},
            args={name: settings.args},
            slots=1,
            log_dir=Path(logs),
            seed=seed,
            variables=settings.environment,
        )
        try:
            env = await host.open(played.task, TrajectoryId(group="play", member=0, attempt=0))
            observation = await env.reset()
            for turn in range(settings.max_turns):
                _show(observation, show)
                if observation.done or observation.truncated:
                    break
                said = await asyncio.to_thread(answer, observation.messages, turn == 0)
                if said is None:
                    break
                context = text_of(observation)
                observation = await env.step(said)
                played.turns.append(EpisodeTurn(context=context, text=said, tokens=0, reward=observation.reward))
            else:
                _show(observation, show)
            played.status = "done" if observation.done else "truncated"
            await env.close()
        finally:
            await host.close()


def _show(observation: Observation, show: Callable[[str], object]) -> None:
    for message in observation.messages:
        text = visible(message.content).rstrip("\n")
        show(text if message.role == "user" else f"[{message.role}] {text}")


def by_hand(ask: Callable[[], str]) -> Answer:
    """Answers that are typed, one line each; the end of the input ends the episode."""

    def answer(messages: Sequence[Message], fresh: bool) -> str | None:
        try:
            return ask()
        except EOFError:
            return None

    return answer


def with_model(path: Path, settings: TaskSettings, show: Callable[[str], object]) -> Answer:
    """Answers of a model in a Hugging Face directory, by transformers' own generation. What it says is shown."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from rollart.model.tokenizer import ChatTokenizer

    if not (path / "config.json").exists():
        raise JobError(f"--model: {path} is not a Hugging Face directory (it has no config.json); name another")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = ChatTokenizer(path)
    model: Any = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    model.eval()
    context: list[int] = []
    sampling: dict[str, float] = {"do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        sampling |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}

    def answer(messages: Sequence[Message], fresh: bool) -> str:
        import numpy as np

        after = None if fresh else np.asarray(context, dtype=np.int32)
        context.extend(tokenizer.render(messages, fresh=fresh, after=after).tolist())
        ids = torch.tensor([context])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings.max_tokens,
            eos_token_id=list(tokenizer.stop_tokens),
            pad_token_id=tokenizer.stop_tokens[0],
            **sampling,
        )
        new = made[0, len(context) :].tolist()
        context.extend(new)
        text = tokenizer.decode(np.asarray(new, dtype=np.int32))
        show(f"> {visible(text)}")
        return text

    return answer


def as_json(played: PlayedEpisode) -> JsonObject:
    turns: Json = [{"shown": turn.context, "said": turn.text, "reward": turn.reward} for turn in played.turns]
    task = {"id": played.task.id, "payload": json.loads(json.dumps(dict(played.task.payload), default=str))}
    return {
        "task": task,
        "turns": turns,
        "status": played.status,
        "reward": played.reward,
        "parts": dict(played.parts),
    }
