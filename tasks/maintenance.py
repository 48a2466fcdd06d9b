"""Look after what lies on a target: one retryable, timed act for each experiment, beside whoever runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.aside import put_aside
from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.experiment_names import experiment_names
from prefect_tune.core.inspection import Inspection, Limits, inspect
from prefect_tune.core.journal import load
from prefect_tune.core.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.retention import Retention
from prefect_tune.core.rounds import Change, Remembered, last_number, last_round, leave_round
from prefect_tune.core.standing import best_of
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.tidying import Collected, collect_from, look_for_garbage, look_for_prunable, prune
from prefect_tune.core.trial import ENDED, Trial
from prefect_tune.core.unreadable import Unreadable, unless_unreadable
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.stamp import new_stamp
from prefect_tune.tasks.transient import RETRYING, retrying

__all__ = [
    "CollectedTrials",
    "PrunedTrials",
    "Remembered",
    "Sample",
    "collect_garbage",
    "is_there",
    "names_on",
    "prune_checkpoints",
    "quarantine_checkpoints",
    "recall",
    "remember",
    "verify_checkpoints",
]

_TIMEOUT_SECONDS = 1800.0
_SHARE_FOR_BEGINNING = 0.8
"""Of the time there is for a try; what was begun by then has the rest of it to end in."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CollectedTrials:
    """What was collected of an experiment, by trial; those for which there was no time are counted."""

    trials: tuple[Collected, ...]
    skipped_count: int = 0
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class PrunedTrials:
    """How many checkpoints of an experiment were retired, and which of its trials cannot be read."""

    count: int
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read of an experiment; see `core.inspection`."""

    begins_at: int = 0
    """Where on the ring the last round ended."""
    share: float = 1.0
    max_bytes: int | None = None
    until: datetime | None = None
    """When to read no further one."""


@task(name="verify-checkpoints", task_run_name="verify {experiment}", **RETRYING)
def verify_checkpoints(
    target: StorageTarget,
    experiment: str,
    sample: Sample,
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Inspection:
    """Read live checkpoints of `experiment` and check every byte; nothing is written. See `core.inspection`.

    Raises:
        JournalCorrupt, UnknownVersion: the journal cannot be read.
        StoreUnavailable: the retries are spent.
    """
    limits = Limits(sample.share, sample.max_bytes, _has_time(sample.until, timeout_seconds))
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        return inspect(store, state, sample.begins_at, limits, side_by_side=transfers)


@task(name="quarantine-checkpoints", task_run_name="quarantine of {experiment}", **RETRYING)
def quarantine_checkpoints(
    target: StorageTarget,
    experiment: str,
    damaged: Mapping[CheckpointKey, str],
    *,
    timeout_seconds: float = 120.0,
) -> Sequence[CheckpointKey]:
    """Have damaged checkpoints not used any more, whoever runs the experiment; return those that are aside now.

    See `core.aside`. Done twice it is done once. Raises as `verify_checkpoints`, and `CommitUnknown`.
    """
    by_trial: dict[TrialKey, dict[CheckpointKey, str]] = {}
    for key, reason in damaged.items():
        by_trial.setdefault(key.trial, {})[key] = reason
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:

        def aside(trial: TrialKey) -> Sequence[CheckpointKey]:
            return put_aside(store, trial, by_trial[trial], new_stamp(), side_by_side=transfers)

        found, _ = _each(store, experiment, aside, by_trial)  # of what cannot be read nothing is aside
        return [key for keys in found for key in keys]


@task(name="prune-checkpoints", task_run_name="prune {experiment}", **RETRYING)
def prune_checkpoints(
    target: StorageTarget,
    experiment: str,
    policy: Retention,
    *,
    dry_run: bool = False,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> PrunedTrials:
    """Retire what `policy` does not keep of a finished experiment, or in a dry run only look what that would be.

    Of an experiment with a trial that has not ended none is retired, and none of its best trial. What is
    retired is deleted by `collect_garbage`. Raises as `quarantine_checkpoints`.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        if any(each.status not in ENDED for each in state.trials.values()):
            return PrunedTrials(0)
        best = best_of(state)
        keys = [_key(state, each) for each in state.trials.values() if best is None or each.trial != best.trial]

        def retired(key: TrialKey) -> Sequence[int]:
            known = state.trial(key.trial)
            if dry_run:
                return look_for_prunable(store, key, policy, side_by_side=map, known=known)
            return prune(store, key, policy, new_stamp(), side_by_side=map, known=known)

        found, unreadable = _each(store, experiment, retired, keys, transfers)
        return PrunedTrials(sum(len(each) for each in found), unreadable)


@task(name="collect-garbage", task_run_name="collect {experiment}", **RETRYING)
def collect_garbage(
    target: StorageTarget,
    experiment: str,
    *,
    dry_run: bool = False,
    until: datetime | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> CollectedTrials:
    """Delete what nobody needs any more, and return what that was; see `core.tidying`. A dry run only looks.

    Args:
        dry_run: whether nothing is deleted, nor written.
        until: when to begin with no further trial.
        timeout_seconds: for each try.

    Raises as `quarantine_checkpoints`.
    """
    has_time = _has_time(until, timeout_seconds)
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        keys = [_key(state, trial) for trial in state.trials.values()]

        def tidy(key: TrialKey) -> Collected | None:
            known = state.trial(key.trial)
            if not has_time():
                return None
            if dry_run:
                return look_for_garbage(store, key, side_by_side=map, known=known)
            return collect_from(store, key, new_stamp(), side_by_side=map, known=known)

        found, unreadable = _each(store, experiment, tidy, keys, transfers)
        done = tuple(each for each in found if each is not None)
        return CollectedTrials(done, len(found) - len(done), unreadable)


def _each(
    store: ObjectStore,
    experiment: str,
    act: Callable[[TrialKey], _Result],
    trials: Iterable[TrialKey],
    transfers: Mapper = map,
) -> tuple[Sequence[_Result], tuple[Unreadable, ...]]:
    """What was done with each trial, and those of which something cannot be read, which keep nobody from the others."""

    def done(trial: TrialKey) -> _Result | Unreadable:
        place = JournalKey(experiment=experiment, trial=trial.trial)
        return unless_unreadable(store, place, trial.folder, lambda: act(trial))

    found = list(transfers(done, trials))
    unreadable = tuple(each for each in found if isinstance(each, Unreadable))
    return [each for each in found if not isinstance(each, Unreadable)], unreadable


def recall(target: StorageTarget, experiment: str) -> Remembered:
    """Return what the last round of maintenance left; where that alone cannot be read, it is as if it were not there.

    Raises:
        StoreUnavailable, StoreRefused: the target cannot be had.
    """

    def look() -> Remembered:
        with target.open(timeout=timedelta(minutes=2)) as store:
            return last_round(store, experiment)

    def look_around() -> Remembered:
        with target.open(timeout=timedelta(minutes=2)) as store:
            return Remembered(last_number(store, experiment))

    try:
        return retrying(look)
    except (StoreUnavailable, StoreRefused) as error:
        logging.getLogger("prefect_tune").warning("%s: what the last round left is not read: %s", experiment, error)
        return retrying(look_around)


def is_there(target: StorageTarget, experiment: str) -> bool:
    """Return whether the experiment has a first entry: it loses that first when it is deleted."""

    def look() -> bool:
        with target.open(timeout=timedelta(minutes=2)) as store:
            return store.size(JournalKey(experiment=experiment).entry_path(1)) is not None

    return retrying(look)


def names_on(target: StorageTarget) -> Sequence[str]:
    """Return the names of the experiments on `target`."""

    def look() -> Sequence[str]:
        with target.open(timeout=timedelta(minutes=10)) as store:
            return experiment_names(store)

    return retrying(look)


def remember(target: StorageTarget, experiment: str, known: Remembered, change: Change) -> Remembered:
    """Leave to the next round what it has to know; see `core.rounds.leave_round`."""

    def write() -> Remembered:
        with target.open(timeout=timedelta(minutes=2)) as store:
            return leave_round(store, experiment, known, change)

    return retrying(write)


def _key(state: Experiment, trial: Trial) -> TrialKey:
    return TrialKey(experiment=state.name, trial=trial.trial)


def _has_time(until: datetime | None, timeout_seconds: float) -> Callable[[], bool]:
    """Whether there is time to begin with another one: neither the budget is spent, nor most of this try's time."""
    latest = datetime.now(UTC) + timedelta(seconds=_SHARE_FOR_BEGINNING * timeout_seconds)
    return lambda: datetime.now(UTC) < (latest if until is None else min(latest, until))
