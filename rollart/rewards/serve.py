"""The logic of `rollart reward serve`: reward functions under functions-framework, on this machine.

Binds to loopback unless told otherwise. Bound to any other address it demands a token: a reward function is code
that runs on what strangers send.
"""

import importlib
import os
from pathlib import Path
from typing import Any

from rollart.errors import JobError, install
from rollart.rewards import function
from rollart.rewards.connections import is_loopback
from rollart.tasks.load import load_reward


def serve(functions: str, *, host: str = "127.0.0.1", port: int = 8080) -> None:
    """Serve `module:function`, or `domain=module:function,...`, until the process is stopped."""
    if not is_loopback(host) and not os.environ.get(function.TOKEN_VARIABLE):
        raise JobError(
            f"reward serve: {host} can be reached by others; set {function.TOKEN_VARIABLE} to a secret that callers "
            "must show, or serve on 127.0.0.1"
        )
    for name in function.parse_functions(functions).values():
        load_reward(name)  # a wrong name is told now, not at the first request
    try:
        framework: Any = importlib.import_module("functions_framework")
        http: Any = importlib.import_module("functions_framework._http")
    except ImportError as error:
        raise JobError(f"reward serve needs functions-framework: {install('rewards')}") from error
    os.environ[function.FUNCTION_VARIABLE] = functions
    app = framework.create_app(target="handle", source=str(Path(function.__file__)))
    http.create_server(app, debug=False).run(host, port)
