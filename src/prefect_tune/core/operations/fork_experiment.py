"""Fork an experiment: the fork continues from any entry of the origin's journal, with copies of the checkpoints.

    first entry, names the origin ──► blobs ──► seen in the fork ──► manifests ──► entry: old events, `ExperimentForked`

A fork begins with the state of the origin after the chosen entry. The origin is only read, so it may be running. If the
target can copy objects, no bytes pass through this machine. Manifests keep their step and sequence, and clones stay
clones within the fork. Once the fork is complete, neither experiment needs the other.

The entry that completes the fork has all events of the origin up to the chosen entry. An incomplete fork cannot be
used. To complete it, fork again with the same name; then only missing objects are copied.

Never create a manifest before all its blobs, or the entry that completes the fork before all manifests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prefect_tune.core.checkpoints.commit import make_key_fields, publish_manifest, require_blobs_stored
from prefect_tune.core.checkpoints.manifest import Manifest, read_newest_metadata
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput, ObjectNotFound, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import is_kept_by_clones, is_live_checkpoint
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_at, load_experiment, write_snapshot
from prefect_tune.core.journal_events import (
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    DeletionStarted,
    Event,
    ExperimentConfigured,
    ExperimentForked,
    ForkedTrial,
    ForkOrigin,
    Owner,
    OwnerChanged,
    StopRequested,
    WarmStart,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The state of an experiment after an entry of its journal, and the events of its trials up to that entry."""

    experiment: Experiment
    events: Sequence[Event]
    settings: Mapping[str, object]
    """The parameters with which the fork starts."""
    warm_starts: Sequence[WarmStart]

    @property
    def origin(self) -> ForkOrigin:
        """The entry from which the fork continues."""
        state = self.experiment
        return ForkOrigin(
            experiment=state.name, generation=state.key.generation, number=state.entry_count, digest=state.digest
        )

    @property
    def settings_event(self) -> ExperimentConfigured:
        """The event with the parameters of the fork, and with all added samples and warm starts of the origin."""
        extensions = self.experiment.extensions
        return ExperimentConfigured(settings=self.settings, extensions=extensions, warm_starts=tuple(self.warm_starts))


@dataclass(frozen=True, slots=True)
class ForkResult:
    """A complete fork."""

    experiment: Experiment
    lost_checkpoints: Mapping[str, Sequence[CheckpointRef]] = field(default_factory=dict)
    """For each trial, the checkpoints that the fork lacks because the origin no longer used them, oldest first."""


def load_fork_point(store: ObjectStore, experiment: JournalKey, number: int | None) -> ForkPoint:
    """Return the state and events of `experiment` up to entry `number`, or up to the last if `number` is None.

    Raises:
        InvalidInput: the entry does not exist, or the experiment is being deleted, incomplete, or not a search.
        JournalCorrupt: the journal is inconsistent.
    """
    state, entries = load_at(store, experiment, number)
    if state.is_being_deleted:
        raise InvalidInput(f"{experiment} is being deleted: there is nothing to fork")
    if not state.is_complete:
        raise InvalidInput(f"{experiment} is an incomplete fork: fork its origin, or complete it first")
    if not all(trial.proposed_by_search for trial in state.trials.values()):
        raise InvalidInput(f"{experiment} is not a search: only searches can be forked")
    past_events, warm_starts = list[Event](), list[WarmStart]()
    for entry in entries:
        for event in entry.events:
            match event:
                case ExperimentConfigured():
                    warm_starts += event.warm_starts
                case CheckpointQuarantined() if entry.writer == "non-owner":  # the fork's owner writes the copy
                    past_events.append(event.model_copy(update={"by_non_owner": True}))
                case CheckpointsAdopted():
                    past_events.append(event.model_copy(update={"last_seen_at": None}))  # a time in the origin's run
                case OwnerChanged() | StopRequested() | DeletionStarted() | ExperimentForked(trials=None):
                    pass  # a stop request concerns only the origin; other events record its effects
                case _:
                    past_events.append(event)
    return ForkPoint(state, past_events, state.settings, warm_starts)


def find_lost_checkpoints(store: ObjectStore, point: ForkPoint) -> Mapping[str, Sequence[CheckpointRef]]:
    """Return, by trial, the checkpoints that the origin has retired or quarantined since the entry of `point`."""
    used = _list_used_keys(point.experiment, load_experiment(store, point.experiment.key))
    return _select_lost_refs(point.experiment, used)


def _list_used_keys(state: Experiment, current: Experiment) -> Sequence[CheckpointKey]:
    """Return the keys of the checkpoints of `state` that `current` still uses; a clone has the key of its original."""
    trials = state.trials.values()
    live = (state.trial_key(trial.id).checkpoint_key(ref) for trial in trials for ref in trial.checkpoints)
    keys_with_trial = ((key, current.trial(key.trial.trial)) for key in dict.fromkeys(live))
    return [key for key, trial in keys_with_trial if is_live_checkpoint(trial, key) or is_kept_by_clones(trial, key)]


def _select_lost_refs(state: Experiment, keys: Sequence[CheckpointKey]) -> Mapping[str, Sequence[CheckpointRef]]:
    """Return, by trial, the checkpoints of `state` whose keys are not in `keys`."""
    kept = frozenset(keys)
    lost = {
        trial.id: [ref for ref in trial.checkpoints if state.trial_key(trial.id).checkpoint_key(ref) not in kept]
        for trial in state.trials.values()
    }
    return {trial: refs for trial, refs in lost.items() if refs}


def begin_fork(store: ObjectStore, into: JournalKey, origin: ForkOrigin, owner: Owner, stamp: WriteStamp) -> Experiment:
    """Become the owner of the experiment `into`, a new or existing fork of `origin`; return the fork.

    Raises:
        InvalidInput: `into` exists and is not a fork of `origin`, or is being deleted.
        Superseded: another process makes the same fork.
    """

    def events_for(state: Experiment) -> Sequence[Event]:
        if not state.entry_count:
            return [ExperimentForked(origin=origin)]
        if state.is_being_deleted:
            raise InvalidInput(f"{into} is being deleted: use another name, or finish the deletion first")
        if state.origin != origin:
            actual = f"a fork of {state.origin}" if state.origin else "another experiment"
            raise InvalidInput(f"{into}: expected a fork of {origin}, found {actual}: use another name")
        return []

    return acquire_ownership(store, into, owner, stamp, events_for=events_for)


def complete_fork(store: ObjectStore, point: ForkPoint, into: Experiment, stamp: WriteStamp) -> ForkResult:
    """Complete `into`, which `begin_fork` returned, as a fork of `point`; return the complete fork.

    If the process is killed, call `begin_fork` and this function again; both keep the objects that were copied.

    Raises:
        InvalidInput: the origin was deleted before all of its checkpoints were copied.
        Superseded: another process makes the same fork.
        StoreUnavailable, CommitUnknown: call again with the same stamp.
    """
    if into.is_complete:
        return ForkResult(into)
    lost = _select_lost_refs(point.experiment, _copy_checkpoints(store, point, into))
    trials = {
        name: ForkedTrial(checkpoints=tuple(ref for ref in trial.checkpoints if ref not in lost.get(name, ())))
        for name, trial in point.experiment.trials.items()
    }
    forked = ExperimentForked(origin=point.origin, trials=trials)
    completed = append_events(store, into, [point.settings_event, *point.events, forked], stamp)
    write_snapshot(store, completed)
    return ForkResult(completed, lost)


def _copy_checkpoints(store: ObjectStore, point: ForkPoint, into: Experiment) -> Sequence[CheckpointKey]:
    """Copy the checkpoints that the origin still uses; return the origin's keys of all checkpoints in the fork."""
    folder = f"{into.key.folder}/trials"
    existing = {listed.path: listed.size_bytes for listed in store.list(folder)}
    needed = _list_used_keys(point.experiment, point.experiment)
    copied = [key for key in needed if _make_key_in_fork(key, into).manifest_path in existing]
    if len(copied) == len(needed):
        return copied
    sources = [key for key in _list_used_keys(point.experiment, _load_origin(store, point, into)) if key not in copied]

    def read_source(key: CheckpointKey) -> tuple[CheckpointKey, Manifest | None]:
        """Return `key`, and its manifest with the newest metadata, or None if either is damaged or deleted."""
        try:
            manifest, metadata = read_manifest(store, key), read_newest_metadata(store, key.metadata_folder)
        except (CheckpointNotFound, CheckpointCorrupt):
            return key, None
        update = {} if metadata is None else {"user_metadata": metadata}
        return key, manifest.model_copy(update={"metadata": manifest.metadata.model_copy(update=update)})

    manifests = {key: manifest for key, manifest in store.map(read_source, sources) if manifest}
    # Paths of blobs are relative to the experiment's folder, so they are the same in both experiments.
    sizes = {blob.path: blob.size_bytes for manifest in manifests.values() for blob in manifest.blobs}
    origin_folder, fork_folder = point.experiment.key.folder, into.key.folder
    missing = [path for path, size_bytes in sizes.items() if existing.get(f"{fork_folder}/{path}") != size_bytes]

    def copy_blob(path: str) -> str | None:
        try:
            store.copy(f"{origin_folder}/{path}", f"{fork_folder}/{path}")
        except ObjectNotFound:
            return path  # the blob's checkpoint was deleted after its manifest was read
        return None

    deleted = set(store.map(copy_blob, missing))
    complete = {
        key: manifest for key, manifest in manifests.items() if deleted.isdisjoint(blob.path for blob in manifest.blobs)
    }
    required = {f"{fork_folder}/{b.path}": b.size_bytes for manifest in complete.values() for b in manifest.blobs}
    require_blobs_stored(store, folder, required)

    def copy_manifest(key: CheckpointKey) -> CheckpointKey:
        key_in_fork = _make_key_in_fork(key, into)
        publish_manifest(store, key_in_fork, complete[key].model_copy(update=make_key_fields(key_in_fork)))
        return key

    copied += store.map(copy_manifest, complete)
    if len(copied) < len(needed):
        _load_origin(store, point, into)
    return copied


def _make_key_in_fork(key: CheckpointKey, into: Experiment) -> CheckpointKey:
    return key.model_copy(update={"trial": into.trial_key(key.trial.trial)})


def _load_origin(store: ObjectStore, point: ForkPoint, into: Experiment) -> Experiment:
    """Return the current state of the origin; raise `InvalidInput` if it is deleted, or is being deleted."""
    key = point.experiment.key
    with suppress(Superseded):
        current = load_experiment(store, key)
        if not current.is_being_deleted and current.entry_count >= point.experiment.entry_count:
            return current
    raise InvalidInput(f"{key} is being deleted: the fork {into.name!r} cannot be completed; delete the fork, too")
