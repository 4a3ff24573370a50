"""`benchmarks.gpu_affinity` without a GPU: on a card made up here, whose parts slow each other down, the predictions
hold and `auto` chooses well."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu_affinity import ANSWER, ASSIGNMENTS, PROMPT, WHOLE, calibrate, summary, work_of
from benchmarks.gpu_beside import (
    STEP_TOKENS,
    Step,
    Work,
    chosen,
    costs_beside,
    kept_apart,
    measured,
    play,
    policy_s,
    problem_of,
)
from rollart.types import StepSums

DEMAND = {"prefill": 32, "decode": 64}
TASKS = {"prefill": PROMPT, "decode": ANSWER}
ROOM = 300_000


@dataclass(slots=True)
class Part:
    """An engine of a 4B model, step by step: those that decode, and beside them prompts up to the budget."""

    compute: float
    """Of the card."""
    bandwidth: float
    free_s: float = 0.0
    began_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    """Tokens to compute, context so far, tokens to say."""
    answers: list[list[int]] = field(default_factory=list)
    """Context, tokens to say."""
    steps: list[Step] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.prompts or self.answers)

    def step(self, beside: str) -> None:
        sequences, cached = len(self.answers), sum(context for context, _ in self.answers)
        budget, pairs, done = STEP_TOKENS - sequences, 0.0, 0
        for prompt in self.prompts:
            took = min(budget, prompt[0])
            budget -= took
            pairs += took * (prompt[1] + took / 2)
            prompt[0] -= took
            prompt[1] += took
            done += not prompt[0]
        tokens = STEP_TOKENS - sequences - budget
        rate = self.bandwidth / {"": 1.0, "decode": 1.35, "prefill": 1.15}[beside]
        flops = self.compute / {"": 1.0, "decode": 1.08, "prefill": 1.04}[beside]
        read_s = (8e9 + cached * 147e3) / (4.3e12 * rate)
        computed_s = ((sequences + tokens) * 8e9 + pairs * 1.2e6) / (700e12 * flops)
        seconds = 1e-3 + max(read_s, computed_s) + 0.3 * min(read_s, computed_s)
        self.began_s, self.free_s = self.free_s, self.free_s + seconds
        self.steps.append(Step(self.free_s, StepSums(1, sequences, cached, done, tokens, pairs, seconds)))
        self.answers = [[context + 1, left - 1] for context, left in self.answers if left > 1]
        self.answers += [[context + 1, left - 1] for _, context, left in self.prompts[:done] if left > 1]
        self.prompts = self.prompts[done:]


class Card:
    """48 of its 132 multiprocessors, and the others."""

    def __init__(self) -> None:
        self.parts = (Part(0.42, 0.75), Part(0.68, 0.95))

    def play(self, works: Sequence[Work], late_s: Sequence[float] = (0.0, 0.0)) -> list[float]:
        begin_s = max(part.free_s for part in self.parts) + 0.1
        for part, work, late in zip(self.parts, works, late_s, strict=True):
            part.free_s = part.began_s = begin_s + late
            part.prompts = [[tokens_in, 0, tokens_out] for tokens_in, tokens_out in work]
        while any(part.busy for part in self.parts):
            part = min((one for one in self.parts if one.busy), key=lambda one: one.free_s)
            other = self.parts[part is self.parts[0]]
            running = other.steps and other.began_s <= part.free_s < other.steps[-1].end_s
            part.step(other.steps[-1].doing if running else "")
        return [part.free_s - begin_s for part in self.parts]

    def steps(self, first: Work, second: Work, first_late_s: float, second_late_s: float) -> list[list[Step]]:
        for part in self.parts:
            part.steps = []
        self.play([first, second], [first_late_s, second_late_s])
        return [part.steps for part in self.parts]


def test_the_simulator_predicts_every_assignment_and_auto_is_as_fast_as_the_best() -> None:
    card = Card()
    steps = calibrate(card.steps)
    both = [alone + beside for alone, beside in steps]
    costs = [costs_beside(both[0], both[1]), costs_beside(both[1], both[0])]
    share = 48 / WHOLE
    unknown = problem_of("4b", (share, 1 - share), TASKS, DEMAND, ROOM)
    problem = measured(unknown, [kept_apart(own) for own in costs])
    shares = {name: given or (share, share) for name, given in ASSIGNMENTS.items()} | {"auto": chosen(problem)}
    works = {name: work_of(given, DEMAND) for name, given in shares.items()}
    taken = {name: [max(card.play(work))] for name, work in works.items()}
    simulated = {name: max(play("4b", costs, work, ROOM)) for name, work in works.items()}
    found = summary(taken, simulated, {name: policy_s(problem, given) for name, given in shares.items()})
    assert found["furthest_simulated"] < 0.06
    assert found["auto_by_best_fixed"] < 1.05
    assert found["best_fixed"] == "decode first, prefill second"
