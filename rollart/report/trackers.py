"""TensorBoard and Weights & Biases: metrics and evaluations beside `metrics.jsonl`.

A tracker only reads. One that fails, at its start or later, is left out with a warning: it never ends the run.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rollart.config.job import Job
from rollart.errors import JobError, install
from rollart.events import schema
from rollart.events.schema import Event

INSTALL = f"install it with: {install('logging')}"


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that `tensorboard --logdir RUN` shows."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as TbEvent
        from tensorboard.compat.proto.summary_pb2 import Summary as TbSummary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = TbEvent
        self._summary: Any = TbSummary
        self._writer: Any = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run per run directory; a resumed job goes on in it."""

    def __init__(self, job: Job, out: Path) -> None:
        import wandb

        mode: Any = job.track.wandb
        self._run: Any = wandb.init(
            project=job.track.project,
            name=out.name,
            id=out.name,
            resume="allow",
            dir=str(out),
            mode=mode,
            config=job.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Tracking:
    """All trackers of a job. `row` takes a step's metrics, `read` the events."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._trackers: list[Tracker] = []
        self._warn = warn

    def start(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        for name, make in makers.items():
            try:
                self._trackers.append(make())
            except Exception as error:  # as in `_each`
                self._warn(f"{name} did not start and is left out: {error}")

    def row(self, row: Mapping[str, float]) -> None:
        self._log(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def read(self, event: Event) -> None:
        if isinstance(event, schema.Eval) and event.versions and event.reward is not None:
            self._log(event.versions[1], {f"eval/{event.task}/{event.play}": event.reward})

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # other people's code, whose errors must not end a run
                self._trackers.remove(tracker)
                self._warn(f"{type(tracker).__name__} failed and is left out from here on: {error}")


def check_trackers(job: Job) -> None:
    """Raises JobError for what is not installed, or has no key, before anything is written."""
    for package, asked in (("tensorboard", job.track.tensorboard), ("wandb", job.track.wandb != "off")):
        if asked and find_spec(package) is None:
            raise JobError(f"track.{package}: {package} is not installed; {INSTALL}")
    if job.track.wandb == "online" and not os.environ.get("WANDB_API_KEY"):
        raise JobError("track.wandb: online needs WANDB_API_KEY in the environment; set it, or track.wandb=offline")


def trackers(job: Job, out: Path) -> dict[str, Callable[[], Tracker]]:
    """Makers of the trackers that the job asks for."""
    found: dict[str, Callable[[], Tracker]] = {}
    if job.track.tensorboard:
        found["TensorBoard"] = partial(TensorBoard, out / "tensorboard")
    if job.track.wandb != "off":
        found["WandB"] = partial(WandB, job, out)
    return found
