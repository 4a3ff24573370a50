"""What two engines on two parts of one card are predicted to take, from steps that they were measured to take.

A step takes longer while the other part reads from the same memory. So the costs of a part's steps are fitted, by what
`rollart sim fit` uses, to those during which the other part did nothing; and four factors say by how much decoding and
prompts take longer while the other part decodes, or computes prompts. `play` gives the same work to two engines of the
simulator, on its virtual clock, and changes the costs of each whenever the other begins something else. The policy that
a job with `affinity: auto` uses knows none of this: it is asked with one set of costs for each part, or as in a job
with two factors to the tables. Used by `gpu_affinity.py`.
"""

import asyncio
import bisect
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_shapes import SHAPES, TIED
from rollart.config.settings import Spread
from rollart.config.sim import MeasuredEngineSettings, SimEngineSettings, SimTaskSettings
from rollart.events.log import EventLog
from rollart.hardware import HARDWARE, EngineCosts, ModelShape
from rollart.policy.planning import Problem, best_plan
from rollart.policy.prediction import PoolSpeed
from rollart.policy.profile import TaskProfile
from rollart.policy.speeds import Gauge, learnt
from rollart.sim.clock import VirtualLoop
from rollart.sim.cores import Core
from rollart.sim.dice import Dice
from rollart.sim.engine import EngineWorld, SimEngine
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink, SimStore
from rollart.sim.steps import fit_reports
from rollart.types import EngineSpec, EngineWork, GenerateRequest, Sampling, StepSums

PARTS = ("first", "second")
STEP_TOKENS = 16_384
WATCHED_S = 0.002
"""Simulated seconds between two looks at what the other part does."""
SHORTEST_S = 1e-9
"""Nothing is free."""

Work = Sequence[tuple[int, int]]
"""Tokens in and out of each trajectory, in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One that an engine was measured to take."""

    end_s: float
    """By a clock that both parts have."""
    has: StepSums

    @property
    def doing(self) -> str:
        """As `SimEngine.doing` has it."""
        return "prefill" if self.has.tokens else "decode"


# --- what steps cost


Costs = Mapping[str, MeasuredEngineSettings]
"""Of one part's steps, by what the other part does; "": nothing."""
LONG_SEEN = 1024.0
"""Prompt tokens that look at fewer before them are left out of fits, which know no attention: long prompts are what
matters, and take a fifth more for each token."""


def costs_beside(own: Sequence[Step], other: Sequence[Step]) -> Costs:
    """Of the first of these two parts."""
    by_state: dict[str, list[StepSums]] = {"": [], "decode": [], "prefill": []}
    for step, beside in _told_apart(own, other):
        if not is_short(step):
            by_state[beside].append(step.has)
    alone = _fitted(by_state[""])
    found = {"": alone} | {state: _slowed(alone, steps) for state, steps in by_state.items() if state}
    for state, costs in found.items():
        told = ", ".join(f"{name} {value * 1e6:.4g}" for name, value in costs.model_dump().items())
        words = f"beside {state or 'nothing'}: {len(by_state[state])} steps; microseconds: {told}"
        print(words, file=sys.stderr, flush=True)
    return found


def is_short(step: Step) -> bool:
    """Whether it computes short prompts."""
    return step.has.pairs < LONG_SEEN * step.has.tokens


def kept_apart(costs: Costs) -> MeasuredEngineSettings:
    """One set of costs: of decoding while the other part computes prompts, and of prompts while it decodes."""
    prompts = {name: getattr(costs["decode"], name) for name in PROMPTS}
    return costs["prefill"].model_copy(update=prompts)


PROMPTS = ("prefill_token_s", "prompt_step_s", "launch_s")
"""Keys of what prompts cost; the others are of decoding."""


def _fitted(steps: Sequence[StepSums]) -> MeasuredEngineSettings:
    found = fit_reports(steps)
    print(f"fitted to {len(steps)} steps, median error {found.error:.1%}", file=sys.stderr, flush=True)
    return MeasuredEngineSettings(
        step_s=max(found.step_s, SHORTEST_S),
        sequence_s=found.sequence_s,
        kv_token_s=found.kv_token_s,
        prefill_token_s=max(found.prefill_token_s, SHORTEST_S),
        prompt_step_s=found.prompt_step_s,
        launch_s=found.launch_s,
    )


def _slowed(alone: MeasuredEngineSettings, steps: Sequence[StepSums]) -> MeasuredEngineSettings:
    """Decoding and prompts each take so many times as long as alone: the median of these steps."""
    costs = alone.costs(0)
    decoding = _middle([one.seconds / costs.step_s(one.sequences, one.cached) for one in steps if not one.tokens])
    ratios = []
    for one in steps:
        if one.tokens:
            decode_s = costs.step_s(one.sequences, one.cached) if one.sequences else 0.0
            whole_s = costs.step_s(one.sequences, one.cached, one.tokens, one.pairs / one.tokens, one.prompts)
            ratios.append((one.seconds - decoding * decode_s) / (whole_s - decode_s))
    prompts = _middle(ratios)
    scaled = {name: value * (prompts if name in PROMPTS else decoding) for name, value in alone.model_dump().items()}
    return MeasuredEngineSettings(**scaled)


def _middle(ratios: Sequence[float]) -> float:
    """Nothing is faster for what runs beside it."""
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _told_apart(own: Sequence[Step], other: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Each step, and what the other part did in the middle of it."""
    ends = [step.end_s for step in other]
    for step in own:
        middle_s = step.end_s - step.has.seconds / 2
        at = bisect.bisect(ends, middle_s)
        busy = at < len(other) and ends[at] - other[at].has.seconds <= middle_s
        yield step, other[at].doing if busy else ""


# --- the simulator


def play(shape: str, costs: Sequence[Costs], works: Sequence[Work], kv_tokens: int) -> tuple[float, float]:
    """Simulated seconds until each part has done its work."""
    known = [{state: one.costs(kv_tokens) for state, one in own.items()} for own in costs]
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_played(shape, known, works, kv_tokens))


async def _played(
    shape: str, costs: Sequence[Mapping[str, EngineCosts]], works: Sequence[Work], kv_tokens: int
) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    log = EventLog(loop.time)
    most = max(map(len, works))
    answers = {str(said): SimTaskSettings(answer_tokens=Spread(mean=said)) for work in works for _, said in work}
    world = EngineWorld(
        model=model_shape(shape),
        hardware=dict.fromkeys(PARTS, HARDWARE["h200"]),
        settings=SimEngineSettings(chunk_tokens=STEP_TOKENS),
        max_batch=dict.fromkeys(PARTS, most),
        disaggregated={},
        tasks=answers,
        dice=Dice(0),
        store=SimStore(log),
        pull=SimLink(1e9),
        blocking=False,
        log=log,
        faults=Faults((), log),
        cores={part: Core() for part in PARTS},
        counts_work=False,
        kv_tokens=dict.fromkeys(PARTS, kv_tokens),
    )
    engines = [
        SimEngine(EngineSpec(id=part, pool=part, type="embedded", hardware="h200", gpus=1), world, lambda _: None)
        for part in PARTS
    ]

    async def done_s(engine: SimEngine, work: Work) -> float:
        await asyncio.gather(*(engine.generate(_request(number, *one)) for number, one in enumerate(work)))
        return loop.time()

    for engine, own in zip(engines, costs, strict=True):
        engine.recost(own[""])
    under_way = [asyncio.ensure_future(done_s(*one)) for one in zip(engines, works, strict=True)]
    known = ["", ""]
    while not all(one.done() for one in under_way):
        beside = [engines[1].doing, engines[0].doing]
        for at, engine in enumerate(engines):
            if beside[at] != known[at]:
                engine.recost(costs[at][beside[at]])
        known = beside
        await asyncio.sleep(WATCHED_S)
    first, second = under_way
    return first.result(), second.result()


def _request(number: int, tokens_in: int, tokens_out: int) -> GenerateRequest:
    return GenerateRequest(
        id=f"{number}/0",
        session=str(number),
        domain=str(tokens_out),
        turn=0,
        prompt=(np.zeros(tokens_in, dtype=np.int32),),
        prompt_tokens=tokens_in,
        sampling=Sampling(max_tokens=tokens_out),
        last=True,
    )


# --- the policy


def problem_of(
    shape: str,
    shares: Sequence[float],
    tasks: Mapping[str, tuple[int, int]],
    demand: Mapping[str, int],
    kv_tokens: int,
) -> Problem:
    """What the policy is asked where it knows nothing but the tables. `shares`: of the card. `tasks`: tokens in and out
    of a trajectory."""
    pools = [
        PoolSpeed(
            name=part,
            hardware=HARDWARE["h200"].part(share),
            model=model_shape(shape),
            engines=1,
            gpus=1,
            max_batch=sum(demand.values()),
            chunk_tokens=STEP_TOKENS,
            kv_tokens=kv_tokens,
        )
        for part, share in zip(PARTS, shares, strict=True)
    ]
    return Problem(
        profiles={task: _profile(*tokens) for task, tokens in tasks.items()},
        demand={task: float(count) for task, count in demand.items()},
        members=dict.fromkeys(tasks, 1),
        pools=pools,
        fixed={},
        ahead=1.0,
    )


def measured(problem: Problem, costs: Sequence[MeasuredEngineSettings]) -> Problem:
    """The same, asked with these costs of each part."""
    pools = [
        replace(pool, measured=own.costs(pool.table.kv_tokens)) for pool, own in zip(problem.pools, costs, strict=True)
    ]
    return replace(problem, pools=pools, _known={}, _prices={})


def as_a_job(problem: Problem, steps: Sequence[Sequence[Step]]) -> Problem:
    """The same, asked as a job does: with two factors for each part, learnt from these steps."""
    gauges = {pool.name: Gauge() for pool in problem.pools}
    for pool, own in zip(problem.pools, steps, strict=True):
        for step in own:
            gauges[pool.name].add(None, _as_work(step), pool.table, pool.prefill_table)
    factors = learnt(gauges)
    pools = [replace(pool, learnt=factors[pool.name]) for pool in problem.pools]
    return replace(problem, pools=pools, _known={}, _prices={})


def chosen(problem: Problem) -> tuple[float, ...]:
    """Of each task, the share that the policy gives to the first part."""
    plan = best_plan(problem)
    return tuple(plan[task].get(PARTS[0], 0.0) for task in problem.profiles)


def policy_s(problem: Problem, shares: Sequence[float]) -> float:
    """What the policy predicts where the first part has these shares of the tasks."""
    plan = {
        task: {part: its for part, its in zip(PARTS, (share, 1 - share), strict=True) if its}
        for task, share in zip(problem.profiles, shares, strict=True)
    }
    return max(problem.periods(plan).values())


def _as_work(step: Step) -> EngineWork:
    """A report of this step alone."""
    nothing = StepSums()
    if step.doing == "decode":
        return EngineWork(step.has, nothing, nothing)
    return EngineWork(nothing, step.has, nothing) if step.has.sequences else EngineWork(nothing, nothing, step.has)


def _profile(tokens_in: int, tokens_out: int) -> TaskProfile:
    return TaskProfile(
        prompt_tokens=tokens_in,
        new_tokens=tokens_in,
        cached_tokens=0.0,
        prefill_tokens=tokens_in,
        decode_tokens=tokens_out,
        decode_squares=float(tokens_out**2),
        turns=1.0,
        context_tokens=tokens_in + tokens_out / 2,
        elsewhere_s=0.0,
        trajectories=64,
    )


def model_shape(shape: str) -> ModelShape:
    """Of `gpu_shapes`, as the policy and the simulator want it."""
    sizes = SHAPES[shape]
    hidden, layers, width = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    body = layers * (2 * hidden * width * (heads + kv_heads) + 3 * hidden * sizes["intermediate_size"])
    head = sizes["vocab_size"] * hidden
    params = body + head * (1 if shape in TIED else 2)
    return ModelShape(
        params=params,
        active_params=params,
        kv_bytes_per_token=4.0 * layers * kv_heads * width,
        layers=layers,
        hidden=hidden,
        attention_width=heads * width,
        kv_heads=kv_heads,
        head_params=head,
        lookup_params=params - body - head,
    )
