"""One class per thing a caller can do about it.

A message says what, where, what was expected, what was found, and the next move.
"""

from __future__ import annotations

__all__ = [
    "AlreadyCommitted",
    "AlreadyExists",
    "BadMetric",
    "CheckpointCorrupt",
    "CheckpointNotFound",
    "CommitUnknown",
    "CrashLoop",
    "DamageFound",
    "DeadlineExceeded",
    "IllegalTransition",
    "InvalidInput",
    "JournalCorrupt",
    "ObjectNotFound",
    "ResumeFailed",
    "SaveOvertaken",
    "StagedFilesChanged",
    "StoreRefused",
    "StoreUnavailable",
    "Superseded",
    "TrialFailed",
    "TuneError",
    "UnknownVersion",
    "UnsafePayload",
]


class TuneError(Exception):
    """Everything that prefect-tune raises on purpose."""


class InvalidInput(TuneError, ValueError):
    """What was asked for cannot be done as asked: correct the input and call again."""


class BadMetric(InvalidInput):
    """A reported metric cannot be stored (NaN, infinite, not a number or text): mend the trainable."""


class StoreUnavailable(TuneError):
    """The target did not do it, and doing it again may work: retry."""


class DeadlineExceeded(StoreUnavailable):
    """The target did not answer in time, and the work was ended: retry, or raise the timeout."""


class StoreRefused(TuneError):
    """The target will not do it (credentials, permission, bucket): correct the configuration."""


class ObjectNotFound(TuneError):
    """The target answered, and there is nothing at this path."""


class AlreadyExists(TuneError):
    """Create-if-absent found something: read it, and decide."""


class CommitUnknown(TuneError):
    """The target did not say whether it wrote: read back before anything else."""


class AlreadyCommitted(TuneError):
    """The key holds a checkpoint with other bytes: choose another key."""


class CheckpointNotFound(TuneError):
    """No such checkpoint is committed: choose one that is listed."""


class CheckpointCorrupt(TuneError):
    """Committed bytes are missing or differ from their hash: use the checkpoint before it."""


class DamageFound(TuneError):
    """Maintenance found damage that nobody had been told of: look at it. All else that was to be done is done."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
        """The `MaintenanceReport`, for whoever called in this process."""


class StagedFilesChanged(TuneError):
    """Files changed while they were read: stage them again, and leave them alone until the commit."""


class SaveOvertaken(TuneError):
    """A checkpoint was put aside while this one was saved, which may share what is damaged: save it again."""


class JournalCorrupt(TuneError):
    """The experiment's history does not hold together: nothing is resumed from it; ask for help."""


class UnknownVersion(TuneError):
    """Written by a newer prefect-tune: upgrade this one."""


class UnsafePayload(TuneError):
    """Reading it could execute code: allow it explicitly, with a key, or store plain JSON."""


class IllegalTransition(TuneError):
    """The event cannot happen to a trial in this status: a bug, or a foreign writer."""


class Superseded(TuneError):
    """Somebody else owns the experiment now: stop; nothing of yours was lost that was acknowledged."""


class ResumeFailed(TuneError):
    """The experiment exists and could not be read: nothing was started afresh; resume again."""


class CrashLoop(TuneError):
    """Automations started a run again and again, and nothing came of it: mend the cause, then Retry or resume."""


class TrialFailed(TuneError):
    """The trial ended without finishing and its retry budget is spent: mend the cause, then resume."""
