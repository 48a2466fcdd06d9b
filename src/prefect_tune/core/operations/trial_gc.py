"""Garbage-collect a trial from outside its owner: retired checkpoints, remains of interrupted saves, old replies.

There are no waiting periods: an object may be deleted once the trial's journal holds a limit after it, that is a
retirement (see `collect.is_collectable`). The owner writes one with each retirement. When a trial has ended, no save is
running, and a guest may write one (`Retired`): the journal is one sequence, so that a process that starts the
trial again comes after that entry.

Some trials end in the experiment's journal only: those that are given up, or not resumed. In its own journal such a
trial waits, so that no save is running either, and a process that starts it again opens that journal first. So it has
ended as long as no process has opened its journal since the experiment's journal absorbed it, and a guest's entry is
refused if such a process is faster. A trial that is running by its own journal may have a live owner: it is left alone.

On a target that supports one writer only, no guest's entry is written: only objects that need no new limit are
deleted, and `Collected.kept` says why the rest stays.

The replies to trials on other machines are stored on the target, too. Attempt numbers only grow, so that replies to
an attempt that is over may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from prefect_tune.core.errors import CheckpointCorrupt, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention, retired, retired_quarantined
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, is_collectable, is_held
from prefect_tune.core.journal.journal import append_as_guest, load
from prefect_tune.core.journal_events import Claim, Retired
from prefect_tune.core.messages.target_messages import answers_up_to, node_messages_up_to
from prefect_tune.core.operations.checkpoint_gc import leftover, orphans
from prefect_tune.core.operations.clone import claims_over, clear, settle
from prefect_tune.core.restore import OutdatedStateError, journal_of
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ONE_WRITER, Listed, ObjectStore, ParallelMap
from prefect_tune.core.values import Stamp

_WAITS = frozenset({Phase.PENDING, Phase.PAUSED})


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
    """Replies to attempts that are over, and messages between their nodes."""
    kept: str | None = None
    """Why some garbage stays; None where none does."""
    damage: str | None = None
    """The damage for which nothing of the trial may be deleted; None where there is none."""


@dataclass(frozen=True, slots=True)
class _Garbage:
    doomed: Sequence[CheckpointKey]
    orphans: Sequence[Listed]
    answers: Sequence[Listed]
    undecided_count: int

    def collected(self, trial: TrialKey, kept: str | None) -> Collected:
        return Collected(
            trial.trial,
            checkpoints=tuple(key.step for key in self.doomed),
            orphan_count=len(self.orphans),
            orphan_bytes=sum(each.size_bytes for each in self.orphans),
            undecided_count=self.undecided_count,
            answer_count=len(self.answers),
            kept=kept,
        )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A trial and how to read it; `known` is the trial in its experiment's journal, where it may have ended only."""

    store: ObjectStore
    trial: TrialKey
    side_by_side: ParallelMap
    known: Trial | None

    def state(self) -> Experiment:
        """Read the journal that records its checkpoints."""
        return load(self.store, journal_of(self.store, self.trial), side_by_side=self.side_by_side)

    def ended(self, state: Experiment) -> Trial | None:
        """Return the trial if it has ended: in `state`, or, since it was opened last, in the experiment's journal."""
        found = None if state.is_removed else state.trials.get(self.trial.trial)
        if found is None or found.phase in ENDED:
            return found
        known = self.known
        elsewhere = (
            known is not None and known.own_journal and known.phase in ENDED and state.opened_at <= known.absorbed
        )
        return found if elsewhere and found.phase in _WAITS else None

    def orphans(self, own: Trial) -> Sequence[Listed]:
        return orphans(self.store, self.trial, own, side_by_side=self.side_by_side)

    def left(self, state: Experiment, own: Trial) -> Sequence[CheckpointKey]:
        return leftover(self.store, self.trial, own, max(state.settled_from, own.collected_up_to))

    def held(self, state: Experiment, own: Trial) -> Sequence[CheckpointKey]:
        """Return retired checkpoints that are kept for clones, which may be over."""
        return [key for key in self.left(state, own) if is_held(own, key)] if own.claims else []

    def claims_over(self, own: Trial, checkpoints: Sequence[CheckpointKey]) -> Sequence[Claim]:
        return claims_over(self.store, own, checkpoints, side_by_side=self.side_by_side)

    def without_claims_that_are_over(self, own: Trial, checkpoints: Sequence[CheckpointKey]) -> Trial:
        """Return the trial as `settle` would change it."""
        over = self.claims_over(own, checkpoints)
        return own.model_copy(update={"claims": tuple(each for each in own.claims if each not in over)})

    def settled(self, checkpoints: Sequence[CheckpointKey], stamp: Stamp) -> Trial:
        return settle(self.store, self.trial, checkpoints, stamp, side_by_side=self.side_by_side)

    def garbage(self, state: Experiment, own: Trial) -> _Garbage:
        left = self.left(state, own)
        doomed = [key for key in left if is_collectable(own, key)]
        over = own.attempt if self.ended(state) else own.attempt - 1
        answers = [*answers_up_to(self.store, self.trial, over), *node_messages_up_to(self.store, self.trial, over)]
        return _Garbage(doomed, self.orphans(own), answers, len(left) - len(doomed))

    def needs_limit(self, state: Experiment) -> bool:
        """Return whether a guest may write a `Retired` entry, and it would free garbage."""
        return self.ended(state) is not None and self._is_young(state)

    def _is_young(self, state: Experiment) -> bool:
        """Return whether a retirement now would free objects."""
        own = state.trial(self.trial.trial)
        beyond = own.model_copy(update={"collected_up_to": state.number + 1})
        left = leftover(self.store, self.trial, beyond, state.number + 1)
        now = [key for key in left if is_collectable(beyond, key) and not is_collectable(own, key)]
        young = (each.path for each in self.orphans(beyond))
        return bool(now) or any(blob_sequence(path) >= own.collected_up_to for path in young)

    def why_not_settled(self, state: Experiment) -> str | None:
        """Return why no entry is written to free more garbage; None where it can be written, or would free none."""
        if self.store.conditional_create:
            return None
        own = state.trial(self.trial.trial)
        held = self.held(state, own)
        more = self.needs_limit(state) or bool(self.claims_over(own, held))
        return f"more could be deleted after an entry in its journal: {ONE_WRITER}" if more else None

    def pruned(self, state: Experiment, retires: Callable[[Trial], Sequence[int]] = lambda _: ()) -> Sequence[Retired]:
        """Return a guest's retirement for the trial as it is in `state`; none unless it has ended."""
        found = self.ended(state)
        return () if found is None else [Retired(trial=self.trial.trial, retires=tuple(retires(found)))]


def look_for_garbage(
    store: ObjectStore, trial: TrialKey, *, side_by_side: ParallelMap, known: Trial | None = None
) -> Collected:
    """Return what `collect_from` would delete; writes nothing."""
    return _repeated_while_outdated(trial, partial(_looked_for, _Subject(store, trial, side_by_side, known)))


def _looked_for(subject: _Subject) -> Collected:
    state, trial = subject.state(), subject.trial
    if trial.trial not in state.trials:
        return Collected(trial.trial)  # it was added, and not started
    own, kept = state.trial(trial.trial), subject.why_not_settled(state)
    if kept is None and subject.needs_limit(state):
        own = own.model_copy(update={"collected_up_to": state.number + 1})
    if kept is None:
        own = subject.without_claims_that_are_over(own, subject.held(state, own))
    return subject.garbage(state, own).collected(trial, kept)


def collect_from(
    store: ObjectStore, trial: TrialKey, stamp: Stamp, *, side_by_side: ParallelMap, known: Trial | None = None
) -> Collected:
    """Delete the garbage of `trial`, and return what was deleted. The next call finishes an interrupted one.

    Args:
        known: the trial in its experiment's journal: it may have ended only there.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """
    return _repeated_while_outdated(trial, partial(_collected, _Subject(store, trial, side_by_side, known), stamp))


def _collected(subject: _Subject, stamp: Stamp) -> Collected:
    state, store, trial = subject.state(), subject.store, subject.trial
    if trial.trial not in state.trials:
        return Collected(trial.trial)
    own, kept = state.trial(trial.trial), subject.why_not_settled(state)
    if kept is None and subject.needs_limit(state):
        state = append_as_guest(store, state.key, subject.pruned, stamp, side_by_side=subject.side_by_side)
        own = state.trial(trial.trial)
    if kept is None and (held := subject.held(state, own)):
        own = subject.settled(held, stamp)
    found = subject.garbage(state, own)
    if found.doomed:
        clear(store, trial, own, found.doomed, stamp, side_by_side=subject.side_by_side)
    if left := [*subject.orphans(own), *found.answers]:
        store.delete([each.path for each in left])
    return found.collected(trial, kept)


def _repeated_while_outdated(trial: TrialKey, act: Callable[[], Collected]) -> Collected:
    """Call `act`, again while the owner retires checkpoints meanwhile; return damage and a deletion as a result."""
    while True:
        try:
            return act()
        except OutdatedStateError:
            continue
        except CheckpointCorrupt as corrupt:
            return Collected(trial.trial, damage=str(corrupt))
        except Superseded:
            return Collected(trial.trial, kept="its experiment is being deleted")


# ------------------------------------------------------------------------------------------------- pruning


def look_for_prunable(
    store: ObjectStore,
    trial: TrialKey,
    policy: Retention,
    *,
    side_by_side: ParallelMap,
    known: Trial | None = None,
    needed: Collection[int] = (),
) -> Sequence[int]:
    """Return what `prune` would retire; writes nothing."""
    subject = _Subject(store, trial, side_by_side, known)
    found = subject.ended(subject.state())
    if found is None:
        return ()
    settled = subject.without_claims_that_are_over(found, _claimed(trial, found, policy))
    return _prunable(settled, policy, needed)


def prune(
    store: ObjectStore,
    trial: TrialKey,
    policy: Retention,
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
    known: Trial | None = None,
    needed: Collection[int] = (),
) -> Sequence[int]:
    """Retire the checkpoints of an ended trial that `policy` does not keep; return their sequences.

    Their bytes are deleted by a later `collect_from`. The newest checkpoint, pinned ones, those that clones and
    forks need, and the sequences in `needed` are kept. If the trial is running again by then, none is retired: its
    owner has a policy. Other arguments and errors are those of `collect_from`.
    """
    subject = _Subject(store, trial, side_by_side, known)
    found = subject.ended(subject.state())
    if found is not None and (claimed := _claimed(trial, found, policy)):
        try:
            found = subject.settled(claimed, stamp)
        except Superseded:
            return ()  # its experiment was deleted meanwhile
    if found is None or not _prunable(found, policy, needed):
        return ()
    retirements: Sequence[Retired] = ()

    def events(state: Experiment) -> Sequence[Retired]:
        nonlocal retirements
        retirements = [
            each for each in subject.pruned(state, lambda now: _prunable(now, policy, needed)) if each.retires
        ]
        return retirements

    append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    return [sequence for each in retirements for sequence in each.retires]


def _unwanted(trial: Trial, policy: Retention) -> Sequence[int]:
    quarantined = (
        each.sequence for each in retired_quarantined(trial.quarantined_checkpoints, trial.checkpoints, policy)
    )
    return [*retired(trial.checkpoints, policy), *quarantined]


def _prunable(trial: Trial, policy: Retention, needed: Collection[int]) -> Sequence[int]:
    kept = {each.sequence for each in trial.claims}.union(needed)
    return [each for each in _unwanted(trial, policy) if each not in kept]


def _claimed(trial: TrialKey, found: Trial, policy: Retention) -> Sequence[CheckpointKey]:
    """Return checkpoints that only clones keep from being retired; the clones may be over."""
    unwanted = frozenset(_unwanted(found, policy))
    named = {(each.step, each.sequence) for each in found.claims if each.sequence in unwanted}
    return [CheckpointKey(trial=trial, step=step, sequence=sequence) for step, sequence in sorted(named)]
