"""Lets nobody speak to a server who does not show the token: on any path, HTTP or WebSocket.

Runs inside the server's own interpreter (vLLM's `--middleware`), so it imports nothing of ours. A server's own key
guards only some of its paths; its control calls load weights and run code. The token comes by the environment: others
could read it on a command line.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TypedDict

TOKEN_VARIABLE = "ROLLART_SERVER_TOKEN"
REFUSAL = b'{"error": "Unauthorized"}'


class Scope(TypedDict):
    """What we read of a connection."""

    type: str
    headers: list[tuple[bytes, bytes]]


Message = Mapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenOnly:
    """ASGI middleware. Raises KeyError where no token is set: such a server must not start."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _allowed(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)
