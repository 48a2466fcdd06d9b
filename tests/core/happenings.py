"""Trial events other than a start, as plain words, for models that share no code with the package."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Finished,
    GaveUp,
    OneTrialsEvent,
    Paused,
    Requeued,
    Resumed,
)

AFTER: Mapping[str, Mapping[str, str]] = {
    "running": {
        "attempt-ended": "pending",
        "finished": "finished",
        "gave-up": "errored",
        "paused": "paused",
        "resumed": "running",
    },
    "pending": {
        "finished": "finished",
        "gave-up": "errored",
        "requeued": "pending",
        "paused": "paused",
        "resumed": "pending",
    },
    "paused": {"resumed": "pending", "finished": "finished", "gave-up": "errored"},
    "finished": {"requeued": "pending", "gave-up": "errored"},
    "errored": {"requeued": "pending"},
}
"""The possible events of each status, and the next status. A start leads from "pending" to "running"."""


def happening(what: str, trial: str) -> OneTrialsEvent:
    """Return the event with this name."""
    match what:
        case "attempt-ended":
            return AttemptEnded(trial=trial, cause=Cause.USER, reason="x")
        case "finished":
            return Finished(trial=trial, reason="enough")
        case "gave-up":
            return GaveUp(trial=trial, cause=Cause.USER, reason="x")
        case "paused":
            return Paused(trial=trial, reason="others are better")
        case "resumed":
            return Resumed(trial=trial)
        case "requeued":
            return Requeued(trial=trial, reason="more")
    raise AssertionError(what)
