"""An agent as people have it: OpenAI's client, and nothing of RollArt."""

import os

from openai import OpenAI


def solve(problem: str) -> str:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY; made here, since each episode has its own
    messages = [{"role": "user", "content": problem}]
    for doubt in ("Are you sure?", None):
        said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        answer = said.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": doubt}]
    return answer
