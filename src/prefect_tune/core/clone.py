"""Clone a checkpoint by its manifest: no byte is copied, and none is deleted while a clone needs it.

Whoever clones writes first into the journal of the trial whose bytes they are, the origin, as a guest: a
claim. That journal has one order. A claim before a checkpoint's retirement is known to everybody who may
delete it; after the retirement nobody can claim it, unless another clone's claim still holds it. So a
deletion asks nobody, and a claim that was written holds. Then the manifest of the clone is created, and
its trial's own journal says that it is a checkpoint.

A claim ends when it is released: by whoever deletes the retired clone, or by whoever finds the clone's
journal so far on that the clone is no checkpoint and cannot become one. Both are for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from prefect_tune.core.adopt import ref_of
from prefect_tune.core.collect import collect
from prefect_tune.core.commit import Mapper, publish
from prefect_tune.core.errors import (
    AlreadyCommitted,
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    JournalCorrupt,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.events import CheckpointRef, Claim, Claimed, GuestsEvent, Released
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import append_as_guest, load
from prefect_tune.core.layout import CheckpointKey, TrialKey
from prefect_tune.core.manifest import About, BlobRef, Manifest
from prefect_tune.core.metadata import newest_metadata
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.stale_reads import journal_of, trial_in
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import Trial, is_acceptable, is_aside, is_collectable, is_held, is_live, newest_key
from prefect_tune.core.values import Stamp

__all__ = ["claims_over", "clear", "clone", "let_go", "let_go_of_all", "newest_of", "settle"]


def newest_of(store: ObjectStore, trial: TrialKey, *, side_by_side: Mapper) -> CheckpointKey:
    """Return the checkpoint that `trial` would go on from now, as its journal tells it.

    Raises:
        CheckpointNotFound: it has none.
    """
    state = load(store, journal_of(store, trial), side_by_side=side_by_side).trials.get(trial.trial)
    newest = newest_key(trial, state) if state else None
    if newest is None:
        raise CheckpointNotFound(f"{trial.folder}: there is no checkpoint that could be cloned")
    return newest


def clone(  # noqa: PLR0913 - from where, to where, and how: none can be had from another
    store: ObjectStore,
    source: CheckpointKey,
    into: Experiment,
    trial: str,
    stamp: Stamp,
    *,
    side_by_side: Mapper,
) -> CheckpointRef:
    """Create the manifest of a clone of `source` in `trial`, and return how `trial`'s journal is to name it.

    It is a checkpoint once its owner, who knows that journal as `into`, has journaled it as `Cloned`, in the
    same epoch and before another checkpoint. Called again with the same arguments it is the same clone. What
    is said of it is what is said of `source` now.
    Whatever becomes of `source`, its bytes stay; if the clone is never journaled, until that is found.

    Raises:
        CheckpointNotFound: `source` is gone, or about to be: choose its trial's newest one, and try again.
        CheckpointCorrupt: its manifest is damaged.
        InvalidInput: the experiment that holds its bytes is being deleted.
        AlreadyCommitted: there is another checkpoint of this step, begun after the same entry.
        CommitUnknown, StoreUnavailable: call again.
    """
    original = read_manifest(store, source)
    origin = original.origin or source
    if not original.lies_at(origin):
        raise CheckpointCorrupt(f"{source.manifest_path}: refers to bytes of another trial")
    key = CheckpointKey(trial=TrialKey(experiment=into.name, trial=trial), step=source.step, sequence=into.number)
    claim = Claim(step=origin.step, sequence=origin.sequence, clone=key, journal=into.key, epoch=into.epoch)
    journal = journal_of(store, origin.trial)
    say = partial(_claimed, origin=origin, claim=claim)
    append_as_guest(store, journal, say, stamp, side_by_side=side_by_side)
    said = newest_metadata(store, source.metadata_folder)
    about = _about(original.about, said, into, trial, stamp)
    published = publish(store, key, _manifest_of_clone(original, origin, key, about))
    if published.origin != origin:
        raise AlreadyCommitted(f"{key.manifest_path}: holds a clone of {published.origin}")
    return ref_of(published)


def _claimed(state: Experiment, *, origin: CheckpointKey, claim: Claim) -> Sequence[GuestsEvent]:
    if state.is_removed:
        raise InvalidInput(f"experiment {state.name!r} is being deleted: nothing that lies there can be cloned")
    trial = trial_in(state, origin.trial)
    if trial is None or not (is_live(trial, origin) or is_held(trial, origin)):
        raise CheckpointNotFound(f"{origin.folder}: is no checkpoint any more, and cannot be cloned")
    return () if claim in trial.claims else (Claimed(trial=origin.trial.trial, claim=claim),)


def _about(original: About, said: Mapping[str, object] | None, into: Experiment, trial: str, stamp: Stamp) -> About:
    """No attempt trained it: the one that starts from it is the next one."""
    state = into.trials.get(trial)
    return original.model_copy(
        update={
            "attempt": state.attempt if state else 0,
            "metadata": original.metadata if said is None else said,
            "epoch": into.epoch,
            "write_id": stamp.write_id,
            "created_at": stamp.at,
            "parent": None,
            "reports": (),
        }
    )


def _manifest_of_clone(original: Manifest, origin: CheckpointKey, key: CheckpointKey, about: About) -> Manifest:
    home = origin.trial.experiment if origin.trial.experiment != key.trial.experiment else None
    return original.model_copy(
        update={
            "experiment": key.trial.experiment,
            "trial": key.trial.trial,
            "step": key.step,
            "sequence": key.sequence,
            "about": about,
            "blobs": tuple(
                BlobRef(path=each.path, size_bytes=each.size_bytes, experiment=home) for each in original.blobs
            ),
            "origin": origin,
        }
    )


# ------------------------------------------------------------------------------------------------- deletion


def clear(  # noqa: PLR0913 - as `collect`, and with a stamp for what it journals elsewhere
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Sequence[CheckpointKey],
    stamp: Stamp,
    *,
    side_by_side: Mapper,
) -> int:
    """Delete retired checkpoints of `trial` as `collect` does, clones and what clones needed among them.

    A clone is released where its bytes are, and if it was the last that needed them, they are deleted there.
    What clones of others still need stays. Returns how many objects were deleted.

    Raises:
        CheckpointCorrupt, Superseded: as `collect`.
        StoreUnavailable, CommitUnknown: call again.
    """
    if any(is_held(state, key) for key in doomed):
        state = settle(store, trial, doomed, stamp, side_by_side=side_by_side)
    lets_go = partial(let_go, store, stamp, side_by_side)
    return collect(store, trial, state, doomed, side_by_side=side_by_side, let_go=lets_go)


def settle(
    store: ObjectStore, trial: TrialKey, checkpoints: Iterable[CheckpointKey], stamp: Stamp, *, side_by_side: Mapper
) -> Trial:
    """Release the claims to `checkpoints` of `trial` whose clones are over, and return the trial after that."""
    found = _trial_now(store, trial, side_by_side)
    over = claims_over(store, found, checkpoints, side_by_side=side_by_side)
    if not over:
        return found
    say = partial(_released, trial=trial, clones={each.clone for each in over})
    after = append_as_guest(store, journal_of(store, trial), say, stamp, side_by_side=side_by_side)
    return _still_there(after, trial)


def claims_over(
    store: ObjectStore, trial: Trial, checkpoints: Iterable[CheckpointKey], *, side_by_side: Mapper
) -> Sequence[Claim]:
    """Return the claims to `checkpoints`, which are `trial`'s, whose clones are over."""
    named = {(key.step, key.sequence) for key in checkpoints}
    claims = [each for each in trial.claims if (each.step, each.sequence) in named]
    return [each for each in claims if _is_over(store, each, side_by_side)]


def let_go(store: ObjectStore, stamp: Stamp, side_by_side: Mapper, clone: CheckpointKey, origin: CheckpointKey) -> int:
    """Release a retired clone; its trial's journal says that it is retired, and that is for good."""
    journal = journal_of(store, origin.trial)
    say = partial(_released, trial=origin.trial, clones={clone})
    after = append_as_guest(store, journal, say, stamp, side_by_side=side_by_side)
    return _collect_released(store, origin.trial, after, [origin], side_by_side)


def let_go_of_all(
    store: ObjectStore, stamp: Stamp, trial: TrialKey, experiment: str, origins: Collection[CheckpointKey]
) -> int:
    """Release every clone of `trial`'s checkpoints that `experiment` has or was about to have: it is being deleted.

    Of those, and of `origins`, what nobody needs any more is deleted. Returns how many objects that were.
    """
    doomed = set(origins)

    def say(state: Experiment) -> Sequence[GuestsEvent]:
        found = trial_in(state, trial)
        theirs = [each for each in (found.claims if found else ()) if each.clone.trial.experiment == experiment]
        doomed.update(trial.checkpoint_key(each) for each in theirs)
        return [Released(trial=trial.trial, clone=each.clone) for each in theirs]

    after = append_as_guest(store, journal_of(store, trial), say, stamp, side_by_side=map)
    return _collect_released(store, trial, after, doomed, map)


def _collect_released(
    store: ObjectStore, trial: TrialKey, after: Experiment, origins: Iterable[CheckpointKey], side_by_side: Mapper
) -> int:
    """Delete those that nobody needs any more."""
    state = trial_in(after, trial)
    if state is None:
        return 0
    doomed = [key for key in origins if key.sequence not in state.quarantined and is_collectable(state, key)]
    try:
        return collect(store, trial, state, doomed, side_by_side=side_by_side)
    except (CheckpointCorrupt, Superseded):
        return 0  # a matter between that trial and its owner, who finds them among what is left, or deletes it all


def _released(state: Experiment, *, trial: TrialKey, clones: set[CheckpointKey]) -> Sequence[GuestsEvent]:
    found = trial_in(state, trial)
    claims = found.claims if found else ()
    return [Released(trial=trial.trial, clone=each.clone) for each in claims if each.clone in clones]


def _is_over(store: ObjectStore, claim: Claim, side_by_side: Mapper) -> bool:
    """Whether the clone is no checkpoint, and never will be one. Where that cannot be known, it is not said."""
    try:
        state = load(store, claim.journal, side_by_side=side_by_side)
    except (JournalCorrupt, UnknownVersion):
        return False
    trial = trial_in(state, claim.clone.trial)
    if trial is not None and is_live(trial, claim.clone):
        return False
    if trial is not None and is_aside(trial, claim.clone):
        return False  # it may be a checkpoint again
    if state.epoch == claim.epoch:
        return trial is not None and not is_acceptable(trial, claim.clone.sequence)
    return state.epoch > claim.epoch  # a journal that has not come as far as it was then tells nothing


def _trial_now(store: ObjectStore, trial: TrialKey, side_by_side: Mapper) -> Trial:
    return _still_there(load(store, journal_of(store, trial), side_by_side=side_by_side), trial)


def _still_there(state: Experiment, trial: TrialKey) -> Trial:
    found = trial_in(state, trial)
    if found is None:
        raise Superseded(f"{trial.folder}: its experiment has been deleted. Stop here")
    return found
