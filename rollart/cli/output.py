"""What commands have in common: where a run goes and how it is resumed, warnings, JSON."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart.config.job import Job


def print_json(value: object) -> None:
    import msgspec
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    sys.stdout.buffer.write(orjson.dumps(value, default=msgspec.to_builtins, option=options))
    sys.stdout.flush()


def warn(job: "Job") -> None:
    from rollart.config.load import warnings

    for text in warnings(job):
        print(f"rollart: warning: {text}", file=sys.stderr)


def run_dir(wanted: Path | None, job: "Job", what: str = "") -> Path:
    import time

    out: Path = wanted or Path("runs") / f"{job.name}{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    if wanted is None:
        number = 1
        while out.exists():
            number += 1
            out = out.with_name(f"{out.name.split('~')[0]}~{number}")
    return out


def resume_command(out: Path) -> str:
    return shlex.join(["rollart", "train", "--resume", str(out)])
