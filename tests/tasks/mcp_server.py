"""A real MCP server, made with the official SDK. `python mcp_server.py [PORT]`: over HTTP where a port is given."""

import os
import sys

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def refuse() -> str:
    """Never works."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """Takes the server with it."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
