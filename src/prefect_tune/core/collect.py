"""Delete the bytes of checkpoints that the journal has retired, and nothing that is reachable.

Names are never written twice, so a deletion that arrives late, from a process thought dead or a
request thought lost, hits nothing that was written since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.events import Aside
from prefect_tune.core.layout import CheckpointKey, Saved, TrialKey, blob_sequence
from prefect_tune.core.manifest import Manifest
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.stale_reads import OutdatedStateError, require_still_needed
from prefect_tune.core.store import Listed, ObjectStore
from prefect_tune.core.trial import Trial, is_collectable, is_live

__all__ = ["LetGo", "collect", "is_collectable", "leftover", "nothing_let_go", "orphans"]

LetGo: TypeAlias = Callable[[CheckpointKey, CheckpointKey], int]
"""Hears of a clone and its origin before the clone is deleted; returns how many objects that let it delete."""


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A checkpoint that is none any more, and is still there."""

    key: CheckpointKey
    blobs: frozenset[str] = frozenset()
    origin: CheckpointKey | None = None


def nothing_let_go(clone: CheckpointKey, origin: CheckpointKey) -> int:
    """Leave it to the owner of the origin to find out."""
    del clone, origin
    return 0


def collect(  # noqa: PLR0913 - the last one is what a clone needs, and known to those who know of clones
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Collection[CheckpointKey],
    *,
    side_by_side: Mapper,
    let_go: LetGo = nothing_let_go,
) -> int:
    """Delete retired checkpoints: blobs that nobody else needs, what was said of them, then manifests.

    The manifest goes last, so that a deletion cut short is found, and finished, by the next one.
    What is not collectable is left alone. Returns how many blobs and manifests were deleted.

    Where the journal has gone on, and what `state` says is needed was retired and deleted by others, it is asked
    what is needed now.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable: nothing is
            deleted on a guess.
        Superseded: the experiment is being deleted, or was deleted.
    """
    while True:
        try:
            return _collected(store, trial, state, doomed, side_by_side, let_go)
        except OutdatedStateError as outdated:
            state = outdated.current


def _collected(  # noqa: PLR0913, PLR0917 - as `collect`
    store: ObjectStore,
    trial: TrialKey,
    state: Trial,
    doomed: Iterable[CheckpointKey],
    side_by_side: Mapper,
    let_go: LetGo,
) -> int:
    keys = [key for key in doomed if is_collectable(state, key)]
    found = [each for each in side_by_side(lambda key: _doomed(store, key), keys) if each is not None]
    if not found:
        return 0
    blobs = {path for each in found for path in each.blobs} - _reachable(store, trial, state, side_by_side)
    ours = sorted(path for path in blobs if path.startswith(f"{trial.blobs}/"))
    store.delete(ours)
    store.delete([each.path for key in keys for each in store.list(key.metadata_folder)])
    store.delete([each.key.manifest_path for each in found if each.origin is None])
    let_go_of = [_let_go(store, each.key, each.origin, let_go) for each in found if each.origin is not None]
    return len(ours) + len(found) + sum(let_go_of)


def _let_go(store: ObjectStore, clone: CheckpointKey, origin: CheckpointKey, let_go: LetGo) -> int:
    deleted = let_go(clone, origin)
    store.delete([clone.manifest_path])
    return deleted


def leftover(store: ObjectStore, trial: TrialKey, state: Trial, settled_from: int) -> Sequence[CheckpointKey]:
    """Return checkpoints on the target that are none: retired and not yet deleted, or never a commit.

    Those that clones need are among them: they are looked at again until they are not needed any more.
    `settled_from` is the experiment's: manifests from there on may belong to a save that is under way.
    """
    if settled_from <= 1:
        return []  # no save is settled yet, and the first one's number is 1
    keys = (CheckpointKey.from_manifest_path(trial, each.path) for each in store.list(trial.checkpoints))
    return [
        key
        for key in keys
        if key and not is_live(state, key) and key.sequence not in state.quarantined and key.sequence < settled_from
    ]


def orphans(store: ObjectStore, trial: TrialKey, state: Trial, *, side_by_side: Mapper) -> Sequence[Listed]:
    """Return the blobs that no live checkpoint refers to, and no clone, and that no save will ever reuse.

    Saves that were cut short leave them, and so do deletions of manifests that cannot be read. They
    may be deleted at any time. Blobs of checkpoints that were put aside are not among them: those may be
    reinstated.

    Raises:
        CheckpointCorrupt: a manifest that is live, or that a clone needs, is missing or unreadable.
        OutdatedStateError: the journal has gone on, and needs those no more: repeat with what it says now.
        Superseded: the experiment is being deleted, or was deleted.
    """
    reachable = _reachable(store, trial, state, side_by_side)
    return [
        each
        for each in store.list(trial.blobs)
        if 0 <= blob_sequence(each.path) < state.collected_up_to and each.path not in reachable
    ]


def _doomed(store: ObjectStore, key: CheckpointKey) -> _Doomed | None:
    """Return what a retired checkpoint names; None if it is gone already."""
    try:
        manifest = read_manifest(store, key)
    except CheckpointNotFound:
        return None
    except CheckpointCorrupt:
        return _Doomed(key)  # it is no checkpoint any more, whatever it said; its blobs become orphans
    return _Doomed(key, manifest.blob_paths(), manifest.origin)


def _reachable(store: ObjectStore, trial: TrialKey, state: Trial, side_by_side: Mapper) -> set[str]:
    """The blobs of checkpoints that are live, that a clone needs, or that were put aside."""
    needed: Sequence[Saved] = (*state.checkpoints, *state.claims)
    keys = dict.fromkeys(trial.checkpoint_key(each) for each in needed)
    found = dict(side_by_side(lambda key: (key, _needed(store, key)), keys))
    if bad := {key: each for key, each in found.items() if isinstance(each, CheckpointCorrupt)}:
        require_still_needed(store, trial, bad, side_by_side=side_by_side)
    blobs = {path for each in found.values() if isinstance(each, Manifest) for path in each.blob_paths()}
    return blobs.union(*side_by_side(lambda each: _aside(store, trial, each), state.aside))


def _aside(store: ObjectStore, trial: TrialKey, aside: Aside) -> frozenset[str]:
    """What its manifest names. Of one that cannot be read it is only known that nothing is younger than it is."""
    ref = aside.checkpoint
    try:
        return read_manifest(store, trial.checkpoint_key(ref)).blob_paths()
    except (CheckpointCorrupt, CheckpointNotFound):
        return frozenset(each.path for each in store.list(trial.blobs) if blob_sequence(each.path) <= ref.sequence)


def _needed(store: ObjectStore, key: CheckpointKey) -> Manifest | CheckpointCorrupt:
    try:
        return read_manifest(store, key)
    except CheckpointNotFound as missing:
        return CheckpointCorrupt(f"{missing}, and the journal says that it was")
    except CheckpointCorrupt as corrupt:
        return corrupt
