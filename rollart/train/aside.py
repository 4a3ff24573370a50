"""What could not be trained on: `set_aside.jsonl` of the run directory, one JSON object a line.

A row is a trajectory that a step left out, with the reason and its turns; or the smaller micro-batches that a step, and
those after it where memory had run out, were cut into.
Invariant: what is written here holds for its step for ever. A trainer that does the step again after a crash reads it
first, and leaves out the same, whatever memory it finds. Called by the trainers, one at a time.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rollart.errors import writing
from rollart.types import Batch, Trajectory, TrajectoryId


class Aside:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._reasons: dict[int, dict[str, str]] = {}
        self._tokens: list[tuple[int, int, bool]] = []
        """(step, tokens of a micro-batch, also in all later steps)"""
        if path.exists():
            self._read(path)

    def reasons(self, step: int) -> Mapping[str, str]:
        """Trajectory -> why it was set aside in this step."""
        return self._reasons.get(step, {})

    def microbatch_tokens(self, step: int, wanted: int) -> int:
        """The budget of this step's micro-batches."""
        return min([wanted, *(tokens for at, tokens, lasting in self._tokens if at == step or (lasting and at < step))])

    def put(self, batch: Batch, reasons: Mapping[TrajectoryId, str]) -> None:
        """Set these trajectories of a batch aside. Those that are known already are not written again. Raises StoreFull
        where the disk is; then nothing is noted."""
        known = self._reasons.setdefault(batch.step, {})
        new = {str(trajectory): reason for trajectory, reason in reasons.items() if str(trajectory) not in known}
        members = {str(member.id): member for group in batch.groups for member in group.members}
        self._write(
            [
                {"step": batch.step, "trajectory": name, "reason": reason, **_content(members.get(name))}
                for name, reason in new.items()
            ]
        )
        known |= new

    def shrink(self, step: int, tokens: int, reason: str, *, lasting: bool) -> None:
        """Micro-batches have at most so many tokens in this step; where `lasting`, in all that follow as well."""
        self._write([{"step": step, "microbatch_tokens": tokens, "lasting": lasting, "reason": reason}])
        self._tokens.append((step, tokens, lasting))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        lines = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        with writing(str(self._path)), open(self._path, "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                left = memoryview(lines)
                while left:  # a disk that gets full takes a part first
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                os.truncate(file.fileno(), before)
                raise

    def _read(self, path: Path) -> None:
        whole = 0
        with open(path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                row = orjson.loads(line)
                if "trajectory" in row:
                    self._reasons.setdefault(row["step"], {})[row["trajectory"]] = row["reason"]
                else:
                    self._tokens.append((row["step"], row["microbatch_tokens"], row["lasting"]))
        if whole < path.stat().st_size:  # killed while it wrote: that row never was
            os.truncate(path, whole)


def _content(trajectory: Trajectory | None) -> dict[str, Any]:
    """All of a trajectory that a step looks at. JSON has no NaN: what is not finite is null."""
    if trajectory is None:
        return {}
    turns = [
        {
            "context": turn.context.tolist(),
            "fresh": turn.fresh,
            "tokens": turn.completion.tokens.tolist(),
            "logprobs": turn.completion.logprobs.tolist(),
            "spans": [list(span) for span in turn.completion.spans],
            "engine": turn.completion.engine,
        }
        for turn in trajectory.turns
    ]
    return {"task": trajectory.task.id, "reward": trajectory.reward, "turns": turns}
