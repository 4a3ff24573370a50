"""How trajectories lie on disk: `trajectories/000000.rec` and so on, in the run directory.

A file is frames one after the other: length and CRC-32 of the payload (4 bytes each, little-endian), then the payload.
So a file only ever grows, and one that was cut off anywhere is readable up to its last whole frame. A payload is
msgpack: `[texts, contexts, tokens, logprobs, rows]`.

- `texts`: every different text of the frame once, as a msgpack list compressed with zlib. Rows name texts by position.
  Members of a group see the same texts, and short answers repeat: this saves the most.
- `contexts`: every different piece of prompt tokens once, as their lengths and all of them in a row.
- `tokens`, `logprobs`: all sampled ones, attempt after attempt. Tokens are 16 or 24 bits each where they fit,
  log-probabilities float32.
- `rows`: lists, the kind first: `life` (first of each file: format, how often the run had been started before),
  `played` (one attempt), `ended` (a group ended untrained, and how), `trained` (a step, its groups' members and their
  advantages: known only later, joined when read), `dropped` (how many attempts could not be kept).

Only texts are compressed: numbers shrink little, and compressing them took longer than everything else together. The
layout is flat for the same reason: writing costs the job time, reading does not.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from rollart.errors import as_utf8
from rollart.records.rows import TIMES, AttemptRow, Row
from rollart.types import NO_LOGPROBS, NO_TOKENS, Logprobs, Played, Tokens

T = TypeVar("T")

FOLDER = "trajectories"
SUFFIX = ".rec"
FRAME = struct.Struct("<II")
LEVEL = 1
ROW_BYTES = 200
"""About what a row takes beside its arrays and texts."""

Packed = tuple[int, bytes]
"""Bytes per token, and all tokens in a row. Of three bytes, the lower two of all tokens come first, then the third."""
Contexts = tuple[list[int], Packed]
"""Their lengths, and all of them in a row."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, Contexts, Packed, bytes, list[Row]]).decode
_decode_texts = msgspec.msgpack.Decoder(list[str]).decode


def files_of(folder: Path) -> list[Path]:
    """The files of a run's trajectories, the oldest first."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


class _Places(dict[T, int]):
    """Each different value and its position, which it gets when it is first looked up."""

    def __missing__(self, value: T) -> int:
        self[value] = place = len(self)
        return place


def _as_text(text: object) -> str:
    """User code may have put anything into a message."""
    try:
        return as_utf8(str(text))
    except Exception:  # the boundary to user code
        return f"<a {type(text).__name__}>"


class Frame:
    """Rows that are written together. Add, then `whole`."""

    def __init__(self) -> None:
        self._rows: list[msgspec.Raw] = []
        self._texts: _Places[str] = _Places()
        self._contexts: _Places[bytes] = _Places()
        self._tokens: list[Tokens] = []
        self._logprobs: list[Logprobs] = []
        self._first = 0
        """Where the next attempt's sampled tokens begin."""

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(msgspec.Raw(_encode(row)))

    def played(self, played: Played, zero_s: float) -> None:
        """One attempt. Its times count from `zero_s`. Raises for what cannot be encoded; no row is added then."""
        trajectory, turns = played.trajectory, played.trajectory.turns
        texts, contexts = self._texts, self._contexts
        numbers: list[int] = []
        rewards: list[float] = []
        seconds: list[float] = []
        wait_s = generate_s = env_s = 0.0
        count = 0
        for turn, (pool, waited_s, shown, text) in zip(turns, played.notes, strict=True):
            said = turn.completion
            generated_s = turn.generate_s - waited_s
            numbers += (
                contexts[turn.context.tobytes()],
                len(said.tokens),
                turn.fresh,
                texts[said.finish],
                texts[said.engine],
                texts[pool],
                said.prefill_tokens,
                said.cached_tokens,
                texts[text],
                len(said.spans),
                len(shown),
            )
            for span in said.spans:
                numbers += span
            for message in shown:
                numbers += (texts[message.role], texts[message.content])
            rewards.append(turn.reward)
            seconds += (waited_s, generated_s, turn.env_s)
            wait_s += waited_s
            generate_s += generated_s
            env_s += turn.env_s
            count += len(said.tokens)
        for message in played.left:
            numbers += (texts[message.role], texts[message.content])
        times = struct.pack(
            f"<{len(TIMES)}d",
            trajectory.started_s - zero_s,
            trajectory.ended_s - zero_s,
            played.open_s,
            played.reset_s,
            wait_s,
            generate_s,
            env_s,
            played.queue_s,
            played.reward_s,
        )
        self.add(
            AttemptRow(
                id=str(trajectory.id),
                group=texts[trajectory.id.group],
                task=texts[trajectory.task.id],
                domain=texts[trajectory.task.domain],
                evaluation=played.evaluation,
                status=texts[trajectory.status],
                reason=texts[trajectory.reason],
                reward=trajectory.reward,
                parts={as_utf8(name): value for name, value in trajectory.reward_parts.items()},
                born=trajectory.born,
                newest=max((turn.completion.spans[-1].version for turn in turns), default=None),
                turns=len(turns),
                tokens=count,
                times=times,
                first=self._first,
                numbers=numbers,
                rewards=struct.pack(f"<{len(rewards)}d", *rewards),
                seconds=struct.pack(f"<{len(seconds)}f", *seconds),
            )
        )
        self._tokens += [turn.completion.tokens for turn in turns]
        self._logprobs += [turn.completion.logprobs for turn in turns]
        self._first += count

    def whole(self) -> bytes:
        """As it is written."""
        contexts = [np.frombuffer(raw, dtype=np.int32) for raw in self._contexts]
        logprobs = np.concatenate(self._logprobs).astype("<f4", copy=False) if self._logprobs else NO_LOGPROBS
        payload = _encode(
            (
                zlib.compress(_encode([_as_text(text) for text in self._texts]), LEVEL),
                ([len(context) for context in contexts], packed_tokens(contexts)),
                packed_tokens(self._tokens),
                logprobs.tobytes(),
                self._rows,
            )
        )
        return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """A frame as it is read again."""

    texts: list[str]
    contexts: Contexts
    tokens: Packed
    logprobs: bytes
    rows: list[Row]


def packed_tokens(pieces: Sequence[Tokens]) -> Packed:
    tokens = np.concatenate(pieces) if pieces else NO_TOKENS
    if not len(tokens):
        return 4, b""
    most = int(tokens.max()) if int(tokens.min()) >= 0 else 1 << 31
    if most < 1 << 16:
        return 2, tokens.astype("<u2").tobytes()
    if most < 1 << 24:
        return 3, tokens.astype("<u2").tobytes() + (tokens >> 16).astype(np.uint8).tobytes()
    return 4, tokens.astype("<i4").tobytes()


def unpacked_tokens(packed: Packed) -> Tokens:
    width, raw = packed
    if width == 3:
        low = np.frombuffer(raw, dtype="<u2", count=len(raw) // 3).astype(np.int32)
        return low | np.frombuffer(raw, dtype=np.uint8, offset=2 * len(low)).astype(np.int32) << 16
    return np.frombuffer(raw, dtype="<u2" if width == 2 else "<i4").astype(np.int32)


def frames_of(path: Path) -> Iterator[ReadFrame]:
    """The frames of one file, in order, up to the first that is cut off or damaged."""
    with open(path, "rb") as file:
        while len(header := file.read(FRAME.size)) == FRAME.size:
            size, check = FRAME.unpack(header)
            payload = file.read(size)
            if len(payload) < size or zlib.crc32(payload) != check:
                return
            texts, contexts, tokens, logprobs, rows = _decode(payload)
            yield ReadFrame(_decode_texts(zlib.decompress(texts)), contexts, tokens, logprobs, rows)
