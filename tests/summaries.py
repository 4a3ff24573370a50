"""Summaries for tests that need one, whatever is in it."""

from typing import Any

from msgspec import structs

from rollart.events.schema import Event
from rollart.report.fold import SummaryFold
from rollart.report.summary import Summary


def summary_with(*events: Event, **fields: Any) -> Summary:
    """The summary of these events, with these fields set."""
    fold = SummaryFold()
    for event in events:
        fold.read(event)
    return structs.replace(fold.result(), **fields)
