"""The prefill side of a pair (`pair.py`): an engine that computes prompts, and lends their pages to another process.

It has a thread, a cache and weights of its own, and keeps sessions as any engine does: of a session's next prompt it
computes what it has not seen, which is what the other side said and what the environment answered. A prompt is computed
as a request for one token, which nobody uses. Its pages then stay as they are until they are given back. Calls come
from the other side's process (`rollart.workers`); keys and values do not cross with them.
"""

from typing import NamedTuple

from msgspec.structs import replace

from rollart.engines.embedded.paged.pages import PagedMemory
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.model.mapped import MemoryPlace
from rollart.types import EngineWork, GenerateRequest, Sampling, SwapReport, WeightManifest, WeightVersion
from rollart.workers.wire import allow

ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


class Lent(NamedTuple):
    """A prompt that was computed, all but its last token."""

    number: int
    version: WeightVersion
    """Of the weights that computed all of it."""
    pages: list[int]
    """Of the cache that is mapped; to be given back. None: they are not there."""
    computed_tokens: int
    cached_tokens: int
    busy_s: float
    work: EngineWork | None
    """What the prefill side has done in all, now and then."""


allow(Lent, MemoryPlace)


class PrefillSide:
    """The worker. Requests have numbers: the same request may come again while it is still being aborted."""

    def __init__(self, engine: ThreadedEngine) -> None:
        self.engine = engine
        self._memory = cache_of(engine)
        self._lent: dict[int, tuple[list[int], str]] = {}
        """Pages, and the session where it has no further turn."""

    async def place(self) -> MemoryPlace:
        """Where its cache is."""
        assert self._memory.lending is not None, "an engine that lends"
        return self._memory.lending.place

    async def compute(self, number: int, request: GenerateRequest) -> Lent:
        """The prompt of a request. Raises RequestError for one that does not fit here."""
        asked = replace(request, id=str(number), sampling=ONE_TOKEN, min_version=0, last=False)
        done = await self.engine.generate(asked)
        pages = self.engine.core.lent.pop(asked.id, [])
        self._lent[number] = (pages, request.session if request.last else "")
        return Lent(
            number=number,
            version=done.spans[0].version if done.spans else -1,
            pages=pages,
            computed_tokens=done.prefill_tokens,
            cached_tokens=done.cached_tokens,
            busy_s=done.busy_s,
            work=done.work,
        )

    async def give_back(self, number: int) -> None:
        """Whatever was lent is copied, or not wanted any more."""
        pages, over = self._lent.pop(number)

        def back() -> None:
            self._memory.take_back(pages)
            if over:
                self._memory.forget(over)

        await self.engine.call(back)

    async def abort(self, number: int) -> int:
        """Returns how far this side has come."""
        return await self.engine.abort(str(number))

    async def stage(self, version: WeightVersion) -> None:
        await self.engine.stage(version)

    async def prepare(self, manifest: WeightManifest) -> None:
        await self.engine.prepare(manifest)

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        return await self.engine.swap(manifest)

    async def close(self) -> None:
        await self.engine.close()


def cache_of(engine: ThreadedEngine) -> PagedMemory:
    """Of an engine that is one half of a pair."""
    assert isinstance(engine.core.kv, PagedMemory), "prefill and decode apart need pages on both sides"
    return engine.core.kv
