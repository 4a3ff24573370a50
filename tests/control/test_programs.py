"""An agent that is a program, over a gateway: its conversations become turns, and what it does harms nobody else."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rollart.control.program import MAX_REFUSED, ProgramAgent
from rollart.events import schema
from rollart.ports import Env
from rollart.types import (
    ChatAnswer,
    ChatRequest,
    Endpoint,
    Message,
    Observation,
    Program,
    Sample,
    Task,
    Tool,
    ToolCall,
    TrajectoryId,
)
from tests.control.invariant import check_first_invariant
from tests.control.scene import Played, Scene, ScriptedEnv, Words, for_ever, scene_job

BAD = TrajectoryId("g1", 1, 0)
LOOK = Tool(name="look", description="", parameters="{}")


class Refused(Exception):
    pass


class Call:
    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.answered: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()

    def answer(self, answer: ChatAnswer) -> None:
        self.answered.set_result(answer)

    def refuse(self, code: str, reason: str) -> None:
        self.answered.set_exception(Refused(code, reason))
        self.answered.exception()


class Door:
    """What an agent's OpenAI client would be, without the wire."""

    def __init__(self, trajectory: TrajectoryId) -> None:
        self.endpoint = Endpoint(str(trajectory), "key")
        self.queue: asyncio.Queue[Call] = asyncio.Queue()
        self.closed = False

    async def next(self) -> Call:
        return await self.queue.get()

    def close(self) -> None:
        self.closed = True

    async def ask(self, *messages: Message, **more: Any) -> Message:
        call = Call(ChatRequest(messages=messages, **more))
        self.queue.put_nowait(call)
        return (await call.answered).message


Script = Callable[[Door], Awaitable[object]]


class Plays(ScriptedEnv):
    """An environment in which a script plays, as a program would."""

    script: Script
    doors: dict[str, Door]

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        await self.script(self.doors[endpoint.url])
        return Observation(reward=1.0, done=True)


@dataclass
class Gateway:
    doors: dict[str, Door] = field(default_factory=dict)

    async def open(self, trajectory: TrajectoryId) -> Door:
        door = self.doors[str(trajectory)] = Door(trajectory)
        return door


def user(text: str) -> Message:
    return Message(role="user", content=text)


async def two_turns(door: Door) -> None:
    first = await door.ask(user("a"))
    await asyncio.sleep(1.0)
    await door.ask(user("a"), first, user("b"))


def program_scene(usual: Script, bad: Script | None = None, **settings: Any) -> tuple[Scene, Gateway]:
    """Programs play; one trajectory's, in its first attempt, is another."""
    gateway = Gateway()
    scene = Scene(scene_job(**settings), agent=ProgramAgent(Program(function="tests:solve"), gateway))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        env = Plays(scene, task, trajectory)
        env.doors = gateway.doors
        env.script = bad if bad is not None and trajectory == BAD else usual
        return env

    scene.on_open = opened
    return scene, gateway


def of_trajectory(samples: list[Sample], trajectory: TrajectoryId) -> list[Sample]:
    return [sample for sample in samples if sample.trajectory == trajectory]


def test_a_conversation_that_goes_on_is_one_sample_of_exactly_what_the_engine_saw() -> None:
    scene, gateway = program_scene(two_turns)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    samples = check_first_invariant(scene)
    assert {len(of_trajectory(samples, sample.trajectory)) for sample in samples} == {1}
    assert {event.turns for event in played.ends("done")} == {2}
    assert all(door.closed for door in gateway.doors.values())
    first, second = (said for said in scene.said if said.request.session == "g1.0.0")
    assert second.prompt == [*first.prompt, *first.tokens, 2, ord("b")], "what was sampled is not made again from text"


async def handed_back_changed(door: Door) -> None:
    """Agents trim answers, and do not send thoughts back."""
    said = await door.ask(user("a"))
    trimmed = Message(role="assistant", content=f"\n{said.content} ", reasoning="")
    await door.ask(user("a"), trimmed, user("b"))


async def rewrites_its_history(door: Door) -> None:
    said = await door.ask(user("a"))
    await door.ask(user("a"), said, user("b"))
    await door.ask(user("so far: c"))


async def changes_an_answer(door: Door) -> None:
    await door.ask(user("a"))
    await door.ask(user("a"), Message(role="assistant", content="what it never said"), user("b"))


async def gains_a_tool(door: Door) -> None:
    said = await door.ask(user("a"))
    await door.ask(user("a"), said, user("b"), tools=(LOOK,))


@pytest.mark.parametrize(
    ("script", "prefixes"),
    [(handed_back_changed, 1), (rewrites_its_history, 2), (changes_an_answer, 2), (gains_a_tool, 2)],
)
def test_a_new_prefix_begins_where_history_is_rewritten_and_shares_the_reward(script: Script, prefixes: int) -> None:
    scene, _ = program_scene(script)
    assert scene.play().finished
    samples = check_first_invariant(scene)
    for sample in samples:
        of_this = of_trajectory(samples, sample.trajectory)
        assert len(of_this) == prefixes
        assert len({float(one.advantages[one.mask][0]) for one in of_this}) == 1


async def asks_a_sub_agent(door: Door) -> None:
    main = await door.ask(user("main"))
    await door.ask(user("sub"))
    await door.ask(user("main"), main, user("go on"))


async def tries_again(door: Door) -> None:
    said = await door.ask(user("main"))
    await door.ask(user("main"), said, user("this way"))
    await door.ask(user("main"), said, user("or that"))


async def has_two_conversations(door: Door) -> None:
    """In turn, and one of them is forked."""
    one, two = [user("one")], [user("two")]
    for _ in range(3):
        one += [await door.ask(*one), user("go on")]
        two += [await door.ask(*two), user("go on")]
    await door.ask(*one[:2], user("otherwise"))


@pytest.mark.parametrize(
    ("script", "turns"),
    [(asks_a_sub_agent, [2, 1]), (tries_again, [2, 1]), (has_two_conversations, [3, 3, 1])],
)
def test_one_that_goes_on_after_another_keeps_its_tokens_and_none_is_trained_on_twice(
    script: Script, turns: list[int]
) -> None:
    scene, _ = program_scene(script)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    samples = [sample for batch in scene.journal.all.values() for sample in batch.samples]
    calls = [said for said in scene.said if said.request.session == "g1.0.0"]
    mine = of_trajectory(samples, TrajectoryId("g1", 0, 0))
    trained = [token for sample in mine for token in sample.tokens[sample.mask]]
    assert sorted(trained) == sorted(token for call in calls for token in call.tokens)
    whole = [call.prompt + call.tokens for call in calls]
    assert all(sample.tokens.tolist() in whole for sample in mine), "each is what the engine saw"
    assert [int(sample.mask.sum()) // 3 for sample in mine] == turns, "a conversation is one sample"
    assert len({float(sample.advantages[sample.mask][0]) for sample in mine}) == 1


def check_only_it_failed(played: Played, reason: str) -> None:
    assert played.finished, played.error
    assert not played.violations
    assert [event.id for event in played.ends("failed")] == [str(BAD)]
    assert reason in played.ends("failed")[0].reason
    assert "g1.1.1" in [event.id for event in played.ends("done")], "it was tried again"


async def dies(door: Door) -> None:
    await door.ask(user("a"))
    raise RuntimeError("exited with status 3")


async def hangs(door: Door) -> None:
    await door.ask(user("a"))
    await for_ever()


async def never_asks(door: Door) -> None:
    await asyncio.sleep(1.0)


async def asks_nonsense(door: Door) -> None:
    while True:
        with pytest.raises(Refused, match="invalid_request"):
            await door.ask(Message(role="narrator", content="meanwhile"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (dies, "EnvError: agent: RuntimeError: exited with status 3"),
        (hangs, "EnvError: agent: no answer in 300 s"),
        (never_asks, "ended before the model said anything"),
        (asks_nonsense, f"it went on after {MAX_REFUSED} refusals; the last: the chat template refuses"),
    ],
)
def test_a_bad_program_ends_its_own_attempt_only(script: Script, reason: str) -> None:
    scene, gateway = program_scene(two_turns, script)
    check_only_it_failed(scene.play(), reason)
    assert str(BAD) in scene.closed
    assert gateway.doors[str(BAD)].closed


async def never_stops(door: Door) -> None:
    await _goes_on(door, [user("a")])


async def _goes_on(door: Door, history: list[Message]) -> None:
    while True:
        history += [await door.ask(*history), user("b" * 10)]


async def floods(door: Door) -> None:
    """It does not listen, and asks a hundred times at once."""
    while True:
        await asyncio.gather(*(door.ask(user("a")) for _ in range(100)), return_exceptions=True)


async def compresses(door: Door) -> None:
    """As frameworks do when they are told that the context is full."""
    history = [user("a" * 30)]
    with pytest.raises(Refused, match="context_length_exceeded"):
        await _goes_on(door, history)
    await door.ask(user("in short"))


@pytest.mark.parametrize(
    ("script", "settings", "status", "turns"),
    [
        (never_stops, {}, "truncated", 8),
        (floods, {}, "truncated", 8),
        (never_stops, {"model__context_tokens": 48}, "truncated", 4),  # 2 + 3, and 14 more each turn
        (compresses, {"model__context_tokens": 60}, "done", 4),
    ],
)
def test_turns_and_context_are_bounded_as_anywhere(
    script: Script, settings: dict[str, Any], status: str, turns: int
) -> None:
    scene, _ = program_scene(script, **settings)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert not played.ends("failed")
    assert {event.turns for event in played.ends(status)} == {turns}
    assert all(event.reward is not None for event in played.ends(status))


def test_time_in_the_engine_does_not_count_against_a_program() -> None:
    async def slowly(door: Door) -> None:
        history = [user("a")]
        for _ in range(4):
            history += [await door.ask(*history), user("b")]

    scene, _ = program_scene(slowly, limits__step_s=30.0, limits__generate_s=10_000.0)

    async def busy(engine: object, request: object) -> None:
        await asyncio.sleep(20.0)

    scene.on_generate = busy
    assert not scene.play().ends("failed")


def test_one_that_is_too_old_is_stopped_wherever_it_is() -> None:
    async def dreams(door: Door) -> None:
        said = await door.ask(user("a"))
        await asyncio.sleep(200.0)
        await door.ask(user("a"), said, user("b"))

    scene, gateway = program_scene(two_turns, dreams, rollout__spare_groups=2, train__steps=8)
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert str(BAD) in [event.id for event in played.ends("stale")]
    assert gateway.doors[str(BAD)].closed


def test_a_swap_in_the_middle_of_a_conversation_is_in_its_versions() -> None:
    async def takes_its_time(door: Door) -> None:
        said = await door.ask(user("a"))
        await asyncio.sleep(4.0)
        await door.ask(user("a"), said, user("b"))

    scene, _ = program_scene(takes_its_time, train__steps=6, rollout__staleness=2)
    assert scene.play().finished
    samples = check_first_invariant(scene)
    assert any(len(set(sample.versions[sample.mask].tolist())) > 1 for sample in samples)


def test_what_the_agent_wants_of_the_sampling_only_makes_an_answer_shorter() -> None:
    async def asks(door: Door) -> None:
        await door.ask(user("a"), max_tokens=2, stop=("x",))
        await door.ask(user("b"), max_tokens=5000)

    scene, _ = program_scene(asks)
    assert scene.play().finished
    asked = {(said.request.sampling.max_tokens, said.request.sampling.stop) for said in scene.said}
    assert asked == {(2, ("x",)), (8, ())}


def test_the_answer_has_the_tokens_texts_and_counts() -> None:
    answers: list[ChatAnswer] = []

    async def looks(door: Door) -> None:
        call = Call(ChatRequest(messages=(user("abc"),), logprobs=True))
        door.queue.put_nowait(call)
        answers.append(await call.answered)

    scene, _ = program_scene(looks)
    assert scene.play().finished
    answer = answers[0]
    assert answer.prompt_tokens == 4
    assert answer.pieces == tuple(str(token) for token in answer.completion.tokens.tolist())
    assert np.array_equal(answer.completion.logprobs, np.array(scene.said[0].logprobs, dtype=np.float32))


def test_an_environment_that_is_not_over_is_played_again() -> None:
    class TwoRounds(Plays):
        async def play(self, program: Program, endpoint: Endpoint) -> Observation:
            await self.script(self.doors[endpoint.url])
            self.done_turns += 1
            return Observation(done=True) if self.done_turns == 2 else self.says("once more", reward=0.5)

    gateway = Gateway()
    scene = Scene(agent=ProgramAgent(Program(command=("solve",)), gateway))

    async def opened(task: Task, trajectory: TrajectoryId) -> Env | None:
        env = TwoRounds(scene, task, trajectory)
        env.doors, env.script = gateway.doors, two_turns
        return env

    scene.on_open = opened
    played = scene.play()
    assert played.finished
    assert {event.turns for event in played.ends("done")} == {4}
    assert played.of(schema.Finished)


@pytest.mark.parametrize(("tools", "calls"), [((), 0), ((LOOK,), 1)])
def test_calls_are_given_to_who_offers_tools(
    tools: tuple[Tool, ...], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ToolCall(id="call_0", name="look", arguments="{}")
    monkeypatch.setattr(Words, "parse", lambda self, tokens: Message(role="assistant", content="", tool_calls=(call,)))
    said: list[Message] = []

    async def asks(door: Door) -> None:
        answer = await door.ask(user("a"), tools=tools)
        said.append(answer)
        await door.ask(user("a"), answer, user("b"), tools=tools)

    scene, _ = program_scene(asks)
    assert scene.play().finished
    assert {len(message.tool_calls) for message in said} == {calls}
    assert all(message.tool_calls or message.content for message in said)
    assert {len(of_trajectory(check_first_invariant(scene), TrajectoryId("g1", 0, 0)))} == {1}


def test_what_is_not_taken_from_an_agent_is_said_once() -> None:
    async def asks(door: Door) -> None:
        await door.ask(user("a"), ignored=("temperature", "seed"))

    scene, _ = program_scene(asks)
    played = scene.play()
    assert played.finished
    told = [event.text for event in played.of(schema.Warning) if "its agent asks for" in event.text]
    assert [text.split("asks for ")[1].split(",")[0] for text in told] == ["temperature", "seed"]
