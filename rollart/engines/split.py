"""Prefill and decode on two vLLM servers: the cache of a prompt travels between them by vLLM's own connector.

Each segment takes two steps: the prefill server computes the prompt (one token, thrown away) and answers with where its
cache lies; the decode server fetches that cache and samples. Weights change on both, with nothing in flight in either.

The configuration and the two steps are tested; no connector has been run by us: those for two servers need GPUs.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

from rollart.engines.embedded.segments import Piece, Segment
from rollart.engines.vllm import VllmServer
from rollart.types import Finish, WeightVersion


def arguments(connector: str) -> list[str]:
    """What makes a vLLM server one of a pair. Either may give and take: which does is said in each request."""
    return ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": "kv_both"})]


def environment(side_port: int, devices: range, visible: str | None) -> dict[str, str]:
    """The connector's own loopback port, and this server's share of the devices we may use."""
    ours = [device.strip() for device in visible.split(",")] if visible else None
    mine = [ours[at] if ours else str(at) for at in devices]
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "CUDA_VISIBLE_DEVICES": ",".join(mine),
    }


class SplitServer:
    """A prefill and a decode server as one `Server`."""

    def __init__(self, prefill: VllmServer, decode: VllmServer) -> None:
        self._prefill = prefill
        self._decode = decode

    async def context_tokens(self) -> int:
        return min(await self._prefill.context_tokens(), await self._decode.context_tokens())

    async def stream(self, segment: Segment) -> AsyncGenerator[Piece, None]:
        transfer = await self._prefill.prefill(segment)
        if transfer is None:
            yield Piece([], [], Finish.ABORT)
            return
        async with contextlib.aclosing(self._decode.stream(segment, transfer)) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, segment_id: str) -> None:
        await asyncio.gather(self._prefill.abort(segment_id), self._decode.abort(segment_id))

    async def halt(self) -> None:
        # The prefill server first: what it has finished is then in the decode server, and ends there.
        await self._prefill.halt()
        await self._decode.halt()

    async def resume(self) -> None:
        await asyncio.gather(self._prefill.resume(), self._decode.resume())

    async def load(self, folder: Path, version: WeightVersion) -> None:
        await asyncio.gather(self._prefill.load(folder, version), self._decode.load(folder, version))

    async def score(self, tokens: list[int]) -> list[list[float]]:
        return [*await self._prefill.score(tokens), *await self._decode.score(tokens)]

    async def close(self) -> None:
        await asyncio.gather(self._prefill.close(), self._decode.close())
