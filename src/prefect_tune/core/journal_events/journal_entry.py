"""`Entry`: the document that a journal stores for each group of events; `core/journal` writes and reads it."""

from __future__ import annotations

from typing import Literal

from prefect_tune.core.journal_events.experiment_events import Event
from prefect_tune.core.storage.documents import Document

__all__ = ["Entry"]


class Entry(Document):
    """One numbered, immutable record of the journal: a group of events, chained to the entry before it."""

    format: Literal["prefect-tune/journal"] = "prefect-tune/journal"
    version: Literal[1] = 1
    number: int
    epoch: int
    write_id: str
    at: str
    previous: str
    events: tuple[Event, ...]
