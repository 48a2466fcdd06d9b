"""Garbage-collect trials from outside their owner: retired checkpoints, remains of interrupted saves, old messages.

There are no waiting periods: an object may be deleted once the journal holds a limit of its trial after it, that is a
retirement (see `is_collectable`). The owner writes one with each retirement. When a trial has ended, no save is
running, and a guest may write one (`Retired`): the journal is one sequence, so that a process that starts the trial
again comes after that entry. A trial with an open outbox has not ended: its attempt may save at any time, and counts
its limits itself.

On a target that supports one writer only, no guest's entry is written: only objects that need no new limit are
deleted, and `Collected.kept` says why the rest stays.

The replies and posts of trials on other machines are stored on the target, too. Attempts and outboxes are numbered
upwards, so that those of an attempt that is over may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prefect_tune.core.errors import CheckpointCorrupt, Superseded
from prefect_tune.core.experiment.experiment import Experiment, after_event
from prefect_tune.core.experiment.retention import Retention, retired, retired_quarantined
from prefect_tune.core.experiment.summary import best_of, objective_in
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, after, is_collectable
from prefect_tune.core.journal.journal import append_as_guest, load
from prefect_tune.core.journal.outbox import received_posts
from prefect_tune.core.journal_events import Retired
from prefect_tune.core.messages.target_messages import answers_up_to, node_objects_up_to
from prefect_tune.core.operations.checkpoint_gc import collect, leftover, orphans
from prefect_tune.core.operations.scrub import Unreadable, unless_unreadable
from prefect_tune.core.prefect_events import best_checkpoints
from prefect_tune.core.restore import OutdatedStateError
from prefect_tune.core.storage.generations import delete_objects_before, objects_before
from prefect_tune.core.storage.layout import JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ONE_WRITER, Listed, ObjectStore, ParallelMap
from prefect_tune.core.values import Stamp

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Collected:
    """The garbage of a trial: found, or deleted."""

    trial: str
    checkpoints: tuple[int, ...] = ()
    """The steps of retired checkpoints."""
    orphan_count: int = 0
    orphan_bytes: int = 0
    undecided_count: int = 0
    """Manifests that are kept for now: a running save may need them (until the trial's next retirement or end), or a
    clone does."""
    answer_count: int = 0
    """Replies to attempts that are over, messages between their nodes, and posts that the journal has."""
    kept: str | None = None
    """Why some garbage stays; None where none does."""
    damage: str | None = None
    """The damage, or the failure to read, for which nothing of the trial may be deleted; None where there is none."""

    @property
    def object_count(self) -> int:
        """The number of objects, with a checkpoint as one."""
        return len(self.checkpoints) + self.orphan_count + self.answer_count


@dataclass(frozen=True, slots=True)
class Garbage:
    """The garbage of an experiment: found, or deleted."""

    trials: Sequence[Collected]
    skipped_count: int
    """The number of trials for which there was no time."""
    dead: Sequence[Listed]
    """Objects that deleted experiments of the same name have left."""

    @property
    def object_count(self) -> int:
        """The number of objects, with a checkpoint as one."""
        return len(self.dead) + sum(each.object_count for each in self.trials)

    @property
    def size_bytes(self) -> int:
        """The size of what was listed; that of retired checkpoints is not known."""
        return sum(each.size_bytes for each in self.dead) + sum(each.orphan_bytes for each in self.trials)


def has_ended(trial: Trial) -> bool:
    """Return whether no attempt of the trial can save before its next `Started` entry."""
    return trial.phase in ENDED and trial.outbox is None


def needs_limit(store: ObjectStore, key: TrialKey, trial: Trial, *, side_by_side: ParallelMap) -> bool:
    """Return whether a guest may write a `Retired` entry for the trial, and it would free garbage."""
    if not has_ended(trial) or not trial.attempt:
        return False
    try:
        limited = after(trial, Retired(trial=trial.trial, retires=()), "guest")
        left = leftover(store, key, limited)
        if any(is_collectable(limited, old) and not is_collectable(trial, old) for old in left):
            return True
        blobs = orphans(store, key, limited, side_by_side=side_by_side)
        return any(blob_sequence(blob.path) >= trial.collected_up_to for blob in blobs)
    except (CheckpointCorrupt, OutdatedStateError, Superseded):
        return False  # `collect_from` reports it


def collect_experiment(
    store: ObjectStore,
    experiment: Experiment,
    stamp: Stamp,
    *,
    only: Collection[str] | None = None,
    side_by_side: ParallelMap,
    dry_run: bool = False,
    has_time: Callable[[], bool] = lambda: True,
) -> Garbage:
    """Delete the garbage of an experiment, or of `only` these trials, and return it.

    First it writes a `Retired` entry for the trials that have ended where that frees garbage; on a target that supports
    one writer only it writes none. A dry run writes and deletes nothing, and returns what a run would delete. An object
    that cannot be read is reported as its trial's damage, and does not stop the others.

    Raises:
        JournalCorrupt, Superseded, UnknownVersion: as `load`.
        StoreUnavailable, StoreRefused, CommitUnknown: call again.
    """
    names = experiment.trials if only is None else only
    state = experiment

    def for_each(act: Callable[[TrialKey, Trial], _Result]) -> Sequence[_Result | Unreadable | None]:
        def act_in_time(name: str) -> _Result | Unreadable | None:
            key = state.trial_key(name)
            if not has_time():
                return None
            return unless_unreadable(store, key, key.folder, lambda: act(key, state.trial(name)))

        return list(side_by_side(act_in_time, names))

    def limits(state: Experiment) -> Sequence[Retired]:
        return [Retired(trial=name, retires=()) for name in limited if has_ended(state.trial(name))]

    limited: Collection[str] = ()
    if store.conditional_create:
        young = for_each(lambda key, trial: needs_limit(store, key, trial, side_by_side=map))
        limited = [name for name, is_young in zip(names, young, strict=True) if is_young is True]
    if limited and not dry_run:
        state = append_as_guest(store, state.key, limits, stamp, side_by_side=side_by_side)
    for limit in limits(state) if dry_run else ():
        state = after_event(state, limit, state.number + 1, "guest")
    collected = for_each(lambda key, trial: collect_from(store, key, trial, side_by_side=map, dry_run=dry_run))
    delete = objects_before if dry_run else delete_objects_before
    return Garbage(
        [
            Collected(each.trial, damage=each.why) if isinstance(each, Unreadable) else each
            for each in collected
            if each is not None
        ],
        collected.count(None),
        delete(store, state.name, state.key.generation) if only is None else (),
    )


def collect_from(
    store: ObjectStore, key: TrialKey, trial: Trial, *, side_by_side: ParallelMap, dry_run: bool = False
) -> Collected:
    """Delete the garbage of a trial, and return what was deleted. The next call finishes an interrupted one.

    A dry run deletes nothing.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable: call again.
    """
    if not trial.attempt:
        return Collected(trial.trial)  # it was added, and not started
    kept = None
    if not store.conditional_create and needs_limit(store, key, trial, side_by_side=side_by_side):
        kept = f"more could be deleted after an entry in its journal: {ONE_WRITER}"
    while True:
        try:
            left = leftover(store, key, trial)
            doomed = [old for old in left if is_collectable(trial, old)]
            blobs = orphans(store, key, trial, side_by_side=side_by_side)
            over = trial.attempt if has_ended(trial) else trial.attempt - 1
            messages = [
                *answers_up_to(store, key, over),
                *node_objects_up_to(store, key, over),
                *received_posts(store, key, trial),
            ]
            if not dry_run:
                collect(store, key, trial, doomed, side_by_side=side_by_side)
                unneeded = orphans(store, key, trial, side_by_side=side_by_side) if doomed else blobs
                store.delete([listed.path for listed in (*unneeded, *messages)])
        except OutdatedStateError as outdated:  # the owner retires checkpoints meanwhile
            trial = outdated.current
            continue
        except CheckpointCorrupt as corrupt:
            return Collected(trial.trial, damage=str(corrupt))
        except Superseded:
            return Collected(trial.trial, kept="its experiment is being deleted")
        return Collected(
            trial.trial,
            checkpoints=tuple(old.step for old in doomed),
            orphan_count=len(blobs),
            orphan_bytes=sum(blob.size_bytes for blob in blobs),
            undecided_count=len(left) - len(doomed),
            answer_count=len(messages),
            kept=kept,
        )


# ------------------------------------------------------------------------------------------------- pruning


def prunable(experiment: Experiment, policy: Retention) -> Sequence[Retired]:
    """Return the retirements of what `policy` does not keep; none while a trial has not ended.

    The newest checkpoint of each trial and pinned ones stay, and so do the best trial and the best checkpoint of all.
    """
    trials = experiment.trials.values()
    if experiment.is_removed or not all(has_ended(trial) for trial in trials):
        return ()
    best, best_saved = best_of(experiment), best_checkpoints(experiment, objective_in(experiment.settings))
    unwanted = (
        Retired(
            trial=trial.trial,
            retires=tuple(sequence for sequence in _unwanted(trial, policy) if sequence != best_saved.get(trial.trial)),
        )
        for trial in trials
        if best is None or trial.trial != best.trial
    )
    return [retirement for retirement in unwanted if retirement.retires]


def prune(
    store: ObjectStore,
    journal: JournalKey,
    policy: Retention,
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
    dry_run: bool = False,
) -> Sequence[Retired]:
    """Retire what is `prunable` in one entry, and return the retirements. Their bytes are deleted by `collect_from`.

    If a trial is running again by then, none is retired: its owner has a policy. A dry run writes nothing.

    Raises:
        StoreRefused: the target supports one writer only.
        JournalCorrupt, Superseded, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """
    if dry_run:
        return prunable(load(store, journal, side_by_side=side_by_side), policy)
    retirements: Sequence[Retired] = ()

    def events(state: Experiment) -> Sequence[Retired]:
        nonlocal retirements
        retirements = prunable(state, policy)
        return retirements

    append_as_guest(store, journal, events, stamp, side_by_side=side_by_side)
    return retirements


def _unwanted(trial: Trial, policy: Retention) -> Iterable[int]:
    quarantined = retired_quarantined(trial.quarantined_checkpoints, trial.checkpoints, policy)
    return (*retired(trial.checkpoints, policy), *(ref.sequence for ref in quarantined))
