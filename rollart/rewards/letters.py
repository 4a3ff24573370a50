"""Dead letters: the reward calls of a run that failed for good, each with its request, for `rollart reward replay`.

One JSON line for each in the run directory, written at once and never changed. It holds the episode that was sent and
why it failed: no address, no header, no token. The file is bounded; what comes when it is full is not kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import orjson

from rollart.append import AppendFile
from rollart.errors import JobError, StoreFull, as_utf8
from rollart.rewards.episodes import Decode, episode_of
from rollart.tasks.api import Episode
from rollart.types import Trajectory

FILE = "dead_letters.jsonl"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One call that failed for good."""

    reward: str
    """Its name among the rewards of its task; empty where it is the job's."""
    reason: str
    tries: int
    episode: Episode


class LetterFile:
    """The DeadLetters port, over a file that is made with its first letter."""

    def __init__(self, path: Path, decode: Decode, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._decode = decode
        self._max_bytes = max_bytes
        self._file: AppendFile | None = None

    def keep(self, trajectory: Trajectory, *, reward: str, reason: str, tries: int) -> bool:
        try:
            episode = episode_of(trajectory, self._decode)
            letter = Letter(reward=reward, reason=as_utf8(reason), tries=tries, episode=episode)
            line = orjson.dumps(letter, option=orjson.OPT_APPEND_NEWLINE)
            if self._file is None:
                self._file = AppendFile(self._path)
            if self._file.num_bytes + len(self._file.held) + len(line) > self._max_bytes:
                return False
            self._file.put(line)
            self._file.write_out()
        except StoreFull:
            return True  # it is held, and goes first when there is room
        except (OSError, TypeError, ValueError):  # no file can be made; an episode that JSON cannot hold
            return False
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_letters(path: Path) -> Iterator[Letter]:
    """Of this file, in their order; a last line that a kill has torn is left out. Raises JobError."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            yield msgspec.json.decode(line, type=Letter)
        except msgspec.MsgspecError as error:
            raise JobError(f"{path}: line {number} is no dead letter ({error}); remove it") from None
