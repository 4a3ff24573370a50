"""The task mixes of `rollart bench affinity`: drawn from seeds, by rules that know the hardware but no result.

Two rules. `draw_mix` draws two or three tasks of any profile, in equal numbers, for comparing assignments on one fleet.
`draw_sides` draws mixes for comparing fleets of equal price, where three more things are fixed beforehand:

- a side is what its name says: at equal price the roofline finds its tasks clearly cheaper on that side's hardware;
- the sides take comparable GPU time: one's share of the price is drawn between a third and two thirds;
- the load fits: the caches of all trajectories that may be alive fill half the KV memory of the fleet that has least.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.hardware import HARDWARE, MODELS, RUNTIMES, Hardware, engine_costs, kv_capacity_tokens

MODEL = MODELS["qwen3-8b"]
GROUP = 4
STALENESS = 1
DEAR, CHEAP = HARDWARE["h800"], HARDWARE["h20"]
CLEAR = 0.8
"""A task leans to a kind when it costs at most this share there of what it costs on the other."""
FILL = 0.5
"""Share of the KV memory of DEAR hardware alone, which has least for its price, that caches take. Much more, and it is
memory that is compared; much less, and a step takes as long as its longest trajectory, on whatever hardware."""

Tasks = Mapping[str, Mapping[str, Any]]
"""Task -> how it behaves: `sim.tasks` of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Tasks, and how many groups of each there are."""

    name: str
    tasks: Tasks
    weights: Mapping[str, float]
    """Task -> its share of the groups, relative to the others'."""
    groups_per_step: int

    @property
    def kinds(self) -> str:
        """One letter per task."""
        return "".join(task[0] for task in self.tasks)


def draw_mix(seed: int, groups_per_step: int) -> Mix:
    """Two or three tasks, of profiles that the seed draws."""
    rng = random.Random(f"mix/{seed}")
    kinds = "".join(rng.choice("pdb") for _ in range(rng.choice((2, 3, 3))))
    return equal_parts(f"seed {seed}", draw_tasks(seed, kinds), groups_per_step)


def equal_parts(name: str, tasks: Tasks, groups_per_step: int) -> Mix:
    return Mix(name=name, tasks=tasks, weights=dict.fromkeys(tasks, 1.0), groups_per_step=groups_per_step)


def draw_tasks(seed: int, kinds: str) -> Tasks:
    """One task per letter: p is prefill-heavy (many turns, short answers), d decode-heavy (few turns, long answers), b
    between the two."""
    rng = random.Random(f"tasks/{seed}")
    return {f"{kind}{number}": _task(rng, kind) for number, kind in enumerate(kinds)}


def draw_sides(seed: int, kinds: str, dear: int) -> Mix:
    """One task per letter, p or d, each the seed's first that leans clearly to its side; for fleets of the price of
    `dear` engines of the dear kind."""
    rng = random.Random(f"sides/{seed}")
    tasks = {f"{kind}{number}": _leaning(rng, kind) for number, kind in enumerate(kinds)}
    prefill_part = rng.uniform(1 / 3, 2 / 3)
    part = {"p": prefill_part, "d": 1.0 - prefill_part} if len(set(kinds)) > 1 else dict.fromkeys(kinds, 1.0)
    weights = {
        name: part[name[0]] / kinds.count(name[0]) / price(task, DEAR if name[0] == "p" else CHEAP)
        for name, task in tasks.items()
    }
    context = sum(weights[name] * _Shape.of(task).context for name, task in tasks.items()) / sum(weights.values())
    room = FILL * dear * kv_capacity_tokens(MODEL, DEAR, 1)
    return Mix(
        name=f"seed {seed}",
        tasks=tasks,
        weights=weights,
        groups_per_step=int(room / ((STALENESS + 1) * GROUP * context)),
    )


def lean(task: Mapping[str, Any]) -> float:
    """What it costs on the dear kind, as a share of what it costs on the cheap one. Below 1: prefill-heavy."""
    return price(task, DEAR) / price(task, CHEAP)


def price(task: Mapping[str, Any], hardware: Hardware) -> float:
    """Price of the seconds that one trajectory takes of an engine whose KV memory is half full; its cache is computed
    anew once, for the swap in its life."""
    one = _Shape.of(task)
    batch = FILL * kv_capacity_tokens(MODEL, hardware, 1) / one.context
    costs = engine_costs(MODEL, hardware, 1, RUNTIMES["embedded"])
    prefill_s = (one.new + one.context) * costs.prefill_token_s(one.context)
    decode_s = one.decode * costs.step_s(batch, batch * one.context) / batch
    return hardware.cost * (prefill_s + decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Tokens of a mean trajectory."""

    new: float
    decode: float
    context: float
    """Held by one call, on average over its calls."""

    @classmethod
    def of(cls, task: Mapping[str, Any]) -> "_Shape":
        turns, prompt, observation, answer = (
            task[key]["mean"] for key in ("turns", "prompt_tokens", "observation_tokens", "answer_tokens")
        )
        return cls(
            new=prompt + (turns - 1) * observation,
            decode=turns * answer,
            context=prompt + (turns - 1) / 2 * (observation + answer) + answer,
        )


def _leaning(rng: random.Random, kind: str) -> dict[str, Any]:
    while True:
        task = _task(rng, kind)
        if lean(task) <= CLEAR if kind == "p" else lean(task) >= 1.0 / CLEAR:
            return task


def shifting(seed: int, after_s: float, groups_per_step: int) -> Mix:
    """Three tasks, of which one (p2) turns from prefill-heavy to decode-heavy in the middle of the run."""
    tasks = {name: dict(task) for name, task in draw_tasks(seed, "pdp").items()}
    later = _task(random.Random(f"shift/{seed}"), "d")
    changed = {key: later[key] for key in ("turns", "prompt_tokens", "observation_tokens", "answer_tokens", "step_s")}
    tasks["p2"]["shift"] = {"after_s": after_s, **changed}
    return equal_parts("after a shift", tasks, groups_per_step)


def _task(rng: random.Random, kind: str) -> dict[str, Any]:
    match kind:
        case "p":
            turns, spread = rng.randint(6, 14), 4
            prompt, observation, answer = rng.uniform(800, 4000), rng.uniform(600, 2500), rng.uniform(30, 120)
        case "d":
            turns, spread = 2, 1
            prompt, observation, answer = rng.uniform(200, 600), 150.0, rng.uniform(1000, 3500)
        case _:
            turns, spread = rng.randint(3, 8), 2
            prompt, observation, answer = rng.uniform(500, 2000), rng.uniform(200, 1500), rng.uniform(150, 800)
    return {
        "turns": {"kind": "uniform", "mean": turns, "sigma": spread, "low": 1},
        "prompt_tokens": {"kind": "lognormal", "mean": round(prompt), "sigma": 0.3},
        "observation_tokens": {"kind": "lognormal", "mean": round(observation), "sigma": 0.5},
        "answer_tokens": {"kind": "lognormal", "mean": round(answer), "sigma": 0.5},
        "reset_s": 0.5,
        "step_s": round(rng.uniform(0.2, 1.5), 2),
    }
