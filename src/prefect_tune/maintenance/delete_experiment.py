"""Delete an experiment that a person names: say before what would go, and refuse while a run may own it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import InvalidInput, JournalCorrupt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import kind_of
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import load, next_entry
from prefect_tune.core.messages.live_status import ExperimentView, live_status_of
from prefect_tune.core.models import plural, valid_name
from prefect_tune.core.operations.delete_experiment import remove
from prefect_tune.core.recovery import is_deletion
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, no_experiment
from prefect_tune.core.storage.object_store import Listed, ObjectStore
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

    If the call is interrupted, the experiment can no longer be opened, and a second call deletes the rest. A fork
    releases the checkpoints of its origin. What Prefect's server has of the experiment, its runs and artifacts, stays.

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
    contents_of(experiment, target=place, even_if_running=even_if_running)
    owner, stamp = current_owner(), new_write_id()  # the same for every try, so that a retry is the same deletion

    def delete(store: ObjectStore) -> int:
        with transfer_pool() as transfers:
            return remove(store, experiment, owner, stamp, side_by_side=transfers)

    return on_target(place, delete, _TIMEOUT)


def contents_of(experiment: str, *, target: StorageTarget | str, even_if_running: bool = False) -> ExperimentContents:
    """Return what `delete_experiment` would delete, after the same checks; claims of forks are checked only by it.

    Raises:
        InvalidInput: there is no such experiment, or a run may own it.
        JournalCorrupt: its journal cannot be read, and no deletion explains that.
    """
    place = resolve_existing(target)

    def look(store: ObjectStore) -> ExperimentContents:
        state = _state(store, valid_name(experiment), place.uri)
        if state is not None and not even_if_running:
            _require_no_run(store, state, place.uri)
        return _contents(experiment, state, store.list(experiment))

    return on_target(place, look, _TIMEOUT)


def _state(store: ObjectStore, name: str, uri: str) -> Experiment | None:
    """Return the experiment; None if an interrupted deletion has begun to delete its journal.

    A folder without a journal is no experiment: whatever it holds, it is not deleted.
    """
    key = JournalKey(experiment=name)
    if not store.list(key.entries):
        raise InvalidInput(no_experiment(store, name, uri))
    try:
        with transfer_pool() as transfers:
            state = load(store, name, side_by_side=transfers)
    except JournalCorrupt:
        if is_deletion(store, key):
            return None
        raise
    if not state.number:
        if is_deletion(store, key):
            return None
        raise InvalidInput(no_experiment(store, name, uri))
    return None if state.is_removed else state


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


def _contents(name: str, state: Experiment | None, listed: Sequence[Listed]) -> ExperimentContents:
    parts = [each.path.split("/") for each in listed]
    trials = {each[2] for each in parts if len(each) > 3 and each[1] == "trials"} | set(state.trials if state else ())
    manifests = (
        CheckpointKey.from_manifest_path(TrialKey(experiment=name, trial=split[2]), each.path)
        for split, each in zip(parts, listed, strict=True)
        if len(split) > 3 and split[1] == "trials"
    )
    return ExperimentContents(
        name,
        trial_count=len(trials),
        checkpoint_count=sum(key is not None for key in manifests),
        object_count=len(listed),
        size_bytes=sum(each.size_bytes for each in listed),
    )
