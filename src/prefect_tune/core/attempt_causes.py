"""How attempts and trials end: apart from the journal's events, so that a failure policy is imported without them."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why an attempt ended without finishing; each cause counts against one retry budget, or against none."""

    MACHINE = "machine"
    """The machine, the worker or the target failed, not the trial."""
    PREEMPTED = "preempted"
    """The attempt was asked to stop, and stopped in order: no failure."""
    USER = "user"
    """The user's code raised."""
    IMPORT = "import"
    """The trainable could not be loaded: a retry does not help."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed the process for using too much memory: a retry does not help."""
    BAD_METRIC = "bad-metric"
    """It reported a metric that cannot be stored, such as a NaN: a retry does not help."""
    BAD_STOP = "bad-stop"
    """The stop criterion needs a metric that it did not report: a retry does not help."""


class FinishKind(StrEnum):
    """How a trial finished. Only a trial that met its stop criterion continues when that changes."""

    RETURNED = "returned"
    """The trainable returned by itself."""
    CRITERION = "criterion"
    """A stop criterion was met."""
    ALL_STEPS = "all-steps"
    """It has trained all of the scheduler's steps."""
    PRUNED = "pruned"
    """The scheduler ended it early."""
    STOPPED = "stopped"
    """A person ended it: by a stop request, or by the choice on Resume."""
