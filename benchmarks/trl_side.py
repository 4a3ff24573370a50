"""TRL's side of the comparison; runs in TRL's own environment, with this repository on PYTHONPATH.

Runs GRPOTrainer on FrozenLake, through `environment_factory` (form `tools`) or `rollout_func` (`words`, `chat`), and
writes the times of its steps, its figures and, every so many steps, the weights, which is taken off the clock.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lake_player import DOMAIN, FORMS, Episode, Form, play
from benchmarks.tool_lake import DONE, INSTRUCTION, MAX_CALLS, Walk
from rollart.model.tokenizer import ChatTokenizer
from rollart.tasks.frozen_lake import FrozenLakeTasks


class Lakes:
    """TRL's `environment_factory`: what it makes is reset with the number of a training task."""

    def __init__(self, seed: int) -> None:
        self._tasks = FrozenLakeTasks(seed=seed, domain=DOMAIN)

    def __call__(self) -> "Lake":
        return Lake(self._tasks)


class Lake:
    """An environment as TRL wants it: every public method but `reset` is a tool."""

    def __init__(self, tasks: FrozenLakeTasks) -> None:
        self._tasks = tasks
        self._walk: Walk | None = None

    def reset(self, number: int = 0, **_: object) -> str:
        self._walk = Walk(self._tasks.environment(self._tasks.task(number)))
        return self._walk.grid()

    def move(self, direction: str) -> str:
        assert self._walk is not None
        return self._walk.move(direction)

    move.__doc__ = Walk.move.__doc__

    def _earned(self, completion: Sequence[dict[str, Any]]) -> float:
        """As `ToolLake` rewards it."""
        *calls, last = [message for message in completion if message["role"] == "assistant"]
        clean = all(len(call.get("tool_calls") or []) == 1 and not call["content"].strip() for call in calls)
        done = not last.get("tool_calls") and last["content"].strip() == DONE
        return self._walk.reward if self._walk is not None and clean and done else 0.0


class Rollouts:
    """TRL's `rollout_func`: each prompt is the number of a training task."""

    def __init__(self, model_path: Path, form: Form, seed: int) -> None:
        self._tokenizer = ChatTokenizer(model_path)
        self._max_turns = form.max_turns
        self._tasks = form.tasks(seed=seed, domain=DOMAIN)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        tasks = [self._tasks.task(int(prompt)) for prompt in prompts]
        episodes = play(tasks, self._tokenizer, self._tasks, self._max_turns, _by_trl(trainer))
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.rest for episode in episodes],
            "env_mask": [episode.sampled for episode in episodes],
            "logprobs": None,
            "earned": [episode.reward for episode in episodes],
        }


def _by_trl(trainer: Any) -> Any:
    """What GRPOTrainer's own tool loop calls for every turn: the whole prompt again, in a padded batch."""

    def answer(live: Sequence[Episode]) -> list[list[int]]:
        prompts = [episode.prompt + episode.rest for episode in live]
        said, _ = trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        return list(said)

    return answer


def earned(earned: list[float], **_: object) -> list[float]:
    """The reward function with `rollout_func`: what the environment gave."""
    return earned


def walked(completions: list[list[dict[str, Any]]], environments: list[Lake], **_: object) -> list[float]:
    """The reward function with tools."""
    return [lake._earned(completion) for lake, completion in zip(environments, completions, strict=True)]


class Clocks(NamedTuple):
    """Wall time, and CPU time of all threads of this process."""

    wall_s: float
    cpu_s: float

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def now() -> Clocks:
    return Clocks(time.monotonic(), time.process_time())


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended, and writes the weights every so many steps, off the clock."""

    def __init__(self, out: Path, every: int, cap_s: float) -> None:
        self._out, self._every, self._cap_s = out, every, cap_s
        self._paused = Clocks(0.0, 0.0)
        self.began = Clocks(0.0, 0.0)
        self.ends: list[Clocks] = []
        """Since the start of training, at the end of each step."""
        self.rewards: list[float] = []
        """Means, as TRL logs them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = now()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        ended = now()
        self.ends.append(ended - self.began - self._paused)
        if state.global_step % self._every == 0:
            model.save_pretrained(self._out / f"step-{state.global_step:08d}")
            self._paused = now() - (ended - self._paused)
        if self.ends[-1].wall_s > self._cap_s:
            control.should_training_stop = True


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    numbers = list(range(args.groups * args.steps))
    play: dict[str, Any]
    if args.form == "tools":
        prompts = [[{"role": "user", "content": INSTRUCTION}] for _ in numbers]
        data = {"prompt": prompts, "number": numbers}
        play = {"environment_factory": Lakes(args.seed), "reward_funcs": walked}
    else:
        data = {"prompt": [str(number) for number in numbers]}
        play = {"rollout_func": Rollouts(args.model, FORMS[args.form], args.seed), "reward_funcs": earned}
    watch = Watch(args.out, args.every, args.cap_s)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=settings(args),
        train_dataset=Dataset.from_dict(data),
        callbacks=[watch],
        **play,
    )
    trainer.train()
    result = {
        "began_s": watch.began.wall_s,
        "ends_s": [end.wall_s for end in watch.ends],
        "ends_cpu_s": [end.cpu_s for end in watch.ends],
        "rewards": watch.rewards,
    }
    (args.out / "result.json").write_text(json.dumps(result))


def settings(args: argparse.Namespace) -> Any:
    """As in the job files. One update a batch; `dapo` is TRL's name for a mean over all tokens."""
    form = FORMS[args.form]
    return GRPOConfig(
        output_dir=str(args.out / "trainer"),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=min(args.microbatch, args.groups * args.group_size),
        gradient_accumulation_steps=max(1, args.groups * args.group_size // args.microbatch),
        num_generations=args.group_size,
        shuffle_dataset=False,
        learning_rate=form.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=form.grad_clip,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.2,
        beta=0.0,
        entropy_coef=form.entropy_coef,
        temperature=1.0,
        # TRL bounds the whole episode, with what the tool says; each answer is bounded by `generate`'s own option.
        max_completion_length=form.max_turns * (form.max_tokens + 8),
        generation_kwargs={"max_new_tokens": form.max_tokens},
        max_tool_calling_iterations=MAX_CALLS,
        gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
        bf16=args.device != "cpu",
        report_to="none",
        logging_steps=50,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--cap-s", type=float, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--form", choices=tuple(FORMS), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    args = parser.parse_args()
    train(args)


if __name__ == "__main__":
    main()
