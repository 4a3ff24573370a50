"""From settings to a running remote engine: start a server below this process or attach to one, and make it ready.

The one place that knows every kind of server.
"""

import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollart.config.settings import EngineSettings, LoraSettings
from rollart.engines import disaggregated, sglang, vllm
from rollart.engines.http import Http
from rollart.engines.process import ServerProcess, free_port
from rollart.engines.remote import RemoteEngine, RemoteSettings
from rollart.engines.staged import Ahead, HostStore, StagedFiles
from rollart.engines.stops import StopFinder
from rollart.errors import EngineError
from rollart.types import ParsedJson

PYTHON_VARIABLES = {"vllm": "ROLLART_VLLM_PYTHON", "sglang": "ROLLART_SGLANG_PYTHON"}
"""Where the interpreter that has the server is named, if not in the job."""
TOKEN_VARIABLE = "ROLLART_ENGINE_TOKEN"
"""Holds the key of a server that we attach to. Never in the job file, which is written into the run directory."""
WARM_TOKENS = [1, 2, 3, 4]

AnyServer = vllm.VllmServer | sglang.SglangServer | disaggregated.DisaggregatedServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a remote engine is started from."""

    engines: EngineSettings
    engine_id: str
    model: Path
    context_tokens: int
    log_dir: Path
    cpu: bool = False
    """No GPU: nothing is compiled."""
    stop_tokens: tuple[int, ...] = ()
    """End an answer, beside those that the model's files name."""
    start_s: float = 600.0
    lora: LoraSettings | None = None
    """Versions are adapters; None where they are whole models."""


async def launch(settings: ServerSettings, store: HostStore, ahead: Ahead) -> RemoteEngine:
    """Raises EngineError, with the server's last words where it did not start. Versions come from `store`, through
    `ahead`."""
    model, config = _model(settings.model)
    max_context = min(settings.context_tokens, int(config.get("max_position_embeddings") or settings.context_tokens))
    decode, eos = _tokenizer(model, config)
    own = RemoteSettings(
        engine_id=settings.engine_id,
        max_context=max_context,
        vocab_size=int(config["vocab_size"]),
        eos=eos | set(settings.stop_tokens),
        dtype=settings.engines.dtype,
        keep_kv=settings.engines.keep_kv,
    )
    server = await _server(settings, model, max_context)
    try:
        theirs = await server.context_tokens()
        if theirs and theirs < max_context:
            raise EngineError(
                f"{settings.engine_id}: the server holds {theirs} tokens, less than model.context_tokens {max_context}"
                "; set that to what the server holds, or start it with more"
            )
        # The first scoring compiles what it needs, and shows that the server can compute this model at all.
        await server.score(WARM_TOKENS)
        staged = StagedFiles(settings.engine_id, model, store, ahead)
        return RemoteEngine(server, own, staged, stops=StopFinder(decode))
    except BaseException:
        await server.close()
        raise


async def _server(settings: ServerSettings, model: Path, max_context: int) -> AnyServer:
    if settings.engines.url is not None:
        http = Http(settings.engines.url, os.environ.get(TOKEN_VARIABLE))
        if settings.engines.type == "sglang":
            return sglang.SglangServer(http)
        return vllm.VllmServer(http, adapters=settings.lora is not None)
    if settings.engines.type == "sglang":
        port, token = free_port(), secrets.token_urlsafe(24)
        line = sglang.command(
            server_python(settings.engines.type, settings.engines.python),
            str(model),
            port=port,
            dtype=settings.engines.dtype,
            max_batch=settings.engines.max_batch,
            max_context=max_context,
            gpus=settings.engines.gpus,
        )
        return sglang.SglangServer(*await _start(settings, "sglang", line, sglang.environment(token), port, token))
    if settings.engines.prefill is None:
        return await _vllm(settings, "vllm", model, max_context, settings.engines.gpus, [], {})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    more = disaggregated.arguments(settings.engines.prefill.connector)
    by_role: dict[str, list[vllm.VllmServer]] = {"decode": [], "prefill": []}
    try:
        for role, devices in disaggregated.servers(settings.engines):
            started, variables = by_role[role], disaggregated.environment(free_port(), devices, visible)
            name = f"{role}-{len(started)}"
            started.append(await _vllm(settings, name, model, max_context, len(devices), more, variables))
    except BaseException:
        for server in [*by_role["decode"], *by_role["prefill"]]:
            await server.close()
        raise
    return disaggregated.DisaggregatedServer(**by_role)


async def _vllm(
    settings: ServerSettings,
    name: str,
    model: Path,
    max_context: int,
    gpus: int,
    more: list[str],
    variables: dict[str, str],
) -> vllm.VllmServer:
    port, token = free_port(), secrets.token_urlsafe(24)
    line = vllm.command(
        server_python(settings.engines.type, settings.engines.python),
        str(model),
        port=port,
        dtype=settings.engines.dtype,
        max_batch=settings.engines.max_batch,
        max_context=max_context,
        gpus=gpus,
        cpu=settings.cpu,
        lora=settings.lora,
    )
    adapters = settings.lora is not None
    environment = vllm.environment(token, settings.engines.threads, cpu=settings.cpu, adapters=adapters) | variables
    http, process = await _start(settings, name, [*line, *more], environment, port, token)
    return vllm.VllmServer(http, process, gives=name.startswith("prefill"), adapters=adapters)


def server_python(kind: str, asked: str | None) -> str:
    """The interpreter that has the server: the one asked for, the environment's, or this one."""
    python = asked or os.environ.get(PYTHON_VARIABLES[kind]) or sys.executable
    # The server runs in another directory; a venv's link must stay a link.
    return os.path.abspath(python) if os.sep in python else python


async def _start(
    settings: ServerSettings, role: str, line: list[str], variables: dict[str, str], port: int, token: str
) -> tuple[Http, ServerProcess]:
    log = settings.log_dir / f"{settings.engine_id}-{role}.log"
    process = ServerProcess([*line, *settings.engines.args], variables, log)
    url = f"http://127.0.0.1:{port}"
    try:
        await process.ready(f"{url}/health", settings.start_s, token)
    except BaseException:
        await process.stop()
        raise
    return Http(url, token), process


def _model(path: Path) -> tuple[Path, ParsedJson]:
    model = path.absolute()
    config: ParsedJson = json.loads((model / "config.json").read_text())
    return model, config


def _tokenizer(model: Path, config: ParsedJson) -> tuple[Callable[[list[int]], str], frozenset[int]]:
    """How tokens become text, and which end an answer: those the model's and the tokenizer's files name."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    generation = model / "generation_config.json"
    named = [config, json.loads(generation.read_text()) if generation.exists() else {}]
    values = [source.get("eos_token_id") for source in named] + [tokenizer.eos_token_id]
    eos = {token for value in values for token in (value if isinstance(value, list) else [value]) if token is not None}

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode, frozenset(eos)
