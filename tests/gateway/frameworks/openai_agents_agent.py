"""An agent of OpenAI's Agents SDK, as its documentation has it: a question on standard input, an answer printed."""

import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled  # type: ignore

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(name="adder", instructions="Add.", tools=[add], model=os.environ["OPENAI_MODEL"])
sys.stdout.write(f"last word: {Runner.run_sync(agent, sys.stdin.read()).final_output}")
