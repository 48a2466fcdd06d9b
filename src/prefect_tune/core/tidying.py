"""Delete what of a trial nobody needs any more, beside its owner: what is retired, and what saves that died left.

No time is waited for: a thing may be deleted once the trial's journal has drawn a line after it (see
`collect.is_collectable`). The owner draws one with each retirement. Where a trial has ended no save is under way, and a
guest may draw it: the journal has one order, so that whoever starts the trial again comes after the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prefect_tune.core.clone import clear, journal_of
from prefect_tune.core.collect import is_collectable, leftover, orphans
from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointCorrupt
from prefect_tune.core.events import GuestsEvent, Pruned
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import append_as_guest, load
from prefect_tune.core.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.retention import Retention, retired, retired_aside
from prefect_tune.core.store import Listed, ObjectStore
from prefect_tune.core.trial import ENDED, Trial
from prefect_tune.core.values import Stamp

__all__ = ["Collected", "collect_from", "look_for_garbage", "prunable", "prune"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What of a trial can be collected, or was."""

    trial: str
    checkpoints: tuple[int, ...] = ()
    """The steps of those that are none any more."""
    orphan_count: int = 0
    orphan_bytes: int = 0
    undecided_count: int = 0
    """Objects that a save under way may still use; the trial's next retirement decides, or its end."""
    damage: str | None = None
    """Why nothing of it may be deleted."""


@dataclass(frozen=True, slots=True)
class _Garbage:
    doomed: Sequence[CheckpointKey]
    orphans: Sequence[Listed]
    undecided_count: int

    def told_of(self, trial: TrialKey) -> Collected:
        return Collected(
            trial.trial,
            checkpoints=tuple(key.step for key in self.doomed),
            orphan_count=len(self.orphans),
            orphan_bytes=sum(each.size_bytes for each in self.orphans),
            undecided_count=self.undecided_count,
        )


def look_for_garbage(store: ObjectStore, trial: TrialKey, *, side_by_side: Mapper) -> Collected:
    """Return what `collect_from` would delete; nothing is written."""
    state = _state(store, trial, side_by_side)
    if trial.trial not in state.trials:
        return Collected(trial.trial)  # it was added, and has not begun
    try:
        return _garbage(store, trial, state, side_by_side).told_of(trial)
    except CheckpointCorrupt as corrupt:
        return Collected(trial.trial, damage=str(corrupt))


def collect_from(store: ObjectStore, trial: TrialKey, stamp: Stamp, *, side_by_side: Mapper) -> Collected:
    """Delete what nobody needs of `trial`, and return what that was. Cut short, it is finished by the next one.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """
    state = _state(store, trial, side_by_side)
    if trial.trial not in state.trials:
        return Collected(trial.trial)
    try:
        state = _with_line(store, trial, state, stamp, side_by_side)
        found = _garbage(store, trial, state, side_by_side)
        if found.doomed:
            clear(store, trial, state.trial(trial.trial), found.doomed, stamp, side_by_side=side_by_side)
        if left := orphans(store, trial, state.trial(trial.trial), side_by_side=side_by_side):
            store.delete([each.path for each in left])
    except CheckpointCorrupt as corrupt:
        return Collected(trial.trial, damage=str(corrupt))
    return found.told_of(trial)


def _state(store: ObjectStore, trial: TrialKey, side_by_side: Mapper) -> Experiment:
    return load(store, journal_of(store, trial), side_by_side=side_by_side)


def _garbage(store: ObjectStore, trial: TrialKey, state: Experiment, side_by_side: Mapper) -> _Garbage:
    known = state.trial(trial.trial)
    left = leftover(store, trial, known, max(state.settled_from, known.collected_up_to))
    doomed = [key for key in left if is_collectable(known, key)]
    return _Garbage(doomed, orphans(store, trial, known, side_by_side=side_by_side), len(left) - len(doomed))


def _with_line(
    store: ObjectStore, trial: TrialKey, state: Experiment, stamp: Stamp, side_by_side: Mapper
) -> Experiment:
    """Where the trial has ended and something was begun since the last line, there is one after that."""
    known = state.trial(trial.trial)
    if known.status not in ENDED or not _is_young(store, trial, state, side_by_side):
        return state
    say = partial(_pruned, trial=trial, chosen=lambda _: ())
    return append_as_guest(store, state.key, say, stamp, side_by_side=side_by_side)


def _is_young(store: ObjectStore, trial: TrialKey, state: Experiment, side_by_side: Mapper) -> bool:
    """Whether anything would be garbage if the line were drawn now."""
    known = state.trial(trial.trial)
    beyond = known.model_copy(update={"collected_up_to": state.number + 1})
    left = leftover(store, trial, beyond, state.number + 1)
    now = [key for key in left if is_collectable(beyond, key) and not is_collectable(known, key)]
    young = (each.path for each in orphans(store, trial, beyond, side_by_side=side_by_side))
    return bool(now) or any(blob_sequence(path) >= known.collected_up_to for path in young)


# ------------------------------------------------------------------------------------------------- pruning


def prunable(trial: Trial, policy: Retention) -> Sequence[int]:
    """Return the sequences of the checkpoints of an ended trial that `policy` does not keep.

    Its newest stays, what is pinned, and what clones and forks go on from.
    """
    needed = {each.sequence for each in trial.claims}
    aside = (each.sequence for each in retired_aside(trial.aside, trial.checkpoints, policy))
    return [each for each in (*retired(trial.checkpoints, policy), *aside) if each not in needed]


def prune(
    store: ObjectStore, trial: TrialKey, policy: Retention, stamp: Stamp, *, side_by_side: Mapper
) -> Sequence[int]:
    """Retire what `policy` does not keep of a trial that has ended, and return the sequences; their bytes go later.

    Of one that goes on again, by then, nothing is retired: its owner has a policy. Raises as `collect_from`.
    """
    chosen: list[int] = []

    def choose(found: Trial) -> Sequence[int]:
        chosen[:] = prunable(found, policy)
        return chosen

    say = partial(_pruned, trial=trial, chosen=choose, only_if_any=True)
    append_as_guest(store, journal_of(store, trial), say, stamp, side_by_side=side_by_side)
    return chosen


def _pruned(
    state: Experiment, *, trial: TrialKey, chosen: Callable[[Trial], Sequence[int]], only_if_any: bool = False
) -> Sequence[GuestsEvent]:
    found = None if state.is_removed else state.trials.get(trial.trial)
    if found is None or found.status not in ENDED:
        return ()
    retires = tuple(chosen(found))
    return () if only_if_any and not retires else [Pruned(trial=trial.trial, retires=retires)]
