"""Fork an experiment: a new one continues from any entry of its journal, with copies of its checkpoints.

    first entry, names the origin ──► blobs ──► seen in the fork ──► manifests ──► one entry: the past, and `Forked`

A fork begins with the state of the origin's journal at that entry. The origin is only read, so it may be running; the
target itself copies the blobs, so that no byte passes through this machine where the target can do that. Manifests are
copied under the same step and sequence, and clones stay references within the fork. From then on neither experiment
needs the other.

The last entry holds all the origin's events and completes the fork. An incomplete fork cannot be used; forking again
under the same name completes it, and copies what is missing.

Never: a manifest before all blobs that it names; the last entry before all manifests that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prefect_tune.core.checkpoints.commit import names_of, publish, require_stored
from prefect_tune.core.checkpoints.manifest import Manifest, newest_metadata
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    ObjectNotFound,
    Superseded,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import is_held, is_live
from prefect_tune.core.journal.journal import append, as_of, load, take_over, write_snapshot
from prefect_tune.core.journal_events import (
    Adopted,
    CheckpointRef,
    Configured,
    Deletion,
    Event,
    Forked,
    ForkedTrial,
    ForkOrigin,
    Opened,
    Owner,
    Quarantined,
    StopAsked,
    WarmStart,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp


@dataclass(frozen=True, slots=True)
class Past:
    """The state of an experiment after an entry of its journal, and the events of its trials up to it."""

    experiment: Experiment
    events: Sequence[Event]
    settings: Mapping[str, object]
    """The parameters of the fork."""
    warm_starts: Sequence[WarmStart]

    @property
    def origin(self) -> ForkOrigin:
        """The entry that is forked."""
        found = self.experiment
        return ForkOrigin(
            experiment=found.name, generation=found.key.generation, number=found.number, digest=found.digest
        )

    @property
    def configured(self) -> Configured:
        """The event that has the parameters of the fork, and all samples and warm starts of the origin."""
        known = self.experiment.extensions
        return Configured(settings=self.settings, extensions=known, warm_starts=tuple(self.warm_starts))


@dataclass(frozen=True, slots=True)
class Fork:
    """A complete fork, and the checkpoints of its past that the origin had deleted already."""

    experiment: Experiment
    lost: Mapping[str, Sequence[CheckpointRef]] = field(default_factory=dict)
    """By trial, oldest first."""


def past_of(store: ObjectStore, experiment: JournalKey, number: int | None) -> Past:
    """Return the past of `experiment` up to entry `number` (None: up to its last entry).

    Raises:
        InvalidInput: there is no such entry, the experiment is being deleted, is an incomplete fork, or is no search.
        JournalCorrupt: its journal is inconsistent.
    """
    found, entries = as_of(store, experiment, number)
    if found.is_removed:
        raise InvalidInput(f"{experiment} is being deleted: there is nothing to fork")
    if not found.is_whole:
        raise InvalidInput(f"{experiment} is an incomplete fork: fork its origin, or complete it first")
    if not all(trial.of_search for trial in found.trials.values()):
        raise InvalidInput(f"{experiment} is not a search: only searches can be forked")
    events, warm_starts = list[Event](), list[WarmStart]()
    for entry in entries:
        for event in entry.events:
            match event:
                case Configured():
                    warm_starts += event.warm_starts
                case Quarantined() if entry.writer == "guest":  # the owner of the fork writes it
                    events.append(event.model_copy(update={"by_guest": True}))
                case Adopted():
                    events.append(event.model_copy(update={"seen_at": None}))  # that was a run of the origin
                case Opened() | StopAsked() | Deletion() | Forked(trials=None):
                    pass  # a stop request that was not carried out by then was meant for the origin
                case _:
                    events.append(event)
    return Past(found, events, found.settings, warm_starts)


def deleted_since(store: ObjectStore, past: Past) -> Mapping[str, Sequence[CheckpointRef]]:
    """Return by trial the checkpoints of the past that the origin has retired or quarantined since."""
    used = _used(past.experiment, load(store, past.experiment.key))
    return _without(past.experiment, used)


def _used(past: Experiment, now: Experiment) -> Sequence[CheckpointKey]:
    """Return the keys of the checkpoints of `past` that are used `now`; a clone has that of its origin."""
    live = (
        past.trial_key(trial.trial).checkpoint_key(ref) for trial in past.trials.values() for ref in trial.checkpoints
    )
    homes = ((key, now.trial(key.trial.trial)) for key in dict.fromkeys(live))
    return [key for key, home in homes if is_live(home, key) or is_held(home, key)]


def _without(past: Experiment, keys: Sequence[CheckpointKey]) -> Mapping[str, Sequence[CheckpointRef]]:
    """Return by trial the checkpoints of `past` whose keys are not among `keys`."""
    there = frozenset(keys)
    lost = {
        trial.trial: [ref for ref in trial.checkpoints if past.trial_key(trial.trial).checkpoint_key(ref) not in there]
        for trial in past.trials.values()
    }
    return {trial: refs for trial, refs in lost.items() if refs}


def begin_fork(store: ObjectStore, into: JournalKey, origin: ForkOrigin, owner: Owner, stamp: Stamp) -> Experiment:
    """Open the experiment `into` to make it a fork of `origin`, or because it is one already.

    A second call for an incomplete fork opens the same fork.

    Raises:
        InvalidInput: the name belongs to another experiment, or to a fork of another entry, or is being deleted.
        Superseded: another process makes the same fork.
    """

    def also(found: Experiment) -> Sequence[Event]:
        if not found.number:
            return [Forked(origin=origin)]
        if found.is_removed:
            raise InvalidInput(f"{into} is being deleted: use another name, or finish the deletion first")
        if found.origin != origin:
            what = f"a fork of {found.origin}" if found.origin else "no fork"
            raise InvalidInput(f"{into}: expected a fork of {origin}, found {what}: use another name")
        return []

    return take_over(store, into, owner, stamp, also=also)


def fork(store: ObjectStore, past: Past, into: Experiment, stamp: Stamp) -> Fork:
    """Make the experiment that `begin_fork` opened a fork of `past`, and return the complete fork.

    If it is killed at any time, call `begin_fork` and this again: what exists already is kept.

    Raises:
        InvalidInput: the origin is being deleted, and not all of its checkpoints were copied.
        Superseded: another process makes the same fork.
        StoreUnavailable, CommitUnknown: call again, with the same stamp.
    """
    if into.is_whole:
        return Fork(into)
    copied = _copy_checkpoints(store, past, into)
    lost = _without(past.experiment, copied)
    trials = {
        name: ForkedTrial(checkpoints=tuple(ref for ref in trial.checkpoints if ref not in lost.get(name, ())))
        for name, trial in past.experiment.trials.items()
    }
    forked = Forked(origin=past.origin, trials=trials)
    complete = append(store, into, [past.configured, *past.events, forked], stamp)
    write_snapshot(store, complete)
    return Fork(complete, lost)


def _copy_checkpoints(store: ObjectStore, past: Past, into: Experiment) -> Sequence[CheckpointKey]:
    """Copy the checkpoints of the past that the origin still uses, and return the keys of all that the fork has.

    Raises:
        InvalidInput: the origin is being deleted, and not all of them were copied.
    """
    folder = f"{into.key.folder}/trials"
    existing = {listed.path: listed.size_bytes for listed in store.list(folder)}
    wanted = _used(past.experiment, past.experiment)
    copied = [key for key in wanted if _key_in_fork(key, into).manifest_path in existing]
    if len(copied) == len(wanted):
        return copied
    sources = [key for key in _used(past.experiment, _load_origin(store, past, into)) if key not in copied]

    def read(key: CheckpointKey) -> tuple[CheckpointKey, Manifest | None]:
        """Return the manifest of `key` with its newest metadata; None where that is deleted or damaged."""
        try:
            manifest, metadata = read_manifest(store, key), newest_metadata(store, key.metadata_folder)
        except (CheckpointNotFound, CheckpointCorrupt):
            return key, None
        about = manifest.about if metadata is None else manifest.about.model_copy(update={"metadata": metadata})
        return key, manifest.model_copy(update={"about": about})

    manifests = {key: manifest for key, manifest in store.map(read, sources) if manifest}
    # Paths of blobs are relative to the folder of either experiment.
    sizes = {blob.path: blob.size_bytes for manifest in manifests.values() for blob in manifest.blobs}
    origin_folder, fork_folder = past.experiment.key.folder, into.key.folder
    missing = [path for path, size_bytes in sizes.items() if existing.get(f"{fork_folder}/{path}") != size_bytes]

    def copy_blob(path: str) -> str | None:
        try:
            store.copy(f"{origin_folder}/{path}", f"{fork_folder}/{path}")
        except ObjectNotFound:
            return path  # its checkpoint was retired and deleted meanwhile
        return None

    deleted = set(store.map(copy_blob, missing))
    whole = {
        key: manifest for key, manifest in manifests.items() if deleted.isdisjoint(blob.path for blob in manifest.blobs)
    }
    required = {f"{fork_folder}/{blob.path}": blob.size_bytes for manifest in whole.values() for blob in manifest.blobs}
    require_stored(store, folder, required)

    def publish_manifest(key: CheckpointKey) -> CheckpointKey:
        key_in_fork = _key_in_fork(key, into)
        publish(store, key_in_fork, whole[key].model_copy(update=names_of(key_in_fork)))
        return key

    copied += store.map(publish_manifest, whole)
    if len(copied) < len(wanted):
        _load_origin(store, past, into)
    return copied


def _key_in_fork(key: CheckpointKey, into: Experiment) -> CheckpointKey:
    return key.model_copy(update={"trial": into.trial_key(key.trial.trial)})


def _load_origin(store: ObjectStore, past: Past, into: Experiment) -> Experiment:
    """Return the present state of the origin; raise InvalidInput if it is being deleted."""
    key = past.experiment.key
    with suppress(Superseded):
        now = load(store, key)
        if not now.is_removed and now.number >= past.experiment.number:
            return now
    raise InvalidInput(f"{key} is being deleted: {into.name!r} is no fork of it; delete {into.name!r}, too")
