"""Simulated environments: latencies, reset tails, failures and hangs, drawn per attempt."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache

from rollart.config.sim import FaultSettings, SimTaskSettings
from rollart.errors import EnvError, JobError
from rollart.sim.dice import Dice
from rollart.sim.faults import Faults, Work, Workplace
from rollart.sim.tokens import blank_tokens
from rollart.sim.traffic import SharedLink, SimImages
from rollart.types import Endpoint, Message, Observation, Program, Task, Tokens, Tool, TrajectoryId

REFUSED = "refused"
"""A role that the simulated chat template does not know."""


class SimTokenizer:
    """A message says how many tokens it is."""

    def render(
        self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None, tools: Sequence[Tool] = ()
    ) -> Tokens:
        if messages[0].role == REFUSED:
            raise JobError("the chat template refuses messages in the roles refused (simulated)")
        return blank_tokens(int(messages[0].content))

    def decode(self, tokens: Tokens) -> str:
        return ""

    def parse(self, tokens: Tokens) -> Message:
        return Message(role="assistant", content="")


class SimTaskSet:
    def __init__(self, domain: str, seed: int, faults: Faults) -> None:
        self._domain = domain
        self._seed = seed
        self._faults = faults

    def task(self, index: int) -> Task:
        if self._faults.broken(self._domain, "draw"):
            raise OSError("the problems are away (simulated)")
        return Task(id=f"{self._domain}/{index}", domain=self._domain, index=index, seed=self._seed)

    def held_out(self, index: int) -> Task:
        return Task(id=f"{self._domain}/held-out/{index}", domain=self._domain, index=index, seed=self._seed)


class SimHost:
    """All environment slots of the job."""

    def __init__(
        self,
        slots: int,
        tasks: Mapping[str, SimTaskSettings],
        dice: Dice,
        faults: Faults,
        images: SimImages | None = None,
        calls: SharedLink | None = None,
    ) -> None:
        """`images`, `calls`: where these take time."""
        self.images = images
        self.calls = calls
        self.room = asyncio.Semaphore(slots)
        self._tasks = tasks
        self.dice = dice
        self.faults = faults
        self.work = Workplace(faults, ("env_crash", "env_hang", "env_slow"), _strike)
        faults.on("failing_task", lambda fault: faults.break_task(fault, tuple(tasks)))

    async def open(self, task: Task, trajectory: TrajectoryId) -> "SimEnv":
        await self.room.acquire()
        settings = self._tasks[task.domain].at(asyncio.get_running_loop().time())
        env = SimEnv(self, settings, task.domain, str(trajectory), trajectory.group)
        if self.images is not None and settings.image_gb:
            env.image = f"{task.domain}/{task.index % settings.images}"
            try:
                await self.images.take(env.image, settings.image_gb * 1e9)
            except BaseException:
                await env.close()
                raise
        return env


@cache
def _says(role: str, length: int) -> Observation:
    return Observation(messages=(Message(role=role, content=str(length)),))


def _strike(work: Work, fault: FaultSettings) -> None:
    """Let an environment fault happen to work under way."""
    match fault.kind:
        case "env_crash":
            work.fail(EnvError("the environment crashed (simulated)"))
        case "env_hang":
            work.hang()
        case _:
            work.delay(fault.duration_s)


class SimEnv:
    def __init__(self, host: SimHost, settings: SimTaskSettings, domain: str, key: str, group: str) -> None:
        self._host = host
        self._dice = host.dice
        self._faults = host.faults
        self._settings = settings
        self._domain = domain
        self._key = key
        self._group = group
        self._open = True
        self.image: str | None = None
        self._step = 0
        self._turns = self._dice.count(settings.turns, f"{key}/turns")
        self._fails_at = self._unlucky(settings.failure, "failure")
        self._hangs_at = self._unlucky(settings.hang, "hang")

    def _unlucky(self, share: float, what: str) -> int:
        """The step at which this happens; -1 for never."""
        if not share or self._dice.uniform(f"{self._key}/{what}") >= share:
            return -1
        return self._dice.number(f"{self._key}/{what}/step", self._turns + 1)

    async def reset(self) -> Observation:
        settings, key = self._settings, self._key
        spread = settings.reset_s
        if settings.reset_tail and self._dice.uniform(f"{key}/tail") < settings.reset_tail:
            spread = settings.reset_tail_s
        if self._host.calls is not None:
            await self._sent(self._host.calls, f"{key}/reset")
        await self._host.work.do(self._work(self._dice.draw(spread, f"{key}/reset")))
        return self._observe(self._dice.count(settings.prompt_tokens, f"{self._group}/prompt"))

    async def step(self, action: str) -> Observation:
        self._step += 1
        settings, name = self._settings, f"{self._key}/{self._step}"
        spread = settings.step_s
        if settings.step_tail and self._dice.uniform(f"{name}/tail") < settings.step_tail:
            spread = settings.step_tail_s
        if self._host.calls is not None:
            await self._sent(self._host.calls, f"{name}/step")
        await self._host.work.do(self._work(self._dice.draw(spread, f"{name}/step")))
        if self._step >= self._turns:
            return Observation(done=True)
        return self._observe(self._dice.count(settings.observation_tokens, f"{name}/obs"))

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        raise EnvError("play: programs are not simulated")

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._host.room.release()
            if self._host.images is not None and self.image is not None:
                self._host.images.leave(self.image)

    def _observe(self, length: int) -> Observation:
        refused = self._faults.armed and self._faults.take("refused_observation", self._key) is not None
        return _says(REFUSED if refused else "user", length)

    async def _sent(self, calls: SharedLink, name: str) -> None:
        """What this call sends and gets, over the link of all calls."""
        await calls.transfer(1e6 * self._dice.draw(self._settings.call_mb, f"{name}/mb"))

    def _work(self, seconds: float) -> Work:
        """Of one call of the environment, with whatever goes wrong in it."""
        if self._fails_at == self._step:
            raise EnvError("the environment crashed (simulated)")
        if self._faults.broken(self._domain, "environment"):
            raise EnvError("the machines of this task are away (simulated)")
        work = Work(self._key, seconds)
        if self._hangs_at == self._step:
            work.hang()
        return work
