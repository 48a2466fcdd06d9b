"""Trial events other than a start, as plain words, for models that share no code with the package."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptEnded,
    Cause,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
)

NEXT_STATUS: Mapping[str, Mapping[str, str]] = {
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


def make_event(kind: str, trial: str) -> AnyTrialEvent:
    """Return the event with this name."""
    match kind:
        case "attempt-ended":
            return AttemptEnded(trial=trial, cause=Cause.TRAINABLE, reason="x")
        case "finished":
            return TrialFinished(trial=trial, reason="enough")
        case "gave-up":
            return TrialErrored(trial=trial, cause=Cause.TRAINABLE, reason="x")
        case "paused":
            return TrialPaused(trial=trial, reason="others are better")
        case "resumed":
            return TrialResumed(trial=trial)
        case "requeued":
            return TrialRequeued(trial=trial, reason="more")
    raise AssertionError(kind)
