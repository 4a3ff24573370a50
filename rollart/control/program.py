"""The agent that is a program of its own: it reaches the model through a door, and its answer goes to the environment.

Everything happens in the attempt's own task: requests are taken from the door one by one and answered as any other
turn, so that swaps, aborts, staleness, turns and context mean the same. A program that fails or hangs ends its
attempt, and is killed with its environment.
"""

import asyncio

from rollart.control.chat import Chat
from rollart.control.env_manager import Session, checked
from rollart.errors import EnvError, JobError, boundary
from rollart.ports import ChatCall, Door, Gateway
from rollart.types import Observation, Program, Status

_PLAY = boundary(EnvError, "agent")
MAX_REFUSED = 8
"""Refusals after which a program is not going to do anything else: it is ended."""


class ProgramAgent:
    def __init__(self, program: Program, gateway: Gateway) -> None:
        self._program = program
        self._gateway = gateway

    async def play(self, session: Session) -> Status:
        observation = await session.reset()
        door = await self._gateway.open(session.attempt.id)
        game = _Game(session, door)
        try:
            while not observation.done:
                if observation.truncated:
                    return Status.TRUNCATED
                try:
                    with _PLAY:
                        observation = await game.run(self._program)
                except EnvError:
                    if game.cut_off:
                        return Status.TRUNCATED
                    raise
        finally:
            door.close()
            game.chat.by_conversation()
        return Status.DONE


class _Game:
    """One attempt of a program."""

    def __init__(self, session: Session, door: Door) -> None:
        self._session = session
        self._door = door
        self.chat = Chat(session)
        self.cut_off = False
        """It was refused an answer, since turns or context had run out."""
        self._refused = 0

    async def run(self, program: Program) -> Observation:
        """Let it answer what the environment said last, and step with that."""
        session, attempt = self._session, self._session.attempt
        loop, waits = session.manager.loop, session.manager.env_calls(attempt).step
        playing = loop.create_task(session.env.play(program, self._door.endpoint))
        asking = loop.create_task(self._door.next())
        try:
            while True:
                await waits.guard(attempt.key, asyncio.wait([playing, asking], return_when=asyncio.FIRST_COMPLETED))
                if playing.done():
                    break
                call, asking = asking.result(), loop.create_task(self._door.next())
                await self._answer(call)
        finally:
            for task in (playing, asking):
                task.cancel()
            await asyncio.gather(playing, asking, return_exceptions=True)
        observation = checked(playing.result())
        session.stepped(observation, self.chat.answered_s)
        return observation

    async def _answer(self, call: ChatCall) -> None:
        attempt, most = self._session.attempt, self._session.manager.job.model.context_tokens
        try:
            answer = await self.chat.answer(call.request)
        except JobError as error:
            self._refuse(call, "invalid_request", str(error))
            return
        if answer is not None:
            call.answer(answer)
            return
        self.cut_off = True
        if len(attempt.turns) >= attempt.settings.max_turns:
            self._refuse(call, "max_turns", f"this episode has had its {attempt.settings.max_turns} turns (max_turns)")
        else:
            self._refuse(call, "context_length_exceeded", f"this does not fit model.context_tokens {most}")

    def _refuse(self, call: ChatCall, code: str, reason: str) -> None:
        call.refuse(code, reason)
        self._refused += 1
        if self._refused > MAX_REFUSED:
            raise EnvError(f"it went on after {MAX_REFUSED} refusals; the last: {reason}")
