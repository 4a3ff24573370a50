"""Engines die, hang, refuse and come back; a request is whole, so nothing is lost with one but time."""

import asyncio
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from rollart.control.context import JobContext
from rollart.control.fleet import Fleet
from rollart.control.proxy import MAX_SENDS, Proxy
from rollart.errors import EngineError, JobStopped, RequestError, WeightError
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.events.schema import Event
from rollart.ports import Env
from rollart.sim.clock import VirtualLoop
from rollart.types import (
    Completion,
    EngineSpec,
    Finish,
    GenerateRequest,
    Sampling,
    Span,
    Task,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)
from tests.control.invariant import check_first_invariant
from tests.control.scene import PUSH_S, Scene, ScriptedCluster, ScriptedEngine, ScriptedTrainer, for_ever, scene_job

TWO_POOLS = [
    {"name": "fast", "hardware": "h20", "engines": {"count": 1}},
    {"name": "other", "hardware": "h800", "engines": {"count": 1}},
    {"name": "rooms", "slots": 64},
]
ON_FAST = [{"name": "a", "group_size": 2, "max_tokens": 8, "affinity": "fast"}]


def kill(scene: Scene, name: str) -> None:
    scene.engine(name).dead = "killed"


def test_the_requests_of_an_engine_that_dies_are_sent_again_and_no_trajectory_is_lost() -> None:
    scene = Scene()
    scene.at(2.25, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished
    assert not played.violations
    lost = played.of(schema.Lost)
    assert len(lost) == 4
    assert {event.engine for event in lost} == {"fast-0"}
    for event in lost:
        again = [sent for sent in played.of(schema.Send, id=event.id) if sent.n > event.n]
        assert again
        assert again[0].cause == event.n
    assert not played.ends("failed")
    assert played.one(schema.EngineDown).calls == 3, "those that had not noticed themselves"
    check_first_invariant(scene)


def test_an_engine_that_comes_back_serves_again_with_the_weights_of_the_day() -> None:
    scene = Scene(scene_job(train__steps=6))
    scene.when(lambda event: isinstance(event, schema.SwapEnd) and event.version == 2, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished
    assert not played.violations
    up = played.one(schema.EngineUp)
    assert up.version >= 2
    reborn = scene.engine("fast-0")
    assert reborn is not scene.engines["fast-0"][0]
    assert reborn.asked
    assert all(version >= 2 for _, version in reborn.asked)


def test_an_engine_that_answers_nothing_any_more_is_found_by_its_progress() -> None:
    scene = Scene(scene_job(limits__progress_s=40.0))

    def hang() -> None:
        scene.engine("fast-0").hung = True

    scene.at(2.25, hang)
    played = scene.play()
    assert played.finished
    assert not played.violations
    down = played.one(schema.EngineDown)
    assert "asked for its progress: fast-0: no answer in 40 s" in down.reason
    assert 40.0 <= down.t - 2.25 <= 1.5 * 40.0
    assert not played.ends("failed")


def test_an_engine_that_computes_nothing_while_it_has_requests_is_taken_for_hung_and_they_are_sent_again() -> None:
    """As a server does whose front answers while its model hangs."""
    scene = Scene(scene_job(limits__progress_s=40.0))

    async def stands_still(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if engine is scene.engines["fast-0"][0] and len(engine.asked) > 2:
            await for_ever()

    scene.on_generate = stands_still
    played = scene.play()
    assert played.finished
    assert not played.violations
    down = played.one(schema.EngineDown)
    assert "fast-0: computed nothing for 40 s with" in down.reason
    assert "limits.progress_s" in down.reason
    assert down.calls >= 1
    assert len(played.of(schema.Lost, engine="fast-0")) == down.calls
    assert not played.ends("failed")


def test_an_engine_that_is_idle_or_takes_new_weights_is_not_hung() -> None:
    scene = Scene(scene_job(limits__progress_s=40.0, train__steps=6))
    scene.step_s = 200.0

    async def slowly(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        await asyncio.sleep(100.0)

    scene.on_swap = slowly
    played = scene.play()
    assert played.finished
    assert not played.of(schema.EngineDown)


def test_one_answer_slower_than_its_limit_ends_its_own_attempt_and_nothing_else() -> None:
    scene = Scene(scene_job(limits__generate_s=50.0, limits__progress_s=25.0, limits__engine_restarts=1))

    async def slow(engine: ScriptedEngine, request: GenerateRequest) -> None:
        for _ in range(100 if request.session == "g1.1.0" else 0):
            await engine.works(1.0)
            engine.computed += 1

    scene.on_generate = slow
    played = scene.play()
    assert played.finished, played.error
    assert not played.violations
    assert not played.of(schema.EngineDown), "an engine that computes is well, however slow one answer is"
    failed = played.one(schema.End, id="g1.1.0")
    assert failed.status == "failed"
    assert "RequestError: fast-" in failed.reason
    assert "no answer in 50 s; it was aborted (limits.generate_s)" in failed.reason
    sent = played.one(schema.Send, id="g1.1.0/0")
    assert failed.t - sent.t == pytest.approx(50.0)
    assert "g1.1.0/0" in scene.engine(sent.engine).aborted, "its slot is freed"
    assert [event.id for event in played.ends("failed")] == ["g1.1.0"]
    assert played.one(schema.End, id="g1.1.1").status == "done", "it is tried again"


def test_when_one_request_finds_its_engine_hung_the_others_there_are_sent_again_at_once() -> None:
    scene = Scene(scene_job(limits__progress_s=40.0))

    async def later(task: Task, trajectory: TrajectoryId) -> Env | None:
        await asyncio.sleep(10.0 * trajectory.member)
        return None

    def hang() -> None:
        scene.engine("fast-0").hung = True

    scene.on_open = later
    scene.at(2.05, hang)
    played = scene.play()
    assert played.finished
    lost = played.of(schema.Lost)
    sent_s = {event.id: event.t for event in reversed(played.of(schema.Send))}
    assert len({sent_s[event.id] for event in lost}) > 1, "some were sent later than others"
    assert len({round(event.t, 3) for event in lost}) == 1


def test_a_request_that_kills_its_engines_is_given_up_after_so_many_sends() -> None:
    scene = Scene(scene_job(limits__engine_restarts=20, limits__attempts=1, train__steps=1))

    async def poisoned(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if request.id == "g1.1.0/0":
            engine.dead = "poisoned"
            raise EngineError("segmentation fault")

    scene.on_generate = poisoned
    played = scene.play()
    assert played.finished
    assert len(played.of(schema.Send, id="g1.1.0/0")) == MAX_SENDS
    failed = played.one(schema.End, id="g1.1.0")
    assert f"{MAX_SENDS} engines in a row were lost with this request; the last:" in failed.reason
    assert "segmentation fault" in failed.reason
    assert {event.status for event in played.of(schema.End) if event.id != "g1.1.0"} <= {"done", "aborted"}


def test_a_request_no_engine_can_serve_fails_its_attempt_and_costs_no_engine() -> None:
    scene = Scene(scene_job(limits__attempts=1, train__steps=1))

    async def too_long(engine: ScriptedEngine, request: GenerateRequest) -> None:
        if request.session == "g1.1.0":
            raise RequestError("the prompt does not fit")

    scene.on_generate = too_long
    played = scene.play()
    assert played.finished
    assert "RequestError: the prompt does not fit" in played.one(schema.End, id="g1.1.0").reason
    assert not played.of(schema.EngineDown)


class Liar(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> Completion:
        honest = await super().generate(request)
        if request.session == "g1.1.0":
            tokens = honest.tokens if request.turn else np.zeros(0, dtype=np.int32)
            spans = (Span(0, 7),) if request.turn else ()
            return Completion(
                tokens=tokens, logprobs=honest.logprobs[: len(tokens)], spans=spans, finish=Finish.STOP, engine="liar"
            )
        if request.session == "g0.1.0":
            return Completion(
                tokens=honest.tokens,
                logprobs=honest.logprobs[:1],
                spans=honest.spans,
                finish=Finish.STOP,
                engine="liar",
            )
        return honest


def test_what_an_engine_returns_is_believed_only_where_it_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.control.scene.ScriptedEngine", Liar)
    played = Scene(scene_job(limits__attempts=2)).play()
    assert played.finished
    assert "liar returned no token" in played.one(schema.End, id="g1.1.0").reason
    assert "3 tokens, 1 log-probabilities and spans for 3; they must be equal" in (
        played.one(schema.End, id="g0.1.0").reason
    )


def test_an_engine_that_cannot_start_again_leaves_the_rotation_and_the_others_go_on() -> None:
    scene = Scene(scene_job(limits__engine_restarts=2))

    async def no_more(spec: EngineSpec, before: int) -> None:
        if before:
            raise RuntimeError("no GPU left")

    scene.on_start = no_more
    scene.at(2.25, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert played.one(schema.EngineGone).restarts == 2
    assert all("no GPU left" in event.reason for event in played.of(schema.EngineRetry))
    gone_n = played.one(schema.EngineGone).n
    assert {event.engine for event in played.of(schema.Send) if event.n > gone_n} == {"fast-1"}


def test_an_engine_that_cannot_load_the_weights_leaves_the_rotation() -> None:
    scene = Scene(scene_job(limits__engine_restarts=2, train__steps=6))

    async def cannot(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine.spec.id == "fast-0":
            raise EngineError("out of memory")

    scene.on_swap = cannot
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert "swap to 1: out of memory" in played.of(schema.EngineDown, engine="fast-0")[0].reason
    assert played.one(schema.EngineGone).engine == "fast-0"
    assert not played.ends("failed")


def test_an_engine_that_hangs_in_a_swap_is_found_by_the_limit_and_replaced() -> None:
    scene = Scene(scene_job(limits__swap_s=30.0, train__steps=4))

    async def hangs(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine is scene.engines["fast-0"][0]:
            await for_ever()

    scene.on_swap = hangs
    played = scene.play()
    assert played.finished
    assert not played.violations
    assert "no answer in 30 s" in played.one(schema.EngineDown).reason


def test_a_damaged_bucket_is_pushed_again_and_the_engine_loads_it() -> None:
    scene = Scene()
    damaged: list[str] = []

    async def once(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if not damaged:
            damaged.append(engine.spec.id)
            raise WeightError("bucket 0 is damaged")

    scene.on_swap = once
    played = scene.play()
    assert played.finished
    assert not played.of(schema.EngineDown)
    assert played.one(schema.WeightsDamaged).reason == "bucket 0 is damaged"
    assert scene.published.count(1) == 2


def test_weights_pushed_again_with_other_bits_are_loaded_by_their_own_manifest() -> None:
    """A trainer that was rebuilt on a GPU: the digests of the first push never match again."""
    scene = Scene()
    pushes: list[WeightVersion] = []
    publish = ScriptedTrainer.publish

    async def other_bits(trainer: ScriptedTrainer, version: WeightVersion) -> WeightManifest:
        manifest = await publish(trainer, version)
        pushes.append(version)
        digest = f"push {pushes.count(version)}"
        return replace(manifest, buckets=tuple(bucket._replace(digest=digest) for bucket in manifest.buckets))

    async def second_only(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if manifest.version == 1 and manifest.buckets[0].digest != "push 2" and engine.spec.id == "fast-0":
            raise WeightError("bucket 0 is damaged")

    scene.on_swap = second_only
    with mock.patch.object(ScriptedTrainer, "publish", other_bits):
        played = scene.play()
    assert played.finished
    assert not played.of(schema.EngineDown)
    assert len(played.of(schema.WeightsDamaged)) == 1


def test_weights_that_stay_damaged_cost_the_engine_after_so_many_repairs() -> None:
    scene = Scene(scene_job(limits__engine_restarts=1))

    async def always(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine.spec.id == "fast-0":
            raise WeightError("bucket 0 is damaged")

    scene.on_swap = always
    played = scene.play()
    assert played.finished
    assert len(played.of(schema.WeightsDamaged)) == 4 + 4
    assert played.one(schema.EngineGone).engine == "fast-0"


def test_when_every_engine_is_gone_the_job_stops_and_says_so() -> None:
    scene = Scene(scene_job(limits__engine_restarts=1))

    async def no_more(spec: EngineSpec, before: int) -> None:
        if before:
            raise RuntimeError("no GPU left")

    scene.on_start = no_more
    for name in ("fast-0", "fast-1"):
        scene.at(2.25, lambda name=name: kill(scene, name))  # type: ignore[misc]
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    assert "no engine is left: each was restarted 1 times" in str(played.error)


def test_a_request_that_waits_when_the_last_engine_goes_fails_with_that_reason() -> None:
    """The job ends at once; here one attempt is made to look before it does."""
    scene = Scene(scene_job(limits__engine_restarts=0))
    seen: list[str] = []

    async def dies(engine: ScriptedEngine, request: GenerateRequest) -> None:
        raise EngineError("gone")

    scene.on_generate = dies
    played = scene.play()
    assert isinstance(played.error, JobStopped)
    seen += [event.reason for event in played.ends("failed")]
    assert all("no engine is left" in reason for reason in seen)


def test_an_engine_that_does_not_start_at_all_stops_the_job() -> None:
    async def broken(spec: EngineSpec, before: int) -> None:
        raise RuntimeError("no driver")

    played = Scene(on_start=broken).play()
    assert "start: RuntimeError: no driver" in str(played.error)


def test_a_start_that_hangs_is_given_up_at_its_limit() -> None:
    async def hangs(spec: EngineSpec, before: int) -> None:
        if spec.id == "fast-1":
            await for_ever()

    played = Scene(scene_job(limits__start_s=40.0), on_start=hangs).play()
    assert "start: no answer in 40 s" in str(played.error)


def test_a_served_request_forgives_the_restarts_before_it() -> None:
    scene = Scene(scene_job(limits__engine_restarts=1, train__steps=9))
    for seconds in (3.25, 20.0, 40.0):
        scene.at(seconds, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished
    assert len(played.of(schema.EngineDown)) == 3
    assert not played.of(schema.EngineGone)


def test_another_pool_stands_in_only_while_the_own_one_is_down_and_the_reason_is_recorded() -> None:
    scene = Scene(scene_job(pools=TWO_POOLS, tasks=ON_FAST, train__steps=6))
    scene.at(2.25, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished
    assert not played.violations
    sends = played.of(schema.Send)
    elsewhere = [event for event in sends if event.pool == "other"]
    down, up = played.one(schema.EngineDown), played.one(schema.EngineUp)
    assert elsewhere
    assert all(down.n < event.n < up.n for event in elsewhere)
    assert {(event.why, event.fallback) for event in elsewhere} == {("fallback", "pool fast has no engine up")}
    assert all(not event.fallback for event in sends if event.pool == "fast")


def test_a_trajectory_stays_with_the_engine_that_has_its_cache() -> None:
    scene = Scene(turns=4)
    played = scene.play()
    engines: dict[str, set[str]] = {}
    for said in scene.said:
        engines.setdefault(said.request.session, set()).add(said.engine)
    assert all(len(names) == 1 for names in engines.values())
    assert {event.why for event in played.of(schema.Send) if not event.id.endswith("/0")} == {"session"}


def test_a_stage_that_fails_takes_that_engine_down_and_no_other() -> None:
    scene = Scene(scene_job(train__steps=4))
    hit: list[str] = []

    async def fails_once(engine: ScriptedEngine, version: WeightVersion) -> None:
        if not hit:
            hit.append(engine.spec.id)
            raise RuntimeError("cannot map memory")

    scene.on_stage = fails_once
    played = scene.play()
    assert played.finished
    assert "stage: RuntimeError: cannot map memory" in played.one(schema.EngineDown).reason


@pytest.mark.parametrize("pushed", [0, 2])
def test_an_engine_that_comes_back_stages_what_is_on_its_way(pushed: int) -> None:
    """And nothing before there is anything."""
    scene = Scene(scene_job(train__steps=4))

    def due(event: Event) -> bool:
        return (
            event.version == pushed if isinstance(event, schema.Push) else not pushed and isinstance(event, schema.Send)
        )

    scene.when(due, lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished, played.error
    _, successor = scene.engines["fast-0"]
    assert successor.staged[0] == max(1, pushed)


def test_a_stage_that_fails_while_an_engine_comes_back_costs_a_restart_and_not_the_job() -> None:
    scene = Scene(scene_job(train__steps=6))

    async def second_life_fails(engine: ScriptedEngine, version: WeightVersion) -> None:
        if len(scene.engines["fast-0"]) == 2 and engine is scene.engine("fast-0"):
            raise RuntimeError("cannot map memory")

    scene.on_stage = second_life_fails
    scene.when(lambda event: isinstance(event, schema.SwapEnd), lambda: kill(scene, "fast-0"))
    played = scene.play()
    assert played.finished, played.error


def test_a_stage_that_hangs_while_an_engine_comes_back_is_found_by_the_limit() -> None:
    scene = Scene(scene_job(train__steps=6, limits__swap_s=30.0, limits__progress_s=30.0))

    async def second_life_hangs(engine: ScriptedEngine, version: WeightVersion) -> None:
        if len(scene.engines["fast-0"]) == 2 and engine is scene.engine("fast-0"):
            await for_ever()

    scene.on_stage = second_life_hangs
    scene.when(lambda event: isinstance(event, schema.SwapEnd), lambda: kill(scene, "fast-0"))
    scene.step_s = 40.0
    played = scene.play()
    assert played.finished, played.error
    assert played.of(schema.EngineRetry) or len(played.of(schema.EngineDown)) > 1, (
        "nobody noticed that it never came back"
    )


def test_a_late_swap_report_of_a_replaced_engine_is_not_believed_of_its_successor() -> None:
    scene = Scene(scene_job(train__steps=4))
    first: list[ScriptedEngine] = []

    async def slow_first_life(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if engine is scene.engines["fast-0"][0] and not first:
            first.append(engine)
            assert scene.coordinator is not None
            scene.coordinator.lost("fast-0", "its process has ended")
            await asyncio.sleep(5.0)  # its report comes all the same, while its successor starts

    async def slow_second_life(engine: ScriptedEngine, version: WeightVersion) -> None:
        if engine is not scene.engines["fast-0"][0] and engine.spec.id == "fast-0":
            await asyncio.sleep(6.0)

    scene.on_swap = slow_first_life
    scene.on_stage = slow_second_life
    played = scene.play()
    assert played.finished, played.error
    assert first[0].swapped == [1], "the report came"
    successor = scene.engine("fast-0")
    assert successor is not first[0]
    assert 1 in successor.swapped, "it took the weights itself"
    assert successor.asked
    assert all(version >= 1 for _, version in successor.asked)
    assert not played.violations


def test_an_abort_that_hangs_on_a_lost_engine_leaves_its_replacement_alone() -> None:
    """A hung engine is replaced at the limit of its progress; an abort sent to it later runs into its own limit."""

    async def work() -> list[Event]:
        scene = Scene()
        events: list[Event] = []
        log = EventLog(asyncio.get_running_loop().time)
        log.read_by(events.append)
        limits = {"backoff_s": 1.0, "swap_s": 50.0, "start_s": 50.0, "progress_s": 40.0, "generate_s": 500.0}
        context = JobContext(scene_job(limits=limits), LogHandle(log))
        supervisor = context.supervisor
        spec = EngineSpec(id="e", pool="p", type="", hardware="h20", gpus=1)
        cluster = ScriptedCluster(scene)
        fleet = Fleet(context, cluster, {spec: await cluster.engine(spec)}, no_repair, lambda up, cause: None)
        supervisor.spawn(fleet.watch(), background=True)
        proxy = Proxy(context, fleet)
        scene.engine("e").hung = True
        first = supervisor.spawn(proxy.generate(request("first"), ["p"], None, -1))
        await asyncio.sleep(10.0)
        second = supervisor.spawn(proxy.generate(request("second"), ["p"], None, -1))
        await asyncio.sleep(10.0)
        second.cancel()
        await first
        await asyncio.sleep(100.0)
        await supervisor.close()
        return events

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        events = runner.run(work())
    assert [event.reason for event in events if isinstance(event, schema.EngineDown)] == [
        "asked for its progress: e: no answer in 40 s"
    ]


async def no_repair(version: WeightVersion) -> WeightManifest:
    raise AssertionError


def request(name: str) -> GenerateRequest:
    prompt = np.array([1, 2], dtype=np.int32)
    return GenerateRequest(
        id=name, session=name, domain="a", turn=0, prompt=(prompt,), prompt_tokens=2, sampling=Sampling(max_tokens=8)
    )


def test_an_engine_that_hangs_on_an_abort_is_found_by_the_limit() -> None:
    scene = Scene(scene_job(limits__progress_s=50.0, train__steps=14, rollout__spare_members=1))

    class Deaf(ScriptedEngine):
        async def abort(self, request_id: str) -> int:
            if request_id and self is scene.engines["fast-0"][0]:
                await for_ever()
            return await super().abort(request_id)

    async def slow_third(task: Task, trajectory: TrajectoryId) -> Env | None:
        if trajectory.member == 2:
            await asyncio.sleep(1.65)  # so that it is in the engine when its siblings are scored
        return None

    scene.on_open = slow_third
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.control.scene.ScriptedEngine", Deaf)
        played = scene.play()
    assert played.finished
    assert any("no answer in 50 s" in event.reason for event in played.of(schema.EngineDown, engine="fast-0"))


def test_one_push_repairs_a_version_for_all_engines_that_find_it_damaged() -> None:
    """Four at once; one more while it is pushed again, and a last one that began before and is told after."""
    pools = [{"name": "fast", "hardware": "h20", "engines": {"count": 6}}, {"name": "rooms", "slots": 64}]
    scene = Scene(scene_job(pools=pools))
    late = {"fast-4": 0.5 * PUSH_S, "fast-5": 4.0 * PUSH_S}

    async def damaged(engine: ScriptedEngine, manifest: WeightManifest) -> None:
        if manifest.version == 1 and len(scene.published) < 3 and scene.published.count(1) < 2:
            await asyncio.sleep(late.get(engine.spec.id, 0.0))
            raise WeightError("bucket 0 is damaged")

    scene.on_swap = damaged
    played = scene.play()
    assert played.finished
    assert not played.of(schema.EngineDown)
    assert len(played.of(schema.WeightsDamaged, version=1)) == 6
    assert scene.published.count(1) == 2, "the push, and one more for all of them"
