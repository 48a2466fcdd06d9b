"""Delete an experiment that a person names: say before what would go, and refuse while a run may own it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import kind_of
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import load, next_entry
from prefect_tune.core.messages.live_status import ExperimentView, live_status_of
from prefect_tune.core.operations.delete_experiment import generation_to_delete, remove
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.generations import is_deleted, no_experiment, objects_before
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore
from prefect_tune.core.values import valid_name
from prefect_tune.journal_access import current_owner, new_write_id
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.formatting import freshness_of

__all__ = ["ExperimentContents", "contents_of", "delete_experiment"]

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class ExperimentContents:
    """What an experiment has on its target."""

    experiment: str
    trial_count: int
    checkpoint_count: int
    """Those whose manifest exists: live, quarantined, and retired ones that are not collected yet."""
    object_count: int
    size_bytes: int


def delete_experiment(experiment: str, *, target: StorageTarget | str, even_if_running: bool = False) -> int:
    """Delete an experiment from its target for good, and return the number of deleted objects.

    If the call is interrupted, the experiment can no longer be opened, and a second call deletes the rest. The name can
    be used again from the time at which the first object is deleted; a marker of some 300 bytes stays. A fork releases
    the checkpoints of its origin. What Prefect's server has of the experiment, its runs and artifacts, stays.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        even_if_running: whether it is deleted while a run may own it; that run ends with `Superseded`.

    Raises:
        InvalidInput: there is no such experiment, a run may own it, or another experiment, such as a fork, needs bytes
            of its checkpoints; nothing was deleted.
        JournalCorrupt: its journal cannot be read; nothing was deleted.
        Superseded: another process deletes it at the same time.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed.
    """
    place = resolve_existing(target)
    journal = on_target(
        place, lambda store: _found(store, experiment, place.uri, even_if_running=even_if_running).journal, _TIMEOUT
    )
    owner, stamp = current_owner(), new_write_id()  # the same for every try, so that a retry is the same deletion

    def delete(store: ObjectStore) -> int:
        with transfer_pool() as transfers:
            return remove(store, journal, owner, stamp, side_by_side=transfers)

    return on_target(place, delete, _TIMEOUT)


def contents_of(experiment: str, *, target: StorageTarget | str, even_if_running: bool = False) -> ExperimentContents:
    """Return what `delete_experiment` would delete, after the same checks; claims of forks are checked only by it.

    Raises:
        InvalidInput: there is no such experiment, or a run may own it.
        JournalCorrupt: its journal cannot be read, and no deletion explains that.
    """
    place = resolve_existing(target)

    def look(store: ObjectStore) -> ExperimentContents:
        found = _found(store, experiment, place.uri, even_if_running=even_if_running)
        return _contents(found, objects_before(store, experiment, found.journal.generation + 1))

    return on_target(place, look, _TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Found:
    """The generation to delete, and its experiment; None if only an interrupted deletion has left objects."""

    journal: JournalKey
    state: Experiment | None


def _found(store: ObjectStore, name: str, uri: str, *, even_if_running: bool) -> _Found:
    """Find what a deletion would delete, after the same checks.

    A folder without a journal is no experiment: whatever it holds, it is not deleted.
    """
    if (journal := generation_to_delete(store, valid_name(name))) is None:
        raise InvalidInput(no_experiment(store, name, uri))
    if is_deleted(store, journal):
        return _Found(journal, None)
    with transfer_pool() as transfers:
        state = load(store, journal, side_by_side=transfers)
    if not (even_if_running or state.is_removed):
        _require_no_run(store, state, uri)
    return _Found(journal, state)


def _require_no_run(store: ObjectStore, state: Experiment, uri: str) -> None:
    """Refuse while a trial runs by the journal, or its owner still publishes, by this machine's clock.

    A search between two trials has none that runs; a process that was killed stops publishing. Not noticed is a search
    in its first second, or one with `live_period_seconds=None` while none of its trials runs.
    """
    last, live = next_entry(store, state.key, state.number - 1), live_status_of(store, state)
    as_of = max(live.at if live else "", last.at if last else "")
    fresh = freshness_of(ExperimentView(state, as_of, live), datetime.now(UTC))
    fresh = replace(fresh, is_running=fresh.is_running or live is not None)
    if not fresh.is_running or fresh.is_stale:
        return
    by_journal = sum(each.status is Status.RUNNING for each in state.trials.values())
    count = max(by_journal, len(live.trials) if live is not None else 0)  # the journal of a search may be older
    alive = plural(count, "trial was running", "trials were running") if count else "its process was alive"
    runs = f"{alive} as of {fresh.words()}"
    end = f"prefect-tune stop {uri} {state.name}" if kind_of(state) == "search" else "cancel its flow run"
    raise InvalidInput(
        f"experiment {state.name!r} at {uri}: a run may own it, {state.owner}: {runs}. End that run first "
        f"({end}); or, if it has ended or may fail, delete the experiment with even_if_running (--even-if-running)"
    )


def _contents(found: _Found, listed: Sequence[Listed]) -> ExperimentContents:
    folder = f"{found.journal.folder}/trials/"
    named = [
        (each.path.removeprefix(folder).split("/")[0], each.path) for each in listed if each.path.startswith(folder)
    ]
    keys = (CheckpointKey.from_manifest_path(found.journal.trial_key(trial), path) for trial, path in named)
    return ExperimentContents(
        found.journal.experiment,
        trial_count=len({trial for trial, _ in named} | set(found.state.trials if found.state else ())),
        checkpoint_count=sum(key is not None for key in keys),
        object_count=len(listed),
        size_bytes=sum(each.size_bytes for each in listed),
    )
