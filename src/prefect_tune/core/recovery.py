"""Distinguish damage from a stale read or a deletion: the owner may have retired and deleted the missing objects.

Each deletion follows an entry of the trial's journal, and a reader may know an older state of that journal. So a
missing or altered manifest or blob is damage only if the journal, read again after that, still needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prefect_tune.core.checkpoints.manifest import Manifest, decode_manifest
from prefect_tune.core.checkpoints.verified_reads import NoSink, Sink, fetch, reads
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ObjectNotFound,
    StoreRefused,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import OWNER_VANISHED
from prefect_tune.core.experiment.trial_transitions import (
    Status,
    Trial,
    is_acceptable,
    is_collectable,
    is_held,
    is_live,
)
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Event,
    OneTrialsEvent,
    Quarantined,
    Reported,
)
from prefect_tune.core.messages.live_status import NOTHING_KNOWN, LastKnown
from prefect_tune.core.storage.documents import read_document
from prefect_tune.core.storage.generations import is_deleted
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap


class OutdatedStateError(TuneError):
    """Checkpoints that the given state of the trial needs were retired since: repeat with the `current` state."""

    def __init__(self, current: Trial) -> None:
        super().__init__(f"trial {current.trial!r}: its journal has retired checkpoints that this call needed")
        self.current = current


def journal_of(store: ObjectStore, trial: TrialKey) -> JournalKey:
    """Return the key of the trial's own journal if that exists, else of its experiment's."""
    has_own = store.size(trial.journal.entry_path(1)) is not None
    return trial.journal if has_own else trial.of_experiment


def trial_in(state: Experiment, trial: TrialKey) -> Trial | None:
    """Return the trial if `state` is of the journal that records its checkpoints; else None."""
    found = state.trials.get(trial.trial)
    elsewhere = found is not None and found.own_journal and state.key.trial is None
    return None if elsewhere else found


def current_trial(store: ObjectStore, trial: TrialKey, *, side_by_side: ParallelMap) -> Trial:
    """Read the trial's journal, and return the trial's present state.

    Raises:
        Superseded: its experiment is being deleted, or was deleted.
        JournalCorrupt, UnknownVersion: as `load`.
    """
    state = load(store, journal_of(store, trial), side_by_side=side_by_side)
    if (found := None if state.is_removed else trial_in(state, trial)) is None:
        raise Superseded(f"{trial.folder}: its experiment is being deleted, or was deleted. Stop here")
    return found


def require_still_needed(
    store: ObjectStore, trial: TrialKey, bad: Mapping[CheckpointKey, CheckpointCorrupt], *, side_by_side: ParallelMap
) -> None:
    """Raise the damage of the first of the `bad` manifests that the trial's journal still needs.

    Raises:
        CheckpointCorrupt: that checkpoint is live, or a clone needs its bytes.
        OutdatedStateError: the journal no longer needs any of them.
        Superseded: the experiment is being deleted, or was deleted.
    """
    current = current_trial(store, trial, side_by_side=side_by_side)
    for key, damage in bad.items():
        if is_live(current, key) or is_held(current, key):
            raise damage
    raise OutdatedStateError(current)


def is_live_now(store: ObjectStore, key: CheckpointKey, *, side_by_side: ParallelMap) -> bool:
    """Return whether `key` is live in its trial's journal, read now. Raises `JournalCorrupt` as `load`."""
    try:
        return is_live(current_trial(store, key.trial, side_by_side=side_by_side), key)
    except Superseded:
        return False


@contextmanager
def unless_retired(store: ObjectStore, key: CheckpointKey) -> Iterator[None]:
    """When the block raises `CheckpointCorrupt` for `key`, check whether the checkpoint was deleted meanwhile.

    Raises:
        CheckpointNotFound: it was retired, or its experiment is being deleted.
        CheckpointCorrupt: it was not, or the caller may not read its journal: its bytes are damaged.
    """
    try:
        yield
    except CheckpointCorrupt as damage:
        if _was_retired(store, key):
            raise CheckpointNotFound(
                f"{key.folder}: deleted while it was read: its trial has retired it, or its experiment is being "
                "deleted; choose one that is listed"
            ) from damage
        raise


def _was_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        return _is_retired(store, key)
    except (StoreRefused, UnknownVersion):  # the caller may read the checkpoint only: report the damage
        return False


def _is_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    journal = journal_of(store, key.trial)
    try:
        state = load(store, journal, side_by_side=map)
    except Superseded:  # its experiment was deleted
        return True
    if not state.number:  # a copy without a journal, or a deleted experiment
        return store.size(key.manifest_path) is None or is_deleted(store, key.trial.of_experiment)
    found = trial_in(state, key.trial)
    return state.is_removed or (found is not None and is_collectable(found, key))


# Read a checkpoint back, verifying every byte while it streams; unverified bytes are never returned.


def read_manifest(store: ObjectStore, key: CheckpointKey) -> Manifest:
    """Return the manifest of `key`, after checking that it is the manifest of that checkpoint.

    Raises:
        CheckpointNotFound: the target answered that there is no manifest.
        CheckpointCorrupt: the manifest is torn, altered or another checkpoint's.
    """
    try:
        manifest = decode_manifest(read_document(store, key.manifest_path, CheckpointCorrupt), key.manifest_path)
    except ObjectNotFound as absent:
        raise CheckpointNotFound(f"{key.manifest_path}: no such checkpoint is committed") from absent
    if manifest.key != key:
        raise CheckpointCorrupt(f"{key.manifest_path}: holds the manifest of another checkpoint: {manifest.key.folder}")
    return manifest


def manifest_if_readable(store: ObjectStore, key: CheckpointKey | None) -> Manifest | None:
    """Return the manifest of `key`; None for no key, or if it is damaged: then no save may depend on its bytes."""
    try:
        return read_manifest(store, key) if key else None
    except (CheckpointCorrupt, CheckpointNotFound):
        return None


def checkpoints_with(
    store: ObjectStore, keys: Iterable[CheckpointKey], blobs: Mapping[str, str], *, side_by_side: ParallelMap
) -> Mapping[CheckpointKey, str]:
    """Return the checkpoints that refer to one of the damaged `blobs` (path to damage), each with that damage.

    Checkpoints whose manifest cannot be read are left out: a restore reports those.
    """

    def found(key: CheckpointKey) -> tuple[CheckpointKey, str | None]:
        try:
            paths = read_manifest(store, key).blob_paths()
        except (CheckpointCorrupt, CheckpointNotFound):
            return key, None
        return key, next((damage for path, damage in blobs.items() if path in paths), None)

    return {key: damage for key, damage in side_by_side(found, keys) if damage is not None}


def restore(store: ObjectStore, manifest: Manifest, sink: Sink, *, side_by_side: ParallelMap) -> None:
    """Write every byte of `manifest` to `sink`, each chunk verified before it is written.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest, in a second read too.
        CheckpointNotFound: the checkpoint was retired, and bytes of it were deleted, during the read.
    """
    with unless_retired(store, manifest.key):
        for _ in side_by_side(lambda read: fetch(store, manifest, read, sink), reads(manifest)):
            pass


def verify(store: ObjectStore, manifest: Manifest, *, side_by_side: ParallelMap) -> None:
    """Read and verify every byte of `manifest`, without storing it. Raises as `restore` does."""
    restore(store, manifest, NoSink(), side_by_side=side_by_side)


# Adopt saves that the last owner did not finish: the manifest exists, the journal entry was never written.
#
# A save ends with two writes: the manifest, which is the commit, and the journal entry, which makes it known. An owner
# that dies between them leaves a whole checkpoint that no entry names. The next owner looks for it before it starts the
# trial again, and journals it as adopted.
#
# A save's sequence is the number of the journal's last entry when it began. So the saves of the last owner are those
# with a sequence from `settled_from` (the entry up to which an earlier owner has looked) to below `opened_at` (the
# entry by which the present owner opened the journal): no save of the present owner, now or later, can be taken for one
# of them. Of these, saves of earlier attempts and manifests of clones are not adopted: their owner had decided against
# the former, and a clone counts only once its own entry is written.


@dataclass(frozen=True, slots=True)
class _OrphanedSaves:
    """The newest unjournaled save of a trial, and the damaged saves newer than it."""

    trial: Trial
    manifest: Manifest | None
    damaged: tuple[Quarantined, ...]


def adopt(
    store: ObjectStore,
    experiment: Experiment,
    *,
    reached: Mapping[str, int] | None = None,
    last: LastKnown = NOTHING_KNOWN,
    side_by_side: ParallelMap = map,
) -> Sequence[Event]:
    """Return the events that the owner which has just opened `experiment` journals before any others.

    For each trial that is still running, and has no journal of its own: the newest save of its present attempt
    that has a manifest and no entry becomes a checkpoint, the reports in its manifest count, and the attempt ends as a
    failure of the machine. A save with a damaged manifest is quarantined, and the one before it tried. A save that
    is not adopted here never becomes one. Writes nothing: a crash before the entry changes nothing.

    `reached` has the last steps that running trials are known to have trained, also those with journals of their own;
    `last` is what the live status of the last owner says.
    """
    running = [each for each in experiment.trials.values() if each.status is Status.RUNNING and not each.own_journal]
    found = list(side_by_side(lambda trial: _find(store, experiment, trial), running))
    adopted = {each.trial.trial: (ref_of(each.manifest),) for each in found if each.manifest}
    known = {each.trial: 0 for each in running} | dict(reached or {})
    known |= {name: max(each.step, known.get(name, 0)) for name, each in last.reports.items()}
    trained = {name: each.trained_seconds for name, each in last.reports.items()}
    first = Adopted(checkpoints=adopted, reached=known, trained_seconds=trained, seen_at=last.at)
    return [first, *(event for each in found for event in _events_of(each))]


def _find(store: ObjectStore, experiment: Experiment, trial: Trial) -> _OrphanedSaves:
    damaged: list[Quarantined] = []
    for key in _candidates(store, experiment, trial):
        if damaged and damaged[-1].sequence == key.sequence:
            continue  # the journal names checkpoints by sequence, and this one is quarantined already
        try:
            manifest = read_manifest(store, key)
        except CheckpointNotFound:
            continue  # listed, and deleted since by a process that was believed dead
        except CheckpointCorrupt as corrupt:
            damaged.append(Quarantined(trial=trial.trial, sequence=key.sequence, reason=str(corrupt)))
            continue
        if manifest.origin is not None:
            continue  # a clone is a checkpoint only once its owner has journaled it
        if manifest.about.attempt == trial.attempt:  # what earlier attempts left was abandoned by the owner
            return _OrphanedSaves(trial, manifest, tuple(damaged))
    return _OrphanedSaves(trial, None, tuple(damaged))


def _candidates(store: ObjectStore, experiment: Experiment, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of saves that may be adopted, newest first."""
    folder = experiment.trial_key(trial.trial)
    keys = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    unsettled = [
        key
        for key in keys
        if key and experiment.settled_from <= key.sequence < experiment.opened_at and is_acceptable(trial, key.sequence)
    ]
    return sorted(unsettled, key=lambda key: (key.sequence, key.step), reverse=True)


def ref_of(manifest: Manifest) -> CheckpointRef:
    """Return the reference by which the journal names the checkpoint of `manifest`."""
    about = manifest.about
    return CheckpointRef(
        step=manifest.step,
        sequence=manifest.sequence,
        metrics=about.metrics,
        trained_seconds=about.trained_seconds,
        size_bytes=manifest.size_bytes,
    )


def _events_of(found: _OrphanedSaves) -> Iterator[OneTrialsEvent]:
    trial = found.trial
    yield from found.damaged
    for report in found.manifest.about.reports if found.manifest else ():
        if report.step > trial.step:
            yield Reported(trial=trial.trial, report=report)
    yield AttemptEnded(trial=trial.trial, cause=Cause.MACHINE, message=OWNER_VANISHED)
