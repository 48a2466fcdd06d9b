"""Exceptions of prefect-tune: one class for each way in which a caller can react.

A message says what happened, where, what was expected, what was found, and what to do next.
"""

from __future__ import annotations

from prefect_tune.core.display_text import make_visible


class TuneError(Exception):
    """The base class of all errors that prefect-tune raises on purpose. Its `str()` escapes control characters."""

    def __str__(self) -> str:
        return make_visible(super().__str__())


class InvalidInput(TuneError, ValueError):
    """The input is invalid: correct it and call again."""


class BadMetric(InvalidInput):
    """A reported metric is NaN, infinite, or neither a number nor text, so it cannot be stored: fix the trainable."""


class BadStop(InvalidInput):
    """A report lacks a metric that the stop criterion needs: correct `stop`."""


class StoreUnavailable(TuneError):
    """The target did not carry out the request, but may do so later: retry."""


class DeadlineExceeded(StoreUnavailable):
    """The target did not reply in time, and the request was cancelled: retry, or increase the timeout."""


class StoreRefused(TuneError):
    """The target refuses the request (credentials, permission, bucket): correct the configuration."""


class ObjectNotFound(TuneError):
    """The target answered that no object exists at this path."""


class AlreadyExists(TuneError):
    """Create-if-absent found an object at this path: read the object before you do anything else."""


class CommitUnknown(TuneError):
    """The target did not say whether it wrote the object: read the object before you do anything else."""


class AlreadyCommitted(TuneError):
    """Another save has committed this step or a later step: restore the newest checkpoint, and train from there."""


class CheckpointNotFound(TuneError, FileNotFoundError):
    """The checkpoint was not committed or was deleted, or the folder to read has no files: choose an existing one."""


class CheckpointCorrupt(TuneError):
    """Committed bytes are missing or differ from their hash: use the previous checkpoint."""


class DamageFound(TuneError):
    """Maintenance found damage, and did all of its other work: read the maintenance report."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
        """The `MaintenanceReport`, for a caller in the same process."""


class NotExact(TuneError):
    """A drill found that a killed and resumed run differs from an undisturbed run: read the drill's report."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
        """The `DrillReport`, for a caller in the same process."""


class StagedFilesChanged(TuneError):
    """Files changed while they were being saved: save them again, and do not write to them before the commit."""


class PartMissing(TuneError):
    """A node did not add its part to a checkpoint, so the checkpoint is not committed: training continues."""


class SaveOvertaken(TuneError):
    """Another checkpoint of the trial was saved, quarantined or deleted during this save: save again."""


class JournalCorrupt(TuneError):
    """The experiment's journal is inconsistent, and no run resumes from it: restore the missing entries."""


class UnknownVersion(TuneError):
    """The data comes from a newer release, or from a release that is too old: use the release in the message."""


class UnsafePayload(TuneError):
    """The journal or a JSON document names code that is not trusted: pass the code itself, or trust its package."""


class IllegalTransition(TuneError):
    """The event is impossible in the present state of the experiment: a bug or another program wrote the event."""


class Superseded(TuneError):
    """Another run owns the experiment now: stop. Every acknowledged write of this run is kept."""


class ResumeFailed(TuneError):
    """The experiment cannot be resumed, or does not exist although it must; no new experiment was started."""


class CrashLoop(TuneError):
    """Automations restarted a run repeatedly without progress: fix the cause, then Retry or resume."""


class SearchFailed(TuneError):
    """Every trial of the search errored, or the first three errors are equal: fix the cause, then repeat the search."""

    def __init__(self, message: str, results: object = None) -> None:
        super().__init__(message)
        self.results = results
        """The `Results`, for a caller in the same process."""


class TrialFailed(TuneError):
    """The trial ended without finishing, and its retry budget is spent: fix the cause, then resume."""
