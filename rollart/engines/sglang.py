"""SGLang's own server: how it is started, and its HTTP interface as a `Server`.

Tokens go in and out of `/generate`. Its log-probabilities are of the temperature-scaled full distribution, as they
should be, unless it is told to return original ones. Its cache is flushed as it loads new weights.

SGLang has not been run by us: it needs CUDA. What is here follows its documentation and source, and is tested against a
server that speaks the same protocol (`tests/engines/fake_sglang.py`).
"""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.http import Http
from rollart.engines.process import ServerProcess
from rollart.errors import AnswerError, WeightError
from rollart.types import Finish, Json, JsonObject, ParsedJson, WeightVersion

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
SEED_MASK = (1 << 31) - 1
STREAM_INTERVAL = 8
"""Tokens in one event of a stream: fewer events cost the server less."""


START = Path(__file__).parent / "in_server" / "rollart_sglang.py"
"""Gives the server its key, which is not on the command line: others could read that."""


def command(
    python: str, model: str, *, port: int, dtype: str, max_batch: int, max_context: int, gpus: int
) -> list[str]:
    """The server's command line."""
    return [
        *(python, "-P", str(START)),
        *("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--context-length", str(max_context), "--max-running-requests", str(max_batch)),
        *("--tp-size", str(gpus), "--stream-interval", str(STREAM_INTERVAL)),
    ]


def environment(token: str) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "ROLLART_SERVER_TOKEN": token}


class SglangServer:
    """The HTTP interface of one SGLang server."""

    def __init__(self, http: Http, process: ServerProcess | None = None) -> None:
        self._http = http
        self._process = process
        self._staged = Path()

    async def context_tokens(self) -> int | None:
        """How long prompt and answer may be, where the server says."""
        info = await self._http.get("/get_server_info")
        length = info.get("context_length")
        return int(length) if length else None

    async def stream(self, segment: Segment) -> AsyncGenerator[Piece, None]:
        taken = 0
        async with contextlib.aclosing(self._http.events("/generate", _body(segment))) as events:
            async for event in events:
                piece, taken = _piece(event, taken)
                yield piece

    async def abort(self, segment_id: str) -> None:
        await self._http.post("/abort_request", {"rid": segment_id})

    async def halt(self) -> None:
        await self._http.post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self._http.post("/continue_generation")

    async def hold(self) -> dict[str, int]:
        raise NotImplementedError  # `check_supported` lets no `keep_kv` through: SGLang does not say where it stopped

    async def stage(self, files: Sequence[Path], version: WeightVersion) -> None:
        """It has no call that reads ahead: the folder is read as it loads, from memory where the store is in memory."""
        self._staged = files[0].parent

    async def load(self, version: WeightVersion) -> None:
        body: JsonObject = {"model_path": str(self._staged), "flush_cache": True, "weight_version": str(version)}
        answer = await self._http.post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise WeightError(f"{self._http.url}: could not load {self._staged}: {answer.get('message')}")
        await self._http.post("/flush_cache")

    async def score(self, tokens: list[int]) -> list[list[float]]:
        body: JsonObject = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._http.post("/generate", body)
        return [[row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]]]

    async def close(self) -> None:
        await self._http.close()
        if self._process is not None:
            await self._process.stop()


def _body(segment: Segment) -> JsonObject:
    sampling = segment.sampling
    parameters: dict[str, Json] = {
        "max_new_tokens": segment.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(segment.eos),
        "skip_special_tokens": False,
    }
    if segment.seed is not None:
        parameters["sampling_seed"] = segment.seed & SEED_MASK
    return {
        "rid": segment.id,
        "input_ids": segment.prompt,
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }


def _piece(event: ParsedJson, taken: int) -> tuple[Piece, int]:
    """What is new in an event, and how many tokens are taken by then. SGLang sends all tokens so far, or, where it was
    started with incremental output, the new ones only: their number beside the count tells which."""
    meta = event["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    total = int(meta.get("completion_tokens", len(rows)))
    new = rows[taken:] if len(rows) == total else rows
    if taken + len(new) != total:
        raise AnswerError(f"SGLang counts {total} tokens and sent {taken + len(new)}; tokens were lost on the way")
    reason = (meta.get("finish_reason") or {}).get("type", "")
    piece = Piece(
        [row[1] for row in new], [row[0] for row in new], FINISHES.get(reason), cached_tokens=meta.get("cached_tokens")
    )
    return piece, total
