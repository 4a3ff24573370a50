"""The two sides of a pair in one process, over the codec that is between processes. Their caches are still two, and
what is handed over is mapped."""

import asyncio
from typing import Any

from transformers import PreTrainedModel

from rollart.engines.embedded.handover import PrefillSide, cache_of
from rollart.engines.embedded.pair import PairedEngine
from rollart.engines.embedded.threaded import Fetch, Stage, ThreadedEngine
from rollart.errors import BoundaryError
from rollart.workers.handles import as_raised
from rollart.workers.server import failure
from rollart.workers.wire import pack, unpack
from tests.engines.reference import NO_EOS, make_engine


class SideHere:
    """Calls a prefill side as another process would."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side
        self.gone = False
        self.calls: list[str] = []
        self.answered: list[str] = []
        self.lent = 0
        self.holds: list[str] = []
        """Methods whose next answer is held back until `let_go`."""
        self.held: list[str] = []
        self._open = asyncio.Event()

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        given = unpack(pack(list(arguments)))
        await asyncio.sleep(0)
        if self.gone:
            raise error("prefill: its process was ended by signal 9")
        try:
            answer = await getattr(self.side, method)(*given)
            self.lent += method == "compute"
            if method in self.holds:
                self.holds.remove(method)
                self.held.append(method)
                await self._open.wait()
            self.answered.append(method)
            return unpack(pack(answer))
        except BoundaryError as raised:
            kind, text = failure(raised)
            raise as_raised("prefill", kind, text, error) from None

    def let_go(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        self.gone = True
        await self.side.close()


def pair_of(
    plain: PreTrainedModel, *, fetch: Fetch, stage: Stage | None = None, on: str = "cpu", **settings: Any
) -> tuple[PairedEngine, SideHere]:
    """Greedy and sampled answers are those of any engine with these settings."""
    engines = [make_engine(plain, paged=True, on=on, lends=lends, eos=NO_EOS, **settings) for lends in (False, True)]
    decode, prefill = (ThreadedEngine(core, fetch=fetch, stage=stage) for core in engines)
    side = SideHere(PrefillSide(prefill))
    lending = cache_of(prefill).lending
    assert lending is not None
    return PairedEngine(decode, side, lending.place, max_batch=settings.get("max_batch", 256)), side
