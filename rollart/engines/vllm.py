"""vLLM's own server: how it is started, and its HTTP interface as a `Server`.

Tokens go in and out of `/v1/completions`; the rest are the control calls of its development mode. Log-probabilities
are asked for as processed, so that the temperature is in them. vLLM's own key guards `/v1` only; ours guards every path
(`in_server/rollart_access.py`, which runs in the server). New weights are taken from files of its host by our worker
extension (`in_server/rollart_weights.py`); adapters by vLLM's own calls, under a name with the version. Each request's
cache is salted with the version, so that no prefix of older weights is ever found, whatever the reset of the cache did.

Nothing here imports vLLM: it has an interpreter of its own.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from rollart.config.settings import LoraSettings
from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.http import Http
from rollart.engines.process import ServerProcess
from rollart.engines.staged import paths_of
from rollart.errors import AnswerError, EngineError, RequestError, WeightError
from rollart.types import Finish, Json, JsonObject, ParsedJson, WeightVersion

IN_SERVER = Path(__file__).parent / "in_server"
"""The server imports two files of this folder, and nothing else of ours."""
ACCESS, WEIGHTS = "rollart_access.TokenOnly", "rollart_weights.RollartWeights"
READY_S = 0.02
"""How often a server is asked whether a version is ready."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM takes as the largest of an adapter."""
REQUEST = re.compile(r"cmpl-(.*)-0-[0-9a-f]{8}")
"""vLLM's own name for the only prompt of a completion call."""
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
    python: str,
    model: str,
    *,
    port: int,
    dtype: str,
    max_batch: int,
    max_context: int,
    gpus: int,
    cpu: bool,
    lora: LoraSettings | None = None,
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
        *("--middleware", ACCESS, "--worker-extension-cls", WEIGHTS),
        *(_with_adapters(lora) if lora is not None else []),
        *(_on_a_cpu(max_context) if cpu else []),
    ]


def _with_adapters(lora: LoraSettings) -> list[str]:
    """Two at a time: the one that is served, and the next. Only where adapters are trained: vLLM's own for the output
    layer dies where a prompt is scored."""
    return [
        *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2"),
        *("--max-lora-rank", str(min((allowed for allowed in RANKS if allowed >= lora.rank), default=lora.rank))),
        *("--lora-target-modules", *lora.targets),
    ]


def _on_a_cpu(max_context: int) -> list[str]:
    """Nothing compiled; and prompts computed whole, as vLLM's CPU build dies where a seeded request's prompt is cut."""
    return ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_context, 2048))]


def environment(token: str, threads: int, *, cpu: bool, adapters: bool = False) -> dict[str, str]:
    """Control calls on, everything that speaks to the outside off; a CPU build takes its threads from here."""
    return {
        "ROLLART_SERVER_TOKEN": token,
        "PYTHONPATH": str(IN_SERVER),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {}),
        **({"TORCHDYNAMO_DISABLE": "1"} if cpu else {}),
    }


class VllmServer:
    """The HTTP interface of one vLLM server (0.32; older ones lack some of the control calls)."""

    def __init__(
        self, http: Http, process: ServerProcess | None = None, *, gives: bool = False, adapters: bool = False
    ) -> None:
        """`gives`: it computes prompts for another server, and may hold their cache until that one has fetched it.
        `adapters`: versions are adapters of the model that it was started with."""
        self._http = http
        self._process = process
        self._gives = gives
        self._adapters = adapters
        self._held = False
        """What is in flight waits in the server, with its cache."""
        self._model = MODEL
        """What requests name: the model, or an adapter of it."""

    async def context_tokens(self) -> int:
        """How long prompt and answer may be. Raises EngineError for a server that was not started as we need it."""
        try:
            info = await self._http.get("/server_info?config_format=json")
        except RequestError:
            raise EngineError(
                f"{self._http.url}: this server has no control calls; start it with VLLM_SERVER_DEV_MODE=1"
            ) from None
        config = info["vllm_config"]["model_config"]
        if info["vllm_config"]["parallel_config"].get("worker_extension_cls") != WEIGHTS:
            raise EngineError(
                f"{self._http.url}: this server cannot be given weights; start it with PYTHONPATH={IN_SERVER} and "
                f"--worker-extension-cls {WEIGHTS}"
            )
        if config["logprobs_mode"] != LOGPROBS:
            raise EngineError(
                f"{self._http.url}: this server gives {config['logprobs_mode']}, which leave the temperature out; "
                f"start it with --logprobs-mode {LOGPROBS}"
            )
        return int(config["max_model_len"])

    async def prefill(self, segment: Segment) -> JsonObject | None:
        """Compute the prompt for another server; returns how that one fetches its cache, None where it was ended."""
        body = self._body(segment) | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        del body["stream_options"]
        answer = await self._http.post("/v1/completions", body)
        transfer: JsonObject | None = answer.get("kv_transfer_params")
        return transfer

    async def stream(self, segment: Segment, transfer: JsonObject | None = None) -> AsyncGenerator[Piece, None]:
        """`transfer`: where the prompt's cache lies, as another server's `prefill` said."""
        body = self._body(segment) | ({"kv_transfer_params": transfer} if transfer else {})
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
        self._held = False

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def hold(self) -> dict[str, int]:
        await self._http.post("/pause?mode=keep&clear_cache=false")
        self._held = True
        sampled: dict[str, int] = {}
        for name, tokens in (await self._rpc("rollart_sampled"))[0].items():
            if found := REQUEST.fullmatch(name):
                sampled[found[1]] = tokens
        return sampled

    async def stage(self, files: Sequence[Path], version: WeightVersion) -> None:
        if not self._adapters:
            await self._rpc("rollart_stage", files=paths_of(files), version=version)
            while None in (said := await self._rpc("rollart_staged", version=version)):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(READY_S)
            self._check(said)
        elif version:
            await self._unload_others()
            body = {"lora_name": adapter_name(version), "lora_path": paths_of(files)[0]}
            try:
                await self._http.post("/v1/load_lora_adapter", body)
            except RequestError as error:
                raise WeightError(str(error)) from error

    async def load(self, version: WeightVersion) -> None:
        if not self._adapters:
            self._check(await self._rpc("rollart_load", version=version))
        else:
            self._model = adapter_name(version) if version else MODEL
        answer = await self._http.post("/reset_prefix_cache")
        # What is in flight, or held for another server, cannot be reset; its salt keeps it from later requests.
        if not answer.get("success") and not self._gives and not self._held:
            raise WeightError(f"{self._http.url}: the cache of older weights could not be cleared")

    async def _unload_others(self) -> None:
        """Adapters that are not served, also what was staged and never loaded."""
        for model in (await self._http.get("/v1/models"))["data"]:
            if model["id"] not in (MODEL, self._model):
                await self._http.post("/v1/unload_lora_adapter", {"lora_name": model["id"]})

    async def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        """The answer of each process that computes."""
        answer = await self._http.post("/collective_rpc", {"method": method, "kwargs": arguments})
        results: list[Any] = answer["results"]
        return results

    def _check(self, said: list[str]) -> None:
        for wrong in filter(None, said):
            raise WeightError(f"{self._http.url}: {wrong}")

    async def score(self, tokens: list[int]) -> list[list[float]]:
        body: JsonObject = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        answer = await self._http.post("/v1/completions", body)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        return [[row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows, strict=True)]]

    async def close(self) -> None:
        await self._http.close()
        if self._process is not None:
            await self._process.stop()

    def _body(self, segment: Segment) -> dict[str, Json]:
        sampling = segment.sampling
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            raise RequestError(
                f"request {segment.id}: with top_p or top_k vLLM gives log-probabilities of what they leave, and "
                "training needs those of the whole distribution; leave them out, or use an embedded or SGLang engine"
            )
        return {
            "model": self._model,
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


def adapter_name(version: WeightVersion) -> str:
    return f"{MODEL}-v{version}"


def _piece(event: ParsedJson) -> Piece | None:
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
