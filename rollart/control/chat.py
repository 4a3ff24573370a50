"""Conversations in messages, over an engine that knows tokens.

An agent sends its whole conversation each time. What of it the model has seen and said before is found by its
messages, and stands for the very tokens that were rendered and sampled then; only what is new becomes tokens. Where
the agent rewrote its history nothing is found, and a new prefix begins. Several conversations may take turns. While
they play, one that goes on after another is a new prefix, which holds its old tokens as they were; at the end
`by_conversation` puts its turns together again.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from rollart.control.env_manager import Session
from rollart.control.render import Prefix
from rollart.types import ChatAnswer, ChatRequest, Message, Tokens, Tool


class _Point(NamedTuple):
    """A conversation right after an answer."""

    prefix: Prefix
    said: Tokens
    """The answer."""
    turn: int
    """In which it was given."""


class _Link(NamedTuple):
    """A turn that goes on with a conversation."""

    after: int
    """The turn that it follows."""
    new: Tokens
    """What was said since."""


class Chat:
    """The conversations of one attempt."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._points: dict[bytes, _Point] = {}
        """By the digest of all messages up to and with the answer."""
        self._links: dict[int, _Link] = {}
        """By turn."""
        self.answered_s = session.manager.loop.time()

    async def answer(self, request: ChatRequest) -> ChatAnswer | None:
        """The next message of this conversation; None when turns or context have run out. Raises JobError where the
        chat template refuses it."""
        session, attempt = self._session, self._session.attempt
        for param in request.ignored:
            session.manager.warn_once(
                f"task {attempt.task.domain}: its agent asks for {param}, which is ignored: the job says how its model "
                f"samples (tasks.temperature and so on)"
            )
        digests = list(_digests(request.tools, request.messages))
        known, point = self._longest(digests)
        new = request.messages[known:]
        rendered = context = session.tokenizer.render(
            new, fresh=point is None, after=None if point is None else point.said, tools=request.tools
        )
        fresh = point is None or point.prefix is not attempt.prefix
        if point is not None and fresh:
            context = np.concatenate([*point.prefix.pieces, context])
        attempt.settle(env_s=session.manager.loop.time() - self.answered_s)
        if attempt.notes is not None:
            attempt.notes.shown = tuple(_readable(message) for message in new)
        completion = await session.generate(context, fresh=fresh, max_tokens=request.max_tokens, stop=request.stop)
        if completion is None:
            return None
        self.answered_s = session.manager.loop.time()
        message = session.tokenizer.parse(completion.tokens)
        calls = tuple(
            replace(call, id=f"call_{len(attempt.turns)}_{number}") for number, call in enumerate(message.tool_calls)
        )
        message = replace(message, tool_calls=calls)
        if calls and not request.tools:  # who offers no tools expects words
            message = replace(message, content=session.tokenizer.decode(completion.tokens), tool_calls=())
        if attempt.notes is not None:
            attempt.notes.text = session.tokenizer.decode(completion.tokens)
        *_, digest = _digests((), [message], start=digests[-1])
        self._points[digest] = _Point(attempt.prefix, completion.tokens, len(attempt.turns))
        if point is not None:
            self._links[len(attempt.turns)] = _Link(point.turn, rendered)
        return ChatAnswer(
            message=message,
            completion=completion,
            prompt_tokens=attempt.prefix.length - len(completion.tokens),
            pieces=tuple(
                session.tokenizer.decode(completion.tokens[at : at + 1]) for at in range(len(completion.tokens))
            )
            if request.logprobs
            else (),
        )

    def by_conversation(self) -> None:
        """Put the turns of each conversation one after another, so that it is one prefix; their tokens stay the same.
        Of several that go on from the same answer, the first follows it."""
        attempt = self._session.attempt
        attempt.settle()
        chains: list[list[int]] = []
        chain_of: dict[int, list[int]] = {}
        for at, turn in enumerate(attempt.turns):
            link = self._links.get(at)
            chain = chain_of[link.after] if link is not None else None
            if link is not None and chain is not None and chain[-1] == link.after:
                attempt.turns[at] = replace(turn, context=link.new, fresh=False)
            else:
                chains.append(chain := [])
            chain.append(at)
            chain_of[at] = chain
        attempt.reorder([at for chain in chains for at in chain])

    def _longest(self, digests: Sequence[bytes]) -> tuple[int, _Point | None]:
        """How many of the messages are known, and the point after them."""
        for known in range(len(digests) - 1, 0, -1):
            point = self._points.get(digests[known])
            if point is not None:
                return known, point
        return 0, None


def _digests(tools: Sequence[Tool], messages: Sequence[Message], start: bytes | None = None) -> Iterator[bytes]:
    """One for the beginning, and one for the conversation up to and with each message."""
    digest = start or hashlib.blake2b(repr(tuple(tools)).encode(), digest_size=16).digest()
    yield digest
    for message in messages:
        digest = hashlib.blake2b(digest + _identity(message).encode("utf-8", "replace"), digest_size=16).digest()
        yield digest


def _identity(message: Message) -> str:
    """What makes a message the same one. Agents hand an answer back without its thoughts, with its edges trimmed, or
    with its arguments written anew; what others said they hand back as it was."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [(call.name, _canonical(call.arguments)) for call in message.tool_calls]
    return json.dumps([message.role, content, calls])


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _readable(message: Message) -> Message:
    """For the record, which keeps texts: with its calls as text."""
    if not message.tool_calls:
        return message
    calls = "\n".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return Message(role=message.role, content="\n".join(filter(None, [message.content, calls])))
