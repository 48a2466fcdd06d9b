"""Read and verify checkpoints; distinguish damage from deletion; adopt saves that were not journaled.

If an object is missing, the owner may have retired and deleted it. Each deletion follows an entry of the journal, but
the state that a reader has may be older than this entry. So a missing or altered manifest or blob counts as damage only
if the journal, when it is read again, still needs the object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from prefect_tune.core.checkpoints.manifest import FileSink, Manifest, NullSink, fetch_chunks, plan_reads
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
    can_commit_save,
    is_deletable_checkpoint,
    is_kept_by_clones,
    is_live_checkpoint,
)
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    Event,
    StepReported,
)
from prefect_tune.core.messages.target_messages import NO_LAST_REPORTS, LastKnownReports
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.documents import read_sealed
from prefect_tune.core.storage.generations import is_generation_deleted
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore


class OutdatedStateError(TuneError):
    """The state that the caller passed is outdated: some checkpoints were retired since. Call again with `current`."""

    def __init__(self, current: Trial) -> None:
        super().__init__(f"trial {current.id!r}: checkpoints that this call needed are retired in the journal")
        self.current = current


def load_current_trial(store: ObjectStore, trial: TrialKey) -> Trial:
    """Return the present state of the trial from the experiment's journal.

    Raises:
        Superseded: the experiment is being deleted, or was deleted.
        JournalCorrupt, UnknownVersion: see `load_experiment`.
    """
    state = load_experiment(store, trial.journal_key)
    if state.is_being_deleted or trial.trial not in state.trials:
        raise Superseded(f"{trial.folder}: its experiment is being deleted, or was deleted. Stop here")
    return state.trial(trial.trial)


def raise_damage_or_outdated(
    store: ObjectStore, trial: TrialKey, bad: Mapping[CheckpointKey, CheckpointCorrupt]
) -> None:
    """Read the journal again; raise the damage of the first checkpoint in `bad` that is still needed.

    Raises:
        CheckpointCorrupt: the checkpoint is live, or a clone needs its bytes.
        OutdatedStateError: none of the checkpoints is needed any more.
        Superseded: the experiment is being deleted, or was deleted.
    """
    current = load_current_trial(store, trial)
    for key, damage in bad.items():
        if is_live_checkpoint(current, key) or is_kept_by_clones(current, key):
            raise damage
    raise OutdatedStateError(current)


def is_checkpoint_live(store: ObjectStore, key: CheckpointKey) -> bool:
    """Read the journal, and return whether `key` is live in any trial. Raises JournalCorrupt like `load_experiment`."""
    try:
        state = load_experiment(store, key.trial.journal_key)
    except Superseded:
        return False
    return not state.is_being_deleted and any(is_live_checkpoint(trial, key) for trial in state.trials.values())


def _is_checkpoint_deletable(store: ObjectStore, key: CheckpointKey) -> bool:
    try:
        state = load_experiment(store, key.trial.journal_key)
    except Superseded:  # its experiment was deleted
        return True
    if not state.entry_count:  # the folder is a copy without a journal, or the experiment was deleted
        return store.size(key.manifest_path) is None or is_generation_deleted(store, key.trial.journal_key)
    trial = state.trials.get(key.trial.trial)
    return state.is_being_deleted or (trial is not None and is_deletable_checkpoint(trial, key))


# Read a checkpoint back, and verify every byte on the way; unverified bytes are never returned.


def read_manifest(store: ObjectStore, key: CheckpointKey) -> Manifest:
    """Return the manifest of `key`, and check that it belongs to this checkpoint.

    Raises:
        CheckpointNotFound: the target answered that there is no manifest.
        CheckpointCorrupt: the manifest is incomplete or altered, or belongs to another checkpoint.
    """
    if (manifest := read_sealed(store, Manifest, key.manifest_path, CheckpointCorrupt)) is None:
        raise CheckpointNotFound(f"{key.manifest_path}: no such checkpoint is committed")
    if manifest.key != key:
        raise CheckpointCorrupt(f"{key.manifest_path}: holds the manifest of another checkpoint: {manifest.key.folder}")
    return manifest


def read_manifest_or_none(store: ObjectStore, key: CheckpointKey | None) -> Manifest | None:
    """Return the manifest of `key`, for a save that reuses bytes; None without a key, or without an intact manifest."""
    try:
        return read_manifest(store, key) if key else None
    except (CheckpointCorrupt, CheckpointNotFound):
        return None


def find_damaged_checkpoints(
    store: ObjectStore, keys: Iterable[CheckpointKey], blobs: Mapping[str, str]
) -> Mapping[CheckpointKey, str]:
    """Return those of `keys` that have a damaged blob, each with the damage. `blobs` maps blob paths to their damage.

    Checkpoints with an unreadable manifest are left out, because their restore reports the damage of the manifest.
    """

    def find_damage(key: CheckpointKey) -> tuple[CheckpointKey, str | None]:
        try:
            paths = read_manifest(store, key).blob_paths()
        except (CheckpointCorrupt, CheckpointNotFound):
            return key, None
        return key, next((damage for path, damage in blobs.items() if path in paths), None)

    return {key: damage for key, damage in store.map(find_damage, keys) if damage is not None}


def restore_files(store: ObjectStore, manifest: Manifest, sink: FileSink) -> None:
    """Write every byte of `manifest` to `sink`; each chunk is verified before it is written.

    Raises:
        CheckpointCorrupt: bytes are missing or differ from their digest, also in a second read. Either the checkpoint
            was not retired, or the caller cannot read the journal to find out.
        CheckpointNotFound: during the read, the checkpoint was retired, or its experiment was deleted.
    """
    try:
        for _ in store.map(lambda read: fetch_chunks(store, manifest, read, sink), plan_reads(manifest)):
            pass
    except CheckpointCorrupt as damage:
        try:
            if not _is_checkpoint_deletable(store, manifest.key):
                raise
        except (StoreRefused, UnknownVersion):  # the journal cannot be read, so report the damage
            raise damage from None
        raise CheckpointNotFound(
            f"{manifest.key.folder}: this checkpoint was deleted while it was read, because its trial has retired it, "
            "or its experiment is being deleted; choose a checkpoint that is still listed"
        ) from damage


def verify_files(store: ObjectStore, manifest: Manifest) -> None:
    """Read and verify every byte of `manifest`, but store none. Raises like `restore_files`."""
    restore_files(store, manifest, NullSink())


def make_checkpoint_ref(manifest: Manifest) -> CheckpointRef:
    """Return the journal's reference to the checkpoint of `manifest`."""
    about = manifest.metadata
    return CheckpointRef(
        step=manifest.step,
        sequence=manifest.sequence,
        metrics=about.metrics,
        trained_seconds=about.trained_seconds,
        size_bytes=manifest.size_bytes,
    )


# Adopt saves that the last owner did not finish: saves with a manifest, but without an entry in the journal.
#
# A save ends with two writes: the manifest, which is the commit, and the journal entry, which makes the checkpoint
# visible. An owner that dies between these writes leaves a complete checkpoint that no entry names. The next owner
# looks for such a checkpoint before it starts the trial again, and journals it as adopted.
#
# The sequence increases with each save of a trial and with each attempt. So the sequence of the last attempt's
# unjournaled save is at least the trial's `adopted_up_to`. Once an entry has adopted this save, or has recorded that no
# save exists, no other save from before this entry can become a checkpoint. Saves of earlier attempts are not adopted,
# because their owner had abandoned them. An attempt with an open outbox posts its saves, so they are not adopted.


def make_adoption_events(
    store: ObjectStore,
    experiment: Experiment,
    *,
    trials: Collection[str] | None = None,
    last: LastKnownReports = NO_LAST_REPORTS,
) -> Sequence[Event]:
    """Return the events that end attempts whose end was not journaled, and that adopt their saves.

    Covers only running attempts without an outbox: those of `trials`, or of all trials if that is None (a new owner).
    Of each attempt, the newest save with a manifest but no entry becomes a checkpoint, and its manifest's reports are
    journaled. The attempt ends with the cause `MACHINE`. A save with a damaged manifest is quarantined, and the
    previous save is tried. A save that is not adopted here never becomes a checkpoint. This function writes nothing, so
    a crash before the caller writes the events has no effect. `last` has the reports of the last owner's live status.
    """
    considered = experiment.trials.values() if trials is None else [experiment.trial(name) for name in trials]
    running = [trial for trial in considered if trial.status is Status.RUNNING and trial.outbox is None]
    saves = list(store.map(lambda trial: _find_unjournaled_save(store, experiment, trial), running))
    adopted: dict[str, tuple[CheckpointRef, ...]] = {}
    events: list[Event] = []
    for trial, (manifest, damaged) in zip(running, saves, strict=True):
        events += damaged
        if manifest is not None:
            adopted[trial.id] = (make_checkpoint_ref(manifest),)
            reports = (report for report in manifest.metadata.reports if report.step > trial.step)
            events += [StepReported(trial=trial.id, report=report) for report in reports]
        events.append(AttemptEnded(trial=trial.id, cause=Cause.MACHINE, reason=make_reason("owner-vanished")))
    last_steps = {trial.id: 0 for trial in running}
    last_steps |= {name: max(report.step, last_steps.get(name, 0)) for name, report in last.reports.items()}
    trained_seconds = {name: report.trained_seconds for name, report in last.reports.items()}
    return [
        CheckpointsAdopted(
            checkpoints=adopted, last_known_steps=last_steps, trained_seconds=trained_seconds, last_seen_at=last.at
        ),
        *events,
    ]


def _find_unjournaled_save(
    store: ObjectStore, experiment: Experiment, trial: Trial
) -> tuple[Manifest | None, Sequence[CheckpointQuarantined]]:
    """Return the newest intact, unjournaled save of a trial's last attempt, and quarantines of later, damaged saves."""
    damaged: list[CheckpointQuarantined] = []
    folder = experiment.trial_key(trial.id)
    keys = (CheckpointKey.from_manifest_path(folder, listed.path) for listed in store.list(folder.checkpoints_folder))
    candidates = [key for key in keys if key and can_commit_save(trial, key.sequence)]
    for key in sorted(candidates, key=lambda key: (key.sequence, key.step), reverse=True):
        if damaged and damaged[-1].sequence == key.sequence:
            continue  # the journal names checkpoints by sequence, and this sequence is already quarantined
        try:
            manifest = read_manifest(store, key)
        except CheckpointNotFound:
            continue  # deleted after the listing by a process that was presumed dead
        except CheckpointCorrupt as corrupt:
            if key.sequence > trial.next_sequence + 1:
                continue  # no save has so high a sequence; a quarantine of it would prevent commits of lower ones
            damaged.append(CheckpointQuarantined(trial=trial.id, sequence=key.sequence, reason=str(corrupt)))
            continue
        if manifest.metadata.attempt == trial.attempt:  # saves of earlier attempts were abandoned by their owner
            return manifest, damaged
    return None, damaged
