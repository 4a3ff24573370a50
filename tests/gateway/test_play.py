"""Real agents over the real endpoint: what is captured is what the built-in agent would have had."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rollart.config.load import build_job
from rollart.errors import JobError
from rollart.gateway import server
from rollart.launch.checks import refuse_functions
from rollart.ports import Tokenizer
from rollart.types import Endpoint, Message, Played, Status, Tokens, Tool, ToolCall, TrajectoryId
from rollart.workers.sandbox import missing
from tests.gateway.play import AGENTS, job, play
from tests.gateway.some_agents import bad_for
from tests.gateway.talk_tasks import LAST, SURE
from tests.tasks.libraries import interpreter_with

SAME = 1e-5
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = {"function": f"{AGENTS}:solve"}
"""Where a test's own coroutine plays, it is never called."""


def check_same(ours: dict[TrajectoryId, Played], theirs: dict[TrajectoryId, Played]) -> None:
    """Token for token, and every log-probability."""
    assert ours.keys() == theirs.keys()
    for trajectory, one in ours.items():
        turns, others = one.trajectory.turns, theirs[trajectory].trajectory.turns
        assert theirs[trajectory].trajectory.status is Status.DONE, theirs[trajectory].trajectory.reason
        assert len(turns) == len(others) == 2
        for turn, other in zip(turns, others, strict=True):
            assert turn.fresh == other.fresh
            assert turn.context.tolist() == other.context.tolist()
            assert turn.completion.tokens.tolist() == other.completion.tokens.tolist()
            assert turn.completion.spans == other.completion.spans
            assert np.abs(turn.completion.logprobs - other.completion.logprobs).max() < SAME
        assert one.trajectory.reward is not None


async def two_turns(endpoint: Endpoint, question: str) -> str:
    async with DefaultAsyncHttpxClient() as http:
        return await talk(http, endpoint, question)


async def talk(http: DefaultAsyncHttpxClient, endpoint: Endpoint, question: str) -> str:
    """The conversation of talk_tasks, and a look at the log-probabilities on the way."""
    client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0, http_client=http)
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        said = await client.chat.completions.create(model="any", messages=messages, logprobs=True)
        choice = said.choices[0]
        assert choice.logprobs is not None
        seen[question] = [*seen.get(question, []), *(one.logprob for one in choice.logprobs.content or [])]
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": SURE}]
    return f"{LAST}{choice.message.content}"


seen: dict[str, list[float]] = {}


def test_the_same_play_has_the_same_tokens_and_log_probabilities(model: Path, tmp_path: Path) -> None:
    built_in, _ = play(job(model), tmp_path / "built-in")
    over_http, _ = play(job(model, PROGRAM), tmp_path / "http", two_turns)
    check_same(built_in, over_http)
    for one in over_http.values():
        captured = np.concatenate([turn.completion.logprobs for turn in one.trajectory.turns])
        told = np.array(seen[one.trajectory.task.payload["question"]], dtype=np.float32)
        assert np.abs(captured - told).max() < SAME, "what the agent is told is what is trained on"


@pytest.mark.slow
def test_256_sessions_at_a_time(model: Path, tmp_path: Path) -> None:
    """All are open before the first asks; each has a connection of its own."""
    sessions = 256
    http = DefaultAsyncHttpxClient()  # up to a thousand connections
    arrived: list[str] = []
    left: list[str] = []
    all_there = asyncio.Event()

    async def together(endpoint: Endpoint, question: str) -> str:
        arrived.append(endpoint.url)
        if len(arrived) == sessions:
            all_there.set()
        await all_there.wait()
        try:
            return await talk(http, endpoint, question)
        finally:
            left.append(question)
            if len(left) == sessions:
                await http.aclose()  # in the loop that it belongs to

    built_in, _ = play(job(model, episodes=sessions, slots=sessions), tmp_path / "built-in")
    over_http, _ = play(job(model, PROGRAM, episodes=sessions, slots=sessions), tmp_path / "http", together)
    assert len(set(arrived)) == len(over_http) == sessions
    check_same(built_in, over_http)


# --- programs in processes of their own ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "command"])
def test_an_agent_with_openais_client_in_its_own_process(model: Path, tmp_path: Path, how: str) -> None:
    program = f"{AGENTS}:solve"
    if how == "command":
        code = "import sys; from tests.gateway.some_agents import solve; print(solve(sys.stdin.read()))"
        agent: Any = {"command": ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code]}
    else:
        agent = {"function": program}
    built_in, _ = play(job(model), tmp_path / "built-in")
    theirs, _ = play(job(model, agent), tmp_path / how)
    check_same(built_in, theirs)


@pytest.mark.slow
def test_an_agent_in_a_sandbox_reaches_its_endpoint_and_nothing_else(model: Path, tmp_path: Path) -> None:
    """There is no network inside: the model is reached over the bound socket, everything else is not."""
    if why := missing():
        pytest.skip(why)
    built_in, _ = play(job(model), tmp_path / "built-in")
    theirs, _ = play(job(model, {"function": f"{AGENTS}:solve_in_a_box"}, isolation="sandbox"), tmp_path / "run")
    check_same(built_in, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "turns"), [("solve_streaming", 1), ("solve_with_pydantic_ai", 1)])
def test_agents_that_know_nothing_of_us(model: Path, tmp_path: Path, name: str, turns: int) -> None:
    played, _ = play(job(model, {"function": f"{AGENTS}:{name}"}), tmp_path / "run")
    for one in played.values():
        assert one.trajectory.status is Status.DONE, one.trajectory.reason
        assert len(one.trajectory.turns) == turns


class CallsFirst:
    """The model's own tokenizer; but a first answer, whatever was sampled, is read as a call of a tool."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.results: list[Message] = []

    def render(
        self, messages: Sequence[Message], *, fresh: bool, after: Tokens | None = None, tools: Sequence[Tool] = ()
    ) -> Tokens:
        self.results += [message for message in messages if message.role == "tool"]
        self._first = fresh
        return self._inner.render(messages, fresh=fresh, after=after, tools=tools)

    def decode(self, tokens: Tokens) -> str:
        return self._inner.decode(tokens)

    def parse(self, tokens: Tokens) -> Message:
        if not self._first:
            return self._inner.parse(tokens)
        call = ToolCall(id="", name="add", arguments='{"a":20,  "b": 22}')
        return Message(role="assistant", content="", tool_calls=(call,))


@pytest.mark.slow
def test_a_framework_calls_its_tool_and_goes_on_with_the_same_tokens(model: Path, tmp_path: Path) -> None:
    tokenizers: list[CallsFirst] = []

    def calls_first(inner: Tokenizer) -> Tokenizer:
        tokenizers.append(CallsFirst(inner))
        return tokenizers[0]

    raw = job(model, {"function": f"{AGENTS}:solve_with_pydantic_ai"}, episodes=1, max_tokens=30)
    played, _ = play(raw, tmp_path / "run", tokenizer=calls_first)
    [one] = played.values()
    assert one.trajectory.status is Status.DONE, one.trajectory.reason
    assert [message.content for message in tokenizers[0].results] == ["42"], "the tool was run, and its result shown"
    assert [turn.fresh for turn in one.trajectory.turns] == [True, False], "what was sampled stays as it was"


FRAMEWORKS = {"openai_agents": ("openai-agents",), "langgraph": ("langgraph", "langchain-openai")}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_agent_of_a_framework_in_another_interpreter(
    framework: str, model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It knows the protocol's variables, and nothing of us. Its first answer is read as a call of its tool."""
    python = interpreter_with(FRAMEWORKS[framework], tmp_path_factory.mktemp("venvs"), framework)
    program = Path(__file__).with_name("frameworks") / f"{framework}_agent.py"
    tokenizers: list[CallsFirst] = []

    def calls_first(inner: Tokenizer) -> Tokenizer:
        tokenizers.append(CallsFirst(inner))
        return tokenizers[0]

    raw = job(model, {"command": [str(python), str(program)]}, episodes=1, max_tokens=30)
    played, _ = play(raw, tmp_path / "run", tokenizer=calls_first)
    [one] = played.values()
    assert one.trajectory.status is Status.DONE, one.trajectory.reason
    assert [message.content for message in tokenizers[0].results] == ["42"], "the tool was run, and its result shown"
    assert [turn.fresh for turn in one.trajectory.turns] == [True, False], "what was sampled stays as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dies", "its process exited with status 3"),
        ("raises", "KeyError: 'tool'"),
        ("hangs", "EnvError: agent: no answer in 10 s"),
        ("floods", "500 requests that were refused"),
        ("connects", "EnvError: agent: no answer in 10 s"),
    ],
)
def test_a_bad_agent_costs_itself_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    """Half of the agents are bad, and the others play at the same time."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 800)
    monkeypatch.setenv("BAD_HAS_BEGUN", str(tmp_path / "bad has begun"))
    agent = {"function": f"{AGENTS}:half_{name}"}
    raw = job(model, agent, episodes=6, slots=6, environment=["BAD_HAS_BEGUN"])
    played, _ = play({**raw, "limits": {"step_s": 10.0}}, tmp_path / "run")
    bad = {one.trajectory.id: bad_for(one.trajectory.task.payload["question"]) for one in played.values()}
    assert set(bad.values()) == {True, False}
    for trajectory in (one.trajectory for one in played.values()):
        if bad[trajectory.id]:
            assert trajectory.status is Status.FAILED
            assert reason in trajectory.reason
        else:
            assert trajectory.status is Status.DONE, trajectory.reason


def test_what_is_far_longer_than_the_context_is_not_read_to_its_end(model: Path, tmp_path: Path) -> None:
    """Everybody waits while a text becomes tokens."""
    sizes: list[int] = []

    def looked_at(tokenizer: Tokenizer) -> Tokenizer:
        sizes.append(len(tokenizer.render([Message(role="user", content="12+7 " * 100_000)], fresh=True)))
        return tokenizer

    play(job(model), tmp_path / "run", tokenizer=looked_at)
    assert sizes
    assert 512 < sizes[0] < 100_000


def test_a_function_that_cannot_be_loaded_is_refused_before_the_run(model: Path) -> None:
    with pytest.raises(JobError, match=r"tasks\.0\.agent\.function: nowhere:solve: no module nowhere was found"):
        refuse_functions(build_job(job(model, {"function": "nowhere:solve"})))
    refuse_functions(build_job(job(model, PROGRAM)))


# --- the page ---------------------------------------------------------------------------------------------------------

EXAMPLES = {"with_openai": ("function", "solve"), "second_thoughts": ("use", "SecondThoughts")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_agent_as_it_is(name: str) -> None:
    code = (ROOT / f"examples/agents/{name}.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "docs/agents.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_agents_of_the_page_play(model: Path, tmp_path: Path, name: str) -> None:
    key, thing = EXAMPLES[name]
    agent = {key: f"{ROOT}/examples/agents/{name}.py:{thing}"}
    played, _ = play(job(model, agent), tmp_path / "run")
    assert {(one.trajectory.status, one.trajectory.reason) for one in played.values()} == {(Status.DONE, "")}
    assert {len(one.trajectory.turns) for one in played.values()} == {4}
