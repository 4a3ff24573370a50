"""Several ranks behind one Trainer port.

Owns: the plan of each step, what each rank is told, and the end of them all when one is lost. It holds no weights: the
ranks do (fsdp2.py), each in a process of its own. `RankedTrainer` is told how to reach them; who started them, and
where, is not its concern.
Invariants: every rank gets the same calls in the same order; a rank that dies or raises ends the rest at once (they may
be waiting for it inside a collective call, without end), and every call from then on raises TrainerError: a trainer is
started again as a whole (StartAgain where the next one knows what to do otherwise). What can be refused is refused
before any rank hears of it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from rollart.errors import BoundaryError, StartAgain, StoreFull, TrainerError, boundary
from rollart.model.network import stay_on
from rollart.train.aside import Aside
from rollart.train.checkpoints import saved_version
from rollart.train.fsdp2 import ShardedTrainer
from rollart.train.gathering import PartTarget
from rollart.train.settings import TrainerSettings, learning_rate
from rollart.train.step import RankWork, Step, UpdateReport, check_step
from rollart.train.versions import not_held
from rollart.types import Batch, StepResult, WeightManifest, WeightVersion

REPORT_S = 2.0
"""When a rank reports that another is gone, how long to wait for the end of that other to be seen, to name it."""


class Rank(Protocol):
    """A rank's process, from outside."""

    @property
    def pid(self) -> int | None:
        """None when it has ended."""

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any: ...

    async def stop(self) -> None: ...


class RankedTrainer:
    """The `Trainer` port over ranks that were started from these settings."""

    def __init__(self, settings: TrainerSettings, ranks: Sequence[Rank]) -> None:
        self._settings = settings
        self.ranks = ranks
        self._version: WeightVersion = 0
        self._vocab_size: int | None = None
        self._aside = Aside(settings.set_aside_path)
        self.lost: TrainerError | None = None
        """Why there are no ranks any more."""
        self._work, self._push = asyncio.Lock(), asyncio.Lock()
        """Held while the ranks do one thing; a push and a step may overlap."""

    async def train_step(self, batch: Batch) -> StepResult:
        async with self._work:
            with boundary(TrainerError, f"train step {batch.step}"):
                check_step(batch.step, self._version)
                began = time.perf_counter()
                if self._vocab_size is None:
                    self._vocab_size = (await self._all("vocab_size"))[0]
                step = await asyncio.to_thread(
                    Step, batch, self._settings, self._aside, vocab_size=self._vocab_size, ranks=len(self.ranks)
                )
                lr = learning_rate(self._settings, batch.step)
                try:
                    await self._updates(batch.step, step, lr)
                except StoreFull as error:
                    if step.updates_made:  # the weights are of no version: the step cannot just be tried again
                        raise await self._end_all(TrainerError(str(error))) from error
                    raise
                await self._all("end_step")
                self._version += 1
                return step.result(self._version, lr, time.perf_counter() - began)

    async def _updates(self, number: int, step: Step, lr: float) -> None:
        """All updates of a step, those that failed as often as they are cut anew."""

        def stuck(rank: int, answer: list[UpdateReport]) -> str:
            """The others wait in a call that this rank will never make: what it says is noted for the next trainer."""
            raised = [fault for fault in answer[-1].failed if fault.raised] if answer else []
            return step.note(rank, raised[0]._replace(update=len(answer) - 1 + raised[0].update)) if raised else ""

        while step.shares(0):
            told = [(number, step.shares(rank), lr, not step.updates_made) for rank in range(len(self.ranks))]
            for reports in zip(*await self._each("train_step", told, stuck), strict=True):
                step.book(reports)

    async def publish(self, version: WeightVersion) -> WeightManifest:
        async with self._push:
            held = [at for at in (self._version - 1, self._version) if at >= 0]
            if version not in held:
                raise not_held(version, held)
            manifest: WeightManifest | None = (await self._all("publish", version))[0]
            if manifest is None:
                raise not_held(version, held)
            return manifest

    async def save(self) -> str:
        async with self._work:
            reference: str = (await self._all("save"))[0]
            return reference

    async def restore(self, reference: str) -> WeightVersion:
        async with self._work:
            with boundary(TrainerError, f"trainer restore of {reference}"):
                version = await asyncio.to_thread(saved_version, reference) if reference else 0
            await self._all("restore", reference)
            self._version = version
            return version

    async def close(self) -> None:
        """End all ranks."""
        self.lost = self.lost or TrainerError("it was closed")
        await asyncio.gather(*(rank.stop() for rank in self.ranks))

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await self._each(method, [arguments] * len(self.ranks))

    async def _each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        stuck: Callable[[int, Any], str] = lambda rank, answer: "",
    ) -> list[Any]:
        """Call all ranks, each with its own arguments; the answers by rank. `stuck` looks at each answer as it comes:
        what it returns is why the ranks cannot go on, noted for the next."""
        if self.lost is not None:
            raise type(self.lost)(f"the trainer has no ranks any more ({self.lost}); start it again")
        calls = [
            asyncio.ensure_future(rank.call(TrainerError, method, *own))
            for rank, own in zip(self.ranks, arguments, strict=True)
        ]
        try:
            seen: dict[int, None] = {}
            while len(seen) < len(calls):
                await asyncio.wait(
                    [call for place, call in enumerate(calls) if place not in seen],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if _failed(calls):
                    if full := await _found_no_room(calls):
                        raise full
                    raise await self._give_up(calls)
                for place, call in enumerate(calls):
                    if call.done() and place not in seen:
                        seen[place] = None
                        await self._end_if(stuck, place, call.result())
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    async def _end_if(self, stuck: Callable[[int, Any], str], rank: int, answer: Any) -> None:
        """End all ranks where this answer of one says that the others wait in vain, whether or not it can be noted."""
        try:
            reason = stuck(rank, answer)
        except StoreFull as error:
            await self._end_all(TrainerError(str(error)))
            raise
        if reason:
            raise await self._end_all(StartAgain(reason))

    async def _give_up(self, calls: Sequence["asyncio.Future[Any]"]) -> TrainerError:
        """End all ranks; returns why: the words of one that died, or else of the first that raised."""
        loop = asyncio.get_running_loop()
        until = loop.time() + REPORT_S
        while not (dead := [place for place in _failed(calls) if self.ranks[place].pid is None]):
            waiting = [call for call in calls if not call.done()]
            if not waiting or loop.time() >= until:
                break
            await asyncio.wait(waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        return await self._end_all(TrainerError(str(calls[(dead or _failed(calls))[0]].exception())))

    async def _end_all(self, error: TrainerError) -> TrainerError:
        """Returns why they ended: this, or what ended them before, of which `error` is then a consequence."""
        self.lost = self.lost or error
        await asyncio.gather(*(rank.stop() for rank in self.ranks))
        return type(self.lost)(str(self.lost))


def _failed(calls: Sequence["asyncio.Future[Any]"]) -> list[int]:
    return [place for place, call in enumerate(calls) if call.done() and call.exception() is not None]


async def _found_no_room(calls: Sequence["asyncio.Future[Any]"]) -> StoreFull | None:
    """Rank 0 writes for all: where it found no room and the others ended well, no rank is lost."""
    error = calls[0].exception() if calls[0].done() else None
    if not isinstance(error, StoreFull):
        return None
    await asyncio.wait(calls, timeout=REPORT_S)
    return error if all(call.done() for call in calls) and _failed(calls) == [0] else None


class AsyncRank:
    """What runs in a rank's process, behind its link. One thread trains, saves and restores; another publishes."""

    def __init__(self, core: ShardedTrainer, store: PartTarget) -> None:
        self.core = core
        self._store = store
        self._work, self._push = (
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=stay_on, initargs=(core.device,))
            for name in ("train", "publish")
        )

    async def vocab_size(self) -> int:
        return self.core.vocab_size

    async def train_step(self, step: int, shares: list[RankWork], lr: float, begin: bool) -> list[UpdateReport]:
        work = partial(self.core.train_step, step, shares, lr, begin)
        return await asyncio.get_running_loop().run_in_executor(self._work, work)

    async def end_step(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._work, self.core.end_step)

    async def publish(self, version: WeightVersion) -> WeightManifest | None:
        return await asyncio.get_running_loop().run_in_executor(self._push, self.core.publish, version, self._store)

    async def save(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._work, self.core.save)

    async def restore(self, reference: str) -> WeightVersion:
        return await asyncio.get_running_loop().run_in_executor(self._work, self.core.restore, reference)
