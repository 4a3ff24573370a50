"""The audit's books on tasks that fail: they follow what a resumed run changes, and hold nothing that is over."""

import itertools

from rollart.audit_tasks import TaskBooks
from rollart.events import Event


class Books:
    """Fed by hand; `found` are the violations."""

    def __init__(self, task_failures: int) -> None:
        self.found: list[str] = []
        self.books = TaskBooks(lambda _promise, text: self.found.append(text))
        self._groups = itertools.count()
        self("run", task_failures=task_failures, tasks={"a": {"share": 0.5}, "b": {"share": 0.5}})

    def __call__(self, kind: str, t: float = 0.0, **fields: object) -> None:
        event: Event = {"e": kind, "t": t, **fields}
        self.books.read(event)

    def fails(self, task: str, times: int) -> None:
        for _ in range(times):
            group = f"g{next(self._groups)}"
            self("admit", group=group, task=f"{task}/0")
            self("group", group=group, task=f"{task}/0", how="failed")

    def resumes(self, task_failures: int, out: list[str]) -> None:
        self("killed")
        self("changed", job={"task_failures": task_failures})
        self("resumed", ready=[], open=[], out=out)


def test_a_run_that_is_resumed_with_fewer_failures_allowed_is_audited_by_that() -> None:
    books = Books(5)
    books.fails("a", 4)
    books("checkpoint", ready=[], open=[])
    books.resumes(2, out=[])
    books.fails("a", 1)
    books("breaker.open", task="a", wait_s=10.0)
    books.fails("b", 2)
    assert books.found == []
    books.fails("b", 1)
    assert books.found == ["task b is in the mix after 2 failures in a row"]


def test_a_run_that_is_resumed_with_more_failures_allowed_is_audited_by_that() -> None:
    books = Books(2)
    books.fails("a", 2)
    books("breaker.open", task="a", wait_s=10.0)
    books("checkpoint", ready=[], open=[])
    books.resumes(5, out=["a"])
    books("breaker.probe", task="a", group="p0")
    books("admit", group="p0", task="a/9")
    books("group", group="p0", task="a/9", how="failed")
    books("breaker.open", task="a", wait_s=20.0)
    books.fails("b", 4)
    assert books.found == []
    books("breaker.open", task="b", wait_s=10.0)
    assert books.found == ["task b left the mix after 4 failures in a row"]
