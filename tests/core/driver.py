"""An owner of an experiment, like the flow: open, adopt, start, (train, save, collect)*, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Literal, TypeVar

from prefect_tune.core.adoption import adopt
from prefect_tune.core.checkpoints import commit as committing
from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import About, Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, CommitUnknown, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.retention import Retention, retired, retired_quarantined
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, after, newest_checkpoint, reused_from
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.snapshot import snapshot_is_due, write_snapshot
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Committed,
    Event,
    Finished,
    Owner,
    Quarantined,
    Reported,
    Retired,
    Started,
    TrialAdded,
)
from prefect_tune.core.operations import checkpoint_gc as collecting
from prefect_tune.core.restore import checkpoints_with, read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_files import MemoryFiles, restored

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

    def stamp(self) -> Stamp:
        self.stamps += 1
        return Stamp(write_id=f"w{self.stamps}", at="2026-11-21T08:00:00Z")


@dataclass
class Session:
    """A running owner. Its fields are lost with its process; only the store remains."""

    store: ObjectStore
    witness: Witness
    owner: str = "first"
    retention: Retention = field(default_factory=lambda: Retention(last=2))
    experiment: Experiment = field(default_factory=lambda: nothing_yet(first_generation(NAME)))
    parent: Manifest | None = None
    head: bytes = b""
    waiting: list[StepReport] = field(default_factory=list)
    """Reports that are not journaled yet."""
    doomed: Sequence[CheckpointKey] = ()
    """The checkpoints that the last entry retired."""
    reverify_every: int = 3
    commit_count: int = 0
    """The number of commits in this attempt."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """The blobs that the last save found damaged."""
    clearing: Literal["careful", "careless", "none"] = "careful"
    """How it deletes leftovers of earlier owners: "careless" does not journal first that no save may reuse them."""

    @property
    def trial(self) -> Trial:
        return self.experiment.trial(KEY.trial)

    def open(self) -> None:
        """Take over the experiment, and adopt the saves of its last owner."""
        stamp = self.witness.stamp()
        self.experiment = retried(
            lambda: journal.take_over(self.store, first_generation(NAME), self.opened_by(), stamp, side_by_side=map)
        )
        self.append(retried(lambda: adopt(self.store, self.experiment)))
        if KEY.trial not in self.experiment.trials:
            self.append([TrialAdded(trial=KEY.trial, config={"width": 3})])
        self.clear_away()

    def opened_by(self) -> Owner:
        return Owner(name=self.owner, host="here", pid=1)

    def clear_away(self) -> None:
        """Delete checkpoints that earlier owners retired but did not delete, and saves that were never journaled."""
        if self.clearing == "none":
            return
        left = retried(lambda: collecting.leftover(self.store, KEY, self.trial))
        if self.clearing == "careful" and any(key.sequence >= self.trial.collected_up_to for key in left):
            self.append([Retired(trial=KEY.trial, retires=())])
        self.collect(left)

    def start(self) -> None:
        """Begin an attempt from the newest checkpoint that verifies."""
        self.commit_count = 0
        while newest := newest_checkpoint(self.trial):
            key = CheckpointKey(trial=KEY, step=newest.step, sequence=newest.sequence)
            try:
                self.parent = retried(lambda key=key: read_manifest(self.store, key))
                self.head = retried(lambda: restored(self.store, self.parent))["head"]
                break
            except (CheckpointCorrupt, CheckpointNotFound) as bad:
                self.parent = None
                self.append([Quarantined(trial=KEY.trial, sequence=newest.sequence, reason=str(bad))])
        self.append(
            [
                Started(
                    trial=KEY.trial,
                    attempt=self.trial.attempt + 1,
                    from_step=newest.step if newest else 0,
                    from_sequence=newest.sequence if newest else None,
                )
            ]
        )

    def train(self) -> None:
        """Train one step: the head depends on all earlier steps and on their owners."""
        step = (self.waiting[-1].step if self.waiting else self.trial.step) + 1
        earlier, self.head = self.head, blake2b(self.head + self.owner.encode(), digest_size=8).digest()
        self.witness.before[self.head] = earlier
        self.waiting.append(StepReport(step=step, metrics={"head": self.head.hex()}, trained_seconds=float(step)))

    def save(self) -> None:
        """Publish and journal a checkpoint; then delete the checkpoints that it retired."""
        manifest = self.publish()
        self.doomed = self.acknowledge(manifest)
        self.collect(self.doomed)

    def publish(self) -> Manifest:
        """Save up to the manifest, without the journal entry."""
        step = self.waiting[-1].step if self.waiting else self.trial.step
        key = CheckpointKey(trial=KEY, step=step, sequence=self.trial.next_sequence)
        files = self.files(step)
        self.witness.saved.setdefault((key.step, key.sequence), []).append(files)
        stamp = self.witness.stamp()
        about = About(
            attempt=self.trial.attempt,
            term=self.experiment.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics={"head": self.head.hex()},
            trained_seconds=float(step),
            reports=tuple(self.waiting),
        )
        done = retried(lambda: self._commit(key, files, about))
        manifest, self.damaged = done.manifest, done.damaged
        self.witness.published[key.step, key.sequence] = manifest.blob_paths()
        return manifest

    def _commit(self, key: CheckpointKey, files: Files, about: About) -> committing.Save:
        reuse = committing.reusable(self.store, KEY, self.parent, reused_from(self.trial))
        source = MemoryFiles(files, empty_directories=["none"])
        turn = Reverification(self.commit_count, self.reverify_every)
        return committing.commit(self.store, key, source, about, reuse=reuse, side_by_side=map, reverification=turn)

    def acknowledge(self, manifest: Manifest) -> Sequence[CheckpointKey]:
        """Journal a published checkpoint; return those that it retires."""
        new = CheckpointRef(
            step=manifest.step,
            sequence=manifest.sequence,
            metrics=manifest.about.metrics,
            trained_seconds=manifest.about.trained_seconds,
            size_bytes=manifest.size_bytes,
        )
        live = (*self.trial.checkpoints, new)
        aside = retired_quarantined(self.trial.quarantined_checkpoints, live, self.retention)
        going = (*retired(live, self.retention), *(each.sequence for each in aside))
        reports = [Reported(trial=KEY.trial, report=report) for report in self.waiting]
        stay = [KEY.checkpoint_key(each) for each in self.trial.checkpoints if each.sequence not in going]
        self.append([*reports, Committed(trial=KEY.trial, checkpoint=new, retires=going), *self._damaged(stay)])
        self.commit_count += 1
        self.witness.acknowledged.append((new.step, new.sequence))
        self.waiting.clear()
        self.parent = manifest
        doomed = [each for each in (*live, *aside) if each.sequence in going]
        return [CheckpointKey(trial=KEY, step=each.step, sequence=each.sequence) for each in doomed]

    def _damaged(self, keys: Sequence[CheckpointKey]) -> Sequence[Quarantined]:
        """Quarantine events for the checkpoints that refer to blobs which the last save found damaged."""
        if not self.damaged:
            return []
        found = retried(lambda: checkpoints_with(self.store, keys, self.damaged, side_by_side=map))
        return [Quarantined(trial=KEY.trial, sequence=key.sequence, reason=why) for key, why in found.items()]

    def collect_early(self, new: CheckpointRef, going: tuple[int, ...]) -> None:
        """Delete retired checkpoints before they are journaled as retired: for a mutant that the tests must detect."""
        reports = [Reported(trial=KEY.trial, report=report) for report in self.waiting]
        events = [*reports, Committed(trial=KEY.trial, checkpoint=new, retires=going)]
        state = reduce(after, events, self.trial)
        doomed = [
            CheckpointKey(trial=KEY, step=each.step, sequence=each.sequence)
            for each in self.trial.checkpoints
            if each.sequence in going
        ]
        with suppress(StoreUnavailable):
            collecting.collect(self.store, KEY, state, doomed, side_by_side=map)

    def collect(self, doomed: Sequence[CheckpointKey]) -> None:
        """Delete these checkpoints; the next owner completes a deletion that fails."""
        with suppress(StoreUnavailable):
            collecting.collect(self.store, KEY, self.trial, doomed, side_by_side=map)

    def finish(self) -> None:
        self.append([Finished(trial=KEY.trial, reason="enough")])

    def append(self, events: Sequence[Event]) -> None:
        stamp = self.witness.stamp()
        before = self.experiment.number
        self.experiment = retried(lambda: journal.append(self.store, self.experiment, events, stamp))
        if snapshot_is_due(self.experiment, before):
            write_snapshot(self.store, self.experiment)

    def files(self, step: int) -> Files:
        cycle = b"A" if step % 3 == 1 else b"B"  # the old content returns after its checkpoint was retired
        return {
            "backbone": BACKBONE,
            "cycle": 24 * cycle,
            "empty": b"",
            "head": self.head,
            "logs/steps": b"." * step,
        }


def run_to(session: Session, steps: int) -> None:
    """Open, and train until `steps` are done, saving after each."""
    session.open()
    if session.trial.phase is Phase.FINISHED:
        return
    session.start()
    while session.trial.step < steps:
        session.train()
        session.save()


def retried(act: Callable[[], _T]) -> _T:
    """Call `act` with retries, like a task."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except (StoreUnavailable, CommitUnknown):
            continue
    return act()
