"""Nothing hangs silently: waits have names and limits, errors end the job, deadlocks are reported at once."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from rollart.control.attempt import Attempt
from rollart.control.context import JobContext
from rollart.control.env_manager import Session
from rollart.control.supervisor import TaskSupervisor
from rollart.control.waits import Waits
from rollart.control.watchdog import Watchdog
from rollart.errors import Deadlock
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.ports import BACKGROUND, Env
from rollart.sim.clock import VirtualLoop
from rollart.types import GenerateRequest, Status, Task, TrajectoryId, WeightVersion
from tests.control.scene import Scene, ScriptedEngine, for_ever, scene_job

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def awaited() -> T:
        return await work()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(awaited())


def now() -> float:
    return asyncio.get_running_loop().time()


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_wait_over_its_limit_is_a_timeout_and_one_under_it_is_not() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)
        assert await waits.guard("quick", asyncio.sleep(9.9, "answer")) == "answer"
        began_s = now()
        with pytest.raises(TimeoutError, match="no answer in 10 s"):
            await waits.guard("slow", for_ever())
        assert now() == began_s + 10.0
        assert len(waits) == 0

    run(work)


def test_each_wait_has_its_own_limit_though_they_share_a_timer() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)
        ended: list[tuple[int, float]] = []

        async def one(number: int) -> None:
            await asyncio.sleep(3.0 * number)
            try:
                await waits.guard(str(number), asyncio.sleep(2.0) if number == 1 else for_ever())
            except TimeoutError:
                ended.append((number, now()))

        await asyncio.gather(*(one(number) for number in range(4)))
        assert ended == [(0, 10.0), (2, 16.0), (3, 19.0)]
        with pytest.raises(TimeoutError):
            await waits.guard("later, with a new timer", for_ever())

    run(work)


def test_a_wait_that_takes_its_time_to_end_does_not_hold_up_the_limits_of_the_others() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)
        ended: list[tuple[str, float]] = []

        async def one(name: str, start_s: float, cleanup_s: float) -> None:
            await asyncio.sleep(start_s)

            async def lingers() -> None:
                try:
                    await for_ever()
                finally:
                    await asyncio.sleep(cleanup_s)

            with pytest.raises(TimeoutError):
                await waits.guard(name, lingers())
            ended.append((name, now()))

        await asyncio.gather(one("first", 0.0, 6.0), one("second", 3.0, 0.0))
        assert ended == [("second", 13.0), ("first", 16.0)]

    run(work)


def test_a_wait_cancelled_by_someone_else_as_it_expires_is_cancelled_not_timed_out() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)
        task = asyncio.ensure_future(waits.guard("x", for_ever()))
        asyncio.get_running_loop().call_at(10.0, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_after_a_timeout_the_task_can_be_cancelled_as_ever() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)

        async def timed_out_then_waits() -> None:
            with pytest.raises(TimeoutError):
                await waits.guard("x", for_ever())
            current = asyncio.current_task()
            assert current is not None
            assert current.cancelling() == 0
            await for_ever()

        task = asyncio.ensure_future(timed_out_then_waits())
        await asyncio.sleep(11.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_a_limit_that_was_swallowed_leaves_no_trace_in_the_task() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)

        async def swallows() -> str:
            with contextlib.suppress(asyncio.CancelledError):
                await for_ever()
            return "answer after all"

        assert await waits.guard("x", swallows()) == "answer after all"
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0
        with pytest.raises(TimeoutError):
            await waits.guard("x", for_ever())

    run(work)


def test_one_that_swallows_its_limit_and_waits_on_is_ended_at_the_next() -> None:
    async def work() -> None:
        waits = Waits().on("x", 10.0)

        async def stubborn() -> None:
            for _ in range(2):
                with contextlib.suppress(asyncio.CancelledError):
                    await for_ever()
            await for_ever()

        with pytest.raises(TimeoutError):
            await waits.guard("x", stubborn())
        assert now() == 30.0
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    run(work)


def test_the_longest_waiter_is_named_though_it_swallowed_its_limit() -> None:
    async def work() -> None:
        waits = Waits()
        doors = waits.on("a door", 10.0)

        async def stubborn() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await for_ever()
            await for_ever()

        tasks = [asyncio.ensure_future(doors.guard("Ann", stubborn()))]
        await asyncio.sleep(5.0)
        tasks.append(asyncio.ensure_future(doors.guard("Ben", for_ever())))
        await asyncio.sleep(7.0)
        words = waits.report(now())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert words == "Ann waits on a door since 12.0 s (1 more behind it)"

    run(work)


def test_the_longest_wait_of_each_kind_is_named_the_longest_of_all_first() -> None:
    async def work() -> None:
        waits = Waits()
        assert waits.report(now()) == "nobody waits on anything that is known"
        doors, keys = waits.on("a door"), waits.on("a key")
        assert waits.on("a door") is doors
        tasks = [asyncio.ensure_future(doors.guard("Ann", for_ever()))]
        await asyncio.sleep(1.0)
        tasks += [asyncio.ensure_future(keys.guard(name, for_ever())) for name in ("Ben", "Cyd", "Dan")]
        await asyncio.sleep(2.0)
        assert waits.counts() == {"a door": 1, "a key": 3}
        assert waits.report(now()) == (
            "Ann waits on a door since 3.0 s; Ben waits on a key since 2.0 s (2 more behind it)"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waits.close()

    run(work)


def test_a_closed_list_leaves_no_timer_behind() -> None:
    async def work() -> None:
        waits = Waits()
        task = asyncio.ensure_future(waits.on("x", 5.0).guard("x", asyncio.sleep(1.0)))
        await task
        waits.close()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stuck: asyncio.Future[None] = loop.create_future()

        def go_on() -> None:
            loop.call_later(1.0, stuck.set_result, None)

        loop.on_deadlock = go_on
        await stuck
        assert loop.time() == 2.0, "the clock did not stop at 5 s"

    run(work)


# --- stopping runs --------------------------------------------------------------------------------------------------


def a_run() -> Attempt:
    return Attempt(TrajectoryId("g", 0, 0), Task(id="a/0", domain="a", index=0), scene_job().tasks[0], ("fast",))


def test_a_stop_and_a_cancellation_at_once_is_a_cancellation() -> None:
    async def work() -> None:
        stopped: list[bool] = []
        a = a_run()

        async def body() -> None:
            a.enter()
            try:
                await for_ever()
            except asyncio.CancelledError:
                stopped.append(a.was_stopped())
                raise

        task = asyncio.ensure_future(body())
        await asyncio.sleep(1.0)
        a.stop(Status.ABORTED, "enough")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stopped == [False]

    run(work)


def test_a_run_stopped_before_it_began_or_after_it_ended_is_just_stopped() -> None:
    async def work() -> None:
        a = a_run()
        assert not a.was_stopped()
        under_way = a_run()
        under_way.enter()
        assert not under_way.was_stopped(), "a cancellation that arrives now is somebody else's"
        a.stop(Status.ABORTED, "first")
        a.stop(Status.STALE, "second")
        assert a.stopped == (Status.ABORTED, "first"), "the first word counts"
        with pytest.raises(asyncio.CancelledError):
            a.enter()
        assert a.was_stopped()
        a.leave()

    run(work)


# --- supervisor ----------------------------------------------------------------------------------------------------


def test_a_task_of_the_supervisor_that_raises_fails_the_supervisor_with_the_first_error() -> None:
    async def work() -> None:
        supervisor = TaskSupervisor()

        async def fails(text: str) -> None:
            raise ValueError(text)

        supervisor.spawn(fails("first"))
        supervisor.spawn(fails("second"))
        with pytest.raises(ValueError, match="first"):
            await supervisor.failed
        await supervisor.close()

    run(work)


def test_closing_a_supervisor_ends_its_tasks_in_the_order_they_began_and_those_they_start_on_the_way() -> None:
    async def work() -> None:
        supervisor = TaskSupervisor()
        ended: list[str] = []

        async def one(name: str, then: str = "") -> None:
            try:
                await for_ever()
            finally:
                ended.append(name)
                if then:
                    supervisor.spawn(one(then))

        for name in ("a", "b", "c"):
            supervisor.spawn(one(name, "late" if name == "b" else ""))
        await asyncio.sleep(0)
        await supervisor.close()
        assert ended[:3] == ["a", "b", "c"]
        assert supervisor.failed.cancelled()

    run(work)


def test_only_background_tasks_have_background_timers() -> None:
    async def work() -> list[bool]:
        supervisor = TaskSupervisor()
        seen: list[bool] = []

        async def look() -> None:
            seen.append(BACKGROUND.get())

        await supervisor.spawn(look())
        await supervisor.spawn(look(), background=True)
        seen.append(BACKGROUND.get())
        await supervisor.close()
        return seen

    assert run(work) == [False, True, False]


def test_an_error_of_ours_in_any_task_ends_the_job_with_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> None:
        raise AssertionError("our own mistake")

    monkeypatch.setattr("rollart.policy.affinity.Affinity.seen", mistaken)
    played = Scene().play()
    assert isinstance(played.error, AssertionError)
    assert "our own mistake" in str(played.error)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_cannot_forget_is_a_warning_and_no_more(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.control.weights.DROP_LIMIT_S", 20.0)

    class Full(Scene):
        async def drop_before(self, version: WeightVersion) -> None:
            if hangs:
                await for_ever()
            raise OSError("read-only file system")

    scene = Full(scene_job(train__steps=8))
    played = scene.play()
    assert played.finished
    text = "no answer in 20 s" if hangs else "OSError: read-only file system"
    assert [event for event in played.of(schema.Warning) if f"drop old weights: {text}" in event.text]


# --- watchdog and deadlock ------------------------------------------------------------------------------------------


def test_a_stalled_job_is_reported_with_who_waits_on_what_again_and_again() -> None:
    scene = Scene(scene_job(limits__stall_s=90.0, limits__progress_s=400.0))

    async def hang(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if len(scene.engines[engine.spec.id]) == 1:
            await for_ever()

    scene.on_generate = hang
    played = scene.play()
    assert played.finished
    stalls = played.of(schema.Stall)
    assert len(stalls) >= 4
    first = stalls[0]
    assert first.t - 3.1 >= 90.0
    assert first.t - 3.1 <= 90.0 + 30.0 + 0.1, "within a third of the limit"
    assert "nothing has moved for" in first.text
    assert "g0.0.0/0 waits on generate since" in first.text
    silent_s = [float(event.text.split("moved for ")[1].split(" s")[0]) for event in stalls[:3]]
    assert all(later - sooner >= 89.0 for sooner, later in itertools.pairwise(silent_s)), (
        "its own reports are no movement"
    )
    assert {wait.what for wait in first.waiting} == {"a batch", "generate"}
    assert all(later.t - sooner.t >= 90.0 for sooner, later in itertools.pairwise(stalls) if later.t < 500)


def test_a_job_that_moves_is_not_reported() -> None:
    assert not Scene(scene_job(limits__stall_s=20.0)).play().of(schema.Stall)


class Dreamer:
    """An agent that waits for something of its own, which no limit of ours covers."""

    async def play(self, session: Session) -> Status:
        await session.reset()
        await for_ever()
        raise AssertionError


def test_a_deadlock_is_reported_at_once_with_who_waits() -> None:
    played = Scene(scene_job(limits__stall_s=100_000.0), agent=Dreamer()).play()
    assert isinstance(played.error, Deadlock)
    report = played.one(schema.Deadlock)
    assert "step 0 waits on a batch since" in report.text
    assert (report.waiting[0].who, report.waiting[0].what) == ("step 0", "a batch")
    assert not played.of(schema.Stall), "no clock ran until somebody looked"


def test_the_watchdog_says_what_it_knows_when_asked() -> None:
    async def work() -> list[Event]:
        events: list[Event] = []
        log = EventLog(now)
        log.read_by(events.append)
        context = JobContext(scene_job(), LogHandle(log))
        task = asyncio.ensure_future(context.waits.on("a key").guard("Ben", for_ever()))
        await asyncio.sleep(4.0)
        words = Watchdog(context, list, stalled=None).report(schema.Stall, "nothing moves")
        assert words == "nothing moves: Ben waits on a key since 4.0 s"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return events

    events = run(work)
    [stall] = events
    assert isinstance(stall, schema.Stall)
    assert stall.waiting == [schema.Wait(who="Ben", what="a key", for_s=4.0)]


def test_a_job_cancelled_from_outside_leaves_nothing_running() -> None:
    scene = Scene()

    async def never(task: Task, trajectory: TrajectoryId) -> Env | None:
        await for_ever()
        return None

    scene.on_open = never
    left: list[Any] = []

    def look() -> None:
        assert scene.coordinator is not None
        left.append(scene.coordinator.supervisor)

    scene.at(10.0, look)
    played = scene.play(kills=[lambda event: event.t >= 3600.0 * 0.9 or isinstance(event, schema.Stall)])
    assert played.of(schema.Killed)
    assert left
    assert not left[0].tasks
