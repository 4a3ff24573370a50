"""Decides what each engine step runs: who is in the batch, how many tokens each takes, who gives way.

Every sequence with pending tokens takes some: those that decode take one each, what is left of the step's token budget
goes to prefill in order of arrival, and then to guesses at what comes next, where there are any. One whose beginning
an older sequence is computing in these very steps waits, and copies it then. When memory runs out the youngest
sequence is preempted and computed again later; the oldest always goes on, so every request ends.
It decides; the cache (`Memory`) does the copying, nothing here computes.
"""

from collections import deque

from rollart.engines.embedded.drafts import Drafts
from rollart.engines.embedded.memory import Memory
from rollart.engines.embedded.sequence import Sequence


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(
        self, kv: Memory, drafts: Drafts, *, max_batch: int, step_tokens: int, draft_tokens: int, guesses: int
    ) -> None:
        self._kv = kv
        self._drafts = drafts
        self._draft_tokens = draft_tokens
        self._guesses = guesses
        """The most in one step, of all sequences together."""
        self._max_batch = max_batch
        self.step_tokens = step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival, but for those computed again after a preemption."""
        self.num_preempted = 0

    def schedule(self) -> int:
        """Set `take` of every running sequence; returns the step's number of tokens."""
        self._secure_slots()
        self._admit()
        budget = self.step_tokens
        prefilling: list[Sequence] = []
        for seq in self.running:
            if seq.full:
                seq.take = 0
            elif seq.total - seq.length == 1 and budget > 0:
                seq.take = 1
                budget -= 1
            else:
                seq.take = 0
                prefilling.append(seq)
        for seq in prefilling:
            if budget and seq.length == 0 and not self._kv.borrow(seq):
                continue
            seq.take = min(seq.pending, budget)
            budget -= seq.take
        if self._draft_tokens:
            budget -= self.guess(min(budget, self._guesses))
        return self.step_tokens - budget

    def guess(self, budget: int) -> int:
        """Let those that will sample in this step try some tokens more; returns how many in all."""
        begun = budget
        for seq in self.running:
            seq.draft = 0
            if 0 < seq.take == seq.pending:
                # Guesses make nobody move to a larger slot, and leave room for the token that is sure to come.
                room = min(seq.capacity - seq.total, seq.limit - seq.total - 1, self._draft_tokens, budget)
                guesses = self._drafts.guess(seq, room)
                seq.buffer[seq.total : seq.total + len(guesses)] = guesses
                seq.draft = len(guesses)
                seq.take += seq.draft
                budget -= seq.draft
        return begun - budget

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended. Its slot is the caller's to park or release."""
        (self.running if seq.placed else self.waiting).remove(seq)

    def _secure_slots(self) -> None:
        """Every running sequence has room for all its known tokens, or is preempted."""
        for seq in [seq for seq in self.running if seq.total > seq.capacity]:
            # It may have been preempted for another one in this very loop.
            while seq.placed and not self._kv.grow(seq, seq.total):
                self._preempt(max(self.running, key=lambda other: other.arrival))

    def _preempt(self, seq: Sequence) -> None:
        self.num_preempted += 1
        self.running.remove(seq)
        self._kv.release(seq)
        seq.length = 0
        seq.take = 0
        self.waiting.appendleft(seq)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            followers = min(len(self.waiting), self._max_batch - len(self.running)) - 1
            if not self._kv.place(self.waiting[0], self.waiting[0].total, followers):
                break
            self.running.append(self.waiting.popleft())
