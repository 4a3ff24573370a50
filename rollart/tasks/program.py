"""Runs an agent's program where its environment is: a function in this process, or a command.

A function of one parameter is given what the environment says, and returns its answer. One of two is also given `step`,
with which it plays the episode itself.

The program finds the model where OpenAI's clients look: OPENAI_BASE_URL, OPENAI_API_KEY; and its name in OPENAI_MODEL.
They are of this episode only. What it answers is what the environment is given; where it fails, so does the episode.
"""

import inspect
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from rollart.tasks.load import load_function
from rollart.types import Endpoint, Program
from rollart.workers.forward import forwarded

MAX_ANSWER_BYTES = 1_000_000
"""That a command may print."""
CONNECT_S = 5.0
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Name files that may not be there in a sandbox."""


Step = Callable[[str], str | None]
"""Steps the environment: what it then says, None where the episode is over."""


def answer_of(program: Program, endpoint: Endpoint, shown: str, step: Step) -> str | Awaitable[str | None] | None:
    """What the program answers to what the environment has said; None where it has made its steps itself."""
    os.environ |= variables(endpoint)
    for name in CERTIFICATES:  # a client would fail over what it does not need here
        if name in os.environ and not os.access(os.environ[name], os.R_OK):
            del os.environ[name]
    if program.command:
        return _printed(program.command, shown)
    function = load_function(program.function)
    answer = function(shown, step) if _takes_step(function) else function(shown)
    return _awaited(program, answer) if inspect.isawaitable(answer) else _text(program, answer)


def _takes_step(function: Callable[..., Any]) -> bool:
    """Whether it has a second parameter that must be given."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) > 1


async def _awaited(program: Program, answer: Awaitable[object]) -> str | None:
    return _text(program, await answer)


def _text(program: Program, answer: object) -> str | None:
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"{program.function} returned {type(answer).__name__}; return its answer, a string")
    return answer


def variables(endpoint: Endpoint) -> dict[str, str]:
    """What tells an OpenAI client where to go."""
    found = {"OPENAI_BASE_URL": _reachable(endpoint), "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}
    # no proxy between us and ourselves
    host = urlsplit(found["OPENAI_BASE_URL"]).hostname or ""
    return found | {"NO_PROXY": host, "no_proxy": host}


def _reachable(endpoint: Endpoint) -> str:
    """Its URL; where there is no network, one that leads to its Unix socket."""
    at = urlsplit(endpoint.url)
    if not endpoint.socket or not os.path.exists(endpoint.socket):
        return endpoint.url
    try:
        socket.create_connection((at.hostname or "", at.port or 80), timeout=CONNECT_S).close()
    except OSError:
        return at._replace(netloc=f"127.0.0.1:{forwarded(endpoint.socket)}").geturl()
    return endpoint.url


def _printed(command: tuple[str, ...], shown: str) -> str:
    """In this worker's process group, so that it ends with it."""
    with tempfile.TemporaryFile() as given:
        given.write(shown.encode("utf-8", "replace"))
        given.seek(0)
        # PYTHONPATH is how this worker finds RollArt; another Python would find the wrong packages there.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, env=environment)
    with process:
        assert process.stdout is not None
        said = process.stdout.read(MAX_ANSWER_BYTES + 1)
        if len(said) > MAX_ANSWER_BYTES:
            process.kill()
            raise ValueError(f"{command[0]} printed more than {MAX_ANSWER_BYTES:,} bytes; print the answer only")
        status = process.wait()
    if status:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise RuntimeError(f"{command[0]} {how}; what it wrote to standard error is in this worker's log")
    return said.decode("utf-8", "replace").strip()
