"""Every value that crosses a boundary of RollArt.

Frozen dataclasses, numpy arrays, no torch: control moves these, adapters fill them, nobody changes them. What every
turn makes is a frozen struct of msgspec instead: that takes a tenth of the time, and with `gc=False` the garbage
collector does not look at them. They hold text, numbers and arrays, and are part of no reference cycle.
`WeightVersion` is an int: 0 is the initial model, and the trainer mints n + 1 when step n ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, one dimension."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, one per token."""
WeightVersion = int

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""What JSON can say; for what we write."""
JsonObject: TypeAlias = Mapping[str, Json]
ParsedJson: TypeAlias = dict[str, Any]
"""An object as a parser of JSON or YAML gives it, in whatever shape its author chose. Only at JSON's edge, which
tests/test_imports.py lists."""
Payload: TypeAlias = Mapping[str, Any]
"""A problem, as the author of its task set wrote it. JSON values only."""

NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
NO_LOGPROBS: Logprobs = np.zeros(0, dtype=np.float32)


class Status(StrEnum):
    """How one attempt at a trajectory ended. Only DONE and TRUNCATED enter a group's baseline."""

    DONE = "done"
    """The environment said it is over."""
    TRUNCATED = "truncated"
    """Turns, tokens or context ran out; the reward still counts."""
    ABORTED = "aborted"
    """We stopped it: enough siblings were scored, its group died, or the job ended."""
    STALE = "stale"
    """Its first token is too old for the staleness bound."""
    FAILED = "failed"
    """Something outside the model broke: environment, reward, no engine left."""


SCORED = frozenset({Status.DONE, Status.TRUNCATED})


class Finish(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of a task set: what a group of trajectories is started from.

    Example: `Task(id="maths/17", domain="maths", payload={"question": "2 + 3"}, seed=17)`.
    """

    id: str
    """Unique within the run: `<domain>/<index>`."""
    domain: str
    """The task set's name, and the affinity key: tasks of a domain are placed on pools together."""
    index: int
    """Position in the task set; the mix keeps the cursor."""
    payload: Payload = field(default_factory=dict)
    """What the environment needs to build this problem. JSON values only."""
    seed: int = 0


class TrajectoryId(NamedTuple):
    """Names one attempt. Also the routing session, the rng key and the reward's idempotency key."""

    group: str
    member: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.group}.{self.member}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call, as chat templates are told of it."""

    name: str
    description: str
    parameters: str
    """The JSON schema of its arguments, as text."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The model asks for one call of a tool."""

    id: str
    """Names the call in the message that answers it."""
    name: str
    arguments: str
    """JSON, as text."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One chat message; `role` is what the model's chat template knows: system, user, assistant, tool."""

    role: str
    content: str
    reasoning: str = ""
    """Of an assistant: what it thought before it spoke, where its template keeps that apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str = ""
    """Of a tool: the call that this answers."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says after reset or step."""

    messages: tuple[Message, ...] = ()
    """What is new since the last turn. Empty when there is nothing more to say."""
    tools: tuple[Tool, ...] = ()
    """What the model may call from here on. Read where a prefix begins: at reset, and where `fresh`."""
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    """The environment's own limit was reached."""
    fresh: bool = False
    """History was rewritten: `messages` is the whole conversation and the prefix restarts."""
    info: Mapping[str, object] = msgspec.field(default_factory=dict)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How an engine samples one completion."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Together with the request's id it decides what is sampled, whatever else is in the batch."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call of the model. The prompt is whole, so that any engine can serve it."""

    id: str
    """`<session>/<turn>`: unique, names the call in events and in `abort`."""
    session: str
    """`str(TrajectoryId)`: calls of one session share a growing prefix."""
    domain: str
    turn: int
    prompt: tuple[Tokens, ...]
    """The prompt in pieces; their concatenation is what the model sees."""
    prompt_tokens: int
    """Total length of `prompt`."""
    sampling: Sampling
    min_version: WeightVersion = 0
    """Never serve this request on weights older than these."""
    last: bool = False
    """No further turn of this session will come: its cache may go."""

    def tokens(self) -> Tokens:
        """The prompt as one array."""
        return self.prompt[0] if len(self.prompt) == 1 else np.concatenate(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks of the model, in messages: the whole conversation, as it has it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    """Fewer than the job's, where it wants fewer."""
    stop: tuple[str, ...] = ()
    """Beside the job's."""
    logprobs: bool = False
    """It wants to see those of the answer, each beside its token's text."""
    ignored: tuple[str, ...] = ()
    """What else it asks of the sampling, which is the job's to say."""


class Endpoint(NamedTuple):
    """Where the agent of one trajectory, and nobody else, reaches the model."""

    url: str
    """The base URL of an OpenAI client."""
    key: str
    socket: str = ""
    """The same server on a Unix socket, for who has no network."""
    model: str = ""
    """The name of the only model there is."""


class Program(NamedTuple):
    """An agent that reaches the model by itself: a function or a command, one of them."""

    function: str = ""
    """`module:name` or `file.py:name`. It is given what the environment says, as text, and returns its answer."""
    command: tuple[str, ...] = ()
    """It reads what the environment says from its standard input, and prints its answer."""


class Span(NamedTuple):
    """`length` consecutive tokens sampled under `version`."""

    version: WeightVersion
    length: int


class StepSums(NamedTuple):
    """Steps of an engine, summed since it began. A mean step follows: divide by `steps`."""

    steps: float = 0.0
    sequences: float = 0.0
    """That decoded in them."""
    cached: float = 0.0
    """Tokens in the caches of these."""
    prompts: float = 0.0
    """Whose last token was computed in them."""
    tokens: float = 0.0
    """Of prompts."""
    pairs: float = 0.0
    """For each of these tokens, those that it looked at."""
    seconds: float = 0.0


class EngineWork(NamedTuple):
    """What an engine has done since it began, by kind of step: how fast it is follows from two of these."""

    decode: StepSums
    """Nobody's prompt was computed."""
    mixed: StepSums
    """Prompts were computed beside those who decode."""
    prefill: StepSums
    """Nobody decoded."""


REPORT_STEPS = 32.0
"""Steps between two reports: most answers need not carry one."""


class WorkMeter:
    """What every kind of engine keeps of its own steps, to say it with its answers. Sums since the engine began, so
    that an answer which is lost on its way takes nothing with it. Read by `rollart.policy.speeds`."""

    __slots__ = ("_decode", "_mixed", "_prefill", "_since")

    def __init__(self) -> None:
        self._decode, self._mixed, self._prefill = ([0.0] * len(StepSums._fields) for _ in range(3))
        self._since = 0.0

    def add(
        self,
        seconds: float,
        steps: float = 1.0,
        *,
        sequences: float = 0.0,
        cached: float = 0.0,
        prompts: float = 0.0,
        tokens: float = 0.0,
        pairs: float = 0.0,
    ) -> None:
        """So many alike steps, together `seconds` long; the rest is of one of them. A step in which guesses came out
        counts as many."""
        sums = self._decode if not tokens else self._mixed if sequences else self._prefill
        sums[0] += steps
        sums[1] += steps * sequences
        sums[2] += steps * cached
        if tokens:
            sums[3] += steps * prompts
            sums[4] += steps * tokens
            sums[5] += steps * pairs
        sums[6] += seconds
        self._since += steps

    def report(self) -> EngineWork | None:
        """All so far, where enough came since the last report."""
        if self._since < REPORT_STEPS:
            return None
        self._since = 0.0
        return EngineWork(StepSums(*self._decode), StepSums(*self._mixed), StepSums(*self._prefill))


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an engine sampled. `spans` lengths add up to `len(tokens)`; versions never fall."""

    tokens: Tokens
    logprobs: Logprobs
    """One per token, of the temperature-scaled full distribution it was sampled from."""
    spans: tuple[Span, ...]
    finish: Finish
    engine: str
    prefill_tokens: int = 0
    """Prompt tokens that were computed (a rebuilt cache counts again)."""
    cached_tokens: int = 0
    """Prompt tokens found in the session's cache."""
    busy_s: float = 0.0
    """Engine seconds this call used, its share of the batch."""
    prefill_busy_s: float = 0.0
    """Where prefill is apart from decode: seconds of a prefill worker, not in `busy_s`."""
    work: EngineWork | None = None
    """What its engine has done by now, in all. Said now and then: with the first answer after enough steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What the model said to a ChatRequest: in words, and in the tokens that it sampled."""

    message: Message
    completion: Completion
    prompt_tokens: int
    pieces: tuple[str, ...]
    """The text of each sampled token, where it was asked for."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One round: what the model was shown, what it said, what that earned."""

    context: Tokens
    """The token delta since the last turn (the whole prompt where `fresh`)."""
    fresh: bool
    completion: Completion
    reward: float = 0.0
    generate_s: float = 0.0
    env_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished attempt, good or bad."""

    id: TrajectoryId
    task: Task
    turns: tuple[Turn, ...]
    status: Status
    born: WeightVersion | None
    """Version of the first sampled token; None if none was sampled."""
    oldest: WeightVersion | None
    """Oldest version of any sampled token."""
    reward: float | None = None
    """None until scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it ended so, where the status alone does not say."""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.completion.tokens) for turn in self.turns)


class TurnNote(NamedTuple):
    """What people want to know of a turn beside the turn itself; nobody is trained on it."""

    pool: str
    """Of the engine that answered."""
    waited_s: float
    """Until the call that was answered was sent to its engine; a part of the turn's `generate_s`."""
    shown: tuple[Message, ...]
    """What the environment said since the answer before."""
    text: str
    """The answer as the environment was given it; empty where it was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One finished attempt as it is kept for people to read."""

    trajectory: Trajectory
    notes: tuple[TurnNote, ...]
    """One per turn."""
    left: tuple[Message, ...] = ()
    """What the environment said after the last answer."""
    evaluation: bool = False
    open_s: float = 0.0
    """Waiting for an environment, and its start."""
    reset_s: float = 0.0
    queue_s: float = 0.0
    """Waiting for a reward slot, and for another try."""
    reward_s: float = 0.0
    """In reward calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function gave one trajectory."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    cold_start_s: float = 0.0
    """Part of the call spent starting a function instance."""
    busy_s: float = 0.0
    """Seconds the function itself ran, or the engines of a judge, where the backend knows."""
    calls: int = 1
    """That were made for it: more where one was asked again beside a slow one or a judge votes, none where the answer
    was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Scored trajectories of one task, compared with each other."""

    id: str
    task: Task
    members: tuple[Trajectory, ...]
    born: WeightVersion
    """Of the oldest member."""
    advantages: tuple[float, ...]
    """One per member."""
    admitted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prefix of one trajectory, flat: T tokens, no prompt/response split.

    A trajectory whose history was never rewritten is one sample. Example, two turns:
    tokens  [p p p a a o o b b b], mask [0 0 0 1 1 0 0 1 1 1].
    """

    trajectory: TrajectoryId
    domain: str
    tokens: Tokens
    """(T,) exactly the sequence the engine saw."""
    mask: npt.NDArray[np.bool_]
    """(T,) true exactly on sampled tokens."""
    logprobs: Logprobs
    """(T,) the engine's, 0 where not sampled."""
    versions: npt.NDArray[np.int32]
    """(T,) weights that sampled the token, -1 where not sampled."""
    advantages: npt.NDArray[np.float32]
    """(T,) 0 where not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step trains on."""

    step: int
    serving: WeightVersion
    """The serving version when the batch was formed."""
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...] = ()
    """The groups' trajectories, flat, with advantages: filled by the trainer (`train/samples.py`), empty elsewhere."""


class SetAside(NamedTuple):
    """A trajectory of a batch that could not be trained on, and why."""

    trajectory: TrajectoryId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a train step gave. `version` is minted by the trainer: step + 1."""

    version: WeightVersion
    metrics: Mapping[str, float] = field(default_factory=dict)
    set_aside: tuple[SetAside, ...] = ()
    """Left out of the step. The same batch at the same step gives the same ones again."""


class Bucket(NamedTuple):
    """One piece of a version's weights in a store: what travels at once, and is checked by its digest."""

    name: str
    """Of the file; one that holds a large tensor is several buckets."""
    num_bytes: int
    digest: str
    """Of these bytes."""
    start: int = 0
    """Where in the file they begin."""


class Probe(NamedTuple):
    """What a version's weights say of fixed sequences: proof, for an engine that loads them by other means."""

    tokens: tuple[int, ...]
    """Of all sequences, which are equally long."""
    logprobs: tuple[float, ...]
    """Of each token but each sequence's first, given those before it; temperature 1. Computed in float32: its
    changes are those of the weights, without rounding."""
    num_sequences: int = 1

    def sequences(self) -> list[list[int]]:
        length = len(self.tokens) // self.num_sequences
        return [list(self.tokens[at : at + length]) for at in range(0, len(self.tokens), length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Says that a version is complete. It appears in a store only after all its buckets."""

    version: WeightVersion
    buckets: tuple[Bucket, ...]
    probe: Probe | None = None
    """By the trainer's own model code."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


class Pulled(NamedTuple):
    """How a version came to an engine, or to its host."""

    seconds: float = 0.0
    """That went into it, hidden or not."""
    bytes: int = 0
    """That crossed to the host; 0 where the version is read where it was written."""
    density: float | None = None
    """The part of the weights (of their 16-bit words) that differ from the version before; None where nobody looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """What a swap did on one engine."""

    version: WeightVersion
    pulled: Pulled = field(default_factory=Pulled)
    rebuilt_tokens: int = 0
    """KV tokens of in-flight work to be computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine worker as the job asks for it."""

    id: str
    pool: str
    type: str
    hardware: str
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one worker takes of a machine."""

    resource: str = ""
    """A name that machines of its kind carry; empty where any machine will do."""
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster."""

    name: str
    resources: Mapping[str, float]
    """All it has, in use or not: `CPU`, `GPU`, `memory` (bytes), and the names of its kinds."""
    host: str = ""
    """Nodes of one host share its memory and disks."""
    taken_on_trust: bool = False
    """Everything runs here whatever its kind, and shares the cores: this machine, without a cluster."""


@dataclass(slots=True, kw_only=True)
class EngineView:
    """All that a routing policy may see of one engine. Kept by the proxy, the only mutable type here."""

    id: str
    pool: str
    version: WeightVersion = 0
    in_flight: int = 0
    up: bool = True
    """Alive as far as we know."""
    serving: bool = True
    """Takes new requests now: up, and not in the middle of a swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that was admitted and is not ready: what a checkpoint keeps of it."""

    id: str
    task: Task


class MixState(NamedTuple):
    """Where one task stands in the mix."""

    cursor: int
    """Next index in the task set."""
    returned: tuple[int, ...]
    """Indices to be given out again, before new ones."""
    consumed: int
    """Groups trained on since the set of tasks in the mix last changed."""
    skip: tuple[int, ...]
    """Indices that were trained on already."""


class BreakerState(NamedTuple):
    """Whether one task is out of the mix, and how it came to that."""

    failures: int
    """In a row."""
    open: bool
    probes: int
    """Failed in a row since it opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a resumed job needs; committed together or not at all."""

    step: int
    """The next step; also the trainer's version."""
    trainer: str
    """The trainer's own reference to its saved state."""
    mix: Mapping[str, MixState]
    breakers: Mapping[str, BreakerState]
    """Of each task: whether it is out of the mix."""
    ready: tuple[Group, ...]
    open: tuple[OpenGroup, ...]
    next_group: int
    incarnation: int
    """How often the coordinator was started again; part of new ids, so that none is ever used twice."""
