"""Tools of MCP servers, over the official SDK: a command that speaks over its standard input and output, or a URL.

    class Files(ToolEnvironment):
        def __init__(self):
            self.server = McpServer(["python", "files_server.py"])   # or McpServer("http://127.0.0.1:8000/mcp")
        def tools(self):
            return self.server.tools()
        def close(self):
            self.server.close()

A server that is started here is this environment's own. One behind a URL may be shared.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollart.errors import EnvError, install, text_of
from rollart.tasks.tools import Function
from rollart.types import Tool

TIMEOUT_S = 60.0


class McpServer:
    """Its client runs in a thread of its own, from the first use to `close`."""

    def __init__(
        self, server: str | Sequence[str], *, variables: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`server`: a URL, or a program and its arguments. `variables`: of its environment, beside the usual ones.
        `timeout_s`: of one call."""
        self._server = server
        self._variables = dict(variables) if variables else None
        self._timeout_s = timeout_s
        self._stack = contextlib.ExitStack()
        self._portal: Any = None
        self._client: Any = None

    def tools(self) -> list[Function]:
        """What the server offers. Raises EnvError where it cannot be reached."""
        try:
            self._connect()
            found: list[Any] = []
            cursor = None
            while True:
                page = self._portal.call(partial(self._client.list_tools, cursor=cursor))
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        except Exception as error:  # the boundary to the server
            self.close()
            raise EnvError(f"MCP server {self._name}: {_cause(error)}") from error
        return [
            Function(
                Tool(name=one.name, description=one.description or "", parameters=json.dumps(one.input_schema)),
                partial(self._call, one.name),
            )
            for one in found
        ]

    def close(self) -> None:
        """End the connection, and the server where it was started here."""
        with contextlib.suppress(Exception):  # it may be gone already
            self._stack.close()
        self._portal = self._client = None

    @property
    def _name(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)

    def _connect(self) -> None:
        if self._client is not None:
            return
        try:
            from anyio.from_thread import start_blocking_portal
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import get_default_environment
        except ImportError as error:
            raise EnvError(f"MCP needs the package {error.name}: {install('agents')}") from error
        where: Any = self._server
        if not isinstance(where, str):
            command, *args = where
            environment = get_default_environment() | (self._variables or {})
            where = StdioServerParameters(command=command, args=args, env=environment)
        self._portal = self._stack.enter_context(start_blocking_portal())
        client = Client(where, read_timeout_seconds=self._timeout_s)
        self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(client))

    def _call(self, name: str, arguments: Mapping[str, object]) -> str:
        if self._client is None:
            raise EnvError(f"MCP server {self._name} is closed")
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = self._portal.call(self._client.call_tool, name, dict(arguments))
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise EnvError(f"MCP server {self._name}: {error.message}") from error
            raise ValueError(error.message) from None  # the model asked for what the server refuses
        except Exception as error:  # the boundary to the server
            raise EnvError(f"MCP server {self._name}: {_cause(error)}") from error
        text = "\n".join(_words(block) for block in result.content)
        if result.is_error:
            raise ValueError(text)
        return text


def _words(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', type(block).__name__)}]"


def _cause(error: BaseException) -> str:
    """Groups of errors, as anyio raises them, down to the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {text_of(error)}"
