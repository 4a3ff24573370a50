"""What every Recorder must do: one suite, run against each adapter."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollart.ports import Recorder
from rollart.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Played,
    Span,
    Status,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    TurnNote,
)


def trajectory(group: str = "g1", member: int = 0, attempt: int = 0, reward: float | None = 1.0) -> Trajectory:
    """Two turns, the second under two versions."""

    def said(first: int, count: int, spans: tuple[Span, ...]) -> Completion:
        tokens = np.arange(first, first + count, dtype=np.int32)
        logprobs = (-tokens / 1000).astype(np.float32)
        return Completion(tokens=tokens, logprobs=logprobs, spans=spans, finish=Finish.STOP, engine="fast-1")

    return Trajectory(
        id=TrajectoryId(group, member, attempt),
        task=Task(id="maths/7", domain="maths", index=7),
        turns=(
            Turn(
                context=np.array([1, 2, 3], dtype=np.int32),
                fresh=True,
                completion=said(100, 4, (Span(3, 4),)),
                reward=0.25,
                generate_s=2.0,
                env_s=0.5,
            ),
            Turn(
                context=np.array([4, 5], dtype=np.int32),
                fresh=False,
                completion=said(200, 3, (Span(3, 1), Span(4, 2))),
                reward=0.75,
                generate_s=1.0,
                env_s=0.25,
            ),
        ),
        status=Status.DONE if reward is not None else Status.FAILED,
        born=3,
        oldest=3,
        reward=reward,
        reward_parts={"found": 0.9, "brevity": 0.1} if reward is not None else {},
        reason="" if reward is not None else "EnvError: env.step: broke",
        started_s=110.0,
        ended_s=115.0,
    )


def played(group: str = "g1", member: int = 0, attempt: int = 0, reward: float | None = 1.0) -> Played:
    return Played(
        trajectory=trajectory(group, member, attempt, reward),
        notes=(
            TurnNote(
                "fast", 0.5, (Message(role="system", content="Add."), Message(role="user", content="2+3?")), "calc"
            ),
            TurnNote("fast", 0.25, (Message(role="tool", content="5"),), "5"),
        ),
        left=(Message(role="user", content="Right."),),
        open_s=0.125,
        reset_s=0.0625,
        queue_s=0.5,
        reward_s=0.25,
    )


def batch(step: int, *groups: tuple[str, list[Trajectory]]) -> Batch:
    return Batch(
        step=step,
        serving=step,
        groups=tuple(
            Group(
                id=name,
                task=members[0].task,
                members=tuple(members),
                born=3,
                advantages=tuple(1.0 - 2.0 * number for number in range(len(members))),
            )
            for name, members in groups
        ),
    )


@dataclass
class RecorderBench:
    recorder: Recorder
    kept: Callable[[], dict[str, tuple[str, int | None, float | None]]]
    """By id, once everything is written: what became of it, the step it was trained in, its advantage."""


class Silent:
    def __str__(self) -> str:
        raise ValueError("no words")


class RecorderContract(ABC):
    @abstractmethod
    def bench(self) -> RecorderBench: ...

    def test_what_became_of_each_attempt_is_kept(self) -> None:
        bench = self.bench()
        keep = bench.recorder
        for group in ("g1", "g2", "g3"):
            for member in range(2):
                keep.played(played(group, member))
        keep.played(played("g1", 2, reward=None))
        keep.ended("g2", "filtered")
        keep.trained(batch(5, ("g1", [trajectory("g1", 0), trajectory("g1", 1)])))
        assert bench.kept() == {
            "g1.0.0": ("trained", 5, 1.0),
            "g1.1.0": ("trained", 5, -1.0),
            "g1.2.0": ("unused", None, None),
            "g2.0.0": ("filtered", None, None),
            "g2.1.0": ("filtered", None, None),
            "g3.0.0": ("open", None, None),
            "g3.1.0": ("open", None, None),
        }

    def test_a_step_that_is_said_again_changes_nothing(self) -> None:
        bench = self.bench()
        bench.recorder.played(played())
        for _ in range(2):
            bench.recorder.trained(batch(5, ("g1", [trajectory()])))
        assert bench.kept() == {"g1.0.0": ("trained", 5, 1.0)}

    def test_a_step_of_trajectories_that_it_never_saw_is_fine(self) -> None:
        bench = self.bench()
        bench.recorder.trained(batch(0, ("g9", [trajectory("g9")])))
        bench.recorder.ended("g8", "stale")
        bench.recorder.played(played())
        assert bench.kept() == {"g1.0.0": ("open", None, None)}

    def test_whatever_a_message_holds_nothing_is_raised(self) -> None:
        bench = self.bench()
        strange = Message(role="user", content=b"bytes" * 3)  # type: ignore[arg-type]
        for content in (None, 7, object(), Silent()):
            note = TurnNote("fast", 0.0, (Message(role="user", content=content),), "")  # type: ignore[arg-type]
            whole = played("g7")
            bench.recorder.played(replace(whole, notes=(whole.notes[0], note), left=(strange,)))
        bench.recorder.played(replace(played("g7"), left=("no message",)))  # type: ignore[arg-type]
        bench.recorder.played(played("g7", 5))
        assert "g7.5.0" in bench.kept()
