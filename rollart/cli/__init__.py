"""The command line: reads the words, runs the command, and turns what it raises into one line and an exit code.

Exit codes: 0 well, 1 the run stopped or a check failed, 2 the job or the command line is wrong (nothing was started).
A command's module is imported when it runs: `rollart --help` answers at once.
"""

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from rollart.cli.words import parser, sort_words
from rollart.errors import JobError, install

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

EXTRAS = {
    "train": ("aiohttp", "msgpack", "safetensors", "torch", "transformers", "xxhash"),
    "tasks": ("gymnasium", "msgpack", "reasoning_gym"),
    "repair": ("mpmath", "networkx", "pytest", "toolz"),
    "datasets": ("datasets", "math_verify", "pyarrow"),
    "gem": ("gem_llm",),
    "textarena": ("textarena",),
    "openenv": ("websockets",),
    "verifiers": ("uv", "verifiers"),
    "rewards": ("functions_framework", "httpx", "msgpack"),
    "lambda": ("botocore",),
    "agents": ("aiohttp", "mcp", "msgpack"),
    "smollm2": ("accelerate", "gguf"),
    "logging": ("tensorboard", "wandb"),
    "ray": ("ray",),
    "mooncake": ("mooncake_transfer_engine_non_cuda",),
}
"""What pyproject.toml's extras bring, as it is imported."""


def main(argv: "Sequence[str] | None" = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if hasattr(arguments, "overrides"):
            sort_words(arguments)
        module, _, name = arguments.run.partition(".")
        run: Callable[[Namespace], int] = getattr(import_module(f"rollart.cli.{module}"), name)
        return run(arguments)
    except JobError as error:
        for line in str(error).splitlines():
            print(f"rollart: {line}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extras = [extra for extra, packages in EXTRAS.items() if package in packages]
        if not extras:
            raise
        extra = arguments.extra if arguments.extra in extras else extras[0]
        print(f"rollart: {package} is not installed; install it with: {install(extra)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rollart: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"rollart: stopped: {error.filename or 'the disk'}: {error.strerror}; make room", file=sys.stderr)
        return 1
