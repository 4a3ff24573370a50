"""The embedded engine against a plain transformers forward: across turns, evictions, preemptions and swaps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rollart import types
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.kv import KvCache
from rollart.errors import EngineError, RequestError, WeightError
from rollart.model.network import named_weights
from rollart.types import Completion, Finish, GenerateRequest, Span, Tokens
from tests.engines.reference import EOS, KINDS, NO_EOS, check, drain, make_engine, plain_model, random_tokens, request

Make = Callable[..., EmbeddedEngine]


@pytest.fixture(params=["slabs", "pages"])
def make(request: pytest.FixtureRequest) -> Make:
    """An engine with either back end."""
    return partial(make_engine, paged=request.param == "pages")


def play(
    engine: EmbeddedEngine, sessions: int, turns: int, delta: int, answer: int, **sampling: Any
) -> list[tuple[GenerateRequest, Completion]]:
    """All sessions take their turns side by side, each prompt the whole history and `delta` new tokens."""
    rng = np.random.default_rng(0)
    history: list[Tokens] = [np.zeros(0, dtype=np.int32) for _ in range(sessions)]
    played = []
    for turn in range(turns):
        asked = []
        for session in range(sessions):
            prompt = np.concatenate([history[session], random_tokens(rng, int(rng.integers(1, delta + 1)))])
            limit = int(rng.integers(1, answer + 1))
            asked.append(request(prompt, f"s{session}/{turn}", max_tokens=limit, **sampling))
            engine.add(asked[-1])
        done = drain(engine)
        for session, call in enumerate(asked):
            history[session] = np.concatenate([call.tokens(), done[call.id].tokens])
            played.append((call, done[call.id]))
    return played


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_agrees_with_transformers_across_turns(make: Make, kind: str, temperature: float) -> None:
    plain = plain_model(kind)
    engine = make(plain, step_tokens=48)
    for asked, got in play(engine, sessions=6, turns=4, delta=40, answer=30, temperature=temperature):
        check(asked, got, {0: plain})
        assert got.finish in (Finish.STOP, Finish.LENGTH)
        assert (got.tokens[-1] == EOS) == (got.finish is Finish.STOP)
        if asked.turn:
            # All of the history but its last sampled token was in the cache.
            assert got.cached_tokens > 0
            assert got.prefill_tokens == asked.prompt_tokens - got.cached_tokens <= 41
        else:
            assert got.cached_tokens == 0
    assert engine.kv.num_parked == 6
    assert engine.num_preempted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_after_evictions_and_preemptions(make: Make, kind: str) -> None:
    plain = plain_model(kind)
    engine = make(plain, kv_tokens=500, step_tokens=64)
    played = play(engine, sessions=6, turns=4, delta=40, answer=40, temperature=1.0)
    for asked, got in played:
        check(asked, got, {0: plain})
    later = [got for asked, got in played if asked.turn]
    assert any(got.cached_tokens == 0 for got in later), "nothing was evicted"
    assert any(got.cached_tokens > 0 for got in later), "everything was evicted"
    assert engine.num_preempted > 0


def test_the_oldest_request_is_never_preempted(make: Make) -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    engine = make(plain, kv_tokens=600, eos=NO_EOS)
    asked = [request(random_tokens(rng, 90), f"s{i}/0", max_tokens=200, last=True) for i in range(4)]
    for call in asked:
        engine.add(call)
    ended: list[tuple[str, Completion]] = []
    while engine.busy:
        ended += engine.step()
    assert engine.num_preempted > 0
    assert ended[0][0] == asked[0].id
    # Moving into a slot that fills the cache it computes itself again, once; nobody else makes it.
    assert ended[0][1].prefill_tokens <= 90 + 257
    for call, (name, got) in zip(asked, ended, strict=True):
        assert call.id == name
        check(call, got, {0: plain})


def test_a_lone_request_may_use_the_whole_cache(make: Make) -> None:
    plain = plain_model("qwen3")
    engine = make(plain, kv_tokens=304, eos=NO_EOS)
    asked = request(random_tokens(np.random.default_rng(0), 100), max_tokens=1000, temperature=1.0, seed=4)
    engine.add(asked)
    got = drain(engine)[asked.id]
    check(asked, got, {0: plain})
    assert got.finish is Finish.LENGTH
    assert len(got.tokens) == 204


def test_a_rewritten_history_uses_only_what_is_still_true(make: Make) -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    engine = make(plain)
    first = request(random_tokens(rng, 50), "s/0", max_tokens=5)
    engine.add(first)
    drain(engine)
    rewritten = first.tokens().copy()
    rewritten[30] = EOS
    for turn, prompt, cached in [(1, rewritten, 30), (2, rewritten[:20], 19), (3, random_tokens(rng, 8)[::-1], 0)]:
        asked = request(prompt, f"s/{turn}", max_tokens=5)
        engine.add(asked)
        got = drain(engine)[asked.id]
        check(asked, got, {0: plain})
        assert got.cached_tokens == cached


def test_a_group_computes_its_prompt_once(make: Make) -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    engine = make(plain, step_tokens=64)
    prompt = random_tokens(rng, 100)
    group = [request(prompt, f"g{member}/0", max_tokens=6, temperature=1.0) for member in range(8)]
    for asked in group:
        engine.add(asked)
    done = drain(engine)
    for asked in group:
        check(asked, done[asked.id], {0: plain})
    assert sorted(done[asked.id].cached_tokens for asked in group) == [0] + [99] * 7
    # Other instructions, the same beginning; an idle session has it too, now that nobody is in flight.
    other = request(np.concatenate([prompt[:50], random_tokens(rng, 30)]), "other/0", max_tokens=6)
    engine.add(other)
    done = drain(engine)
    check(other, done[other.id], {0: plain})
    assert 50 <= done[other.id].cached_tokens < 80


def test_a_group_in_flight_is_rebuilt_once_after_a_swap(make: Make) -> None:
    old, new, rng = plain_model("qwen3", 0), plain_model("qwen3", 1), np.random.default_rng(0)
    engine = make(old, eos=NO_EOS)
    prompt = random_tokens(rng, 100)
    group = [request(prompt, f"g{member}/0", max_tokens=12, temperature=1.0) for member in range(8)]
    for asked in group:
        engine.add(asked)
    for _ in range(6):
        engine.step()
    before = engine.stats.computed_tokens
    engine.swap(1, named_weights(new))
    done = drain(engine)
    for asked in group:
        check(asked, done[asked.id], {0: old, 1: new})
    assert engine.stats.computed_tokens - before < 100 + 8 * 13


def test_what_was_kept_over_a_swap_is_not_shared(make: Make) -> None:
    old, new, rng = plain_model("qwen3", 0), plain_model("qwen3", 1), np.random.default_rng(0)
    engine = make(old, keep_kv=True, eos=NO_EOS)
    prompt = random_tokens(rng, 100)
    engine.add(request(prompt, "before/0", max_tokens=5, temperature=1.0))
    engine.step()
    engine.swap(1, named_weights(new))
    for session, cached in [("while", 0), ("since", 99)]:
        asked = request(prompt, f"{session}/0", max_tokens=5, temperature=1.0)
        engine.add(asked)
        got = drain(engine)[asked.id]
        check(asked, got, {1: new})
        assert got.cached_tokens == cached
    # Idle, the first still has keys of the old weights.
    assert engine.kv.num_parked == 3


def test_nobody_waits_for_an_answer_that_begins_like_its_prompt(make: Make) -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    prompt = random_tokens(rng, 20)
    engine = make(plain, draft_tokens=0, eos=NO_EOS)
    engine.add(request(prompt, "ahead/0", last=True, max_tokens=40, temperature=0.0))
    answer = drain(engine)["ahead/0"].tokens
    engine = make(plain, draft_tokens=0, eos=NO_EOS)
    first = request(prompt, "first/0", max_tokens=40, temperature=0.0)
    second = request(np.concatenate([prompt, answer]), "second/1", max_tokens=2, temperature=0.0)
    engine.add(first)
    for _ in range(5):
        engine.step()
    engine.add(second)
    ended = [name for _ in range(4) for name, _ in engine.step()]
    assert ended == [second.id], "it is done long before the first, whose answer is the rest of its prompt"


def test_a_prompt_that_is_prefilled_in_parts_is_computed_once(make: Make) -> None:
    engine = make(plain_model("qwen3"), step_tokens=64)
    engine.add(request(random_tokens(np.random.default_rng(0), 200), max_tokens=1, last=True))
    drain(engine)
    assert (engine.stats.computed_tokens, engine.stats.steps) == (200, 4)


def test_there_are_as_many_slots_as_requests_that_wait_for_one() -> None:
    rng = np.random.default_rng(0)
    engine = make_engine(plain_model("qwen3"), kv_tokens=1 << 14)
    for number in range(20):
        engine.add(request(random_tokens(rng, 100), f"s{number}/0", max_tokens=5, last=True))
    engine.step()
    assert engine.num_running == 20
    assert isinstance(engine.kv, KvCache)
    assert [slab.num_tokens for slab in engine.kv.slabs] == [20 * 128], "in one block"


def test_the_last_turn_leaves_nothing_behind(make: Make) -> None:
    engine = make(plain_model("qwen3"))
    engine.add(request([9, 10, 11], max_tokens=3, last=True))
    drain(engine)
    assert engine.kv.num_parked == 0
    assert engine.num_running == 0


def test_long_prompts_are_prefilled_beside_decoding(make: Make) -> None:
    plain, rng = plain_model("llama"), np.random.default_rng(0)
    engine = make(plain, step_tokens=32, eos=NO_EOS)
    quick = request(random_tokens(rng, 4), "quick/0", max_tokens=12, temperature=0.0)
    slow = request(random_tokens(rng, 200), "slow/0", max_tokens=4, temperature=0.0)
    engine.add(quick)
    engine.step()
    engine.add(slow)
    done: dict[str, Completion] = {}
    while engine.busy:
        done |= dict(engine.step())
        if quick.id not in done:
            assert engine.stats.computed_tokens <= 32 * engine.stats.steps
    # One alone; 200 tokens in chunks of 31 while the other decodes: 7 steps, the last of which samples.
    assert engine.stats.steps == 1 + 11
    for asked in (quick, slow):
        check(asked, done[asked.id], {0: plain})


@pytest.mark.parametrize("kind", KINDS)
def test_each_span_of_a_swap_agrees_with_its_own_weights(make: Make, kind: str) -> None:
    models = {version: plain_model(kind, seed=version) for version in range(3)}
    engine = make(models[0], step_tokens=64, eos=NO_EOS)
    rng = np.random.default_rng(1)
    idle = request(random_tokens(rng, 20), "idle/0", max_tokens=2)
    engine.add(idle)
    before = drain(engine)
    asked = [request(random_tokens(rng, 30), f"s{i}/0", max_tokens=10 + 4 * i, temperature=i % 2) for i in range(5)]
    for call in asked:
        engine.add(call)
    done: dict[str, Completion] = {}
    for version in (1, 2):
        for _ in range(6):
            done |= dict(engine.step())
        assert engine.kv.num_parked == version
        report = engine.swap(version, named_weights(models[version]))
        assert engine.kv.num_parked == 0
        assert report.version == engine.version == version
        assert report.rebuilt_tokens > 100
        engine.add(request([*range(10, 20)], f"new/{version}", max_tokens=1))
    done |= drain(engine)
    for call in asked:
        check(call, done[call.id], models)
    assert [version for version, _ in done["s4/0"].spans] == [0, 1, 2]
    assert done["new/1"].spans == (Span(1, 1),) or done["new/1"].spans == (Span(2, 1),)
    again = request(np.concatenate([idle.tokens(), before[idle.id].tokens]), "idle/1", max_tokens=5)
    engine.add(again)
    got = drain(engine)[again.id]
    assert got.cached_tokens == 0
    check(again, got, models)


def test_keep_kv_goes_on_with_the_old_cache(make: Make) -> None:
    old, new = plain_model("qwen3", seed=0), plain_model("qwen3", seed=1)
    engine = make(old, keep_kv=True, eos=NO_EOS)
    asked = request(random_tokens(np.random.default_rng(0), 20), max_tokens=10, temperature=0.0)
    engine.add(asked)
    for _ in range(4):
        engine.step()
    assert engine.swap(1, named_weights(new)).rebuilt_tokens == 0
    got = drain(engine)[asked.id]
    assert got.spans == (Span(0, 4), Span(1, 6))
    sequence = torch.from_numpy(np.concatenate([asked.tokens(), got.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        cache = DynamicCache(config=old.config)
        old(input_ids=sequence[:, :23], past_key_values=cache, use_cache=True)
        logits = new(input_ids=sequence[:, 23:-1], past_key_values=cache, use_cache=True).logits[0]
    expected = logits.log_softmax(-1).gather(1, sequence[0, 24:, None])[:, 0]
    np.testing.assert_allclose(got.logprobs[4:], expected.numpy(), atol=1e-4)


def test_a_failed_swap_leaves_the_old_weights_serving(make: Make) -> None:
    plain = plain_model("qwen3")
    engine = make(plain)
    asked = request([*range(10, 30)], max_tokens=12)
    engine.add(asked)
    engine.step()
    weights = dict(named_weights(plain_model("qwen3", seed=1)))
    weights.pop("model.norm.weight")
    with pytest.raises(WeightError):
        engine.swap(1, weights)
    got = drain(engine)[asked.id]
    check(asked, got, {0: plain})
    assert {version for version, _ in got.spans} == {0} == {engine.version}


def test_abort_frees_the_slot_at_once(make: Make) -> None:
    plain, rng = plain_model("qwen3"), np.random.default_rng(0)
    engine = make(plain, max_batch=3, eos=NO_EOS)
    asked = [request(random_tokens(rng, 20), f"s{i}/0", max_tokens=12, temperature=1.0) for i in range(5)]
    for call in asked:
        engine.add(call)
    for _ in range(3):
        engine.step()
    engine.abort("s1/0")
    engine.abort("s4/0")
    engine.abort("never seen")
    assert engine.num_running == 2
    done = dict(engine.step())
    assert engine.num_running == 3, "the waiting request did not get the slot in the next step"
    assert {name: (c.finish, len(c.tokens)) for name, c in done.items()} == {
        "s1/0": (Finish.ABORT, 3),
        "s4/0": (Finish.ABORT, 0),
    }
    done |= drain(engine)
    for call in asked:
        check(call, done[call.id], {0: plain})
    engine.abort("s0/0")
    assert not engine.busy


def test_requests_of_one_session_may_overlap(make: Make) -> None:
    plain = plain_model("qwen3")
    engine = make(plain)
    asked = [request([*range(10, 30 + i)], f"s/{i}", max_tokens=5 + i, temperature=0.0) for i in range(3)]
    for call in asked:
        engine.add(call)
    done = drain(engine)
    for call in asked:
        check(call, done[call.id], {0: plain})
    assert engine.kv.num_parked == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (request([10] * 256), "256 tokens cannot fit"),
        (request([]), "0 tokens cannot fit"),
        (request([9, 10], min_version=3), "version 3"),
        (request([9, 10], max_tokens=0), "max_tokens=0"),
        (request([9, 10], temperature=-1.0), "temperature=-1.0"),
        (request([9, 10_000]), "valid token ids"),
    ],
)
def test_what_cannot_be_served_is_refused(make: Make, wrong: GenerateRequest, said: str) -> None:
    engine = make(plain_model("qwen3"), kv_tokens=256)
    # Another engine may have that version; no engine can serve the rest.
    with pytest.raises(EngineError if wrong.min_version else RequestError, match=said):
        engine.add(wrong)
    assert not engine.busy


def test_an_id_in_flight_is_refused(make: Make) -> None:
    engine = make(plain_model("qwen3"))
    engine.add(request([9, 10]))
    with pytest.raises(EngineError, match="already in flight"):
        engine.add(request([9, 10]))


def test_an_engine_counts_what_is_in_its_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token once: prompts where they are computed, answers where they are sampled."""
    monkeypatch.setattr(types, "REPORT_STEPS", 0.0)
    engine = make(plain_model("qwen3"), draft_tokens=0)
    played = [got for _, got in play(engine, sessions=3, turns=2, delta=20, answer=10)]
    last = max((got.work for got in played if got.work is not None), key=lambda work: sum(one.steps for one in work))
    assert sum(one.tokens for one in last) == sum(got.prefill_tokens for got in played)
    sampled = sum(one.sequences + one.prompts for one in last)
    one_too_many = len(played) if engine.backend.overlaps else 0
    assert 0 <= sampled - sum(len(got.tokens) for got in played) <= one_too_many
    assert sum(one.steps for one in last) == engine.stats.steps
    assert sum(one.seconds for one in last) == pytest.approx(engine.stats.step_s)
    assert last.decode.tokens == last.prefill.sequences == 0
    assert last.prefill.pairs > last.prefill.tokens
    assert last.decode.cached > last.decode.sequences


def test_time_is_shared_out(make: Make) -> None:
    engine = make(plain_model("qwen3"))
    played = play(engine, sessions=3, turns=2, delta=20, answer=10)
    assert sum(got.busy_s for _, got in played) == pytest.approx(engine.stats.step_s)
    assert engine.stats.sampled_tokens == sum(len(got.tokens) for _, got in played)
    assert engine.step() == []
