"""What all drivers of one life of a job share: its settings, its events, its waits and its tasks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollart.control.supervisor import TaskSupervisor
from rollart.control.waits import Waits
from rollart.events import schema
from rollart.events.log import Log

if TYPE_CHECKING:
    from rollart.config.job import Job


@dataclass(frozen=True, slots=True)
class JobContext:
    job: "Job"
    log: Log
    waits: Waits = field(default_factory=Waits)
    supervisor: TaskSupervisor = field(default_factory=TaskSupervisor)

    def warn(self, text: str, cause: int = -1) -> None:
        self.log.emit(schema.Warning(text=text, cause=cause))
