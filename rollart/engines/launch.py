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
from typing import Any

from rollart.engines import sglang, vllm
from rollart.engines.http import Http
from rollart.engines.process import ServerProcess, free_port
from rollart.engines.remote import RemoteEngine, RemoteSettings
from rollart.engines.stops import StopFinder
from rollart.types import WeightManifest, WeightVersion

PYTHON_VARIABLES = {"vllm": "ROLLART_VLLM_PYTHON", "sglang": "ROLLART_SGLANG_PYTHON"}
"""Where the interpreter that has the server is named, if not in the job."""
TOKEN_VARIABLE = "ROLLART_ENGINE_TOKEN"
"""Holds the key of a server that we attach to. Never in the job file, which is written into the run directory."""
WARM_TOKENS = [1, 2, 3, 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All that a remote engine is started from. Plain data: it travels to the engine's process."""

    kind: str
    """`vllm` or `sglang`."""
    engine_id: str
    model: str
    context_tokens: int
    log_dir: str
    dtype: str = "float32"
    max_batch: int = 256
    gpus: int = 1
    threads: int = 1
    cpu: bool = False
    """No GPU: nothing is compiled."""
    python: str | None = None
    url: str | None = None
    """Attach to this server instead of starting one."""
    args: tuple[str, ...] = ()
    """More of the server's own command line."""
    start_s: float = 600.0


async def launch(
    settings: ServerSettings,
    *,
    fetch: Callable[[WeightManifest], object],
    folder: Callable[[WeightVersion], Path],
) -> RemoteEngine:
    """Raises EngineError, with the server's last words where it did not start."""
    model, config = _model(settings.model)
    max_context = min(settings.context_tokens, int(config.get("max_position_embeddings") or settings.context_tokens))
    server = await _server(settings, model, max_context)
    try:
        theirs = await server.context_tokens()
        # The first scoring compiles what it needs, and shows that the server can compute this model at all.
        await server.score(WARM_TOKENS)
        decode, eos = _tokenizer(model, config)
        return RemoteEngine(
            server,
            RemoteSettings(
                engine_id=settings.engine_id,
                model=model,
                max_context=min(max_context, theirs or max_context),
                vocab_size=int(config["vocab_size"]),
                eos=eos,
                dtype=settings.dtype,
            ),
            fetch=fetch,
            folder=folder,
            stops=StopFinder(decode),
        )
    except BaseException:
        await server.close()
        raise


async def _server(settings: ServerSettings, model: Path, max_context: int) -> "vllm.VllmServer | sglang.SglangServer":
    kind = vllm.VllmServer if settings.kind == "vllm" else sglang.SglangServer
    if settings.url is not None:
        return kind(Http(settings.url, os.environ.get(TOKEN_VARIABLE)))
    python = settings.python or os.environ.get(PYTHON_VARIABLES[settings.kind]) or sys.executable
    port, key = free_port(), secrets.token_urlsafe(24)
    if settings.kind == "vllm":
        line = vllm.command(
            python,
            str(model),
            port=port,
            dtype=settings.dtype,
            max_batch=settings.max_batch,
            max_context=max_context,
            gpus=settings.gpus,
            eager=settings.cpu,
        )
        variables = vllm.environment(key, settings.threads, eager=settings.cpu)
    else:
        line = sglang.command(
            python,
            str(model),
            port=port,
            key=key,
            dtype=settings.dtype,
            max_batch=settings.max_batch,
            max_context=max_context,
            gpus=settings.gpus,
        )
        variables = sglang.environment()
    log = Path(settings.log_dir) / f"{settings.engine_id}-{settings.kind}.log"
    process = ServerProcess([*line, *settings.args], variables, log)
    url = f"http://127.0.0.1:{port}"
    try:
        await process.ready(url + kind.health, settings.start_s)
    except BaseException:
        await process.stop()
        raise
    return kind(Http(url, key), process)


def _model(path: str) -> tuple[Path, dict[str, Any]]:
    model = Path(path).absolute()
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return model, config


def _tokenizer(model: Path, config: dict[str, Any]) -> tuple[Callable[[list[int]], str], frozenset[int]]:
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
