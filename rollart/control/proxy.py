"""The one door to all engines: routes every generate call, counts it, and sends it again when its engine is lost.

A request is whole, so nothing is lost with an engine but time. Cancelling the caller aborts the request explicitly:
to cancel an awaiting task does not stop remote work. A request that takes longer than its own limit is aborted too, and
its attempt ends; its engine, which the fleet judges by its progress, goes on.
"""

import asyncio
from collections.abc import Callable, Sequence

from rollart.control.context import JobContext
from rollart.control.fleet import EngineSlot, Fleet, InFlightCall
from rollart.control.waits import Expired
from rollart.errors import AnswerError, BoundaryError, EngineError, RequestError
from rollart.events import schema
from rollart.events.log import micros
from rollart.policy.answers import engine_is_broken, wrong_with
from rollart.policy.routing import Route, choose
from rollart.types import Completion, EngineView, EngineWork, GenerateRequest

MAX_SENDS = 6
"""A request that was sent so often and lost each time may be what kills the engines: its attempt fails."""


Worked = Callable[[str, EngineWork | None, EngineWork], None]
"""Pool, an engine's last report (None: it was just started), and its new one."""


class Proxy:
    def __init__(
        self, context: JobContext, fleet: Fleet, *, worked: Worked | None = None, recorded: bool = True
    ) -> None:
        """`worked`: told what engines say they have done. `recorded`: each call is written as events."""
        limits, waits = context.job.limits, context.waits
        self._recorded = recorded
        self._worked = worked
        self._loop = asyncio.get_running_loop()
        self._fleet = fleet
        self._supervisor = context.supervisor
        self._log = context.log
        self._generating = waits.on("generate", limits.generate_s)
        self._queueing = waits.on("an engine")
        self._aborting = waits.on("abort", limits.progress_s)

    async def generate(
        self, request: GenerateRequest, order: Sequence[str], last: EngineView | None, cause: int
    ) -> tuple[Completion, EngineView, int, float]:
        """One completion, the engine it came from, the event it is recorded in, and when it was sent there.

        `order`: the wanted pool, then those that may stand in. `last`: the engine that has the session's cache.
        """
        reason = ""
        for _ in range(MAX_SENDS):
            route = choose(self._fleet.pools, order, last, request.min_version)
            if route is None:
                route = await self._until_one_is_free(request, order, last)
            slot = self._sent(request, order[0], route, cause)
            sent_s = self._loop.time()
            try:
                completion, reason = await self._send(slot, request)
                if completion is not None and (wrong := wrong_with(request, completion)):
                    raise AnswerError(f"{completion.engine} {wrong}")
            except AnswerError as error:
                self._refused(slot, request, str(error), cause)
                raise
            if completion is not None:
                if completion.work is not None:
                    self._note_work(slot, completion.work)
                slot.restarts = slot.refused = 0
                slot.served += 1
                return completion, slot.view, self._log_said(request, slot, completion, cause), sent_s
            last = None
            if self._recorded:
                cause = self._log.emit(schema.Lost(id=request.id, engine=slot.spec.id, reason=reason, cause=cause))
        raise EngineError(f"{MAX_SENDS} engines in a row were lost with this request; the last: {reason}")

    def _note_work(self, slot: EngineSlot, work: EngineWork) -> None:
        if self._worked is not None:
            before, slot.work = slot.work, work
            self._worked(slot.spec.pool, before, work)
        if self._recorded:
            decode, mixed, prefill = ([round(value, 6) for value in sums] for sums in work)
            self._log.emit(schema.EngineWorked(engine=slot.spec.id, decode=decode, mixed=mixed, prefill=prefill))

    async def _until_one_is_free(
        self, request: GenerateRequest, order: Sequence[str], last: EngineView | None
    ) -> Route:
        """No engine takes the request now."""
        fleet, route = self._fleet, None
        while route is None:
            if all(slot.gone for slot in fleet.slots.values()):
                raise EngineError("no engine is left")
            await self._queueing.guard(request.id, fleet.freed.next())
            route = choose(fleet.pools, order, last, request.min_version)
        return route

    def _sent(self, request: GenerateRequest, want: str, route: Route, cause: int) -> EngineSlot:
        """Note where it is sent."""
        view = route.engine
        if self._recorded:
            self._log.emit(
                schema.Send(
                    id=request.id,
                    engine=view.id,
                    pool=view.pool,
                    want=want,
                    version=view.version,
                    why=route.why,
                    prompt=request.prompt_tokens,
                    fallback=route.fallback,
                    cause=cause,
                )
            )
        return self._fleet.slots[view.id]

    async def _send(self, slot: EngineSlot, request: GenerateRequest) -> tuple[Completion | None, str]:
        """The completion; or None and why the engine was lost."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        call = InFlightCall(task)
        slot.calls[request.id] = call
        slot.view.in_flight += 1
        try:
            with slot.at_engine, self._generating.during(request.id):
                return await slot.engine.generate(request), ""
        except (RequestError, AnswerError):
            raise
        except BoundaryError as error:
            if isinstance(error.__cause__, Expired):
                self._supervisor.spawn(self._abort(slot, request.id))
                raise RequestError(f"{error}; it was aborted (limits.generate_s)") from error
            reason = str(error)
        except asyncio.CancelledError:
            if not call.lost or task.uncancel() > 0:
                self._supervisor.spawn(self._abort(slot, request.id))
                raise
            reason = call.lost
        finally:
            del slot.calls[request.id]
            slot.view.in_flight -= 1
        if not call.lost:
            self._fleet.down(slot, reason)
        return None, reason

    async def _abort(self, slot: EngineSlot, request_id: str) -> None:
        engine = slot.engine
        try:
            with slot.at_engine:
                await self._aborting.guard(request_id, engine.abort(request_id))
        except BoundaryError as error:
            if slot.engine is engine:
                self._fleet.down(slot, str(error))

    def _refused(self, slot: EngineSlot, request: GenerateRequest, reason: str, cause: int) -> None:
        """Nobody gets to see this answer. Its attempt ends; an engine that gives nothing better is lost."""
        if self._recorded:
            self._log.emit(schema.Refused(id=request.id, engine=slot.spec.id, reason=reason, cause=cause))
        slot.refused += 1
        if engine_is_broken(slot.refused):
            self._fleet.down(slot, f"{slot.refused} answers in a row could not be believed; the last: {reason}")
            slot.refused = 0

    def _log_said(self, request: GenerateRequest, slot: EngineSlot, completion: Completion, cause: int) -> int:
        if not self._recorded:
            return cause
        return self._log.emit(
            schema.Said(
                id=request.id,
                engine=slot.spec.id,
                tokens=len(completion.tokens),
                spans=[*completion.spans],
                prefill=completion.prefill_tokens,
                cached=completion.cached_tokens,
                busy_s=micros(completion.busy_s),
                finish=completion.finish,
                prefill_busy_s=round(completion.prefill_busy_s, 6) if completion.prefill_busy_s else None,
                cause=cause,
            )
        )
