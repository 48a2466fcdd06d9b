"""Read an experiment before it is opened, and check that it exists or not, as the run requires."""

from __future__ import annotations

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, ResumeFailed, StoreRefused, TuneError, UnknownVersion
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.parameters.resume_mode import Resuming
from prefect_tune.tasks.experiment_state import no_experiment_at, read_journal


def require_presence(
    target: StorageTarget, experiment: str, asked: Resuming, known: LoadedJournal | None = None
) -> LoadedJournal | None:
    """Check, before anything is written, that the experiment exists or not, as `asked`.

    Returns `known`, or the journal if it had to be read; None if neither.

    Raises:
        ResumeFailed: it has to exist and does not, or cannot be read. Nothing was started.
        InvalidInput: it must not exist, and does; or 'local' was asked, and the target is not a `LocalTarget`.
    """
    if asked.local and not isinstance(target, LocalTarget):
        raise InvalidInput(
            f"resume='local': an experiment is stored on its target only, {target.uri}: there is no "
            "copy on this machine that could be newer or older. Use 'must', or a target on this machine"
        )
    if asked.presence == "auto":
        return known
    known = known or read_known(target, experiment)
    found = known.experiment
    if asked.presence == "must" and not found.number:
        raise ResumeFailed(f"nothing was started: {no_experiment_at(target, experiment)}")
    if asked.presence == "never" and found.number:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} exists already, with {len(found.trials)} trials, but "
            "resume='never' (or False) requires a new one: use another name; no experiment is ever overwritten"
        )
    return known


def read_known(target: StorageTarget, experiment: str) -> LoadedJournal:
    """Read the journal of `experiment`, before it is opened.

    Raises:
        ResumeFailed: it cannot be read, and retries do not help.
    """
    try:
        return read_undamaged(target, experiment)
    except StoreRefused as error:
        raise _not_resumed(target, experiment, error) from error


def read_undamaged(target: StorageTarget, experiment: str) -> LoadedJournal:
    """As `read_known`, for a caller that retries refusals.

    Raises:
        ResumeFailed: it is damaged, or of an unknown version.
        StoreRefused: the target refuses access.
    """
    try:
        return read_journal(target, experiment)
    except (JournalCorrupt, UnknownVersion) as error:
        raise _not_resumed(target, experiment, error) from error


def _not_resumed(target: StorageTarget, experiment: str, why: TuneError) -> ResumeFailed:
    return ResumeFailed(f"experiment {experiment!r} at {target.uri}: {why}. Nothing was started")
