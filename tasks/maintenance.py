"""Look after what lies on a target: one retryable, timed act for each experiment, beside whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect import task

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.aside import put_aside
from prefect_tune.core.commit import Mapper
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.experiment_names import experiment_names
from prefect_tune.core.inspection import Inspection, Limits, Round, inspect, last_round, leave_round
from prefect_tune.core.journal import load
from prefect_tune.core.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.retention import Retention
from prefect_tune.core.standing import best_of
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.tidying import Collected, collect_from, look_for_garbage, prunable, prune
from prefect_tune.core.trial import ENDED, Trial
from prefect_tune.core.trial_journal import trial_today
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.stamp import new_stamp
from prefect_tune.tasks.transient import RETRYING, retrying

__all__ = [
    "CollectedTrials",
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


@dataclass(frozen=True, slots=True)
class Remembered:
    """The number of the last round of an experiment, and what it left."""

    number: int
    last: Round | None


@dataclass(frozen=True, slots=True)
class CollectedTrials:
    """What was collected of an experiment, by trial; those for which there was no time are counted."""

    trials: tuple[Collected, ...]
    skipped_count: int = 0


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
    limits = Limits(sample.share, sample.max_bytes, _has_time(sample.until))
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
    del experiment  # which the name of the task run tells
    by_trial: dict[TrialKey, dict[CheckpointKey, str]] = {}
    for key, reason in damaged.items():
        by_trial.setdefault(key.trial, {})[key] = reason
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        found = (put_aside(store, trial, of, new_stamp(), side_by_side=transfers) for trial, of in by_trial.items())
        return [key for keys in found for key in keys]


@task(name="prune-checkpoints", task_run_name="prune {experiment}", **RETRYING)
def prune_checkpoints(
    target: StorageTarget,
    experiment: str,
    policy: Retention,
    *,
    dry_run: bool = False,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> int:
    """Retire what `policy` does not keep of a finished experiment, and return how many checkpoints those are.

    Of an experiment with a trial that has not ended none is retired, and none of its best trial. What is
    retired is deleted by `collect_garbage`. Raises as `quarantine_checkpoints`.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        if any(each.status not in ENDED for each in state.trials.values()):
            return 0
        best = best_of(state)
        trials = [each for each in state.trials.values() if best is None or each.trial != best.trial]

        def retired(trial: Trial) -> Sequence[int]:
            today = trial_today(store, experiment, trial, side_by_side=map)
            if dry_run or not prunable(today, policy):
                return prunable(today, policy)
            return prune(store, _key(state, trial), policy, new_stamp(), side_by_side=map)

        return sum(len(each) for each in transfers(retired, trials))


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
    has_time = _has_time(until)
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        state = load(store, experiment, side_by_side=transfers)
        keys = [_key(state, trial) for trial in state.trials.values()]
        tidy = _looks(store, map) if dry_run else _collects(store, map)
        found = list(transfers(lambda key: tidy(key) if has_time() else None, keys))
        done = tuple(each for each in found if each is not None)
        return CollectedTrials(done, len(found) - len(done))


def recall(target: StorageTarget, experiment: str) -> Remembered:
    """Return what the last round of maintenance left."""

    def look() -> Remembered:
        with target.open(timeout=timedelta(minutes=2)) as store:
            return Remembered(*last_round(store, experiment))

    return retrying(look)


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


def remember(target: StorageTarget, experiment: str, number: int, left: Round) -> None:
    """Leave to the next round what it has to know; a round that dies before is done again."""

    def write() -> None:
        with target.open(timeout=timedelta(minutes=2)) as store:
            leave_round(store, experiment, number, left)

    retrying(write)


def _key(state: Experiment, trial: Trial) -> TrialKey:
    return TrialKey(experiment=state.name, trial=trial.trial)


def _looks(store: ObjectStore, transfers: Mapper) -> Callable[[TrialKey], Collected]:
    return lambda key: look_for_garbage(store, key, side_by_side=transfers)


def _collects(store: ObjectStore, transfers: Mapper) -> Callable[[TrialKey], Collected]:
    return lambda key: collect_from(store, key, new_stamp(), side_by_side=transfers)


def _has_time(until: datetime | None) -> Callable[[], bool]:
    return lambda: until is None or datetime.now(UTC) < until
