"""The protocols through which control touches the world. Each has at most four methods.

An adapter implements one of these, raises only `rollart.errors`, and passes the port's contract suite
(`tests/contracts/`). Simulated adapters are adapters like any other.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from rollart.types import (
    Batch,
    ChatAnswer,
    ChatRequest,
    Checkpoint,
    Completion,
    Endpoint,
    EngineSpec,
    GenerateRequest,
    Message,
    Observation,
    Played,
    Program,
    Score,
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

BACKGROUND: ContextVar[bool] = ContextVar("rollart_background", default=False)
"""True in the context of periodic tasks (watchdog, metrics). Their timers are no sign of life: a loop on
which only such timers remain is deadlocked, and the virtual clock says so."""


class Engine(Protocol):
    """Takes tokens, gives tokens. In-flight work survives a swap: it goes on under the new weights."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises EngineError when the engine cannot go on."""

    async def abort(self, request_id: str) -> int:
        """Stop a request and free its slot within one engine step; an unknown id stops nothing.

        Returns how far the engine has come: a count that grows while it computes, and stands still when it does."""

    async def stage(self, version: WeightVersion) -> None:
        """Fetch the buckets of a coming version as they appear. Returns when they are on this engine's host, or when
        another version is staged or swapped to instead; a damaged bucket is for `swap` to find. Raises StoreFull where
        that host has no room for them; ask again."""

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        """Serve these weights from now on. Raises WeightError if a bucket is missing or damaged, StoreFull where the
        host has no room for them; the engine then still serves the version it had."""


class FrozenModel(Protocol):
    """A model that is not trained, such as a judge: takes tokens, gives tokens. There may be several engines behind."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError, RequestError or AnswerError."""


class Env(Protocol):
    """One single-use environment."""

    async def reset(self) -> Observation: ...

    async def step(self, action: str) -> Observation: ...

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        """Step with the answer of a program, which is run where the environment is, and ends with it."""

    async def close(self) -> None:
        """Free everything, whatever state it is in."""


class EnvHost(Protocol):
    """Opens environments somewhere: in this process, in another, on a CPU machine."""

    async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
        """Wait for a slot and start one environment. Raises EnvError."""


class RewardBackend(Protocol):
    """Scores one finished trajectory. Stateless: the same trajectory id gives the same score."""

    async def score(self, trajectory: Trajectory) -> Score:
        """Raises RewardError."""


class DeadLetters(Protocol):
    """Keeps the reward calls that failed for good, so that they can be made again. It never waits and never raises."""

    def keep(self, trajectory: Trajectory, *, reward: str, reason: str, tries: int) -> bool:
        """`reward`: its name among those of its task, empty where it is the job's. False: there is no room for it."""


class Trainer(Protocol):
    """Owns the policy's weights and its optimizer; mints version numbers.

    `publish` and `save` raise StoreFull where there is no room to write; the trainer is well, and they can be
    repeated."""

    async def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step. Raises TrainerError when the trainer is lost. What cannot be trained on is no reason to
        be: it is set aside, the rest is trained on, and the result says so."""

    async def publish(self, version: WeightVersion) -> WeightManifest:
        """Push the weights of the current or previous version to the store, manifest last."""

    async def save(self) -> str:
        """Write the trainer's state durably; returns a reference for `restore`."""

    async def restore(self, reference: str) -> WeightVersion:
        """Load a saved state ("" means the initial one); returns its version."""


class WeightStore(Protocol):
    """Buckets and manifests of weight versions. Control only ever drops old ones."""

    async def drop_before(self, version: WeightVersion) -> None:
        """Forget all versions older than this one."""


class Call(NamedTuple):
    """What a coordinator and a shard say to each other, one of them; so are the next two."""

    method: str
    arguments: tuple[Any, ...]
    number: int = 0
    """Under which an answer is wanted; 0: none."""


class Answer(NamedTuple):
    number: int
    value: Any
    error: str = ""
    """The class of what was raised instead; its text is the value."""


class Events(NamedTuple):
    """What a shard wrote down, with numbers of its own: structs of `rollart.events.schema`."""

    events: tuple[Any, ...]


ShardMessage = Call | Answer | Events


class Shard(Protocol):
    """A coordinator of its own for a share of the rollout. What is said arrives in order, both ways."""

    async def tell(self, messages: Sequence[ShardMessage]) -> None:
        """Raises ClusterError when it is lost."""

    async def news(self) -> Sequence[ShardMessage]:
        """What it has said since it was asked last; waits for something, but not for long. Raises ClusterError when it
        is lost."""


class Cluster(Protocol):
    """Starts the workers of a job where its pools say."""

    async def engine(self, spec: EngineSpec) -> Engine:
        """Start, or start again, one engine with the initial weights. Raises ClusterError."""

    async def trainer(self) -> Trainer:
        """Start, or start again, the trainer with the initial weights. Raises ClusterError."""

    async def close(self) -> None:
        """Stop all workers."""


class Journal(Protocol):
    """Durable memory of the coordinator: batches since the last checkpoint, and that checkpoint.

    Raises StoreFull where there is no room to write; what was there before is then whole, and the call can be
    repeated."""

    def write_batch(self, batch: Batch) -> None:
        """Durable before it returns. The step trains on it only afterwards."""

    def batches(self, from_step: int) -> Sequence[Batch]:
        """The batches written at or after this step, in order."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Replace the last checkpoint atomically, and forget the batches it covers."""

    def latest(self) -> Checkpoint | None: ...


class Recorder(Protocol):
    """Keeps finished trajectories for people to read. It takes what it is given and returns at once: it never waits,
    never raises, and drops what it cannot keep."""

    def played(self, played: Played) -> None:
        """An attempt is over, good or bad."""

    def ended(self, group: str, how: str) -> None:
        """A group ended untrained."""

    def trained(self, batch: Batch) -> None:
        """A step was made with these groups; said again where it is made again."""


class TaskSet(Protocol):
    """An endless, seeded sequence of tasks of one domain."""

    def task(self, index: int) -> Task: ...

    def held_out(self, index: int) -> Task:
        """The same for evaluation; disjoint from the training tasks."""


class Tokenizer(Protocol):
    """The model's tokenizer and chat template."""

    def render(
        self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None, tools: Sequence[Tool] = ()
    ) -> Tokens:
        """Tokens to append for these messages, up to and with the start of the model's answer. Where not
        `fresh`, they follow `after`, the model's last answer, and first close its turn where it did not itself.
        `tools` stand at the beginning of a prefix: they are read where `fresh`."""

    def decode(self, tokens: Tokens) -> str: ...

    def parse(self, tokens: Tokens) -> Message:
        """A sampled answer as a message: what was thought, said and called, in the format of the chat template. What
        cannot be read as a call stays text."""


class ChatCall(Protocol):
    """One request of an agent that waits for its answer. It is answered or refused, once."""

    @property
    def request(self) -> ChatRequest: ...

    def answer(self, answer: ChatAnswer) -> None: ...

    def refuse(self, code: str, reason: str) -> None:
        """It will get no answer, and should not ask again as it did."""


class Door(Protocol):
    """The endpoint of one trajectory."""

    @property
    def endpoint(self) -> Endpoint: ...

    async def next(self) -> ChatCall:
        """The next request, in the order they came. Raises EnvError where the agent does nothing but flood it."""

    def close(self) -> None:
        """Whoever still asks, or asks later, is refused."""


class Gateway(Protocol):
    """Lets agents that know nothing of us reach the model: each trajectory through a door of its own."""

    async def open(self, trajectory: TrajectoryId) -> Door: ...
