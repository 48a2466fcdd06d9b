"""Clone a checkpoint by its manifest: no byte is copied, and no byte is deleted while a clone needs it.

First the cloning process, as a guest, adds a claim to the journal of the trial that has the bytes (the
origin). That journal is one sequence: a claim before a checkpoint's retirement is known to every process that may
delete it; after the retirement it cannot be claimed, unless another clone's claim still holds it. So a deletion
needs no coordination, and a written claim holds. Then the manifest of the clone is created, and the clone's own
trial journals it as a checkpoint.

A claim ends when it is released: by the process that deletes the retired clone, or by one that finds in the clone's
journal that the clone is no checkpoint and cannot become one. Neither can be undone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from prefect_tune.core.checkpoints.commit import publish
from prefect_tune.core.checkpoints.manifest import About, BlobRef, Manifest
from prefect_tune.core.checkpoints.metadata import newest_metadata
from prefect_tune.core.errors import (
    AlreadyCommitted,
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    JournalCorrupt,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import (
    Status,
    Trial,
    is_acceptable,
    is_collectable,
    is_held,
    is_live,
    is_quarantined,
)
from prefect_tune.core.journal.journal import append_as_guest, load
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Claim,
    Claimed,
    GuestEvent,
)
from prefect_tune.core.operations.checkpoint_gc import collect
from prefect_tune.core.restore import journal_of, read_manifest, ref_of, trial_in
from prefect_tune.core.storage.generations import is_deleted
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap
from prefect_tune.core.values import Stamp


def newest_of(
    store: ObjectStore, trial: TrialKey, *, last_step: int | None = None, side_by_side: ParallelMap
) -> CheckpointKey:
    """Return the newest checkpoint in the journal of `trial` from which a clone trains at least one more step.

    Args:
        last_step: the step with which each trial ends at the latest; None if that is not known.

    Raises:
        CheckpointNotFound: the trial has none.
    """
    state = load(store, journal_of(store, trial), side_by_side=side_by_side).trials.get(trial.trial)
    live = state.checkpoints if state else ()
    if state is not None and state.status is Status.COMPLETED:
        live = tuple(each for each in live if each.step < state.step)
    if last_step is not None:
        live = tuple(each for each in live if each.step < last_step)
    if not live:
        raise CheckpointNotFound(f"{trial.folder}: it has no checkpoint that could be cloned and trained further")
    return trial.checkpoint_key(live[-1])


def clone(
    store: ObjectStore,
    source: CheckpointKey,
    into: Experiment,
    trial: str,
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
) -> CheckpointRef:
    """Create the manifest of a clone of `source` in `trial`, and return the reference for `trial`'s journal.

    The clone is a checkpoint once the owner of the journal `into` has journaled it as `Cloned`, in the same term
    and before another checkpoint. A second call with the same arguments gives the same clone. The clone's
    metadata is the newest of `source`. Its bytes stay even if `source` is retired; if the clone is never journaled,
    they stay until its claim is found to be over.

    Raises:
        CheckpointNotFound: `source` is deleted, or about to be: take its trial's newest checkpoint, and try again.
        CheckpointCorrupt: the manifest of `source` is damaged.
        InvalidInput: the experiment that holds its bytes is being deleted.
        AlreadyCommitted: there is another checkpoint of this step and sequence.
        CommitUnknown, StoreUnavailable: call again.
    """
    original = read_manifest(store, source)
    origin = original.origin or source
    if not original.lies_at(origin):
        raise CheckpointCorrupt(f"{source.manifest_path}: refers to bytes of another trial")
    key = CheckpointKey(trial=into.trial_key(trial), step=source.step, sequence=into.number)
    claim = Claim(step=origin.step, sequence=origin.sequence, clone=key, journal=into.key, term=into.term)
    journal = journal_of(store, origin.trial)
    events = partial(_claimed, origin=origin, claim=claim)
    append_as_guest(store, journal, events, stamp, side_by_side=side_by_side)
    metadata = newest_metadata(store, source.metadata_folder)
    about = _about(original.about, metadata, into, trial, stamp)
    published = publish(store, key, _manifest_of_clone(original, origin, key, about))
    if published.origin != origin:
        raise AlreadyCommitted(f"{key.manifest_path}: holds a clone of {published.origin}")
    return ref_of(published)


def _claimed(state: Experiment, *, origin: CheckpointKey, claim: Claim) -> Sequence[GuestEvent]:
    if state.is_removed:
        raise InvalidInput(f"experiment {state.name!r} is being deleted: its checkpoints cannot be cloned")
    trial = trial_in(state, origin.trial)
    if trial is None or not (is_live(trial, origin) or is_held(trial, origin)):
        raise CheckpointNotFound(f"{origin.folder}: no longer a checkpoint, and cannot be cloned")
    return () if claim in trial.claims else (Claimed(trial=origin.trial.trial, claim=claim),)


def _about(original: About, metadata: Mapping[str, object] | None, into: Experiment, trial: str, stamp: Stamp) -> About:
    """Describe the clone; its attempt is the trial's last one, since the attempt that starts from it comes next."""
    state = into.trials.get(trial)
    return original.model_copy(
        update={
            "attempt": state.attempt if state else 0,
            "metadata": original.metadata if metadata is None else metadata,
            "term": into.term,
            "write_id": stamp.write_id,
            "created_at": stamp.at,
            "parent": None,
            "reports": (),
        }
    )


def _manifest_of_clone(original: Manifest, origin: CheckpointKey, key: CheckpointKey, about: About) -> Manifest:
    home, own = origin.trial.of_experiment, key.trial.of_experiment
    elsewhere = {} if home == own else {"experiment": home.experiment, "generation": home.generation}
    return original.model_copy(
        update={
            "experiment": key.trial.experiment,
            "generation": key.trial.generation,
            "trial": key.trial.trial,
            "step": key.step,
            "sequence": key.sequence,
            "about": about,
            "blobs": tuple(
                BlobRef.model_validate({"path": each.path, "size_bytes": each.size_bytes, **elsewhere})
                for each in original.blobs
            ),
            "origin": origin,
        }
    )


# ------------------------------------------------------------------------------------------------- deletion


def clear(
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Sequence[CheckpointKey],
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
) -> int:
    """Delete retired checkpoints of `trial` as `collect` does, including clones and checkpoints that clones needed.

    A clone is released in its origin's journal; if it was the last that needed the bytes, they are deleted there.
    Bytes that another trial's clone still needs stay. Returns the number of deleted objects.

    Raises:
        CheckpointCorrupt, Superseded: as `collect`.
        StoreUnavailable, CommitUnknown: call again.
    """
    if any(is_held(state, key) for key in doomed):
        state = settle(store, trial, doomed, stamp, side_by_side=side_by_side)
    releases = partial(release, store, stamp, side_by_side)
    return collect(store, trial, state, doomed, side_by_side=side_by_side, release=releases)


def settle(
    store: ObjectStore,
    trial: TrialKey,
    checkpoints: Iterable[CheckpointKey],
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
) -> Trial:
    """Release the claims to `checkpoints` of `trial` whose clones are over, and return the trial after that."""
    found = _still_there(load(store, journal_of(store, trial), side_by_side=side_by_side), trial)
    over = claims_over(store, found, checkpoints, side_by_side=side_by_side)
    if not over:
        return found
    events = partial(_released, trial=trial, clones={each.clone for each in over})
    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    return _still_there(after, trial)


def claims_over(
    store: ObjectStore, trial: Trial, checkpoints: Iterable[CheckpointKey], *, side_by_side: ParallelMap
) -> Sequence[Claim]:
    """Return the claims to `checkpoints`, which are `trial`'s, whose clones are over."""
    named = {(key.step, key.sequence) for key in checkpoints}
    claims = [each for each in trial.claims if (each.step, each.sequence) in named]
    return [each for each in claims if _is_over(store, each, side_by_side)]


def release(
    store: ObjectStore, stamp: Stamp, side_by_side: ParallelMap, clone: CheckpointKey, origin: CheckpointKey
) -> int:
    """Release a retired clone, which can never be a checkpoint again. Returns the number of deleted objects."""
    journal = journal_of(store, origin.trial)
    events = partial(_released, trial=origin.trial, clones={clone})
    after = append_as_guest(store, journal, events, stamp, side_by_side=side_by_side)
    return _collect_released(store, origin.trial, after, [origin], side_by_side)


def release_all(
    store: ObjectStore, stamp: Stamp, trial: TrialKey, experiment: JournalKey, origins: Collection[CheckpointKey]
) -> int:
    """Release every clone of `trial`'s checkpoints in `experiment`, which is being deleted, and every claim for one.

    Those checkpoints, and `origins`, are deleted where they are retired and no other clone needs them. Returns the
    number of deleted objects.
    """
    doomed = set(origins)

    def events(state: Experiment) -> Sequence[GuestEvent]:
        found = trial_in(state, trial)
        theirs = [each for each in (found.claims if found else ()) if each.clone.trial.of_experiment == experiment]
        doomed.update(trial.checkpoint_key(each) for each in theirs)
        return [Claimed(trial=trial.trial, claim=each, released=True) for each in theirs]

    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=map)
    return _collect_released(store, trial, after, doomed, map)


def _collect_released(
    store: ObjectStore, trial: TrialKey, after: Experiment, origins: Iterable[CheckpointKey], side_by_side: ParallelMap
) -> int:
    """Delete those of `origins` that are collectable, and return the number of deleted objects."""
    state = trial_in(after, trial)
    if state is None:
        return 0
    doomed = [key for key in origins if key.sequence not in state.quarantined and is_collectable(state, key)]
    try:
        return collect(store, trial, state, doomed, side_by_side=side_by_side)
    except (CheckpointCorrupt, Superseded):
        return 0  # that trial's owner deletes them later, with its leftovers or the whole experiment


def _released(state: Experiment, *, trial: TrialKey, clones: set[CheckpointKey]) -> Sequence[GuestEvent]:
    found = trial_in(state, trial)
    claims = found.claims if found else ()
    return [Claimed(trial=trial.trial, claim=each, released=True) for each in claims if each.clone in clones]


def _is_over(store: ObjectStore, claim: Claim, side_by_side: ParallelMap) -> bool:
    """Return whether the clone is no checkpoint and can never become one; False where that is not known."""
    try:
        state = load(store, claim.journal, side_by_side=side_by_side)
    except Superseded:
        return True  # the clone's experiment is deleted
    except (JournalCorrupt, UnknownVersion):
        return False
    if not state.number:
        return is_deleted(store, claim.journal)
    trial = trial_in(state, claim.clone.trial)
    if trial is not None and is_live(trial, claim.clone):
        return False
    if trial is not None and is_quarantined(trial, claim.clone):
        return False  # it may be a checkpoint again
    if state.term == claim.term:
        return trial is not None and not is_acceptable(trial, claim.clone.sequence)
    return state.term > claim.term  # a journal of an earlier term is stale, and proves nothing


def _still_there(state: Experiment, trial: TrialKey) -> Trial:
    found = trial_in(state, trial)
    if found is None:
        raise Superseded(f"{trial.folder}: its experiment has been deleted. Stop here")
    return found
