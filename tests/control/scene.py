"""A small world for the control plane, written by hand: every part does what a test tells it to.

Engines return real tokens, each one different from all others of the run (1000 and up), and remember the exact prompt
of every call; what the tokenizer renders lies below 1000. So a test can say of any token where it
came from. Everything runs on the virtual clock, through the ports, under the real coordinator; the audit reads along.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.env_manager import Agent
from rollart.control.world import RolloutWorld, World
from rollart.errors import Deadlock, EngineError, JobError, RollartError, TrainerError
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.hardware import MODELS
from rollart.launch.driver import facts
from rollart.launch.pools import build_affinity, engine_specs
from rollart.ports import DeadLetters, Engine, Env, Recorder, RewardBackend, Trainer
from rollart.report.audit import Audit
from rollart.sim.clock import VirtualLoop
from rollart.sim.trainer import SimJournal
from rollart.train.samples import filled
from rollart.types import (
    Batch,
    Bucket,
    Completion,
    Endpoint,
    EngineSpec,
    Finish,
    GenerateRequest,
    Message,
    Observation,
    Program,
    Score,
    SetAside,
    Span,
    StepResult,
    SwapReport,
    Task,
    Tokens,
    Tool,
    Trajectory,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)

FIRST_SAMPLED = 1000
"""Sampled tokens are these and above; rendered ones are below."""
REFUSED = "narrator"
"""A role that the chat template does not know; refused as `ChatTokenizer` does it."""
TOKEN_S = 0.1
SWAP_S = 1.0
TRAIN_S = 5.0
PUSH_S = 1.0

BASE: dict[str, Any] = {
    "name": "scene",
    "tasks": [{"name": "a", "group_size": 2, "max_turns": 8, "max_tokens": 8}],
    "rollout": {"groups_per_step": 2, "staleness": 1},
    "pools": [
        {"name": "fast", "hardware": "h20", "engines": {"count": 2}},
        {"name": "rooms", "slots": 64},
    ],
    "train": {"steps": 3},
    "checkpoint": {"every": 100},
    "rewards": {"backoff_s": 1.0, "workers": 64},
}


def scene_job(**settings: Any) -> Job:
    """The base job with some keys changed: `rollout__staleness=2`, `tasks=[...]`."""
    raw: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, value in settings.items():
        *parents, last = name.split("__")
        at = raw
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return build_job(raw)


class Words:
    """A tokenizer: one token per character, after a mark that says whether a prefix begins."""

    def render(
        self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None, tools: Sequence[Tool] = ()
    ) -> Tokens:
        if any(message.role == REFUSED for message in messages):
            raise JobError(f"the chat template refuses messages in the roles {REFUSED}: it knows none such")
        assert fresh or after is not None, "what follows an answer is told the answer"
        marks = [1 if fresh else 2]
        return np.array(marks + [ord(letter) for message in messages for letter in message.content], dtype=np.int32)

    def decode(self, tokens: Tokens) -> str:
        return " ".join(str(token) for token in tokens.tolist())

    def parse(self, tokens: Tokens) -> Message:
        return Message(role="assistant", content=self.decode(tokens))


class Tasks:
    def __init__(self, domain: str, scene: "Scene") -> None:
        self._domain = domain
        self._scene = scene

    def task(self, index: int) -> Task:
        found = self._scene.on_draw(self._domain, index) if self._scene.on_draw is not None else None
        return found or Task(id=f"{self._domain}/{index}", domain=self._domain, index=index)  # type: ignore[return-value]

    def held_out(self, index: int) -> Task:
        if self._scene.on_held_out is not None:
            self._scene.on_held_out(self._domain, index)
        return Task(id=f"{self._domain}/held-out/{index}", domain=self._domain, index=index)


@dataclass
class Said:
    """One completed call, as the engine knows it."""

    request: GenerateRequest
    engine: str
    prompt: list[int]
    tokens: list[int]
    versions: list[int]
    logprobs: list[float]


class ScriptedEngine:
    def __init__(self, spec: EngineSpec, scene: "Scene") -> None:
        self.spec = spec
        self.scene = scene
        self.version: WeightVersion = 0
        self.dead = ""
        self.hung = False
        self.paused = False
        self.computed = 0
        """Tokens."""
        self.asked: list[tuple[GenerateRequest, WeightVersion]] = []
        self.aborted: list[str] = []
        self.staged: list[WeightVersion] = []
        self.swapped: list[WeightVersion] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.well()
        scene = self.scene
        self.asked.append((request, self.version))
        if scene.on_generate is not None:
            await scene.on_generate(self, request)
        tokens: list[int] = []
        versions: list[int] = []
        for _ in range(min(request.sampling.max_tokens, scene.answer_tokens(request))):
            await self.works(TOKEN_S)
            self.computed += 1
            tokens.append(scene.new_token())
            versions.append(self.version)
        logprobs = [-token / 1e4 for token in tokens]
        prompt: list[int] = request.tokens().tolist()
        scene.said.append(Said(request, self.spec.id, prompt, tokens, versions, logprobs))
        spans: list[Span] = []
        for version in versions:
            if spans and spans[-1].version == version:
                spans[-1] = Span(version, spans[-1].length + 1)
            else:
                spans.append(Span(version, 1))
        return Completion(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            spans=tuple(spans),
            finish=Finish.STOP,
            engine=self.spec.id,
            prefill_tokens=len(prompt),
        )

    async def abort(self, request_id: str) -> int:
        await self.well()
        if request_id:
            self.aborted.append(request_id)
        return self.computed

    async def stage(self, version: WeightVersion) -> None:
        await self.well()
        self.staged.append(version)
        if self.scene.on_stage is not None:
            await self.scene.on_stage(self, version)

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        await self.well()
        self.paused = True
        try:
            if self.scene.on_swap is not None:
                await self.scene.on_swap(self, manifest)
            await asyncio.sleep(SWAP_S)
            await self.well()
            self.version = manifest.version
            self.swapped.append(manifest.version)
        finally:
            self.paused = False
        return SwapReport(version=manifest.version)

    async def works(self, seconds: float) -> None:
        """Time passes in the engine: it stands still during a swap, and may die or hang."""
        await asyncio.sleep(seconds)
        while self.paused and not self.dead:  # noqa: ASYNC110 - on the virtual clock this costs nothing
            await asyncio.sleep(0.01)
        await self.well()

    async def well(self) -> None:
        if self.dead:
            raise EngineError(f"{self.spec.id} died: {self.dead}")
        if self.hung:
            await asyncio.get_running_loop().create_future()


class ScriptedTrainer:
    def __init__(self, scene: "Scene", life: int) -> None:
        self.scene = scene
        self.life = life
        self.version: WeightVersion = 0
        self.restored: WeightVersion = 0
        self.dead = ""

    async def train_step(self, batch: Batch) -> StepResult:
        self.well()
        if batch.step != self.version:
            raise AssertionError(f"step {batch.step} on a trainer at version {self.version}")
        if self.scene.on_step is not None:
            await self.scene.on_step(self, batch)
        await asyncio.sleep(TRAIN_S)
        self.well()
        self.version += 1
        self.scene.steps.append((self.life, batch.step, tuple(group.id for group in batch.groups)))
        if self.scene.after_step is not None:
            await self.scene.after_step(self, batch)
        self.well()
        metrics = {"loss": 0.5} | self.scene.metrics
        return StepResult(version=self.version, metrics=metrics, set_aside=self.scene.set_aside(batch))

    async def publish(self, version: WeightVersion) -> WeightManifest:
        self.well()
        if not max(self.restored, self.version - 1) <= version <= self.version:
            raise TrainerError(f"asked for version {version} at version {self.version}")
        if self.scene.on_publish is not None:
            await self.scene.on_publish(self, version)
        await asyncio.sleep(PUSH_S)
        self.well()
        self.scene.published.append(version)
        return WeightManifest(version=version, buckets=(Bucket(f"{version}/0", 8, f"v{version}"),))

    async def save(self) -> str:
        self.well()
        await asyncio.sleep(0.1)
        self.well()
        if self.scene.on_save is not None:
            self.scene.on_save()
        return f"state-{self.version}"

    async def restore(self, reference: str) -> WeightVersion:
        self.well()
        await asyncio.sleep(0.1)
        self.version = self.restored = int(reference.removeprefix("state-") or 0)
        return self.version

    def well(self) -> None:
        if self.dead:
            raise TrainerError(f"the trainer died {self.dead}")


class ScriptedEnv:
    """Says its task and its step; over after `turns` answers."""

    def __init__(self, scene: "Scene", task: Task, trajectory: TrajectoryId, turns: int = 2) -> None:
        self.scene = scene
        self.task = task
        self.trajectory = trajectory
        self.turns = turns
        self.done_turns = 0

    async def reset(self) -> Observation:
        await asyncio.sleep(self.scene.reset_s)
        return self.says(f"{self.task.id}?")

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self.scene.step_s)
        self.done_turns += 1
        if self.done_turns >= self.turns:
            return Observation(reward=1.0, done=True)
        return self.says(f"more {self.done_turns}", reward=0.5)

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        raise AssertionError("no program plays here")

    async def close(self) -> None:
        self.scene.closed.append(str(self.trajectory))

    @staticmethod
    def says(text: str, **fields: Any) -> Observation:
        return Observation(messages=(Message(role="user", content=text),), **fields)


class RecordingJournal(SimJournal):
    """Keeps every batch ever written, with its samples, for tests to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[int, Batch] = {}

    def write_batch(self, batch: Batch) -> None:
        super().write_batch(batch)
        self.all[batch.step] = filled(batch)


@dataclass
class NoWorld:
    """For a run that never touches it."""

    recorder: Any = None
    rollout: Any = field(
        default_factory=lambda: RolloutWorld(
            cluster=None,  # type: ignore[arg-type]
            engines=(),
            host=None,  # type: ignore[arg-type]
            rewards=None,  # type: ignore[arg-type]
            tokenizer=None,  # type: ignore[arg-type]
        )
    )


E = TypeVar("E", bound=Event)


@dataclass
class Played:
    """What a scene came to."""

    events: list[Event]
    error: BaseException | None
    violations: list[str]

    def of(self, kind: type[E], **fields: object) -> list[E]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def one(self, kind: type[E], **fields: object) -> E:
        found = self.of(kind, **fields)
        assert len(found) == 1, f"{len(found)} events {kind} {fields}"
        return found[0]

    def ends(self, status: str) -> list[schema.End]:
        return self.of(schema.End, status=status)

    @property
    def finished(self) -> bool:
        return bool(self.of(schema.Finished))


EngineHook = Callable[[ScriptedEngine, GenerateRequest], Awaitable[None]]


@dataclass
class Scene:
    """One job and its world. Set the hooks, then `play`."""

    job: Job = field(default_factory=scene_job)
    reset_s: float = 1.0
    step_s: float = 1.0
    reward_s: float = 0.5
    task_rewards: dict[str, tuple[RewardBackend, ...]] = field(default_factory=dict)
    """Of tasks that have their own."""
    turns: int = 2
    agent: Agent | None = None
    recorder: Recorder | None = None
    stand_ins: dict[str, RewardBackend] = field(default_factory=dict)
    dead_letters: DeadLetters | None = None

    on_generate: EngineHook | None = None
    on_stage: Callable[[ScriptedEngine, WeightVersion], Awaitable[None]] | None = None
    on_swap: Callable[[ScriptedEngine, WeightManifest], Awaitable[None]] | None = None
    on_start: Callable[[EngineSpec, int], Awaitable[None]] | None = None
    """Before an engine starts; gets how often it was started before."""
    only_evaluate: bool = False
    """As `rollart eval` does."""
    on_trainer_start: Callable[[int], Awaitable[None]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What the trainer reports of each step beside its loss."""
    set_aside: Callable[[Batch], tuple[SetAside, ...]] = lambda batch: ()
    """What the trainer leaves out of each step."""
    on_step: Callable[[ScriptedTrainer, Batch], Awaitable[None]] | None = None
    after_step: Callable[[ScriptedTrainer, Batch], Awaitable[None]] | None = None
    on_publish: Callable[[ScriptedTrainer, WeightVersion], Awaitable[None]] | None = None
    on_draw: Callable[[str, int], object] | None = None
    """By domain and index; what it returns is the task, None: the usual one."""
    on_held_out: Callable[[str, int], None] | None = None
    on_save: Callable[[], None] | None = None
    on_open: Callable[[Task, TrajectoryId], Awaitable[Env | None]] | None = None
    on_score: Callable[[Trajectory], Awaitable[float | None]] | None = None
    """None: the usual reward."""
    answer_tokens: Callable[[GenerateRequest], int] = lambda request: 3
    reward: Callable[[Trajectory], float] = lambda trajectory: float(trajectory.id.member % 2)

    engines: dict[str, list[ScriptedEngine]] = field(default_factory=dict)
    """By id, the latest last."""
    trainers: list[ScriptedTrainer] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    steps: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    """(life of the trainer, step, groups) of every optimizer step that was made."""
    published: list[WeightVersion] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    dropped: list[WeightVersion] = field(default_factory=list)
    journal: RecordingJournal = field(default_factory=RecordingJournal)
    coordinator: Coordinator | None = None
    _tokens: int = FIRST_SAMPLED
    _timers: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    _watchers: list[tuple[Callable[[Event], bool], Callable[[], object]]] = field(default_factory=list)

    # --- telling it what to do ------------------------------------------------------------------------------

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        self._timers.append((seconds, action))

    def when(self, event: Callable[[Event], bool], action: Callable[[], object]) -> None:
        """Once, right after the first such event."""
        self._watchers.append((event, action))

    def engine(self, name: str) -> ScriptedEngine:
        return self.engines[name][-1]

    def all_engines(self) -> list[ScriptedEngine]:
        return [engine for engines in self.engines.values() for engine in engines]

    def play(self, *, kills: Sequence[Callable[[Event], bool]] = ()) -> Played:
        """Run the job. Each of `kills` is the event at which one more life of the coordinator ends."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(self._play(kills))

    # --- the ports --------------------------------------------------------------------------------------------

    def new_token(self) -> int:
        self._tokens += 1
        return self._tokens

    async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
        env = await self.on_open(task, trajectory) if self.on_open is not None else None
        return env if env is not None else ScriptedEnv(self, task, trajectory, self.turns)

    async def score(self, trajectory: Trajectory) -> Score:
        self.scored.append(str(trajectory.id))
        await asyncio.sleep(self.reward_s)
        value = await self.on_score(trajectory) if self.on_score is not None else None
        return Score(value=self.reward(trajectory) if value is None else value)

    async def drop_before(self, version: WeightVersion) -> None:
        self.dropped.append(version)

    # --- the loop ---------------------------------------------------------------------------------------------

    async def _play(self, kills: Sequence[Callable[[Event], bool]]) -> Played:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        events: list[Event] = []
        audit = Audit()
        log = EventLog(loop.time)
        log.read_by(events.append)
        log.read_by(audit.read)
        log.read_by(self._watch)
        log.emit(facts(self.job, clock="real"))
        for seconds, action in self._timers:
            loop.call_later(seconds, action)
        error: BaseException | None = None
        for kill in (*kills, None):
            error = await self._life(loop, log, kill)
        if error is not None:
            log.emit(schema.Stopped(reason=str(error)))
        return Played(events, error, audit.finish())

    async def _life(
        self, loop: VirtualLoop, log: EventLog, kill: Callable[[Event], bool] | None
    ) -> BaseException | None:
        handle = LogHandle(log)
        cluster = ScriptedCluster(self)
        rollout = RolloutWorld(
            cluster=cluster,
            engines=engine_specs(self.job),
            host=self,
            rewards=self,
            task_rewards=self.task_rewards,
            tokenizer=Words(),
            agents={} if self.agent is None else {task.name: self.agent for task in self.job.tasks},
            further_engines=engine_specs(self.job, further=True),
            recorder=self.recorder,
            stand_ins=self.stand_ins,
            dead_letters=self.dead_letters,
        )
        world = World(
            cluster=cluster,
            engines=engine_specs(self.job),
            task_sets={task.name: Tasks(task.name, self) for task in self.job.tasks},
            store=self,
            journal=self.journal,
            affinity=build_affinity(self.job, MODELS[self.job.sim.model]),
            rollout=rollout,
            recorder=self.recorder,
        )
        coordinator = self.coordinator = Coordinator(self.job, world, handle)

        def deadlocked() -> None:
            coordinator.supervisor.fail(Deadlock(coordinator.watchdog.report(schema.Deadlock, "nothing can move")))

        loop.on_deadlock = deadlocked
        task = loop.create_task(coordinator.evaluate() if self.only_evaluate else coordinator.run())
        if kill is not None:
            killed: asyncio.Future[None] = loop.create_future()
            self.when(kill, lambda: killed.set_result(None))
            await asyncio.wait([task, killed], return_when=asyncio.FIRST_COMPLETED)
            assert killed.done(), "the job ended before it could be killed"
            log.emit(schema.Killed())
            handle.cut()
            task.cancel()
        try:
            await task
        except (RollartError, AssertionError, ValueError) as error:
            return error
        except asyncio.CancelledError:
            assert kill is not None
        finally:
            await cluster.close()
        return None

    def _watch(self, event: Event) -> None:
        for watcher in list(self._watchers):
            if watcher[0](event):
                self._watchers.remove(watcher)
                asyncio.get_running_loop().call_soon(watcher[1])


class ScriptedCluster:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def engine(self, spec: EngineSpec) -> Engine:
        scene = self._scene
        known = scene.engines.setdefault(spec.id, [])
        if scene.on_start is not None:
            await scene.on_start(spec, len(known))
        await asyncio.sleep(1.0)
        known.append(ScriptedEngine(spec, scene))
        return known[-1]

    async def trainer(self) -> Trainer:
        scene = self._scene
        if scene.on_trainer_start is not None:
            await scene.on_trainer_start(len(scene.trainers))
        await asyncio.sleep(1.0)
        scene.trainers.append(ScriptedTrainer(scene, len(scene.trainers)))
        return scene.trainers[-1]

    async def close(self) -> None:
        for engine in self._scene.all_engines():
            engine.dead = engine.dead or "the job ended"
        for trainer in self._scene.trainers:
            trainer.dead = trainer.dead or "with the job"


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()
