"""Open an experiment, and write its next journal entry: one retryable, timed act each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, TargetCheck
from prefect_tune.core.adopt import adopt
from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import (
    JournalCorrupt,
    ObjectNotFound,
    ResumeFailed,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.events import Event, Owner
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import Loaded, append, entries_beyond, read, take_over
from prefect_tune.core.layout import JournalKey, journal_key
from prefect_tune.core.segments import write_due_segment
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import Stamp, digest_of
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.book import Listener
from prefect_tune.tasks.stamp import new_stamp
from prefect_tune.tasks.transient import CHECKING, RETRYING, retrying, unseen

__all__ = [
    "Opening",
    "check_target",
    "experiment_id",
    "open_journal",
    "read_experiment",
    "read_journal",
    "restore_experiment_state",
    "sync_experiment_state",
    "write_directly",
    "write_entry",
]

_TIMEOUT_SECONDS = 120.0


@task(name="check-target", task_run_name="check {target.uri}", **CHECKING)
def check_target(target: StorageTarget, *, timeout_seconds: float = 30.0) -> TargetCheck:
    """Find out, by using it, whether `target` can be trusted with checkpoints; says in one line what is wrong.

    Raises:
        StoreRefused: it cannot be, or not with this configuration.
        StoreUnavailable: it did not answer, and the retries are spent.
    """
    found = target.check(timeout=timedelta(seconds=timeout_seconds))
    if found.may_pass:
        raise StoreUnavailable(found.message)
    if not found.ok:
        raise StoreRefused(found.message)
    if not found.conditional_create:
        get_run_logger().warning("%s", found.message)
    return found


@task(name="restore-experiment-state", task_run_name="open {experiment}", **RETRYING)
def restore_experiment_state(  # noqa: PLR0913 - the fifth saves reading again what was just read
    target: StorageTarget,
    experiment: str,
    owner: Owner,
    stamp: Stamp,
    known: Loaded | None = None,
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Experiment:
    """Open `experiment` for `owner` and return its state; from now on every earlier owner's writes fail.

    A checkpoint whose save was killed between its manifest and its journal entry is taken over, and
    trials that were running are waiting again. An experiment that is not there yet is an empty one.

    Args:
        target: where it lives.
        experiment: its name there.
        owner: who opens it, for messages to others.
        stamp: write id and time of the entry that says so.
        known: the experiment as it was just read, which saves reading it again.
        timeout_seconds: by then it has ended, one way or the other.

    Raises:
        ResumeFailed: it exists and cannot be read, whatever the number of tries. Nothing is started afresh.
        Superseded: others kept opening it first.
        StoreRefused: the target refuses it; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: the retries are spent.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        return _opened(store, journal_key(experiment), target, Opening(owner, stamp, known=known), transfers)


@dataclass(frozen=True, slots=True)
class Opening:
    """Who opens a journal, what the entry that does so says besides, and who hears of the entries."""

    owner: Owner
    stamp: Stamp
    also: Callable[[Experiment], Sequence[Event]] = lambda _: ()
    listener: Listener = lambda _events, _experiment: None
    known: Loaded | None = None
    """What was read of it just now, and need not be read again."""


class _BehindError(Exception):
    """Whoever opens it was superseded before: no race, that one could win by trying again."""


def _opened(
    store: ObjectStore, key: JournalKey, target: StorageTarget, opening: Opening, transfers: Mapper
) -> Experiment:
    said: Sequence[Event] | None = None

    def also(found: Experiment) -> Sequence[Event]:
        nonlocal said
        if found.owner is not None and opening.owner.is_behind(found.owner):
            raise _BehindError(f"{key}: these orders have been replaced by newer ones, which {found.owner} carries out")
        said = opening.also(found)
        return said

    try:
        opened = take_over(
            store, key, opening.owner, opening.stamp, side_by_side=transfers, also=also, known=opening.known
        )
        if said is None:  # an earlier try has written it, perhaps with more after it, and its reply was lost
            _hear_again(store, opened, opening.listener, transfers)
        else:
            opening.listener([opened.opened_by(), *said], opened)
        if opened.settled_from == opened.opened_at:
            return opened
        adopted = adopt(store, opened, side_by_side=transfers)
        after = _appended(store, opened, adopted, _second(opening.stamp))
    except _BehindError as behind:
        raise Superseded(str(behind)) from behind
    except (JournalCorrupt, UnknownVersion) as error:
        raise ResumeFailed(f"{key} at {target.uri}: {error}. Nothing was started afresh, nothing is lost") from error
    opening.listener(adopted, after)
    return after


def _hear_again(store: ObjectStore, opened: Experiment, listener: Listener, transfers: Mapper) -> None:
    """Tell what is written, not what is remembered: who takes it for the whole entry would never take in the rest."""
    for entry in entries_beyond(store, opened.key, opened.opened_at - 1, side_by_side=transfers):
        listener(entry.events, opened.model_copy(update={"number": entry.number}))


def open_journal(target: StorageTarget, key: JournalKey, opening: Opening) -> Experiment:
    """Open the journal that a trial has for itself, as `restore_experiment_state` opens the experiment's.

    It is part of the task that runs the trial, and raises what that one raises: `Superseded` without writing
    anything where it was opened for newer orders than `opening.owner` was given.
    """
    tries = iter([opening])

    def open_it() -> Experiment:
        # What was known is true of the first try only: it may have written more than it heard of.
        this_time = next(tries, replace(opening, known=None))
        timeout = timedelta(seconds=_TIMEOUT_SECONDS)
        with target.open(timeout=timeout) as store, side_by_side() as transfers:
            return _opened(store, key, target, this_time, transfers)

    return retrying(open_it)


def _second(stamp: Stamp) -> Stamp:
    """The stamp of the entry after the first: a retry of the task recognizes both."""
    return Stamp(write_id=f"{stamp.write_id}-adopted", at=stamp.at)


@task(name="sync-experiment-state", task_run_name="journal {experiment.name}", **RETRYING)
def sync_experiment_state(
    target: StorageTarget,
    experiment: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Experiment:
    """Write `events` as the next journal entry of `experiment`, and return the state after it: durable, and still ours.

    Args:
        target: where it lives.
        experiment: its state after the entry before.
        events: what happened, in order.
        stamp: write id and time of the entry. A try with the same write id is the same entry.
        timeout_seconds: by then it has ended, one way or the other.

    Raises:
        Superseded: somebody else owns the experiment now.
        StoreUnavailable, CommitUnknown: the retries are spent.
    """
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store:
        return _appended(store, experiment, events, stamp)


def _appended(store: ObjectStore, experiment: Experiment, events: Sequence[Event], stamp: Stamp) -> Experiment:
    after = append(store, experiment, events, stamp)
    write_due_segment(store, after)
    return after


def write_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Run `sync_experiment_state`, with a stamp of its own unless one is given. Raises what it raises."""
    return sync_experiment_state(target, unseen(experiment), unseen(events), stamp or new_stamp())


def write_directly(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """As `write_entry`, within the task that calls it: a search writes too often for a task run each time."""
    once = stamp or new_stamp()

    def write() -> Experiment:
        with target.open(timeout=timedelta(seconds=_TIMEOUT_SECONDS)) as store:
            return _appended(store, experiment, events, once)

    return retrying(write)


def experiment_id(target: StorageTarget, experiment: str) -> str | None:
    """Return what no other experiment has, be it begun under the same name when this one was deleted.

    It is the digest of the journal's first entry. None where there is no such experiment. It costs one request.
    """

    def look() -> str | None:
        with target.open(timeout=timedelta(seconds=_TIMEOUT_SECONDS)) as store:
            try:
                return digest_of(store.read(journal_key(experiment).entry_path(1)))
            except ObjectNotFound:
                return None

    return retrying(look)


def read_experiment(target: StorageTarget, experiment: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Experiment:
    """Return the state of `experiment` without opening it: for whoever only looks."""
    return read_journal(target, experiment, timeout_seconds=timeout_seconds).experiment


def read_journal(target: StorageTarget, experiment: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Loaded:
    """Return the same, for whoever may open it next: as `known` to `restore_experiment_state` it is read once."""
    with target.open(timeout=timedelta(seconds=timeout_seconds)) as store, side_by_side() as transfers:
        return read(store, experiment, side_by_side=transfers)
