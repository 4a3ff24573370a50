"""What an engine's step costs: a linear model by least relative error.

One step takes `step_s` + `sequence_s` for each sequence in it + `kv_token_s` for each cached token of these +
`prefill_token_s` for each prompt token computed in it. A step with prompts takes `prompt_step_s` more, or at least
`launch_s`, whichever explains the steps better: on a GPU a step without prompts is one graph, and the kernels of any
other are started one by one, so that more prompt tokens cost nothing until the device has more to do than the host. A
call takes as many steps as it has tokens, and `call_s` on the way. An engine that says what its steps had in them is
taken at its word: a row for each report, and `call_s` is what calls take beyond their steps. Of others it is known when
calls were sent and answered, and so which were in the engine together: a row for each call, and no cost of a step with
prompts by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollart.types import StepSums

Array = npt.NDArray[np.float64]

REWEIGHTED = 20
"""Least absolute deviations, as so many least squares in which a call counts the less the further off it is: calls that
met what no other did, such as the first use of a kernel, then move little."""
EXACT = 1e-3
"""Relative errors below this count alike."""
ALIKE = 0.25
"""Lengths that spread by less than this share of their mean tell nothing apart. Answers: the way to the engine from
the steps in it; then all of the time is in the steps. Prompt tokens computed while a call was there: what they cost
from what comes with every call; then one costs what one more sequence does, being one more row of the same products."""
AS_MANY = ALIKE / 2
"""Steps whose prompt tokens spread by less than this share of their mean do not tell what a token costs from what the
step does."""
MIN_ROWS = 8
"""Fewer calls, or reports, than this get no row of their own among the residuals."""
WIDER = 4.0
"""Contexts are put together that differ by less than this factor; batches, by less than two."""
MIN_REPORTS = 24
"""Reports of a pool's engines from which on these are believed."""
LAUNCHES = 12
"""So many values are tried for `launch_s`, of those that steps with prompts took."""
CLEARLY = 0.9
"""`launch_s` is taken instead of `prompt_step_s` where what is left unexplained with it is less than this share."""
PASSES = 6
"""Who was in a call's steps depends on how long steps take, and the other way round; so often both are found anew."""


@dataclass(slots=True, kw_only=True)
class GenerateCall:
    """One generate call as the coordinator saw it."""

    engine: str
    pool: str
    sent_s: float
    said_s: float = 0.0
    tokens: int = 0
    prefill: int = 0
    prompt: int = 0
    whole: bool = False
    """Answered in full, under one version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How far predictions are from what was measured, of things that are alike."""

    what: str
    count: int
    measured_s: float
    """Of a call: for one token of its answer, the way to the engine included; median."""
    predicted_s: float
    error: float
    """Median of |predicted - measured| / measured."""
    worst: float
    """The same of the tenth that is furthest off: where that begins."""
    bias: float
    """Median of (predicted - measured) / measured."""

    @classmethod
    def of(cls, what: str, predicted: Array, measured: Array, units: Array | float = 1.0) -> "Residual":
        """Seconds, those shown for one unit."""
        off = (predicted - measured) / measured
        return cls(
            what=what,
            count=len(off),
            measured_s=float(np.median(measured / units)),
            predicted_s=float(np.median(predicted / units)),
            error=float(np.median(np.abs(off))),
            worst=float(np.quantile(np.abs(off), 0.9)),
            bias=float(np.median(off)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    call_s: float
    step_s: float
    sequence_s: float
    kv_token_s: float
    prefill_token_s: float
    prompt_step_s: float = 0.0
    launch_s: float = 0.0
    calls: int
    error: float
    """Median of |predicted - measured| / measured, over the calls."""
    residuals: tuple[Residual, ...] = ()
    """Of all calls, by batch and context, and of those that are mostly prefill."""
    steps: tuple[Residual, ...] = ()
    """Of steps, where the engine said what was in them: all, those without prompts by batch and context, those with
    prompts by their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """What engines said of their steps, a row for each report and kind of step."""

    steps: Array
    batch: Array
    """Of one step, and so are the next ones."""
    cached: Array
    prompts: Array
    tokens: Array
    seconds: Array
    """Of all steps of the row."""

    @classmethod
    def of(cls, reports: Sequence[StepSums]) -> "_Reported":
        sums: Array = np.array(reports, dtype=np.float64)
        steps, sequences, cached, prompts, tokens, _, seconds = sums.T
        return cls(
            steps=steps,
            batch=sequences / steps,
            cached=cached / steps,
            prompts=prompts / steps,
            tokens=tokens / steps,
            seconds=seconds,
        )

    @property
    def prompted(self) -> npt.NDArray[np.bool_]:
        return self.tokens > 0

    def rows(self) -> Array:
        """[steps, sequences that a token is sampled for, cached tokens, prompt tokens, steps with prompts]"""
        columns = [np.ones(len(self.steps)), self.batch + self.prompts, self.cached, self.tokens]
        return np.stack([*columns, np.where(self.prompted, 1.0, 0.0)], axis=1) * self.steps[:, None]

    def predicted(self, weights: Array, launch_s: float) -> Array:
        seconds = self.rows() @ weights
        return np.where(self.prompted, np.maximum(seconds, launch_s * self.steps), seconds)

    def unexplained(self, weights: Array, launch_s: float) -> float:
        """Relative errors, each counted by its steps."""
        off = np.abs(self.predicted(weights, launch_s) - self.seconds) / self.seconds
        return float(np.sum(self.steps * off))


def fit_steps(calls: Sequence[GenerateCall], reports: Sequence[StepSums] = ()) -> StepCosts:
    """`calls` of engines of one kind, and what these said of their steps, each of one kind of steps."""
    if len(reports) >= MIN_REPORTS:
        return _fit_reports(calls, reports)
    engines = [_Timeline([c for c in calls if c.engine == name]) for name in dict.fromkeys(c.engine for c in calls)]
    seconds = np.concatenate([engine.seconds for engine in engines])
    weights = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    for _ in range(PASSES):
        rows = np.concatenate([engine.rows(weights) for engine in engines])
        met = rows.copy()
        if _alike(rows[:, 1]):
            rows[:, 0] = 0.0
        prompts_alike = _alike(rows[:, 4])
        if prompts_alike:
            rows[:, 2] += rows[:, 4]
            rows[:, 4] = 0.0
        weights = _least_deviating(rows, seconds)
        if weights[1] + weights[2] <= 0:  # too few calls to tell: all of a call's time is in its steps
            weights = np.array([0.0, float(np.sum(seconds) / np.sum(rows[:, 1])), 0.0, 0.0, 0.0])
    relative = np.abs(rows @ weights - seconds) / seconds
    call_s, step_s, sequence_s, kv_token_s, prefill_token_s = (float(weight) for weight in weights)
    return StepCosts(
        call_s=call_s,
        step_s=step_s,
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=sequence_s if prompts_alike else prefill_token_s,
        calls=len(seconds),
        error=float(np.median(relative)),
        residuals=tuple(_residuals(met, rows * weights, seconds)),
    )


def fit_reports(reports: Sequence[StepSums]) -> StepCosts:
    """What steps cost by what engines said of them alone, each report of one kind of steps."""
    said = _Reported.of(reports)
    weights, launch_s = _step_weights(said)
    step_s, sequence_s, kv_token_s, prefill_token_s, prompt_step_s = (float(weight) for weight in weights)
    steps = tuple(_step_residuals(said, said.predicted(weights, launch_s)))
    return StepCosts(
        call_s=0.0,
        step_s=step_s,
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        prompt_step_s=prompt_step_s,
        launch_s=launch_s,
        calls=0,
        error=steps[0].error,
        steps=steps,
    )


def _fit_reports(calls: Sequence[GenerateCall], reports: Sequence[StepSums]) -> StepCosts:
    found = fit_reports(reports)
    beyond_s = _beyond(_Reported.of(reports), found)
    engines = [_Timeline([c for c in calls if c.engine == name]) for name in dict.fromkeys(c.engine for c in calls)]
    taken = np.concatenate([engine.seconds for engine in engines])
    costs = np.array([0.0, found.step_s, found.sequence_s, found.kv_token_s, found.prefill_token_s])
    met = np.concatenate([engine.rows(costs) for engine in engines])
    shared = np.concatenate([engine.prompt_steps(costs, beyond_s) for engine in engines])
    parts = met * costs
    parts[:, 4] = shared * beyond_s if found.launch_s else parts[:, 4] + shared * found.prompt_step_s
    parts[:, 0] = call_s = max(0.0, float(np.median(taken - parts.sum(axis=1))))
    return replace(
        found,
        call_s=call_s,
        calls=len(taken),
        error=float(np.median(np.abs(parts.sum(axis=1) - taken) / taken)),
        residuals=tuple(_residuals(met, parts, taken)),
    )


def _step_weights(said: _Reported) -> tuple[Array, float]:
    """What explains the steps best: costs, and `launch_s`."""
    rows = said.rows()
    alike = _alike(said.tokens[said.prompted], AS_MANY)
    if alike:  # then a step with prompts costs what its tokens do: others will have fewer
        rows[:, 4] = 0.0
    best = _least_deviating(rows, said.seconds, said.steps), 0.0
    if not said.prompted.any():
        return best
    least = CLEARLY * said.unexplained(*best)
    without = rows.copy()
    without[:, 4] = 0.0
    each_s = said.seconds / said.steps
    for share in np.linspace(0.0, 1.0, LAUNCHES):
        launch_s = float(np.quantile(each_s[said.prompted], share))
        waiting = said.prompted & (each_s <= (1 + ALIKE) * launch_s)
        for _ in range(PASSES):
            if waiting.all():
                break  # nothing tells what a step costs that does not wait
            if alike and (said.prompted & ~waiting).sum() < MIN_ROWS:
                break  # as many tokens take as long, which says nothing of launches
            weights = _least_deviating(without[~waiting], said.seconds[~waiting], said.steps[~waiting])
            if (left := said.unexplained(weights, launch_s)) < least:
                best, least = (weights, launch_s), left
            before, waiting = waiting, said.prompted & (without @ weights <= launch_s * said.steps)
            if (waiting == before).all():
                break
    return best


def _beyond(said: _Reported, found: StepCosts) -> float:
    """What a step with prompts takes beyond the sequences that decode in it, on average."""
    if not said.prompted.any():
        return 0.0
    weights = np.array([found.step_s, found.sequence_s, found.kv_token_s, found.prefill_token_s, found.prompt_step_s])
    decoding = (weights[0] + weights[1] * said.batch + weights[2] * said.cached) * said.steps
    beyond = said.predicted(weights, found.launch_s) - decoding
    return float(np.sum(beyond[said.prompted]) / np.sum(said.steps[said.prompted]))


def _step_residuals(said: _Reported, predicted: Array) -> Iterator[Residual]:
    def of(what: str, chosen: npt.NDArray[np.bool_]) -> Residual:
        steps = said.steps[chosen]
        row = Residual.of(what, predicted[chosen], said.seconds[chosen], steps)
        return replace(row, count=round(float(np.sum(steps))))

    yield of("all", np.ones(len(predicted), dtype=bool))
    plain, context = ~said.prompted, said.cached / np.maximum(said.batch, 1.0)
    for chosen in _bins(plain, said.batch, context):
        held, long = float(np.median(said.batch[chosen])), float(np.median(context[chosen]))
        yield of(f"no prompts, batch {held:.0f}, context {long:.0f}", chosen)
    for chosen in _bins(said.prompted, said.tokens, np.ones(len(predicted))):
        held, long = float(np.median(said.tokens[chosen])), float(np.median(said.batch[chosen]))
        yield of(f"{held:.0f} tokens of prompts, batch {long:.0f}", chosen)


def _bins(among: npt.NDArray[np.bool_], batch: Array, context: Array) -> Iterator[npt.NDArray[np.bool_]]:
    """Those that are alike, by less than twice the batch and `WIDER` times the context; a few alone are left out."""
    batches = np.floor(np.log2(np.maximum(batch, 1.0)))
    contexts = np.floor(np.log(np.maximum(context, 1.0)) / np.log(WIDER))
    for low in np.unique(batches[among]):
        for short in np.unique(contexts[among & (batches == low)]):
            chosen = among & (batches == low) & (contexts == short)
            if chosen.sum() >= MIN_ROWS:
                yield chosen


def _residuals(met: Array, parts: Array, seconds: Array) -> Iterator[Residual]:
    """`met`: what each call had beside it. `parts`: its predicted seconds, by what they are for."""
    predicted, tokens = parts.sum(axis=1), met[:, 1]
    batch, cached = met[:, 2] / tokens, met[:, 3] / tokens
    context = cached / batch

    def of(what: str, chosen: npt.NDArray[np.bool_]) -> Residual:
        return Residual.of(what, predicted[chosen], seconds[chosen], tokens[chosen])

    yield of("all", np.ones(len(seconds), dtype=bool))
    of_prompts = parts[:, 4] > 0.5 * predicted
    if of_prompts.sum() >= MIN_ROWS:
        yield of("mostly prefill", of_prompts)
    for chosen in _bins(np.ones(len(seconds), dtype=bool), batch, context):
        held, long = float(np.median(batch[chosen])), float(np.median(context[chosen]))
        yield of(f"batch {held:.0f}, context {long:.0f}", chosen)


class _Timeline:
    """Who was in one engine when, between any two arrivals or answers."""

    def __init__(self, calls: Sequence[GenerateCall]) -> None:
        sent = np.array([call.sent_s for call in calls])
        said = np.array([call.said_s for call in calls])
        context = np.array([call.prompt + call.tokens / 2 for call in calls], dtype=np.float64)
        times = np.unique(np.concatenate([sent, said]))
        came, went = np.searchsorted(times, sent), np.searchsorted(times, said)
        self._lengths_s = np.diff(times, append=times[-1])
        self._sent = np.sort(sent)
        self._number = _running(came, went, np.ones(len(calls)), len(times))
        self._cached = _running(came, went, context, len(times))
        prefill: Array = np.array([call.prefill for call in calls], dtype=np.float64)
        prefilled = _sums(np.bincount(came, prefill, len(times)).astype(np.float64))
        counted = np.array([call.whole and call.said_s > call.sent_s for call in calls], dtype=bool)
        self._from, self._to = came[counted], went[counted]
        self._times = times
        self._tokens = np.array([call.tokens for call in calls], dtype=np.float64)[counted]
        self._prefill = prefilled[self._to] - prefilled[self._from]
        self.seconds: Array = (said - sent)[counted]

    def rows(self, weights: Array) -> Array:
        """For each whole call: [1, tokens, tokens x sequences beside it, tokens x their cached tokens, prompt tokens
        computed while it was there]. What is beside it is averaged over steps, by what they cost as known so far."""
        _, step_s, sequence_s, kv_token_s, _ = weights
        steps = self._lengths_s / (step_s + sequence_s * self._number + kv_token_s * self._cached)
        taken, beside, cached = (
            total[self._to] - total[self._from]
            for total in (_sums(steps), _sums(steps * self._number), _sums(steps * self._cached))
        )
        ones = np.ones(len(taken))
        columns = [ones, self._tokens, self._tokens * beside / taken, self._tokens * cached / taken, self._prefill]
        return np.stack(columns, axis=1)

    def prompt_steps(self, weights: Array, beyond_s: float) -> Array:
        """For each whole call: steps in which prompts are computed while it is there. What comes while one is under way
        is computed in the next, all of it. `beyond_s`: that such a step takes, beside those who decode."""
        _, step_s, sequence_s, kv_token_s, _ = weights
        lasts_s = step_s + sequence_s * self._number + kv_token_s * self._cached + beyond_s
        begun: list[float] = []
        free_s = -np.inf
        for sent_s, at in zip(self._sent, np.searchsorted(self._times, self._sent), strict=True):
            if sent_s > free_s or not begun:
                begun.append(sent_s)
                free_s = sent_s + lasts_s[at]
            elif begun[-1] <= sent_s:
                begun.append(free_s)
                free_s += lasts_s[at]
        starts = np.array(begun)
        first, last = (np.searchsorted(starts, self._times[ends]) for ends in (self._from, self._to))
        return np.asarray(last - first, dtype=np.float64)


def _alike(lengths: Array, share: float = ALIKE) -> bool:
    return len(lengths) == 0 or float(lengths.std()) < share * float(lengths.mean())


def _running(came: npt.NDArray[np.intp], went: npt.NDArray[np.intp], amounts: Array, count: int) -> Array:
    """The sum of the amounts of those present, from each time to the next; at least 1 where nobody is there."""
    total: Array = np.cumsum(np.bincount(came, amounts, count) - np.bincount(went, amounts, count))
    return np.maximum(total, 1.0)


def _sums(values: Array) -> Array:
    """The sum of all values before each."""
    return np.cumsum(values) - values


def _least_deviating(rows: Array, seconds: Array, shares: Array | float = 1.0) -> Array:
    """No negative weight, and the least sum of relative errors, each counted by its share."""
    scale = np.sqrt(shares) / seconds
    counts = scale
    for _ in range(REWEIGHTED):
        weights = _not_negative(rows * counts[:, None], seconds * counts)
        off = np.abs(rows @ weights - seconds) / seconds
        counts = scale / np.sqrt(np.maximum(off, EXACT))
    return weights


def _not_negative(rows: Array, seconds: Array) -> Array:
    """Least squares with no negative weight: the most negative one is left out until there is none."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    left = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    weights = np.zeros(rows.shape[1])
    while left:
        found = np.linalg.lstsq(rows[:, left] / scale[left], seconds, rcond=None)[0]
        if (found >= 0).all():
            weights[left] = found / scale[left]
            break
        del left[int(np.argmin(found))]
    return weights
