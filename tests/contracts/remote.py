"""The engine contract's bench for engines behind a server."""

from collections.abc import Awaitable, Callable

from rollart.engines.remote import RemoteEngine
from rollart.types import WeightManifest, WeightVersion
from tests.contracts.engine import EngineBench
from tests.engines.remote import CONTEXT_TOKENS, Versions


async def play_on(
    engine: RemoteEngine, versions: Versions, max_batch: int, work: Callable[[EngineBench], Awaitable[None]]
) -> None:
    async def put(version: WeightVersion) -> WeightManifest:
        return versions.put(version)

    async def lose(manifest: WeightManifest) -> None:
        versions.lose(manifest)

    bench = EngineBench(
        engine=engine,
        max_batch=max_batch,
        domain="test",
        put=put,
        lose=lose,
        too_long=CONTEXT_TOKENS + 1,
        long_answer=200,
    )
    try:
        await work(bench)
    finally:
        await engine.close()
