"""Faults as data: a plan, written in the job or drawn from a seed, and what makes it happen.

A fault is armed at its time, or in the middle of a swap, and fires when the thing it hits does what the fault is about;
the `fault` event is written then. Adapters ask `take`; workers that can be killed at any moment subscribe with `on`.
"""

import asyncio
from collections.abc import Callable, Sequence

from rollart.config.sim import FAULT_KINDS, ChaosSettings, FaultKind, FaultSettings
from rollart.events import schema
from rollart.events.log import EventLog
from rollart.events.schema import Event
from rollart.sim.dice import Dice

AT_A_SWAP = 0.6
"""Share of drawn faults that are placed in the middle of a swap."""


LASTING = {"slow_answer": (1.0, 10.0), "full_store": (0.1, 10.0)}
"""By kind: the share of drawn faults that last longer, and by which factor. Without it no limit would be passed."""
SEVERAL = ("bad_answer", "env", "reward", "refused")
"""Kinds that hit one to four times."""


PLATFORM = ("", "rewards")
"""Whose outage it is when no reward function answers."""


class Work:
    """Work under way in a simulated environment or function, that a fault can hit in the middle."""

    __slots__ = ("_loop", "_timer", "done", "key")

    def __init__(self, key: str, seconds: float) -> None:
        self.key = key
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._loop.time() + seconds, self._do)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def delay(self, seconds: float) -> None:
        if self._timer is not None:
            when_s = self._timer.when() + seconds
            self.hang()
            self._timer = self._loop.call_at(when_s, self._do)

    def _do(self) -> None:
        self._timer = None
        if not self.done.done():
            self.done.set_result(None)

    def hang(self) -> None:
        """Nothing is under way any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Faults:
    def __init__(self, plan: Sequence[FaultSettings], log: EventLog) -> None:
        self._plan = plan
        self._log = log
        self.armed: dict[str, list[FaultSettings]] = {}
        """By kind, those that are due and wait for something to hit."""
        self._hooks: dict[str, Callable[[FaultSettings], bool]] = {}
        self._outages: dict[tuple[str, str], float] = {}
        """Task and its part (`draw` or `environment`), or no task and `rewards` -> when it stops failing."""
        self._swaps = 0
        log.read_by(self._watch, schema.SwapStart)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._plan:
            if fault.at_s is not None:
                loop.call_later(fault.at_s, self._fire, fault)

    def on(self, kind: str, hook: Callable[[FaultSettings], bool]) -> None:
        """Call the hook when such a fault is due. It returns False to leave the fault armed for `take`."""
        self._hooks[kind] = hook

    def take(self, kind: str, target: str) -> FaultSettings | None:
        """The armed fault of this kind, if there is one; it now happens to `target`."""
        armed = self.armed.get(kind)
        if armed is None:
            return None
        fault = armed.pop(0)
        if not armed:
            del self.armed[kind]
        self.fired(fault, target)
        return fault

    def break_task(self, fault: FaultSettings, tasks: Sequence[str]) -> bool:
        """Let the draws or the environments of one task fail for a while, also over restarts."""
        which, task = divmod(fault.target, len(tasks))
        part = ("draw", "environment")[which % 2]
        until_s = asyncio.get_running_loop().time() + fault.duration_s
        self._outages[tasks[task], part] = max(until_s, self._outages.get((tasks[task], part), 0.0))
        self._log.emit(schema.Fault(fault=fault.kind, target=tasks[task], part=part, for_s=fault.duration_s))
        return True

    def stop_platform(self, fault: FaultSettings) -> bool:
        """Let no reward function answer for a while, also over restarts."""
        until_s = asyncio.get_running_loop().time() + fault.duration_s
        self._outages[PLATFORM] = max(until_s, self._outages.get(PLATFORM, 0.0))
        self._log.emit(schema.Fault(fault=fault.kind, target="rewards", for_s=fault.duration_s))
        return True

    def broken(self, task: str, part: str) -> bool:
        """Such an outage is on."""
        until_s = self._outages.get((task, part)) if self._outages else None
        return until_s is not None and asyncio.get_running_loop().time() < until_s

    def fired(self, fault: FaultSettings, target: str) -> None:
        self._log.emit(schema.Fault(fault=fault.kind, target=target))

    def _watch(self, event: Event) -> None:
        """A swap starts."""
        self._swaps += 1
        loop = asyncio.get_running_loop()
        for fault in self._plan:
            if fault.swap == self._swaps:
                loop.call_later(fault.delay_s, self._fire, fault)

    def _fire(self, fault: FaultSettings) -> None:
        hook = self._hooks.get(fault.kind)
        if hook is None or not hook(fault):
            self.armed.setdefault(fault.kind, []).extend([fault] * fault.count)


class Workplace:
    """Where work is under way. A fault of these kinds hits it in the middle, or else the next work that begins."""

    def __init__(self, faults: Faults, kinds: Sequence[str], strike: Callable[[Work, FaultSettings], None]) -> None:
        self._faults = faults
        self._kinds = kinds
        self._strike = strike
        self._busy: dict[Work, None] = {}
        for kind in kinds:
            faults.on(kind, self._hit)

    async def do(self, work: Work) -> None:
        for kind in self._kinds if self._faults.armed else ():
            fault = self._faults.take(kind, work.key)
            if fault is not None:
                self._strike(work, fault)
        self._busy[work] = None
        try:
            await work.done
        finally:
            work.hang()
            del self._busy[work]

    def _hit(self, fault: FaultSettings) -> bool:
        """`fault.count` times. False where no work is under way."""
        works = list(self._busy)
        for number in range(min(fault.count, len(works))):
            work = works[(fault.target + number) % len(works)]
            self._faults.fired(fault, work.key)
            self._strike(work, fault)
        return bool(works)


def draw_plan(chaos: ChaosSettings, seed: int, *, shards: bool = False) -> tuple[FaultSettings, ...]:
    """A fault plan from a seed: what, when, whom. `shards`: the job has some."""
    dice = Dice(seed)
    kinds = FAULT_KINDS if shards else tuple(kind for kind in FAULT_KINDS if kind != "shard_death")
    fewest, most = chaos.faults
    count = fewest + dice.number("count", most - fewest + 1)
    return tuple(_draw_fault(chaos, dice, number, kinds) for number in range(count))


def _draw_fault(chaos: ChaosSettings, dice: Dice, number: int, kinds: Sequence[FaultKind]) -> FaultSettings:
    def uniform(what: str) -> float:
        return dice.uniform(f"{number}/{what}")

    kind = kinds[dice.number(f"{number}/kind", len(kinds))]
    share, factor = LASTING.get(kind, (0.0, 1.0))
    at_swap = uniform("at_swap") < AT_A_SWAP
    return FaultSettings(
        kind=kind,
        swap=1 + dice.number(f"{number}/swap", chaos.swaps) if at_swap else None,
        at_s=None if at_swap else uniform("at") * chaos.horizon_s,
        delay_s=uniform("delay") * 2.0 if at_swap and uniform("late") < 0.5 else 0.0,
        target=dice.number(f"{number}/target", 1024),
        count=1 + dice.number(f"{number}/times", 4) if kind.startswith(SEVERAL) else 1,
        duration_s=(5.0 + 55.0 * uniform("duration")) * (factor if uniform("lasting") < share else 1.0),
    )
