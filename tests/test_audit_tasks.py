"""The books of audit and summary on tasks: they follow what a resumed run changes, and hold nothing that is over."""

import itertools

from rollart.events import Event
from rollart.report.audit import Audit
from rollart.report.audit_tasks import TaskBooks
from rollart.report.summary import Summary

RUN: Event = {
    "e": "run",
    "t": 0.0,
    "clock": "real",
    "pools": {},
    "slots": 9,
    "recheck": "start",
    "bound": 1,
    "task_failures": 5,
    "tasks": {"a": {"share": 1.0, "group_size": 1, "min_group_size": 1}},
}


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
    books("checkpoint", step=0, ready=[], open=[])
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
    books("checkpoint", step=0, ready=[], open=[])
    books.resumes(5, out=["a"])
    books("breaker.probe", task="a", group="p0")
    books("admit", group="p0", task="a/9")
    books("group", group="p0", task="a/9", how="failed")
    books("breaker.open", task="a", wait_s=20.0)
    books.fails("b", 4)
    assert books.found == []
    books("breaker.open", task="b", wait_s=10.0)
    assert books.found == ["task b left the mix after 4 failures in a row"]


def test_the_books_hold_what_a_checkpoint_holds_and_nothing_that_is_over() -> None:
    books = Books(5)
    for number in range(6):
        books("admit", group=f"g{number}", task="a/0")
    for number in (0, 1, 3, 4):
        books("ready", group=f"g{number}")
    books("batch", step=0, groups=["g0"])
    books("group", group="g1", task="a/0", how="stale")
    books("group", group="g2", task="a/0", how="failed")
    books("checkpoint", step=1, ready=["g3", "g4"], open=["g5"])
    assert list(books.books._task_of) == ["g3", "g4", "g5"]
    books("batch", step=1, groups=["g3"])
    books("killed")
    books("resumed", ready=["g3", "g4"], open=["g5"], out=[])
    books("breaker.close", task="a", group="g4")  # counts what is alive of the task
    assert books.books._tasks["a"].owed == 2 + (3 + 2) * 2


def test_the_audit_forgets_the_members_of_groups_that_no_restart_brings_back() -> None:
    audit = Audit()
    audit.read(RUN)
    for number in range(5):
        audit.read({"e": "admit", "t": 0.0, "group": f"g{number}", "task": f"a/{number}"})
        audit.read({"e": "ready", "t": 0.0, "group": f"g{number}", "members": [f"g{number}.0"], "born": 0})
    for step in (0, 1):
        audit.read({"e": "batch", "t": 0.0, "step": step, "groups": [f"g{step}"]})
        audit.read({"e": "written", "t": 0.0, "step": step})
    audit.read({"e": "group", "t": 0.0, "group": "g2", "task": "a/2", "how": "stale"})
    audit.read({"e": "checkpoint", "t": 0.0, "step": 1, "ready": ["g3", "g4"], "open": []})
    assert list(audit._members) == ["g1", "g3", "g4"], "g1 may be replayed"


def test_the_summary_forgets_which_groups_taught_that_no_restart_brings_back() -> None:
    summary = Summary()

    def read(kind: str, **fields: object) -> None:
        summary.read({"e": kind, "t": 0.0, **fields})

    def trains(step: int, group: str) -> None:
        read("batch", step=step, serving=0, groups=[group], tasks=[f"a/{group}"], born=[0], tokens=1)

    summary.read(RUN)
    for number in range(5):
        read("admit", group=f"g{number}", task=f"a/{number}", serving=0)
        read("ready", group=f"g{number}", members=[], born=0, gradient=False)
    trains(0, "g0")
    trains(1, "g1")
    read("group", group="g2", task="a/2", how="stale")
    read("checkpoint", step=1, ready=["g3", "g4"], open=[])
    assert sorted(summary._books._teaches) == ["g1", "g3", "g4"], "g1 may be replayed"
    read("step.aside", step=1, trajectories=[], groups=["g1"])
    trains(2, "g3")
    assert summary.result()["tasks"]["a"]["with_gradient"] == 0
