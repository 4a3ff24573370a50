"""What scoring came to: calls, tries, cold starts, and how well judges agree with themselves. A part of the summary's
fold, which reads the same events."""

from dataclasses import dataclass

from rollart.events import schema
from rollart.report import summary


@dataclass(slots=True)
class _Grades:
    """Of one judge."""

    graded: int = 0
    known: int = 0
    asked: int = 0
    """With several votes each."""
    spreads: float = 0.0
    variances: float = 0.0
    """Of the votes on each episode, summed."""
    means: float = 0.0
    squares: float = 0.0
    """Of these means."""

    def add(self, mean: float, spread: float | None, *, known: bool) -> None:
        self.graded += 1
        self.known += known
        if spread is None or known:
            return
        self.asked += 1
        self.spreads += spread
        self.variances += spread * spread
        self.means += mean
        self.squares += mean * mean

    def agreement(self, votes: int) -> float | None:
        """Krippendorff's alpha, for numbers: 1 - variance within an episode / variance over all votes."""
        if self.asked < 2:
            return None
        within = self.variances / self.asked
        whole = within + self.squares / self.asked - (self.means / self.asked) ** 2
        if whole <= 1e-12:  # every vote was the same: there is nothing to agree on
            return None
        count = self.asked * votes
        return 1.0 - within * votes / (votes - 1) / (whole * count / (count - 1))

    def row(self, votes: int) -> summary.Judge:
        several = votes > 1 and self.asked > 0
        agreement = self.agreement(votes) if several else None
        return summary.Judge(
            graded=self.graded,
            known=self.known,
            votes=votes,
            spread=round(self.spreads / self.asked, 4) if several else None,
            agreement=round(agreement, 4) if agreement is not None else None,
        )


class RewardFold:
    """Calls of reward functions and judges."""

    def __init__(self) -> None:
        self._scores = self._failed = self._made = self._retries = self._cold_starts = 0
        self._given_up = self._kept = self._outages = self._local = 0
        self._seconds = self._cold_start_s = self._outage_s = 0.0
        self._facts: dict[str, dict[str, schema.RewardFacts]] = {}
        self._judges: dict[str, tuple[_Grades, int]] = {}
        """By where they stand in the job; with their votes."""

    def job(self, job: schema.Run) -> None:
        self._facts = {"": {"": job.reward}, **job.task_rewards}

    def scored(self, event: schema.Reward, task: str) -> None:
        for call in event.calls or (event,):
            self._scores += 1
            self._local += call.local
            self._made += call.made
            self._retries += call.tries - 1
            self._seconds += call.busy_s or call.s - call.cold_s
            self._cold_starts += call.cold_s > 0
            self._cold_start_s += call.cold_s
        if not event.calls:
            self._graded("rewards", self._facts[""][""], event.value, event.parts.get("spread"), event.made)
            return
        for (name, facts), call in zip(self._facts.get(task, {}).items(), event.calls, strict=False):
            mean, spread = event.parts[name] / facts.weight, event.parts.get(f"{name}/spread")
            self._graded(f"{task}/{name}", facts, mean, spread, call.made)

    def _graded(self, place: str, facts: schema.RewardFacts, mean: float, spread: float | None, made: int) -> None:
        if facts.type == "judge":
            grades, _ = self._judges.setdefault(place, (_Grades(), facts.votes))
            grades.add(mean, spread, known=not made)

    def failed(self, event: schema.RewardFailed) -> None:
        self._failed += 1
        self._made += event.made

    def given_up(self, event: schema.RewardGivenUp) -> None:
        self._given_up += 1
        self._kept += event.kept

    def outage(self) -> None:
        self._outages += 1

    def back(self, event: schema.RewardBack) -> None:
        self._outage_s += event.s

    def row(self, job: schema.Run | None, seconds: float) -> summary.Rewards:
        workers = sum(facts.workers or 0 for own in self._facts.values() for facts in own.values())
        return summary.Rewards(
            type=job.rewards if job else None,
            calls=self._scores,
            failed=self._failed,
            retries=self._retries,
            given_up=self._given_up,
            dead_letters=self._kept,
            outages=self._outages,
            outage_s=round(self._outage_s, 3),
            local=self._local,
            made=self._made,
            mean_s=round(self._seconds / self._scores, 6) if self._scores else 0.0,
            cold_starts=self._cold_starts,
            cold_start_s=round(self._cold_start_s, 3),
            utilisation=round(self._seconds / (seconds * workers), 4) if workers else None,
            judges={place: grades.row(votes) for place, (grades, votes) in self._judges.items()},
        )
