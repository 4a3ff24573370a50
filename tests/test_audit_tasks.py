"""The books of audit and summary on tasks: they follow what a resumed run changes, and hold nothing that is over."""

import itertools

from rollart.events import schema
from rollart.events.schema import Event
from rollart.report.audit import Audit
from rollart.report.audit_tasks import TaskBooks
from rollart.report.fold import SummaryFold
from tests.events import some

RUN = some(
    schema.Run,
    t=0.0,
    clock="real",
    slots=9,
    recheck="start",
    bound=1,
    task_failures=5,
    tasks={"a": some(schema.TaskFacts, share=1.0, group_size=1, min_group_size=1)},
)


class Books:
    """Fed by hand; `found` are the violations."""

    def __init__(self, task_failures: int) -> None:
        self.found: list[str] = []
        self.books = TaskBooks(lambda _promise, text: self.found.append(text))
        self._groups = itertools.count()
        tasks = {name: some(schema.TaskFacts, share=0.5) for name in ("a", "b")}
        self(schema.Run, task_failures=task_failures, tasks=tasks)

    def __call__(self, kind: type[Event], **fields: object) -> None:
        self.books.read(some(kind, t=0.0, **fields))

    def fails(self, task: str, times: int) -> None:
        for _ in range(times):
            group = f"g{next(self._groups)}"
            self(schema.Admit, group=group, task=f"{task}/0")
            self(schema.Group, group=group, task=f"{task}/0", how="failed")

    def resumes(self, task_failures: int, out: list[str]) -> None:
        self(schema.Killed)
        self(schema.Changed, job=some(schema.Run, task_failures=task_failures))
        self(schema.Resumed, ready=[], open=[], out=out)


def test_a_run_that_is_resumed_with_fewer_failures_allowed_is_audited_by_that() -> None:
    books = Books(5)
    books.fails("a", 4)
    books(schema.Checkpoint, step=0, ready=[], open=[])
    books.resumes(2, out=[])
    books.fails("a", 1)
    books(schema.BreakerOpen, task="a", wait_s=10.0)
    books.fails("b", 2)
    assert books.found == []
    books.fails("b", 1)
    assert books.found == ["task b is in the mix after 2 failures in a row"]


def test_a_run_that_is_resumed_with_more_failures_allowed_is_audited_by_that() -> None:
    books = Books(2)
    books.fails("a", 2)
    books(schema.BreakerOpen, task="a", wait_s=10.0)
    books(schema.Checkpoint, step=0, ready=[], open=[])
    books.resumes(5, out=["a"])
    books(schema.BreakerProbe, task="a", group="p0")
    books(schema.Admit, group="p0", task="a/9")
    books(schema.Group, group="p0", task="a/9", how="failed")
    books(schema.BreakerOpen, task="a", wait_s=20.0)
    books.fails("b", 4)
    assert books.found == []
    books(schema.BreakerOpen, task="b", wait_s=10.0)
    assert books.found == ["task b left the mix after 4 failures in a row"]


def test_probes_of_several_tasks_that_are_due_may_be_made_one_after_the_other() -> None:
    """A probe is not admitted before the other's; a group of a task in the mix would be."""
    for probed_first, found in (
        (True, []),
        (False, ["group g9 was admitted before the probe of task b, which was due"]),
    ):
        books = Books(2)
        books.fails("b", 2)
        books(schema.BreakerOpen, task="b", wait_s=10.0)
        if probed_first:
            books.fails("a", 2)
            books(schema.BreakerOpen, task="a", wait_s=10.0)
            books.books.read(some(schema.BreakerProbe, t=20.0, task="a", group="g9"))
        books.books.read(some(schema.Admit, t=20.0, group="g9", task="a/9"))
        assert books.found == found


def test_the_books_hold_what_a_checkpoint_holds_and_nothing_that_is_over() -> None:
    books = Books(5)
    for number in range(6):
        books(schema.Admit, group=f"g{number}", task="a/0")
    for number in (0, 1, 3, 4):
        books(schema.Ready, group=f"g{number}")
    books(schema.Batch, step=0, groups=["g0"])
    books(schema.Group, group="g1", task="a/0", how="stale")
    books(schema.Group, group="g2", task="a/0", how="failed")
    books(schema.Checkpoint, step=1, ready=["g3", "g4"], open=["g5"])
    assert list(books.books.task_of) == ["g3", "g4", "g5"]
    books(schema.Batch, step=1, groups=["g3"])
    books(schema.Killed)
    books(schema.Resumed, ready=["g3", "g4"], open=["g5"], out=[])
    books(schema.BreakerClose, task="a", group="g4")  # counts what is alive of the task
    assert books.books.tasks["a"].owed == 2 + (3 + 2) * 2


def test_the_audit_forgets_the_members_of_groups_that_no_restart_brings_back() -> None:
    audit = Audit()
    audit.read(RUN)
    for number in range(5):
        audit.read(some(schema.Admit, t=0.0, group=f"g{number}", task=f"a/{number}"))
        audit.read(some(schema.Ready, t=0.0, group=f"g{number}", members=[f"g{number}.0"], born=0))
    for step in (0, 1):
        audit.read(some(schema.Batch, t=0.0, step=step, groups=[f"g{step}"]))
        audit.read(some(schema.Written, t=0.0, step=step))
    audit.read(some(schema.Group, t=0.0, group="g2", task="a/2", how="stale"))
    audit.read(some(schema.Checkpoint, t=0.0, step=1, ready=["g3", "g4"], open=[]))
    assert list(audit.members) == ["g1", "g3", "g4"], "g1 may be replayed"


def test_the_summary_forgets_which_groups_taught_that_no_restart_brings_back() -> None:
    summary = SummaryFold()

    def read(kind: type[Event], **fields: object) -> None:
        summary.read(some(kind, t=0.0, **fields))

    def trains(step: int, group: str) -> None:
        read(schema.Batch, step=step, serving=0, groups=[group], tasks=[f"a/{group}"], born=[0], tokens=1)

    summary.read(RUN)
    for number in range(5):
        read(schema.Admit, group=f"g{number}", task=f"a/{number}", serving=0)
        read(schema.Ready, group=f"g{number}", members=[], born=0, gradient=False)
    trains(0, "g0")
    trains(1, "g1")
    read(schema.Group, group="g2", task="a/2", how="stale")
    read(schema.Checkpoint, step=1, ready=["g3", "g4"], open=[])
    assert sorted(summary.teaches) == ["g1", "g3", "g4"], "g1 may be replayed"
    read(schema.StepAside, step=1, trajectories=[], groups=["g1"])
    trains(2, "g3")
    assert summary.result().tasks["a"].with_gradient == 0
