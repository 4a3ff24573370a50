"""vLLM's own server: how it is started, and its HTTP interface as a `Server`.

Tokens go in and out of `/v1/completions`; the rest are the control calls of its development mode. Log-probabilities
are asked for as processed, so that the temperature is in them. vLLM's own key guards `/v1` only; ours guards every path
(`in_server/rollart_access.py`, which runs in the server). Each request's cache is salted with the version, so
that no prefix of older weights is ever found, whatever the reset of the cache did.

Nothing here imports vLLM: it has an interpreter of its own.
"""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.http import Http
from rollart.engines.process import ServerProcess
from rollart.errors import AnswerError, EngineError, RequestError, WeightError
from rollart.types import Finish, WeightVersion

ACCESS = Path(__file__).parent / "in_server" / "rollart_access.py"
"""The server imports this file, and nothing else of ours."""
MODEL = "policy"
"""The name the server knows the model by."""
LOGPROBS = "processed_logprobs"
STREAM_INTERVAL = 8
"""Tokens in one event of a stream: fewer events cost the server less."""
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


def command(
    python: str, model: str, *, port: int, dtype: str, max_batch: int, max_context: int, gpus: int, cpu: bool
) -> list[str]:
    """The server's command line. The token is not on it: others could read that."""
    return [
        *(python, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(max_context), "--max-num-seqs", str(max_batch)),
        *("--tensor-parallel-size", str(gpus)),
        *("--logprobs-mode", LOGPROBS, "--generation-config", "vllm"),
        *("--stream-interval", str(STREAM_INTERVAL), "--enable-prompt-tokens-details"),
        *("--middleware", f"{ACCESS.stem}.TokenOnly"),
        *(_on_a_cpu(max_context) if cpu else []),
    ]


def _on_a_cpu(max_context: int) -> list[str]:
    """Nothing compiled; and prompts computed whole, as vLLM's CPU build dies where a seeded request's prompt is cut."""
    return ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_context, 2048))]


def environment(token: str, threads: int, *, cpu: bool) -> dict[str, str]:
    """Control calls on, everything that speaks to the outside off; a CPU build takes its threads from here."""
    return {
        "ROLLART_SERVER_TOKEN": token,
        "PYTHONPATH": str(ACCESS.parent),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        **({"TORCHDYNAMO_DISABLE": "1"} if cpu else {}),
    }


class VllmServer:
    """The HTTP interface of one vLLM server (0.32; older ones lack some of the control calls)."""

    def __init__(self, http: Http, process: ServerProcess | None = None, *, gives: bool = False) -> None:
        """`gives`: it computes prompts for another server, and may hold their cache until that one has fetched it."""
        self._http = http
        self._process = process
        self._gives = gives

    async def context_tokens(self) -> int:
        """How long prompt and answer may be. Raises EngineError for a server that was not started as we need it."""
        try:
            info = await self._http.get("/server_info?config_format=json")
        except RequestError:
            raise EngineError(
                f"{self._http.url}: this server has no control calls; start it with VLLM_SERVER_DEV_MODE=1"
            ) from None
        config = info["vllm_config"]["model_config"]
        if config["logprobs_mode"] != LOGPROBS:
            raise EngineError(
                f"{self._http.url}: this server gives {config['logprobs_mode']}, which leave the temperature out; "
                f"start it with --logprobs-mode {LOGPROBS}"
            )
        return int(config["max_model_len"])

    async def prefill(self, segment: Segment) -> dict[str, Any] | None:
        """Compute the prompt for another server; returns how that one fetches its cache, None where it was ended."""
        body = _body(segment) | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        del body["stream_options"]
        answer = await self._http.post("/v1/completions", body)
        transfer: dict[str, Any] | None = answer.get("kv_transfer_params")
        return transfer

    async def stream(self, segment: Segment, transfer: dict[str, Any] | None = None) -> AsyncGenerator[Piece, None]:
        """`transfer`: where the prompt's cache lies, as another server's `prefill` said."""
        body = _body(segment) | ({"kv_transfer_params": transfer} if transfer else {})
        taken, counted = 0, None
        async with contextlib.aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
                piece = _piece(event)
                if piece is not None:
                    taken += len(piece.tokens)
                    yield piece
        if counted is not None and counted != taken:
            raise AnswerError(
                f"request {segment.id}: vLLM counts {counted} tokens and sent {taken}; tokens were lost on the way"
            )

    async def abort(self, segment_id: str) -> None:
        # The server's name for the only prompt of a completion call.
        await self._http.post("/abort_requests", {"request_ids": [f"cmpl-{segment_id}-0"]})

    async def halt(self) -> None:
        await self._http.post("/pause?mode=abort&clear_cache=true")

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def load(self, folder: Path, version: WeightVersion) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._http.post("/collective_rpc", body)
        answer = await self._http.post("/reset_prefix_cache")
        # What is held for another server cannot be reset; its salt keeps it from later requests.
        if not answer.get("success") and not self._gives:
            raise WeightError(f"{self._http.url}: the cache of older weights could not be cleared")

    async def score(self, tokens: list[int]) -> list[list[float]]:
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answer = await self._http.post("/v1/completions", body)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        return [[row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows, strict=True)]]

    async def close(self) -> None:
        await self._http.close()
        if self._process is not None:
            await self._process.stop()


def _body(segment: Segment) -> dict[str, Any]:
    sampling = segment.sampling
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise RequestError(
            f"request {segment.id}: with top_p or top_k vLLM gives log-probabilities of what they leave, and training "
            "needs those of the whole distribution; leave them out, or use an embedded or SGLang engine"
        )
    return {
        "model": MODEL,
        "request_id": segment.id,
        "prompt": segment.prompt,
        "max_tokens": segment.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": segment.seed,
        "stop_token_ids": list(segment.eos),
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": f"version-{segment.version}",
    }


def _piece(event: dict[str, Any]) -> Piece | None:
    usage = event.get("usage")
    if usage is not None:
        details = usage.get("prompt_tokens_details") or {}
        return Piece([], [], cached_tokens=details.get("cached_tokens") or 0)
    for choice in event.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        return Piece(
            choice.get("token_ids") or [],
            logprobs.get("token_logprobs") or [],
            FINISHES.get(choice.get("finish_reason") or ""),
        )
    return None
