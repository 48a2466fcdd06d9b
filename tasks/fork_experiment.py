"""The task that forks an experiment, with retries and a timeout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import (
    CheckpointNotFound,
    InvalidInput,
    JournalCorrupt,
    ResumeFailed,
    StoreRefused,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import CheckpointRef, Owner
from prefect_tune.core.models import Stamp
from prefect_tune.core.operations.fork_experiment import Fork, Past, begin_fork, deleted_since, fork, past_of
from prefect_tune.core.seeded_random import seed_named
from prefect_tune.core.settings_signature import is_signed, signed, unsigned
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap
from prefect_tune.journal_access import current_owner, new_write_id
from prefect_tune.storage_retries import RETRYING, with_retries
from prefect_tune.stores.local.staging import transfer_pool

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """The arguments of a fork. Every try has the same owner and stamp, so that a retry is the same fork."""

    experiment: str
    into: str
    at: int | None = None
    """The entry of the experiment's journal; None for the last."""
    strict: bool = False
    """Whether it is an error if the origin has deleted a checkpoint of that entry since."""
    owner: Owner = field(default_factory=current_owner)
    stamp: Stamp = field(default_factory=new_write_id)


@task(name="fork-experiment", task_run_name="fork {request.experiment} into {request.into}", **RETRYING)
def fork_experiment(target: StorageTarget, request: ForkRequest) -> Experiment:
    """Make the experiment `request.into` a fork of another one on the same target. Idempotent.

    The origin may be running. No checkpoint is copied; the origin keeps the bytes that the fork refers to.

    Raises:
        InvalidInput: there is no such entry, the name is taken, or the origin is being deleted.
        CheckpointNotFound: `strict` is set, and the origin has deleted a checkpoint since.
        ResumeFailed: there is no such experiment, or it cannot be read. Nothing was started.
        Superseded: another process makes the same fork.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with _opened(target, request) as (store, transfers):
        return _forked(store, target, request, transfers)


def fork_source(target: StorageTarget, request: ForkRequest) -> Experiment | None:
    """Return the origin's state that the fork is to begin with, and write nothing; None if the fork has begun.

    Also None if there is no origin: `fork_experiment` then says so. Raises what that raises.
    """

    def look() -> Experiment | None:
        with _opened(target, request) as (store, transfers):
            there = _state(store, request.into, transfers)
            origin = _state(store, request.experiment, transfers)
            return (
                None
                if there.number or not origin.number
                else _past(store, request, origin, there, transfers).experiment
            )

    return with_retries(look)


@contextmanager
def _opened(target: StorageTarget, request: ForkRequest) -> Iterator[tuple[ObjectStore, ParallelMap]]:
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        try:
            yield store, transfers
        except (JournalCorrupt, UnknownVersion, StoreRefused) as error:
            where = f"experiment {request.experiment!r} at {target.uri}"
            raise ResumeFailed(f"{where}: {error}. Nothing was started") from error


def _state(store: ObjectStore, experiment: str, transfers: ParallelMap) -> Experiment:
    return load(store, current_journal(store, experiment), side_by_side=transfers)


def _forked(store: ObjectStore, target: StorageTarget, request: ForkRequest, transfers: ParallelMap) -> Experiment:
    there = _state(store, request.into, transfers)
    if there.origin is not None and there.is_whole and _is_asked_for(there, request):
        return there
    origin = _state(store, request.experiment, transfers)
    if not origin.number:
        raise ResumeFailed(f"nothing was started: {no_experiment(store, request.experiment, target.uri)}")
    log = get_run_logger()
    past = _past(store, request, origin, there, transfers)
    past = replace(past, settings=_settings(past, request, target.signing_secret))
    if request.strict and (gone := deleted_since(store, past, side_by_side=transfers)):
        raise CheckpointNotFound(f"{past.origin}: deleted since then: {_deleted_steps(gone)}. Nothing was started")
    into = begin_fork(store, there.key, past.origin, request.owner, request.stamp, side_by_side=transfers)
    made = fork(store, past, into, request.stamp, side_by_side=transfers)
    _log_fork(log, past, made)
    return made.experiment


def _is_asked_for(there: Experiment, request: ForkRequest) -> bool:
    origin = there.origin
    return origin is not None and origin.experiment == request.experiment and request.at in (None, origin.number)


def _past(
    store: ObjectStore, request: ForkRequest, origin: Experiment, there: Experiment, transfers: ParallelMap
) -> Past:
    """Return the origin's state at the requested entry; if none was requested, at an earlier try's, or at the last."""
    begun = there.origin.number if there.origin is not None and _is_asked_for(there, request) else None
    at = begun if request.at is None else request.at
    past = past_of(store, origin.key, at, side_by_side=transfers)
    if not past.settings:
        raise InvalidInput(f"{past.origin}: expected a search; only searches can be forked, once they have begun")
    return past


def _settings(past: Past, request: ForkRequest, key: bytes | None) -> Mapping[str, object]:
    """Return the fork's settings: the origin's seed is kept, and a valid signature is renewed for the new name.

    Unsigned settings stay unsigned.
    """
    settings = {"seed": seed_named(request.experiment), **unsigned(past.settings)}
    if key is not None and is_signed(past.settings, request.experiment, key):
        return signed(settings, request.into, key)
    return settings


def _log_fork(log: Log, past: Past, made: Fork) -> None:
    """Log the fork, and warn of each trial whose checkpoints the origin has deleted."""
    log.info("%s: a fork of %s, %d trials", made.experiment.name, past.origin, len(made.experiment.trials))
    for name, refs in made.lost.items():
        trial = made.experiment.trial(name)
        left = trial.checkpoints[-1].step if trial.checkpoints else None
        then = "" if trial.phase in ENDED else f"; it resumes from {f'step {left}' if left else 'nothing'}"
        log.warning("trial %s: the origin has deleted %s since%s", name, _deleted_steps({name: refs}), then)


def _deleted_steps(gone: Mapping[str, Sequence[CheckpointRef]]) -> str:
    steps = {trial: ", ".join(str(each.step) for each in refs) for trial, refs in gone.items()}
    return "; ".join(f"trial {trial}, step {found}" for trial, found in steps.items())
