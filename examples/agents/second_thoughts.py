"""An agent of one's own inside RollArt: it asks once more before it acts."""

from rollart.control.chat import Chat
from rollart.types import ChatRequest, Message, Status


class SecondThoughts:
    async def play(self, session):
        chat = Chat(session)
        messages = ()
        observation = await session.reset()
        while not observation.done:
            messages += observation.messages
            for doubt in ("Are you sure?", None):
                answer = await chat.answer(ChatRequest(messages=messages))
                if answer is None:  # turns or context have run out
                    return Status.TRUNCATED
                messages += (answer.message,)
                if doubt:
                    messages += (Message(role="user", content=doubt),)
            observation = await session.step(answer.message.content)
        return Status.DONE
