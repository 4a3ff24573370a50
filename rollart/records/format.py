"""How trajectories lie on disk: `trajectories/000000.rec` and so on, in the run directory.

A file is frames one after the other: length and CRC-32 of the payload (4 bytes each, little-endian), then the payload.
So a file only ever grows, and one that was cut off anywhere is readable up to its last whole frame. A payload is
msgpack: `[texts, contexts, tokens, logprobs, rows]`.

- `texts`: every different text of the frame once, as a msgpack list compressed with zlib. Rows name texts by position.
  Members of a group are shown the same, and short answers repeat: this alone makes most of the difference.
- `contexts`: every different piece of prompt tokens once, as their lengths and all of them in a row.
- `tokens`, `logprobs`: all sampled ones, attempt after attempt. Tokens are 16 or 24 bits each where they fit,
  log-probabilities float32.
- `rows`: lists, the kind first: `life` (first of each file: format, how often the run had been started before),
  `played` (one attempt), `ended` (a group ended untrained, and how), `trained` (a step, its groups' members and their
  advantages: known only later, joined when read), `dropped` (so many attempts could not be kept).

Only texts are compressed: random numbers gain little from it, and compressing them took longer than all the rest
together. The whole is flat for the same reason: what is written costs the job its time, what is read does not.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np

from rollart.types import NO_LOGPROBS, NO_TOKENS, Batch, Logprobs, Played, Tokens

T = TypeVar("T")

FORMAT = 1
FOLDER = "trajectories"
SUFFIX = ".rec"
FRAME = struct.Struct("<II")
LEVEL = 1
ROW_BYTES = 200
"""Of a row beside its arrays and texts, about."""

HEAD = (
    "id",
    "group",
    "task",
    "domain",
    "eval",
    "status",
    "reason",
    "reward",
    "parts",
    "born",
    "newest",
    "turns",
    "tokens",
)
"""Of a played row after its kind, in order."""
TIMES = ("started_s", "ended_s", "open_s", "reset_s", "wait_s", "generate_s", "env_s", "queue_s", "reward_s")
"""Then these, as float64; `FIRST`, where its sampled tokens begin; `NUMBERS`, `REWARDS` and `SECONDS` of its turns."""
TEXTS = ("group", "task", "domain", "status", "reason")
"""Of `HEAD`, positions in `texts`."""


def files_of(folder: Path) -> list[Path]:
    """The files of a run's trajectories, the oldest first."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


class _Places(dict[T, int]):
    """Each different value and its position, given out when it is first asked for."""

    def __missing__(self, value: T) -> int:
        self[value] = place = len(self)
        return place


def _as_text(text: object) -> str:
    """User code may have put anything into a message."""
    if type(text) is str:
        return text
    try:
        return str(text)
    except Exception:  # the boundary to user code
        return f"<a {type(text).__name__}>"


class Frame:
    """Rows that are written together. Add, then `whole`."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._texts: _Places[str] = _Places()
        self._contexts: _Places[bytes] = _Places()
        self._tokens: list[Tokens] = []
        self._logprobs: list[Logprobs] = []
        self._first = 0
        """Where the next attempt's sampled tokens begin."""

    def __bool__(self) -> bool:
        return bool(self._rows)

    def life(self, life: int) -> None:
        self._rows.append(_pack(["life", FORMAT, life]))

    def dropped(self, count: int) -> None:
        self._rows.append(_pack(["dropped", count]))

    def ended(self, group: str, how: str) -> None:
        self._rows.append(_pack(["ended", group, how]))

    def trained(self, step: int, groups: Sequence[Any]) -> None:
        self._rows.append(_pack(["trained", step, groups]))

    def played(self, played: Played, zero_s: float) -> None:
        """One attempt; its times count from `zero_s`. Raises for what cannot be written, and has then added no row."""
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
        row = [
            "played",
            str(trajectory.id),
            texts[trajectory.id.group],
            texts[trajectory.task.id],
            texts[trajectory.task.domain],
            played.evaluation,
            texts[trajectory.status],
            texts[trajectory.reason],
            trajectory.reward,
            dict(trajectory.reward_parts),
            trajectory.born,
            turns[-1].completion.spans[-1].version if turns else None,
            len(turns),
            count,
            times,
            self._first,
            numbers,
            struct.pack(f"<{len(rewards)}d", *rewards),
            struct.pack(f"<{len(seconds)}f", *seconds),
        ]
        self._rows.append(_pack(row))
        self._tokens += [turn.completion.tokens for turn in turns]
        self._logprobs += [turn.completion.logprobs for turn in turns]
        self._first += count

    def whole(self) -> bytes:
        """As it is written."""
        contexts = [np.frombuffer(raw, dtype=np.int32) for raw in self._contexts]
        logprobs = np.concatenate(self._logprobs).astype("<f4", copy=False) if self._logprobs else NO_LOGPROBS
        payload = b"".join(
            [
                b"\x95",  # a list of five
                _pack(zlib.compress(_pack([_as_text(text) for text in self._texts]), LEVEL)),
                _pack([[len(context) for context in contexts], packed_tokens(contexts)]),
                _pack(packed_tokens(self._tokens)),
                _pack(logprobs.tobytes()),
                msgpack.Packer().pack_array_header(len(self._rows)),
                *self._rows,
            ]
        )
        return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """A frame as it is read again."""

    texts: list[str]
    contexts: list[Any]
    tokens: list[Any]
    logprobs: bytes
    rows: list[Any]


def trained_groups(batch: Batch) -> list[Any]:
    """What a `trained` row says of each group."""
    return [[g.id, [str(member.id) for member in g.members], list(g.advantages)] for g in batch.groups]


def packed_tokens(pieces: Sequence[Tokens]) -> list[Any]:
    """[bytes per token, all of them in a row]; of three bytes, the lower two of all come first, then the third."""
    tokens = np.concatenate(pieces) if pieces else NO_TOKENS
    if not len(tokens):
        return [4, b""]
    most = int(tokens.max()) if int(tokens.min()) >= 0 else 1 << 31
    if most < 1 << 16:
        return [2, tokens.astype("<u2").tobytes()]
    if most < 1 << 24:
        return [3, tokens.astype("<u2").tobytes() + (tokens >> 16).astype(np.uint8).tobytes()]
    return [4, tokens.astype("<i4").tobytes()]


def unpacked_tokens(packed: Sequence[Any]) -> Tokens:
    width, raw = packed
    if width == 3:
        low = np.frombuffer(raw, dtype="<u2", count=len(raw) // 3).astype(np.int32)
        return low | np.frombuffer(raw, dtype=np.uint8, offset=2 * len(low)).astype(np.int32) << 16
    return np.frombuffer(raw, dtype="<u2" if width == 2 else "<i4").astype(np.int32)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def unpack(raw: bytes) -> Any:
    return msgpack.unpackb(raw, unicode_errors="replace", strict_map_key=False)


def frames_of(path: Path) -> Iterator[ReadFrame]:
    """The frames of one file, in order. What was cut off is left out, and what follows damage."""
    with open(path, "rb") as file:
        while len(header := file.read(FRAME.size)) == FRAME.size:
            size, check = FRAME.unpack(header)
            payload = file.read(size)
            if len(payload) < size or zlib.crc32(payload) != check:
                return
            texts, *others = unpack(payload)
            yield ReadFrame(unpack(zlib.decompress(texts)), *others)
