"""Own an experiment in a flow of one's own: all tasks of one flow run write its journal in one term.

The tasks remember nothing. Whether this flow run owns the experiment, has lost it, or has never owned it, is read from
the journal, whose openings name the flow run and its run count. So the tasks of a run may run in any process.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import InvalidInput, StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import LoadedJournal, earlier_owners, entries_beyond, load
from prefect_tune.core.journal_events import Event, Owner
from prefect_tune.core.models import Stamp
from prefect_tune.core.storage.generations import require_not_of_before
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.journal_access import (
    Opening,
    Writer,
    append_entry,
    is_same_writer,
    new_write_id,
    open_journal,
    read_undamaged,
    this_writer,
)
from prefect_tune.parameters.argument_checks import require_one_runner
from prefect_tune.parameters.resume_compatibility import require_goes_on
from prefect_tune.storage_retries import on_target, with_retries
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.tasks.experiment_state import check_target

__all__ = ["append_beside_others", "own", "writer_of_trial"]

_RACES = 16
_TIMEOUT = timedelta(minutes=2)
_writing: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
"""One write at a time to each experiment from this process: a target without create-if-absent needs it."""


class _OpenedMeanwhileError(Exception):
    """Another task of this flow run has opened the experiment."""


def own(target: StorageTarget, experiment: str) -> Experiment:
    """Return the experiment, which this flow run owns: since an earlier task of the run, or from now on.

    Another flow run's writes, and those of an earlier try of this one, fail from then on.

    Raises:
        Superseded: this flow run owned the experiment, and another one has taken it over; or it was deleted.
        InvalidInput: the experiment is a search, which writes its own journal; or the target serves one process only,
            and the flow has a task runner with others.
        ResumeFailed: its journal is damaged, or it is being deleted; nothing was started.
        StoreRefused: the target refuses access.
    """
    with _writing[target.uri, experiment]:
        me, known = this_writer(), read_undamaged(target, experiment)
        while not is_same_writer(known.experiment.owner, me):
            _require_ours(known.experiment, target)
            _require_not_superseded(known.experiment, target, me)
            with suppress(_OpenedMeanwhileError):
                return _opened(target, known, me)
            known = read_undamaged(target, experiment)
        return known.experiment


def _opened(target: StorageTarget, known: LoadedJournal, me: Owner) -> Experiment:
    if not check_target.fn(target).conditional_create:
        require_one_runner(target.uri)

    def also(found: Experiment) -> Sequence[Event]:
        if is_same_writer(found.owner, me):
            raise _OpenedMeanwhileError
        return ()

    return open_journal(target, known.experiment.key, Opening(me, new_write_id(), also, known=known))


def _require_ours(state: Experiment, target: StorageTarget) -> None:
    require_goes_on(state)
    if state.settings or any(trial.own_journal for trial in state.trials.values()):
        raise InvalidInput(
            f"experiment {state.name!r} at {target.uri} is a search, which writes its journal itself: expected a name "
            "that is free, or an experiment of these tasks. Nothing was written: choose another experiment name"
        )


def _require_not_superseded(state: Experiment, target: StorageTarget, me: Owner) -> None:
    def look(store: ObjectStore) -> Sequence[Owner]:
        with transfer_pool() as transfers:
            return earlier_owners(store, state, side_by_side=transfers)

    if state.key.generation > 1:
        on_target(target, lambda store: require_not_of_before(store, state.key, me.identity))
    if state.owner is None:
        return
    is_older = state.owner.flow_run == me.flow_run is not None and me.attempt < state.owner.attempt
    if is_older or any(is_same_writer(each, me) for each in on_target(target, look)):
        raise _superseded(state, target)


def _superseded(state: Experiment, target: StorageTarget) -> Superseded:
    return Superseded(
        f"experiment {state.name!r} at {target.uri}: {state.owner} has taken it over from this run, which may no "
        "longer write to it. Stop here: every committed checkpoint is kept. Flow runs that train at the same time "
        "need an experiment each"
    )


def append_beside_others(
    target: StorageTarget,
    known: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
    require: Callable[[Experiment], None],
) -> Experiment:
    """Write `events` as one entry after `known`, or after entries that other tasks of this run have added since.

    `require` gets the state after those, and raises if the events cannot follow it. Writing again with the same
    stamp writes once.

    Raises:
        Superseded: another flow run owns the experiment now.
        StoreUnavailable: other tasks were faster 16 times.
    """
    with _writing[target.uri, known.name], target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        state = known
        for _ in range(_RACES):
            try:
                return append_entry(store, state, events, stamp)
            except Superseded:
                state = load(store, known.key, side_by_side=transfers)
            beyond = entries_beyond(store, known.key, known.number, side_by_side=transfers)
            if any(entry.write_id == stamp.write_id for entry in beyond):
                return state
            if not is_same_writer(state.owner, known.owner or this_writer()):
                raise _superseded(state, target)
            require(state)
    raise StoreUnavailable(f"{known.key}: {_RACES} other writers were faster; try again")


def writer_of_trial(trial: str) -> Writer:
    """Return the journal writer of an attempt of `trial` that runs beside other tasks of this flow run.

    It raises `Superseded` also if another attempt of the trial has begun, or this one was ended.
    """

    def write(
        target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
    ) -> Experiment:
        once, mine = stamp or new_write_id(), experiment.trials.get(trial)

        def require(now: Experiment) -> None:
            theirs = now.trials.get(trial)
            if mine and theirs and (mine.attempt, mine.phase) != (theirs.attempt, theirs.phase):
                raise Superseded(
                    f"trial {trial!r} of {now.key}: another task of the same flow run has begun attempt "
                    f"{theirs.attempt} or ended this one. Stop here: every committed checkpoint is kept"
                )

        return with_retries(lambda: append_beside_others(target, experiment, events, once, require))

    return write
