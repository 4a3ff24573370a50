"""Segments put together: ids that differ, spans that add up, log-probabilities that are none above 0."""

import numpy as np
import pytest

from rollart.engines.embedded.segments import EngineSeconds, RequestProgress, segment_seed
from rollart.types import Finish, GenerateRequest, Sampling, Span


def call() -> RequestProgress:
    prompt = np.array([1, 2], dtype=np.int32)
    request = GenerateRequest(
        id="g1.0.0/3", session="g1.0.0", domain="a", turn=3, prompt=(prompt,), prompt_tokens=2, sampling=Sampling()
    )
    return RequestProgress(request=request, prompt=[1, 2])


def test_each_segment_has_an_id_and_random_numbers_of_its_own() -> None:
    one = call()
    ids = [one.next_id() for _ in range(3)]
    assert ids[0] == one.request.id, "a request that no swap cuts draws by its own id"
    assert len(set(ids)) == 3
    assert one.segment_id == ids[-1]
    assert len({segment_seed(7, name) for name in ids}) == 3
    assert segment_seed(7, ids[0]) != segment_seed(8, ids[0])


def test_a_certain_token_that_the_server_rounded_up_is_certain() -> None:
    one = call()
    one.tokens, one.logprobs = [5, 6], [1e-5, -0.5]
    one.close_span(4)
    assert one.completion(Finish.STOP, "fast-0").logprobs.tolist() == [0.0, -0.5]


def test_spans_of_one_version_are_one_and_empty_ones_are_none() -> None:
    one = call()
    one.close_span(3)
    for version, tokens in ((3, [1]), (3, [2, 3]), (4, [4]), (4, [])):
        one.tokens += tokens
        one.close_span(version)
    assert one.spans == [Span(3, 3), Span(4, 1)]


def test_engine_seconds_are_divided_among_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rollart.engines.embedded.segments.time.perf_counter", lambda: now[0])
    share = EngineSeconds()
    first = share.enter()
    now[0] = 1.0
    second = share.enter()
    now[0] = 3.0
    assert share.leave(second) == 1.0
    now[0] = 4.0
    assert share.leave(first) == 3.0
    now[0] = 10.0
    third = share.enter()
    now[0] = 11.0
    assert share.leave(third) == 1.0, "nobody is charged for the time that nobody was there"


def sampled(progress: RequestProgress, number: int) -> None:
    progress.tokens += [9] * number
    progress.logprobs += [-1.0] * number


def test_a_segment_that_goes_on_over_swaps_has_a_span_for_each_version() -> None:
    progress = call()
    progress.next_id()
    sampled(progress, 3)
    progress.close_span(1)
    progress.next_id()
    sampled(progress, 2)
    progress.turn_at(4, 2)  # two more are on their way
    progress.turn_at(4, 3)  # nothing was sampled between these two
    sampled(progress, 7)
    progress.close_span(1)
    assert progress.spans == [Span(1, 3 + 4), Span(3, 5)]
    assert progress.unspanned == 0
    progress.next_id()
    progress.turn_at(6, 4)  # it ends before that
    sampled(progress, 2)
    progress.close_span(3)
    assert progress.spans == [Span(1, 7), Span(3, 7)]


def test_what_was_sampled_under_a_version_is_taken_back() -> None:
    progress = call()
    progress.next_id()
    sampled(progress, 5)
    progress.turn_at(3, 2)
    progress.close_span(1)
    progress.take_back(3)
    assert progress.spans == [Span(1, 3), Span(2, 2)]
    progress.take_back(2)
    assert progress.spans == [Span(1, 3)]
    assert len(progress.tokens) == len(progress.logprobs) == 3
