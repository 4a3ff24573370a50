"""Prefill and decode on vLLM servers of their own: the cache of a prompt travels by vLLM's own connector.

Each segment takes two steps: a prefill server computes the prompt (one token, thrown away) and answers with where its
cache lies; a decode server fetches that cache and samples. Weights change on all servers, with nothing in flight in
any. A session stays with its two servers, whose caches hold its earlier turns.

The configuration and the two steps are tested; no connector has been run by us: those for several servers need GPUs.
"""

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

from rollart.config.settings import EngineSettings
from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.vllm import VllmServer
from rollart.types import Finish, WeightVersion


def arguments(connector: str) -> list[str]:
    """What lets vLLM servers share caches. Each may give and take: which does is said in each request."""
    return ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": "kv_both"})]


def servers(engines: EngineSettings) -> Iterator[tuple[str, range]]:
    """The role of each server of an engine, and which of the engine's devices it has: decode first, then prefill."""
    assert engines.prefill is not None
    first = 0
    for role, count, gpus in (
        ("decode", engines.prefill.decoders, engines.gpus),
        ("prefill", engines.prefill.workers, engines.prefill.gpus),
    ):
        for _ in range(count):
            yield role, range(first, first + gpus)
            first += gpus


def environment(side_port: int, devices: range, visible: str | None) -> dict[str, str]:
    """The connector's own loopback port, and this server's share of the devices we may use."""
    ours = [device.strip() for device in visible.split(",")] if visible else None
    mine = [ours[at] if ours else str(at) for at in devices]
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "CUDA_VISIBLE_DEVICES": ",".join(mine),
    }


class DisaggregatedServer:
    """Prefill and decode servers as one `Server`."""

    def __init__(self, prefill: Sequence[VllmServer], decode: Sequence[VllmServer]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._all = [*prefill, *decode]

    async def context_tokens(self) -> int:
        return min([await server.context_tokens() for server in self._all])

    async def stream(self, segment: Segment) -> AsyncGenerator[Piece, None]:
        prefill, decode = self._pair(segment.id)
        transfer = await prefill.prefill(segment)
        if transfer is None:
            yield Piece([], [], Finish.ABORT)
            return
        async with contextlib.aclosing(decode.stream(segment, transfer)) as pieces:
            async for piece in pieces:
                yield piece

    def _pair(self, segment_id: str) -> tuple[VllmServer, VllmServer]:
        """The two servers of a request's session."""
        session = zlib.crc32(segment_id.rpartition("/")[0].encode())
        return self._prefill[session % len(self._prefill)], self._decode[session % len(self._decode)]

    async def abort(self, segment_id: str) -> None:
        await asyncio.gather(*(server.abort(segment_id) for server in self._pair(segment_id)))

    async def halt(self) -> None:
        # The prefill servers first: what they have finished is then in the decode servers, and ends there.
        await asyncio.gather(*(server.halt() for server in self._prefill))
        await asyncio.gather(*(server.halt() for server in self._decode))

    async def resume(self) -> None:
        await asyncio.gather(*(server.resume() for server in self._all))

    async def hold(self) -> dict[str, int]:
        raise NotImplementedError  # `check_supported` lets no `keep_kv` through

    async def stage(self, files: Sequence[Path], version: WeightVersion) -> None:
        await asyncio.gather(*(server.stage(files, version) for server in self._all))

    async def load(self, version: WeightVersion) -> None:
        await asyncio.gather(*(server.load(version) for server in self._all))

    async def score(self, tokens: list[int]) -> list[list[float]]:
        return [row for server in self._all for row in await server.score(tokens)]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._all))
