"""An agent of LangGraph, as its documentation has it: a question on standard input, an answer printed."""

import os
import sys

from langchain_openai import ChatOpenAI  # type: ignore
from langgraph.prebuilt import create_react_agent  # type: ignore


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [add], prompt="Add.")
said = agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
sys.stdout.write(f"last word: {said['messages'][-1].content}")
