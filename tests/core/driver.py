"""An owner of an experiment, like the flow: open, adopt, start, (train, save, collect)*, finish; and its promises."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Literal, Self, TypeVar

from prefect_tune.core.checkpoints import commit as committing
from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata, Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, CommitUnknown, StoreUnavailable, TuneError
from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.experiment.retention import Retention, find_quarantined_to_retire, find_sequences_to_retire
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import (
    Phase,
    Trial,
    apply_trial_event,
    min_reusable_sequence,
    newest_checkpoint,
)
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.journal import is_snapshot_due, write_snapshot
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsRetired,
    Entry,
    Event,
    Owner,
    OwnerChanged,
    StepReported,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.messages.target_messages import list_node_objects
from prefect_tune.core.operations import trial_gc as collecting
from prefect_tune.core.restore import find_damaged_checkpoints, make_adoption_events, read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_files import MemoryFiles, load_files
from tests.fakes.stores.memory_store import MemoryStore

NAME = "e"
JOURNAL = JournalKey(experiment=NAME, generation=1)
KEY = TrialKey(experiment=NAME, generation=1, trial="t")
BACKBONE = b"never changed, and shared by every checkpoint..."
TRIES = 3

Files = dict[str, bytes]
_T = TypeVar("_T")


@dataclass
class Witness:
    """The saves that owners requested, and those that were acknowledged; it survives every owner's crash."""

    saved: dict[tuple[int, int], list[Files]] = field(default_factory=dict)
    """By step and sequence."""
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """Steps and sequences, in the order of their acknowledgement."""
    published: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    """Blobs of every manifest whose creation returned, by step and sequence."""
    before: dict[bytes, bytes] = field(default_factory=dict)
    """Which head each head was trained from."""
    stamps: int = 0

    def stamp(self) -> WriteStamp:
        self.stamps += 1
        return WriteStamp(write_id=f"w{self.stamps}", at="2026-11-21T08:00:00Z")


@dataclass
class Session:
    """A running owner. Its fields are lost when its process exits; only the store remains."""

    store: ObjectStore
    witness: Witness
    owner: str = "first"
    retention: Retention = field(default_factory=lambda: Retention(last=2))
    experiment: Experiment = field(default_factory=lambda: make_empty_experiment(first_generation(NAME)))
    parent: Manifest | None = None
    head: bytes = b""
    pending: list[StepReport] = field(default_factory=list)
    """Reports that are not journaled yet."""
    to_delete: Sequence[CheckpointKey] = ()
    """The checkpoints that the last entry retired."""
    reverify_every: int = 3
    commit_count: int = 0
    """The number of commits in this attempt."""
    damaged_blobs: Mapping[str, str] = field(default_factory=dict)
    """The blobs that the last save found damaged."""
    cleanup: Literal["careful", "careless", "none"] = "careful"
    """How it deletes leftovers of earlier owners: "careless" does not first journal that no save may reuse them."""
    steps: int | None = None
    """The step to which a last owner continues when the promises are checked."""
    is_alone: bool = False
    """Whether there is never more than one owner at a time."""

    def copy(self) -> Self:
        """Return a copy on a separate store."""
        witness = copy.deepcopy(self.witness)
        return dataclasses.replace(self, store=MemoryStore(self.objects), witness=witness, pending=list(self.pending))

    def with_store(self, store: ObjectStore) -> Self:
        return dataclasses.replace(self, store=store, pending=list(self.pending))

    @property
    def objects(self) -> dict[str, bytes]:
        assert isinstance(self.store, MemoryStore)
        return self.store.objects

    def live_keys(self) -> list[CheckpointKey]:
        return [KEY.checkpoint_key(ref) for ref in self.trial.checkpoints]

    def find_broken_promises(self, *, tidy: bool = True) -> list[str]:
        return check_recovery(self.store, self.witness, self.steps, alone=self.is_alone, tidy=tidy)

    def outcome(self) -> Hashable:
        return frozenset(self.objects.items()), repr(self.witness), self.steps, self.is_alone

    @property
    def trial(self) -> Trial:
        return self.experiment.trial(KEY.trial)

    def open(self) -> None:
        """Take over the experiment, and adopt the saves of its last owner."""
        stamp = self.witness.stamp()
        self.experiment = retry(
            lambda: journal.acquire_ownership(self.store, first_generation(NAME), self.make_owner(), stamp)
        )
        self.append(retry(lambda: make_adoption_events(self.store, self.experiment)))
        if KEY.trial not in self.experiment.trials:
            self.append([TrialAdded(trial=KEY.trial, config={"width": 3})])
        self.delete_leftovers()

    def make_owner(self) -> Owner:
        return Owner(name=self.owner, host="here", pid=1)

    def delete_leftovers(self) -> None:
        """Delete checkpoints that earlier owners retired but did not delete, and saves that were never journaled."""
        if self.cleanup == "none":
            return
        keys = retry(lambda: collecting.find_leftover_manifests(self.store, KEY, self.trial))
        if self.cleanup == "careful" and any(key.sequence >= self.trial.collected_up_to for key in keys):
            self.append([CheckpointsRetired(trial=KEY.trial, retired_sequences=())])
        self.delete_checkpoints(keys)

    def start(self) -> None:
        """Begin an attempt from the newest checkpoint that verifies."""
        self.commit_count = 0
        while newest := newest_checkpoint(self.trial):
            key = KEY.checkpoint_key(newest)
            try:
                self.parent = retry(lambda key=key: read_manifest(self.store, key))
                self.head = retry(lambda: load_files(self.store, self.parent))["head"]
                break
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                self.parent = None
                self.append([CheckpointQuarantined(trial=KEY.trial, sequence=newest.sequence, reason=str(error))])
        self.append(
            [
                AttemptStarted(
                    trial=KEY.trial,
                    attempt=self.trial.attempt + 1,
                    from_step=newest.step if newest else 0,
                    from_sequence=newest.sequence if newest else None,
                )
            ]
        )

    def train(self) -> None:
        """Train one step: the head depends on all earlier steps and on their owners."""
        step = (self.pending[-1].step if self.pending else self.trial.step) + 1
        earlier, self.head = self.head, blake2b(self.head + self.owner.encode(), digest_size=8).digest()
        self.witness.before[self.head] = earlier
        self.pending.append(StepReport(step=step, metrics={"head": self.head.hex()}, trained_seconds=float(step)))

    def save(self) -> None:
        """Publish and journal a checkpoint; then delete the checkpoints that it retires."""
        self.to_delete = self.acknowledge(self.publish())
        self.delete_checkpoints(self.to_delete)

    def publish(self) -> Manifest:
        """Save up to the manifest, without the journal entry."""
        step = self.pending[-1].step if self.pending else self.trial.step
        key = CheckpointKey(trial=KEY, step=step, sequence=self.trial.next_sequence)
        files = self.files(step)
        self.witness.saved.setdefault((key.step, key.sequence), []).append(files)
        stamp = self.witness.stamp()
        metadata = CheckpointMetadata(
            attempt=self.trial.attempt,
            term=self.experiment.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics={"head": self.head.hex()},
            trained_seconds=float(step),
            reports=tuple(self.pending),
        )
        result = retry(lambda: self._commit(key, files, metadata))
        manifest, self.damaged_blobs = result.manifest, result.damaged_blobs
        self.witness.published[key.step, key.sequence] = manifest.blob_paths()
        return manifest

    def _commit(self, key: CheckpointKey, files: Files, metadata: CheckpointMetadata) -> committing.SaveResult:
        reuse = committing.find_reusable_bytes(self.store, KEY, self.parent, min_reusable_sequence(self.trial))
        source = MemoryFiles(files, empty_directories=["none"])
        schedule = Reverification(self.commit_count, self.reverify_every)
        return committing.commit_checkpoint(self.store, key, source, metadata, reuse=reuse, reverification=schedule)

    def acknowledge(self, manifest: Manifest) -> Sequence[CheckpointKey]:
        """Journal a published checkpoint; return those that it retires."""
        checkpoint = CheckpointRef(
            step=manifest.step,
            sequence=manifest.sequence,
            metrics=manifest.metadata.metrics,
            trained_seconds=manifest.metadata.trained_seconds,
            size_bytes=manifest.size_bytes,
        )
        live = (*self.trial.checkpoints, checkpoint)
        quarantined = find_quarantined_to_retire(self.trial.quarantined_checkpoints, live, self.retention)
        retired_sequences = (*find_sequences_to_retire(live, self.retention), *(ref.sequence for ref in quarantined))
        reports = [StepReported(trial=KEY.trial, report=report) for report in self.pending]
        kept_keys = [KEY.checkpoint_key(ref) for ref in self.trial.checkpoints if ref.sequence not in retired_sequences]
        self.append(
            [
                *reports,
                CheckpointCommitted(trial=KEY.trial, checkpoint=checkpoint, retired_sequences=retired_sequences),
                *self._make_quarantine_events(kept_keys),
            ]
        )
        self.commit_count += 1
        self.witness.acknowledged.append((checkpoint.step, checkpoint.sequence))
        self.pending.clear()
        self.parent = manifest
        return [KEY.checkpoint_key(ref) for ref in (*live, *quarantined) if ref.sequence in retired_sequences]

    def _make_quarantine_events(self, keys: Sequence[CheckpointKey]) -> Sequence[CheckpointQuarantined]:
        """Make an event for each checkpoint that uses a blob that the last save found damaged."""
        if not self.damaged_blobs:
            return []
        reasons = retry(lambda: find_damaged_checkpoints(self.store, keys, self.damaged_blobs)).items()
        return [CheckpointQuarantined(trial=KEY.trial, sequence=key.sequence, reason=text) for key, text in reasons]

    def delete_early(self, checkpoint: CheckpointRef, retired: tuple[int, ...]) -> None:
        """Delete retired checkpoints before they are journaled as retired: for a mutant that the tests must detect."""
        reports = [StepReported(trial=KEY.trial, report=report) for report in self.pending]
        events = [*reports, CheckpointCommitted(trial=KEY.trial, checkpoint=checkpoint, retired_sequences=retired)]
        state = reduce(apply_trial_event, events, self.trial)
        keys = [KEY.checkpoint_key(ref) for ref in self.trial.checkpoints if ref.sequence in retired]
        with suppress(StoreUnavailable):
            collecting.delete_retired_objects(self.store, KEY, state, keys)

    def delete_checkpoints(self, keys: Sequence[CheckpointKey]) -> None:
        """Delete these checkpoints; the next owner completes a deletion that fails."""
        with suppress(StoreUnavailable):
            collecting.delete_retired_objects(self.store, KEY, self.trial, keys)

    def finish(self) -> None:
        self.append([TrialFinished(trial=KEY.trial, reason="enough")])

    def append(self, events: Sequence[Event]) -> None:
        stamp = self.witness.stamp()
        before = self.experiment.entry_count
        self.experiment = retry(lambda: journal.append_events(self.store, self.experiment, events, stamp))
        if is_snapshot_due(self.experiment, before):
            write_snapshot(self.store, self.experiment)

    def files(self, step: int) -> Files:
        cycle = b"A" if step % 3 == 1 else b"B"  # the old content returns after its checkpoint was retired
        return {"backbone": BACKBONE, "cycle": 24 * cycle, "empty": b"", "head": self.head, "logs/steps": b"." * step}


def run_to(session: Session, steps: int) -> None:
    """Open, and train until `steps` are done, saving after each."""
    session.open()
    if session.trial.phase is Phase.FINISHED:
        return
    session.start()
    while session.trial.step < steps:
        session.train()
        session.save()


def retry(act: Callable[[], _T]) -> _T:
    """Call `act` with retries, like a task."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except (StoreUnavailable, CommitUnknown):
            continue
    return act()


# The promises I1 to I8, checked on the state of a store.


def check_recovery(
    store: ObjectStore, witness: Witness, steps: int | None, *, alone: bool = False, tidy: bool = True
) -> list[str]:
    """Open the experiment twice, check, continue to `steps` (if any) and check again; return broken promises.

    `alone`: there was never more than one owner at a time. `tidy`: no write arrived late, which may leave an orphan.
    """
    try:
        return list(_iter_violations(store, witness, steps, alone=alone, tidy=tidy))
    except TuneError as error:
        return [f"I4: recovery failed: {type(error).__name__}: {error}"]


def _iter_violations(
    store: ObjectStore, witness: Witness, steps: int | None, *, alone: bool, tidy: bool
) -> Iterator[str]:
    second, third, last = (Session(store, witness, owner=name) for name in ("second", "third", "last"))
    second.open()
    yield from find_violations(store, witness, second.experiment)
    if alone:
        yield from check_published(second.trial, witness)
    first_state = (_dump_lasting_state(second), _list_paths(store))
    third.open()
    if first_state != (second_state := (_dump_lasting_state(third), _list_paths(store))):
        yield f"I8: recovering twice is not recovering once: {first_state}, then {second_state}"
    if steps is None:
        yield from _find_leaks(store, third, witness, tidy=tidy)
        return
    run_to(last, steps)
    yield from find_violations(store, witness, last.experiment)
    if last.trial.step < steps:
        yield f"I6: continuing ended as {last.trial.phase} at step {last.trial.step}"
    yield from _find_leaks(store, last, witness, tidy=tidy)


def _list_paths(store: ObjectStore) -> list[str]:
    return [listed.path for listed in store.list(KEY.folder)]


def _dump_lasting_state(session: Session) -> object:
    """Return the fields of the trial that opening the experiment does not change."""
    return session.trial.model_dump(exclude={"collected_up_to", "next_sequence"})


def find_violations(store: ObjectStore, witness: Witness, experiment: Experiment) -> list[str]:
    """Return every promise that the state on `store` breaks; `experiment` is the state that the last owner loaded."""
    entries = journal.read_entries(store, first_generation(NAME))
    trial = experiment.trial(KEY.trial)
    return [
        *_check_terms(entries),
        *_check_acknowledged(entries, trial, witness),
        *_check_checkpoints(store, trial, witness),
        *_check_curve(entries, trial, witness),
        *_check_snapshot(store),
    ]


def _check_terms(entries: Sequence[Entry]) -> Iterator[str]:
    opened = [entry.term for entry in entries if any(isinstance(event, OwnerChanged) for event in entry.events)]
    if opened != list(range(1, len(opened) + 1)) or [e.term for e in entries] != sorted(e.term for e in entries):
        yield f"I5: terms {[entry.term for entry in entries]}, opened {opened}"


def _check_acknowledged(entries: Sequence[Entry], trial: Trial, witness: Witness) -> Iterator[str]:
    events = [event for entry in entries for event in entry.events]
    committed = {(e.checkpoint.step, e.checkpoint.sequence) for e in events if isinstance(e, CheckpointCommitted)}
    retired = {
        sequence
        for e in events
        if isinstance(e, CheckpointCommitted | CheckpointsRetired)
        for sequence in e.retired_sequences
    }
    live = {(ref.step, ref.sequence) for ref in trial.checkpoints}
    for step, sequence in witness.acknowledged:
        if (step, sequence) not in committed:
            yield f"I1: step {step} ({sequence}) was acknowledged, and the journal does not know it"
        if (step, sequence) not in live and sequence not in retired:
            yield f"I1: step {step} ({sequence}) was acknowledged, is not live, and was not retired"
    newest = max((sequence for _, sequence in witness.acknowledged), default=0)
    if newest and not any(sequence >= newest for _, sequence in live):
        yield f"I1: the newest acknowledged checkpoint ({newest}) is gone, and there is none after it"
    for event in events:
        if isinstance(event, CheckpointQuarantined):
            yield f"I3: an undamaged store, and yet: {event.reason}"


def _check_checkpoints(store: ObjectStore, trial: Trial, witness: Witness) -> Iterator[str]:
    sequences = [ref.sequence for ref in trial.checkpoints]
    if sequences != sorted(set(sequences)):
        yield f"I6: live checkpoints out of order, or twice: {sequences}"
    for ref in trial.checkpoints:
        key = CheckpointKey(trial=KEY, step=ref.step, sequence=ref.sequence)
        try:
            files = load_files(store, read_manifest(store, key))
        except TuneError as error:
            yield f"I1: step {ref.step} ({ref.sequence}) is live and cannot be restored: {error}"
            continue
        if files not in witness.saved.get((ref.step, ref.sequence), []):
            yield f"I2: step {ref.step} ({ref.sequence}) holds bytes that no owner saved: {files}"


def _check_curve(entries: Sequence[Entry], trial: Trial, witness: Witness) -> Iterator[str]:
    reports = LearningCurves(entries).get_curve(KEY.trial)
    steps = [report.step for report in reports]
    if steps != list(range(1, trial.step + 1)):
        yield f"I6: the curve that counts has steps {steps}, and the trial is at {trial.step}"
    newest = newest_checkpoint(trial)
    if newest is None:
        return
    reported = [report.metrics["head"] for report in reports if report.step <= newest.step]
    head, trained = bytes.fromhex(str(newest.metrics["head"])), []
    while head:
        trained.insert(0, head.hex())
        head = witness.before[head]
    if reported != trained:
        yield f"I6: the newest checkpoint was trained through {trained}, and the curve has {reported}"


def _check_snapshot(store: ObjectStore) -> Iterator[str]:
    by_snapshot = journal.load_experiment(store, JOURNAL)
    by_entries, _ = journal.load_at(store, JOURNAL, None)
    if by_snapshot != by_entries:
        yield f"I6: the snapshot yields {by_snapshot}, and the entries {by_entries}"


def check_published(trial: Trial, witness: Witness) -> Iterator[str]:
    """Check that every published manifest counts, with or without an entry; for a single owner."""
    newest = max((step for step, _ in witness.published), default=0)
    if newest > max((ref.step for ref in trial.checkpoints), default=0):
        yield f"I4: step {newest} was published, and the newest checkpoint is {trial.checkpoints[-1:]}"


def _find_leaks(store: ObjectStore, last: Session, witness: Witness, *, tidy: bool) -> Iterator[str]:
    """Check that every unreachable object is found: as a leftover by the next owner, or later as an orphan."""
    for path in find_unreachable(store, last.trial):
        yield f"I7: {path} is unreachable, and nothing will find it"
    live = {(ref.step, ref.sequence) for ref in last.trial.checkpoints}
    needed = {path for key, paths in witness.published.items() if key in live for path in paths}
    retired = {path for key in witness.acknowledged for path in witness.published[key]} - needed
    for path in sorted(retired & set(_list_paths(store))) if tidy else ():
        yield f"I7: {path} was retired, and outlived the next owner's clearing away"


def find_unreachable(store: ObjectStore, trial: Trial) -> list[str]:
    """Return the objects that no live checkpoint needs and that no search for leftovers or orphans finds."""
    refs = (*trial.checkpoints, *(record.checkpoint for record in trial.quarantined_checkpoints))
    live = [KEY.checkpoint_key(ref) for ref in refs]
    manifests = [manifest for key in live for manifest in _iter_readable_manifests(store, key)]
    needed = {key.manifest_path for key in live} | {path for manifest in manifests for path in manifest.blob_paths()}
    findable = {blob.path for blob in collecting.find_orphan_blobs(store, KEY, trial)}
    findable |= {listed.path for listed in list_node_objects(store, KEY, trial.attempt)}
    settled = trial.model_copy(update={"adopted_up_to": 10**9})  # no save is under way at the end
    findable |= {key.manifest_path for key in collecting.find_leftover_manifests(store, KEY, settled)}
    reusable = {blob.path for blob in store.list(KEY.blobs_folder) if blob_sequence(blob.path) >= trial.collected_up_to}
    unreachable = set(_list_paths(store)) - needed - findable - reusable
    return sorted(path for path in unreachable if not _is_quarantined(path, trial))


def _iter_readable_manifests(store: ObjectStore, key: CheckpointKey) -> Iterator[Manifest]:
    """Skip a damaged manifest: it may be the reason for a quarantine."""
    with suppress(CheckpointCorrupt, CheckpointNotFound):
        yield read_manifest(store, key)


def _is_quarantined(path: str, trial: Trial) -> bool:
    """Quarantined checkpoints are kept for inspection; the trial lists them."""
    key = CheckpointKey.from_manifest_path(KEY, path)
    return key is not None and key.sequence in trial.quarantined_sequences
