"""What could not be trained on: `set_aside.jsonl` of the run directory, one JSON object a line.

A row is a trajectory that a step left out, with the reason and its turns; or the smaller micro-batches that a step, and
those after it where memory had run out, were cut into, until the job asks for others.
Invariant: what is written here holds for its step forever. A trainer that does the step again after a crash reads it
first, and leaves out the same, whatever memory it finds. Called by the trainers, one at a time.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from rollart.errors import writing
from rollart.types import Batch, JsonObject, Trajectory, TrajectoryId


class _LeftOut(NamedTuple):
    """A trajectory of a step."""

    reason: str
    update: int
    """The first update, counted from 0, that goes without it; those before were made, and had their part of it."""


class _Cut(NamedTuple):
    """Smaller micro-batches than the job asks for."""

    step: int
    microbatch_tokens: int
    lasting: bool
    """Also in all later steps."""
    instead_of: int | None
    """What the job asked for; None in rows that do not say it."""


class Aside:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_out: dict[int, dict[str, _LeftOut]] = {}
        self._cuts: list[_Cut] = []
        if path.exists():
            self._read(path)

    def reasons(self, step: int) -> Mapping[str, str]:
        """Trajectory -> why it was set aside in this step."""
        return {name: row.reason for name, row in self._left_out.get(step, {}).items()}

    def left_out(self, step: int, update: int) -> set[str]:
        """The trajectories that this update of the step goes without."""
        return {name for name, row in self._left_out.get(step, {}).items() if row.update <= update}

    def microbatch_tokens(self, step: int, wanted: int) -> int:
        """The budget of this step's micro-batches. A job that asks for another one than was too large gets it."""
        holds = [
            cut.microbatch_tokens
            for cut in self._cuts
            if cut.step == step or (cut.lasting and cut.step < step and cut.instead_of == wanted)
        ]
        return min([wanted, *holds])

    def put(self, batch: Batch, reasons: Mapping[TrajectoryId, str], update: int = 0) -> None:
        """Set these trajectories of a batch aside, from this update of the step on. Those that are known already are
        not written again. Raises StoreFull where the disk is; then nothing is noted."""
        known = self._left_out.setdefault(batch.step, {})
        out = self.left_out(batch.step, update)
        new = {str(name): _LeftOut(reason, update) for name, reason in reasons.items() if str(name) not in out}
        members = {str(member.id): member for group in batch.groups for member in group.members}
        self._write(
            [
                {"step": batch.step, "trajectory": name, **row._asdict(), **_content(members.get(name))}
                for name, row in new.items()
            ]
        )
        known |= new

    def shrink(self, step: int, tokens: int, reason: str, *, lasting: bool, instead_of: int) -> None:
        """Micro-batches have at most this many tokens in this step; where `lasting`, in all that follow too, as long as
        the job asks for `instead_of`."""
        cut = _Cut(step, tokens, lasting, instead_of)
        self._write([{**cut._asdict(), "reason": reason}])
        self._cuts.append(cut)

    def _write(self, rows: list[JsonObject]) -> None:
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
                    left_out = _LeftOut(row["reason"], row.get("update", 0))
                    self._left_out.setdefault(row["step"], {})[row["trajectory"]] = left_out
                else:
                    cut = _Cut(row["step"], row["microbatch_tokens"], row["lasting"], row.get("instead_of"))
                    self._cuts.append(cut)
        if whole < path.stat().st_size:  # killed while it wrote: that row never was
            os.truncate(path, whole)


def _content(trajectory: Trajectory | None) -> JsonObject:
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
