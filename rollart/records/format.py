"""How trajectories lie on disk: `trajectories/000000.rec` and so on, in the run directory.

A file is gzip members one after the other, each whole in itself and holding msgpack maps: so a file that was cut off
anywhere is readable up to its last whole member, and only ever grows. Every map names its kind in `k`:

- `life`, the first of each file: `format`, and how often the run had been started before;
- `played`: one attempt. What a listing needs is plain; turns, tokens and log-probabilities are packed once more in
  `body`, so that a listing does not unpack them. Tokens and log-probabilities of all turns are two arrays of bytes
  (shown and sampled tokens in turn, 16 bits each where they fit; float32);
- `ended`: a group ended untrained, and how;
- `trained`: a step, its groups' members and their advantages. Known only later, joined when read;
- `dropped`: so many attempts could not be kept.

Binary, not JSON: numbers are most of it, and encoding them as text costs several times the rest. gzip at its fastest:
half the size for less time than the encoding.
"""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from rollart.types import Batch, Message, Played, Trajectory

FORMAT = 1
FOLDER = "trajectories"
SUFFIX = ".rec"
GZIP = 31
"""zlib's word for a gzip member."""
LEVEL = 1
READ_BYTES = 1 << 20
Row = dict[str, Any]


def files_of(folder: Path) -> list[Path]:
    """The files of a run's trajectories, the oldest first."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


def life_row(life: int) -> Row:
    return {"k": "life", "format": FORMAT, "life": life}


def ended_row(group: str, how: str) -> Row:
    return {"k": "ended", "group": group, "how": how}


def trained_row(batch: Batch) -> Row:
    groups = [[g.id, [str(member.id) for member in g.members], list(g.advantages)] for g in batch.groups]
    return {"k": "trained", "step": batch.step, "groups": groups}


def played_row(played: Played, zero_s: float) -> Row:
    """One attempt; times are seconds of the run's clock, which began at `zero_s`."""
    trajectory = played.trajectory
    spans = [span for turn in trajectory.turns for span in turn.completion.spans]
    waited_s = sum(note.waited_s for note in played.notes)
    return {
        "k": "played",
        "id": str(trajectory.id),
        "group": trajectory.id.group,
        "task": trajectory.task.id,
        "domain": trajectory.task.domain,
        "eval": played.evaluation,
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "parts": dict(trajectory.reward_parts),
        "born": trajectory.born,
        "newest": spans[-1].version if spans else None,
        "turns": len(trajectory.turns),
        "tokens": trajectory.sampled_tokens,
        "started_s": round(trajectory.started_s - zero_s, 6),
        "ended_s": round(trajectory.ended_s - zero_s, 6),
        "open_s": round(played.open_s, 6),
        "reset_s": round(played.reset_s, 6),
        "wait_s": round(waited_s, 6),
        "generate_s": round(sum(turn.generate_s for turn in trajectory.turns) - waited_s, 6),
        "env_s": round(sum(turn.env_s for turn in trajectory.turns), 6),
        "queue_s": round(played.queue_s, 6),
        "reward_s": round(played.reward_s, 6),
        "body": _body(trajectory, played),
    }


def _body(trajectory: Trajectory, played: Played) -> bytes:
    turns: list[Any] = []
    pieces: list[Any] = []
    logprobs: list[Any] = []
    for turn, note in zip(trajectory.turns, played.notes, strict=True):
        said = turn.completion
        pieces += (turn.context, said.tokens)
        logprobs.append(said.logprobs)
        turns.append(
            [
                len(turn.context),
                len(said.tokens),
                turn.fresh,
                [number for span in said.spans for number in span],
                said.finish.value,
                said.engine,
                note.pool,
                turn.reward,
                round(note.waited_s, 6),
                round(turn.generate_s - note.waited_s, 6),
                round(turn.env_s, 6),
                said.prefill_tokens,
                said.cached_tokens,
                _messages(note.shown),
                note.text,
            ]
        )
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    narrow = not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < 1 << 16)
    body: bytes = msgpack.packb(
        [
            "<u2" if narrow else "<i4",
            tokens.astype("<u2" if narrow else "<i4").tobytes(),
            np.concatenate(logprobs).astype("<f4", copy=False).tobytes() if logprobs else b"",
            turns,
            _messages(played.left),
        ],
        unicode_errors="surrogatepass",
    )
    return body


def _messages(messages: tuple[Message, ...]) -> list[list[str]]:
    return [[str(message.role), str(message.content)] for message in messages]


def pack_row(row: Mapping[str, Any]) -> bytes:
    """Raises TypeError or ValueError for what cannot be written (a user's strange value)."""
    packed: bytes = msgpack.packb(row, unicode_errors="surrogatepass")
    return packed


def member_of(rows: list[bytes]) -> bytes:
    """Packed rows as one gzip member."""
    squeeze = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
    return b"".join([*(squeeze.compress(row) for row in rows), squeeze.flush()])


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of one file, in order. What was cut off at its end is left out; so is what follows damage."""
    with open(path, "rb") as file:
        data = file.read(READ_BYTES)
        while data:
            whole, data = _member(file, data)
            if whole is None:
                return
            unpacker = msgpack.Unpacker(
                unicode_errors="replace", strict_map_key=False, max_buffer_size=len(whole) or 1, read_size=1
            )
            unpacker.feed(whole)
            for row in unpacker:
                if not isinstance(row, dict) or "k" not in row:
                    return
                yield row
            data = data or file.read(READ_BYTES)


def _member(file: Any, data: bytes) -> tuple[bytes | None, bytes]:
    """One gzip member, and what was read beyond it; None where it is torn or damaged."""
    unpack = zlib.decompressobj(GZIP)
    parts: list[bytes] = []
    try:
        while True:
            parts.append(unpack.decompress(data))
            if unpack.eof:
                return b"".join(parts), unpack.unused_data
            data = file.read(READ_BYTES)
            if not data:
                return None, b""
    except zlib.error:
        return None, b""
