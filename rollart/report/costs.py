"""What a run's devices were reserved for and what used them, in engine seconds and in money. A part of the summary.

The engine time of a call that was answered is what its engine measured. A call without
an answer (aborted, lost with its engine, refused) is not measured: it is charged an equal part of its engine's time
with the calls that ran at the same time.
"""

from dataclasses import dataclass

from rollart.events import schema
from rollart.events.schema import attempt_of
from rollart.report import summary

HOUR_S = 3600.0


@dataclass(slots=True)
class _Pool:
    engines: int = 0
    gpus: int = 0
    cost: float = 0.0
    slots: int = 0
    prefill: schema.PrefillFacts | None = None
    prefill_gpus: int = 0
    """Of prefill workers here, whichever pool's engines they belong to."""
    reserved_s: float = 0.0
    """Device-seconds, up to the last change of the job."""
    paid: float = 0.0
    """Device-seconds times price, up to the last change of the job."""
    busy_s: float = 0.0
    """Device-seconds."""
    requests: int = 0
    tokens: int = 0
    fallbacks: int = 0

    @property
    def devices(self) -> int:
        return self.engines * self.gpus + self.prefill_gpus


@dataclass(slots=True)
class _Engine:
    pool: _Pool
    calls: int = 0
    """Under way."""
    share_s: float = 0.0
    """What a call would be charged that ran all the time."""
    at_s: float = 0.0

    def advance(self, now_s: float) -> float:
        if self.calls:
            self.share_s += (now_s - self.at_s) / self.calls
        self.at_s = now_s
        return self.share_s


class CostFold:
    """Fed by the summary, event by event."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._engines: dict[str, _Engine] = {}
        self._calls: dict[str, tuple[_Engine, float]] = {}
        """By attempt: the engine that runs its call, and that engine's `share_s` when the call was sent."""
        self._train = schema.TrainFacts(pool="", gpus=0, cost=0.0)
        self._trainer_paid = 0.0
        self._rewards: dict[tuple[str, str], schema.RewardFacts] = {}
        """By task and name; those of the job under empty ones."""
        self._rewards_paid = 0.0
        """Seconds times price: of functions and calls, and of workers up to the last change of the job."""
        self._changed_s = 0.0
        """When the job's settings were changed last."""

    def job(self, job: schema.Run, now_s: float) -> None:
        """The job's settings from now on. What was reserved until now is charged under the settings before."""
        for pool in self._pools.values():
            pool.reserved_s, pool.paid = self._reserved_s(pool, now_s), self._paid(pool, now_s)
            pool.engines = pool.slots = pool.prefill_gpus = 0
        self._trainer_paid = self._paid_for_training(now_s)
        self._rewards_paid = self._paid_for_rewards(now_s)
        self._changed_s = now_s
        self._train = job.train
        self._rewards = {
            ("", ""): job.reward,
            **{(task, name): facts for task, own in job.task_rewards.items() for name, facts in own.items()},
        }
        for name, now in job.pools.items():
            pool = self._pools.setdefault(name, _Pool())
            pool.engines, pool.gpus, pool.cost = now.engines, now.gpus, now.cost
            pool.slots, pool.prefill = now.slots, now.prefill
        for now in job.pools.values():
            if now.prefill is not None:
                self._pools[now.prefill.pool].prefill_gpus += now.engines * now.prefill.workers * now.prefill.gpus

    # --- calls ------------------------------------------------------------------------------------------------

    def sent(self, event: schema.Send) -> None:
        pool = self._pools[event.pool]
        pool.requests += 1
        pool.fallbacks += bool(event.fallback)
        engine = self._engines.get(event.engine)
        if engine is None:
            engine = self._engines[event.engine] = _Engine(pool)
        share_s = engine.advance(event.t)
        engine.calls += 1
        self._calls[attempt_of(event.id)] = (engine, share_s)

    def said(self, event: schema.Said, attempt: str) -> float:
        """The price of an answered call."""
        pool = self._engines[event.engine].pool
        self._ended(attempt, event.t)
        pool.tokens += event.tokens
        cost = _used(pool, event.busy_s, pool.gpus)
        if pool.prefill is not None:
            cost += _used(self._pools[pool.prefill.pool], event.prefill_busy_s or 0.0, pool.prefill.gpus)
        return cost

    def given_up(self, attempt: str, now_s: float) -> float:
        """The price of the call that this attempt gives up, if it has one."""
        ended = self._ended(attempt, now_s)
        return _used(*ended, ended[0].gpus) if ended is not None else 0.0

    def _ended(self, attempt: str, now_s: float) -> tuple[_Pool, float] | None:
        found = self._calls.pop(attempt, None)
        if found is None:
            return None
        engine, began = found
        used_s = engine.advance(now_s) - began
        engine.calls -= 1
        return engine.pool, used_s

    # --- rewards ----------------------------------------------------------------------------------------------

    def reward(self, event: schema.Reward, task: str) -> float:
        """A call that gave a score, or one for each reward of the task's own. Returns what judges of this job cost."""
        own = [facts for (name, _), facts in self._rewards.items() if name == task]
        calls = zip(own, event.calls, strict=False) if event.calls else [(self._rewards["", ""], event)]
        return sum(
            self._reward_called(facts, call.busy_s + call.cold_s if call.busy_s else call.s, call.made)
            for facts, call in calls
        )

    def reward_failed(self, event: schema.RewardFailed, task: str) -> float:
        """A call that failed: a function ran for as long as it was waited for, as far as is known. Returns what a judge
        of this job cost."""
        facts = self._rewards.get((task, event.reward) if event.reward else ("", ""))
        if facts is None:
            return 0.0
        return self._reward_called(facts, event.busy_s if facts.pool else event.s, event.made)

    def _reward_called(self, facts: schema.RewardFacts, ran_s: float, made: int) -> float:
        """Calls that were made beside each other ran for as long as the one that is known."""
        if facts.pool:
            pool = self._pools[facts.pool]
            pool.requests += made
            return _used(pool, ran_s, pool.gpus) if made else 0.0
        if facts.workers is None:
            self._rewards_paid += made * (ran_s * facts.cost.hour + HOUR_S * facts.cost.call)
        return 0.0

    # --- figures ----------------------------------------------------------------------------------------------

    def pools(self, now_s: float) -> dict[str, summary.Pool]:
        return {
            name: summary.Pool(
                engines=pool.engines,
                gpus=pool.devices,
                utilisation=round(pool.busy_s / max(self._reserved_s(pool, now_s), 1e-9), 4),
                requests=pool.requests,
                tokens=pool.tokens,
                fallbacks=pool.fallbacks,
            )
            for name, pool in self._pools.items()
            if pool.devices or pool.reserved_s
        }

    def reserved(self, now_s: float) -> summary.Reserved:
        """What everything cost, used or not."""
        pools = {name: round(self._paid(pool, now_s) / HOUR_S, 4) for name, pool in self._pools.items()}
        trainer = round(self._paid_for_training(now_s) / HOUR_S, 4)
        rewards = round(self._paid_for_rewards(now_s) / HOUR_S, 4)
        total = round(sum(pools.values()) + trainer + rewards, 4)
        return summary.Reserved(total=total, pools=pools, train=trainer, rewards=rewards)

    def engines(self, now_s: float) -> float:
        """What the pools with engines cost."""
        return sum(self._paid(pool, now_s) / HOUR_S for pool in self._pools.values() if self._reserved_s(pool, now_s))

    def _reserved_s(self, pool: _Pool, now_s: float) -> float:
        """Device-seconds so far."""
        return pool.reserved_s + pool.devices * (now_s - self._changed_s)

    def _paid(self, pool: _Pool, now_s: float) -> float:
        return pool.paid + (pool.devices or pool.slots) * pool.cost * (now_s - self._changed_s)

    def _paid_for_training(self, now_s: float) -> float:
        rate = self._train.gpus * self._train.cost
        return self._trainer_paid + rate * (now_s - self._changed_s)

    def _paid_for_rewards(self, now_s: float) -> float:
        rate = sum((facts.workers or 0) * facts.cost.hour for facts in self._rewards.values())
        return self._rewards_paid + rate * (now_s - self._changed_s)


def _used(pool: _Pool, busy_s: float, gpus: int) -> float:
    """Book the seconds of a worker with these GPUs on a pool; returns their price."""
    pool.busy_s += busy_s * gpus
    return busy_s * gpus * pool.cost / HOUR_S
