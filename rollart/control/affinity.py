"""Places groups on pools: tells the affinity policy what happened, writes down what it decides, and asks it.

Affinity decides; this measures. Everything in a profile comes from finished turns, whatever engine served them; what
is known of the engines' speed comes from their own count of their steps.
"""

from collections import Counter
from collections.abc import Mapping

from rollart.events import schema
from rollart.events.log import LogHandle
from rollart.policy.affinity import Affinity, Decision
from rollart.policy.prediction import NEVER_S
from rollart.policy.profile import TaskProfile
from rollart.policy.speeds import Rate
from rollart.types import EngineWork, Status, Trajectory


class AffinityDriver:
    def __init__(self, affinity: Affinity, log: LogHandle) -> None:
        self._affinity = affinity
        self._log = log
        self._living: dict[str, Counter[str]] = {}
        """Task -> pool -> groups under way."""
        self._write(affinity.first(), -1)

    def place(self, task: str) -> tuple[str, ...]:
        """The pool for an episode of an evaluation, then its stand-ins."""
        return self._affinity.place(task)

    def admit(self, task: str) -> tuple[str, ...]:
        """The pool for the next group of a task, then its stand-ins. Call `left` when the group has left it."""
        living = self._living.setdefault(task, Counter())
        order = self._affinity.place(task, living)
        living[order[0]] += 1
        return order

    def left(self, task: str, pool: str) -> None:
        self._living[task][pool] -= 1

    def measure(self, trajectory: Trajectory) -> None:
        """Let affinity learn from a trajectory."""
        profile = measure(trajectory)
        if profile is not None:
            self.measured(trajectory.task.domain, profile)

    def measured(self, task: str, profile: TaskProfile) -> None:
        self._write(self._affinity.seen(task, profile), -1)

    def worked(self, pool: str, before: EngineWork | None, now: EngineWork) -> None:
        """An engine of this pool says what it has done. `before`: its last report since it was started."""
        self._write(self._affinity.worked(pool, before, now), -1)

    def engines_changed(self, up: Mapping[str, int], cause: int) -> None:
        """`up`: engines, by pool."""
        self._write(self._affinity.engines(up), cause)

    def _write(self, decision: Decision | None, cause: int) -> None:
        if decision is None:
            return
        self._log.emit(
            schema.Affinity(
                reason=decision.reason,
                plan=decision.plan,
                moves=decision.moves,
                step_s={pool: _seconds(value) for pool, value in decision.step_s.items()},
                engines=decision.engines,
                profiles={task: _profile(profile) for task, profile in decision.profiles.items()},
                predicted={
                    task: {
                        pool: schema.Alone(step_s=_seconds(alone.step_s), trajectory_s=_seconds(alone.trajectory_s))
                        for pool, alone in pools.items()
                    }
                    for task, pools in decision.predictions.items()
                },
                speeds={
                    pool: schema.Speed(prefill=_rate(speed.prefill), decode=_rate(speed.decode))
                    for pool, speed in decision.speeds.items()
                },
                cause=cause,
            ),
        )


def measure(trajectory: Trajectory) -> TaskProfile | None:
    """What it needed. One that was cancelled says nothing about its task."""
    return needs(trajectory) if trajectory.turns and trajectory.status is not Status.ABORTED else None


def needs(trajectory: Trajectory) -> TaskProfile:
    """What one trajectory took, counted from its turns."""
    length = prompts = context = new = cached = prefilled = decoded = 0
    generating_s = 0.0
    for turn in trajectory.turns:
        completion, shown, said = turn.completion, len(turn.context), len(turn.completion.tokens)
        length = shown if turn.fresh else length + shown
        new += shown
        prompts += length
        length += said
        context += length
        decoded += said
        cached += completion.cached_tokens
        prefilled += completion.prefill_tokens
        generating_s += turn.generate_s
    turns = len(trajectory.turns)
    return TaskProfile(
        prompt_tokens=prompts,
        new_tokens=new,
        cached_tokens=cached,
        prefill_tokens=prefilled,
        decode_tokens=decoded,
        decode_squares=float(decoded) ** 2,
        turns=turns,
        context_tokens=context / turns,
        elsewhere_s=max(0.0, trajectory.ended_s - trajectory.started_s - generating_s),
    )


def _profile(profile: TaskProfile) -> schema.Profile:
    tokens = ("prompt_tokens", "new_tokens", "cached_tokens", "prefill_tokens", "decode_tokens", "context_tokens")
    return schema.Profile(
        **{name: round(getattr(profile, name), 1) for name in tokens},
        decode_spread=round(profile.decode_spread, 3),
        turns=round(profile.turns, 2),
        elsewhere_s=round(profile.elsewhere_s, 3),
        trajectories=profile.trajectories,
    )


def _rate(rate: Rate | None) -> schema.Rate | None:
    if rate is None:
        return None
    return schema.Rate(
        table_s=float(f"{rate.table_s:.4g}"),
        measured_s=float(f"{rate.measured_s:.4g}"),
        factor=round(rate.factor, 3),
        units=round(rate.units),
        windows=rate.windows,
        believed=rate.believed,
    )


def _seconds(value: float) -> float | None:
    return None if value >= NEVER_S else round(value, 3)
