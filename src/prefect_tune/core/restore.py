"""Read a checkpoint back, every byte verified; distinguish damage from a deletion; adopt saves without an entry.

The owner may have retired and deleted the missing objects. Each deletion follows an entry of the journal, and a reader
may know an older state of it. So a missing or altered manifest or blob is damage only if the journal,
read again after that, still needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prefect_tune.core.checkpoints.manifest import Manifest, NoSink, Sink, fetch, reads
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    StoreRefused,
    Superseded,
    TuneError,
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
)
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import Adopted, AttemptEnded, Cause, CheckpointRef, Event, Quarantined, Reported
from prefect_tune.core.messages.target_messages import NOTHING_KNOWN, LastKnown
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.documents import read_sealed
from prefect_tune.core.storage.generations import is_deleted
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore


class OutdatedStateError(TuneError):
    """Checkpoints that the given state of the trial needs were retired since: repeat with the `current` state."""

    def __init__(self, current: Trial) -> None:
        super().__init__(f"trial {current.trial!r}: its journal has retired checkpoints that this call needed")
        self.current = current


def current_trial(store: ObjectStore, trial: TrialKey) -> Trial:
    """Read the experiment's journal, and return the trial's present state.

    Raises:
        Superseded: its experiment is being deleted, or was deleted.
        JournalCorrupt, UnknownVersion: as `load`.
    """
    state = load(store, trial.of_experiment)
    if state.is_removed or trial.trial not in state.trials:
        raise Superseded(f"{trial.folder}: its experiment is being deleted, or was deleted. Stop here")
    return state.trial(trial.trial)


def require_still_needed(store: ObjectStore, trial: TrialKey, bad: Mapping[CheckpointKey, CheckpointCorrupt]) -> None:
    """Raise the damage of the first of the `bad` manifests of the trial that the journal still needs.

    Raises:
        CheckpointCorrupt: that checkpoint is live, or a clone needs its bytes.
        OutdatedStateError: the journal no longer needs any of them.
        Superseded: the experiment is being deleted, or was deleted.
    """
    current = current_trial(store, trial)
    for key, damage in bad.items():
        if is_live(current, key) or is_held(current, key):
            raise damage
    raise OutdatedStateError(current)


def is_live_now(store: ObjectStore, key: CheckpointKey) -> bool:
    """Return whether `key` is live in a trial by the journal, read now. Raises `JournalCorrupt` as `load`."""
    try:
        state = load(store, key.trial.of_experiment)
    except Superseded:
        return False
    return not state.is_removed and any(is_live(trial, key) for trial in state.trials.values())


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
        try:
            if not _is_retired(store, key):
                raise
        except (StoreRefused, UnknownVersion):  # the caller may read the checkpoint only: report the damage
            raise damage from None
        raise CheckpointNotFound(
            f"{key.folder}: deleted while it was read: its trial has retired it, or its experiment is being "
            "deleted; choose one that is listed"
        ) from damage


def _is_retired(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        state = load(store, key.trial.of_experiment)
    except Superseded:  # its experiment was deleted
        return True
    if not state.number:  # a copy without a journal, or a deleted experiment
        return store.size(key.manifest_path) is None or is_deleted(store, key.trial.of_experiment)
    trial = state.trials.get(key.trial.trial)
    return state.is_removed or (trial is not None and is_collectable(trial, key))


# Read a checkpoint back, verifying every byte while it streams; unverified bytes are never returned.


def read_manifest(store: ObjectStore, key: CheckpointKey) -> Manifest:
    """Return the manifest of `key`, after checking that it is the manifest of that checkpoint.

    Raises:
        CheckpointNotFound: the target answered that there is no manifest.
        CheckpointCorrupt: the manifest is torn, altered or another checkpoint's.
    """
    if (manifest := read_sealed(store, Manifest, key.manifest_path, CheckpointCorrupt)) is None:
        raise CheckpointNotFound(f"{key.manifest_path}: no such checkpoint is committed")
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
    store: ObjectStore, keys: Iterable[CheckpointKey], blobs: Mapping[str, str]
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

    return {key: damage for key, damage in store.map(found, keys) if damage is not None}


def restore(store: ObjectStore, manifest: Manifest, sink: Sink) -> None:
    """Write every byte of `manifest` to `sink`, each chunk verified before it is written.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest, in a second read too.
        CheckpointNotFound: the checkpoint was retired, and bytes of it were deleted, during the read.
    """
    with unless_retired(store, manifest.key):
        for _ in store.map(lambda read: fetch(store, manifest, read, sink), reads(manifest)):
            pass


def verify(store: ObjectStore, manifest: Manifest) -> None:
    """Read and verify every byte of `manifest`, without storing it. Raises as `restore` does."""
    restore(store, manifest, NoSink())


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


# Adopt saves that the last owner did not finish: the manifest exists, the journal entry was never written.
#
# A save ends with two writes: the manifest, which is the commit, and the journal entry, which makes it known. An owner
# that dies between them leaves a whole checkpoint that no entry names. The next owner looks for it before it starts the
# trial again, and journals it as adopted.
#
# Each save of a trial has a higher sequence than the one before it, and each attempt begins with a higher one than
# the attempt before it. So the unjournaled save of the last attempt is one from the trial's `settled_from` on, and
# after the entry that adopts it, or none, no such save becomes a checkpoint any more. Saves of earlier attempts are not
# adopted: their owner had decided against them. An attempt with an open outbox hands its saves over itself.


def adopt(
    store: ObjectStore,
    experiment: Experiment,
    *,
    trials: Collection[str] | None = None,
    last: LastKnown = NOTHING_KNOWN,
) -> Sequence[Event]:
    """Return the events that end attempts which have ended without journaling that, and adopt what they had saved.

    They are the attempts of `trials`, or all that run without an outbox, for an owner that has just opened the
    experiment. For each of them: the newest save of the attempt that has a manifest and no entry becomes a checkpoint,
    the reports in its manifest count, and the attempt ends as a failure of the machine. A save with a damaged manifest
    is quarantined, and the one before it tried. A save that is not adopted here never becomes a checkpoint. Writes
    nothing: a crash before the entry changes nothing. `last` is what the live status of the last owner says.
    """
    chosen = experiment.trials.values() if trials is None else [experiment.trial(name) for name in trials]
    running = [trial for trial in chosen if trial.status is Status.RUNNING and trial.outbox is None]
    saves = list(store.map(lambda trial: _find_save(store, experiment, trial), running))
    adopted: dict[str, tuple[CheckpointRef, ...]] = {}
    events: list[Event] = []
    for trial, (manifest, damaged) in zip(running, saves, strict=True):
        events += damaged
        if manifest is not None:
            adopted[trial.trial] = (ref_of(manifest),)
            reports = (report for report in manifest.about.reports if report.step > trial.step)
            events += [Reported(trial=trial.trial, report=report) for report in reports]
        events.append(AttemptEnded(trial=trial.trial, cause=Cause.MACHINE, reason=make_reason("owner-vanished")))
    reached = {trial.trial: 0 for trial in running}
    reached |= {name: max(each.step, reached.get(name, 0)) for name, each in last.reports.items()}
    trained = {name: each.trained_seconds for name, each in last.reports.items()}
    return [Adopted(checkpoints=adopted, reached=reached, trained_seconds=trained, seen_at=last.at), *events]


def _find_save(
    store: ObjectStore, experiment: Experiment, trial: Trial
) -> tuple[Manifest | None, Sequence[Quarantined]]:
    """Return the newest unjournaled save of a trial's last attempt, and the damaged saves newer than it."""
    damaged: list[Quarantined] = []
    folder = experiment.trial_key(trial.trial)
    keys = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    unsettled = [key for key in keys if key and is_acceptable(trial, key.sequence)]
    for key in sorted(unsettled, key=lambda key: (key.sequence, key.step), reverse=True):
        if damaged and damaged[-1].sequence == key.sequence:
            continue  # the journal names checkpoints by sequence, and this one is quarantined already
        try:
            manifest = read_manifest(store, key)
        except CheckpointNotFound:
            continue  # listed, and deleted since by a process that was believed dead
        except CheckpointCorrupt as corrupt:
            if key.sequence > trial.next_sequence + 1:
                continue  # of no attempt; if it were quarantined, no save before its sequence would be accepted
            damaged.append(Quarantined(trial=trial.trial, sequence=key.sequence, reason=str(corrupt)))
            continue
        if manifest.about.attempt == trial.attempt:  # what earlier attempts left was abandoned by the owner
            return manifest, damaged
    return None, damaged
