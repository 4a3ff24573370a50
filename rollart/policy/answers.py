"""Whether an engine's answer can be believed, and whether an engine that gave several that cannot is broken.

Asked by the proxy of every answer, so it costs two passes over the log-probabilities and no more.
"""

import math

from rollart.types import Completion, GenerateRequest

ROUNDING = 1e-3
"""How far above 0 a log-probability may be: a certain token, as the engine rounded it."""
MAX_REFUSED = 8
"""Refused answers in a row after which an engine counts as broken."""


def wrong_with(request: GenerateRequest, completion: Completion) -> str:
    """What is wrong with an answer; empty where nothing is."""
    total = 0
    version = request.min_version
    for span in completion.spans:
        total += span.length
        if span.length < 0:
            return f"a span of {span.length} tokens"
        if span.version < version:
            return f"sampled under version {span.version} after {version}"
        version = span.version
    logprobs = completion.logprobs
    if total != len(completion.tokens) or total != len(logprobs):
        return (
            f"returned {len(completion.tokens)} tokens, {len(logprobs)} log-probabilities and spans for {total}; "
            "they must be equal"
        )
    if total == 0:
        return "returned no token"
    # Not `max` and `min`, which take three times as long on a short answer. NaN is found first by both.
    highest, lowest = logprobs.item(logprobs.argmax()), logprobs.item(logprobs.argmin())
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        return "returned a log-probability that is not a finite number"
    if highest > ROUNDING:
        return f"returned a log-probability of {highest:.3g}, above 0"
    return ""


def engine_is_broken(refused_in_a_row: int) -> bool:
    """One bad answer is a request's misfortune; nothing but bad ones is the engine's."""
    return refused_in_a_row >= MAX_REFUSED
