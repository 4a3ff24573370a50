"""How a run goes on: under which job, which keys were changed, and which steps belong to an earlier job.

A run directory holds the job it goes on with in `job.yaml`, and every earlier one as `job-until-<n>.yaml`: the job that
the steps before n were trained under. A step that is replayed is trained under the job it was first trained under, so
that it gives the same weights, at the first resume and at any later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rollart.append import write_whole
from rollart.config.changes import Change, as_replayed, differences, refuse_fixed
from rollart.config.job import Job
from rollart.config.load import build_job, load_job, read_yaml, with_overrides
from rollart.errors import JobError
from rollart.launch.hub import with_models_of
from rollart.store.journal import FileJournal
from rollart.types import ParsedJson

JOB = "job.yaml"
EARLIER = "job-until-????????.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run, and what it goes on with."""

    out: Path
    job: Job
    changes: tuple[Change, ...] = ()
    step: int = 0
    """The first step that was never trained. Changes act from here on."""
    earlier: tuple[tuple[int, Job], ...] = ()
    """(n, the job that the steps before n are replayed under), n rising."""

    def keep(self) -> None:
        """Write the job, and keep the one before. After a kill in between, the next resume reads the same."""
        if self.changes:
            before = self.out / f"job-until-{self.step:08d}.yaml"
            if not before.exists():  # a job that trained nothing need not be kept
                write_whole(before, (self.out / JOB).read_bytes())
            write_job(self.out, self.job)


def resumption(out: Path, path: Path | None = None, overrides: Sequence[str] = ()) -> Resumption:
    """How the run in this directory goes on: as it was, or with the job in `path`, and with these overrides.

    Raises JobError that names each key that a run cannot change.
    """
    raw = resumed_job(out)
    before = build_job(raw)
    job = load_job(path, overrides) if path is not None else build_job(with_overrides(raw, overrides))
    job = with_models_of(before, job)
    changes = differences(before, job)
    refuse_fixed(changes)
    journal = FileJournal(out / "journal")
    checkpoint = journal.latest()
    first = checkpoint.step if checkpoint is not None else 0
    step = max([first, *(written + 1 for written in journal.steps())])
    if job.train.steps < step:
        raise JobError(f"train.steps: {job.train.steps}, but {out} has trained {step} already; give {step} or more")
    found = [(int(file.stem[-8:]), file) for file in sorted(out.glob(EARLIER))]
    jobs = [(until, build_job(read_yaml(file, "--resume", "bring it back"))) for until, file in found if first < until]
    if changes and step > first and step not in [until for until, _ in jobs]:
        jobs.append((step, before))
    return Resumption(
        out=out,
        job=job,
        changes=tuple(changes),
        step=step,
        earlier=tuple((until, as_replayed(earlier, job)) for until, earlier in jobs),
    )


def resumed_job(out: Path) -> ParsedJson:
    """The job a run directory was made for."""
    return read_yaml(out / JOB, "--resume", "give a run directory, such as runs/NAME-TIME")


def write_job(out: Path, job: Job) -> None:
    write_whole(out / JOB, yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False).encode())
