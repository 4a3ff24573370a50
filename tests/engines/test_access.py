"""The token in front of a server: whoever does not show it reaches nothing behind it."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollart.engines import sglang
from rollart.engines.in_server.rollart_access import TOKEN_VARIABLE, TokenOnly


def asked(kind: str, headers: list[tuple[bytes, bytes]]) -> tuple[bool, list[Mapping[str, Any]]]:
    """Whether it came through, and what was sent back."""
    through: list[str] = []
    sent: list[Mapping[str, Any]] = []

    async def app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        through.append(scope["type"])

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> Mapping[str, Any]:
        return {}

    asyncio.run(TokenOnly(app)({"type": kind, "headers": headers}, receive, send))
    return bool(through), sent


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_with_the_token(kind: str) -> None:
    assert asked(kind, [(b"host", b"x"), (b"authorization", b"Bearer secret")]) == (True, [])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Bearer another")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer another"), (b"authorization", b"Bearer secret")],
    ],
)
def test_without_it(headers: list[tuple[bytes, bytes]]) -> None:
    through, sent = asked("http", headers)
    assert not through
    assert sent[0]["status"] == 401
    through, sent = asked("websocket", headers)
    assert not through
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(KeyError, match=TOKEN_VARIABLE):
        asked("http", [])


def test_sglang_is_given_its_key_in_its_own_process(tmp_path: Path) -> None:
    """By a package of its name that says what it was started with."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import os, sys\nif __name__ == '__main__':\n    print(sys.argv[1:], 'ROLLART_SERVER_TOKEN' in os.environ)\n"
        "    print(open('/proc/self/cmdline').read())\n"
    )
    line = sglang.command(sys.executable, "/m", port=1, dtype="float32", max_batch=1, max_context=1, gpus=1)
    done = subprocess.run(
        line,
        env={**sglang.environment("secret"), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, command_line = done.stdout.splitlines()[:2]
    assert said.endswith("'--api-key', 'secret'] False")
    assert "secret" not in command_line
