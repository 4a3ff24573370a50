"""What happened in a run: `schema` has the kinds of events, `log` writes and reads them, `metrics` sums them up."""

from rollart.events.log import (
    EventLog,
    Handlers,
    LogHandle,
    Reader,
    drop_torn_line,
    event_files,
    on,
    read_events,
)
from rollart.events.metrics import Last, Max, Mean, Metrics, Sum
from rollart.events.schema import Event

__all__ = [
    "Event",
    "EventLog",
    "Handlers",
    "Last",
    "LogHandle",
    "Max",
    "Mean",
    "Metrics",
    "Reader",
    "Sum",
    "drop_torn_line",
    "event_files",
    "on",
    "read_events",
]
