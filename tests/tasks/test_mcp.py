"""Tools of a real MCP server, over both transports."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import EnvError
from rollart.tasks.api import Said, observe
from rollart.tasks.mcp import McpServer
from rollart.tasks.tools import Function, ToolEnvironment, written
from rollart.types import Observation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("mcp") is None, reason="needs the agents extra")]

SERVER = str(Path(__file__).with_name("mcp_server.py"))


class Sums(ToolEnvironment):
    def __init__(self, server: McpServer) -> None:
        self.server = server

    def tools(self) -> Sequence[Callable[..., Any] | Function]:
        return self.server.tools()

    def start(self) -> Said:
        return "2 + 3?"

    def answer(self, text: str) -> Said:
        return observe(done=True)

    def close(self) -> None:
        self.server.close()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[McpServer]:
    if request.param == "stdio":
        yield McpServer([sys.executable, SERVER])
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield McpServer(f"http://127.0.0.1:{port}/mcp", timeout_s=10.0)
    finally:
        process.kill()
        process.wait()


def test_the_model_calls_the_tools_of_a_server(server: McpServer) -> None:
    environment = Sums(server)
    try:
        first = environment.reset()
        assert isinstance(first, Observation)
        assert [(tool.name, tool.description) for tool in first.tools][:2] == [
            ("add", "Add two numbers."),
            ("refuse", "Never works."),
        ]
        said = environment.step(written("add", a=2, b=3) + written("refuse") + written("add", a="x", b=1))
        assert isinstance(said, Observation)
        summed, refused, wrong = (message.content for message in said.messages)
        assert summed == "5"
        assert refused.startswith("error: ")
        assert "refuse" in refused
        assert wrong.startswith("error: ")
        with pytest.raises(EnvError, match="MCP server"):
            environment.step(written("die"))
    finally:
        environment.close()
    with pytest.raises(EnvError, match="is closed"):
        environment.step(written("add", a=2, b=3))


def test_a_server_that_is_not_there_is_an_error_of_the_environment() -> None:
    for server in (McpServer([sys.executable, "-c", ""]), McpServer("http://127.0.0.1:1/mcp")):
        with pytest.raises(EnvError, match="MCP server"):
            Sums(server).reset()
