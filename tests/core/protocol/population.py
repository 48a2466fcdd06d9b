"""Trials that clone each other's checkpoints, each with its own journal, and the promises for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from prefect_tune.core.adoption import adopt
from prefect_tune.core.checkpoints.commit import commit, reusable
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import CheckpointNotFound, SaveOvertaken, TuneError
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.retention import Retention, retired, retired_quarantined
from prefect_tune.core.experiment.trial_transitions import (
    ENDED,
    Status,
    Trial,
    newest_checkpoint,
    newest_key,
    parent_of_next,
    reused_from,
)
from prefect_tune.core.journal.journal import append, load, take_over
from prefect_tune.core.journal_events import (
    Adopted,
    CheckpointRef,
    Cloned,
    Committed,
    Event,
    Owner,
    Reported,
    Requeued,
    Retired,
    Started,
    TrialAdded,
)
from prefect_tune.core.operations.checkpoint_gc import leftover, orphans
from prefect_tune.core.operations.clone import clear, clone, newest_of
from prefect_tune.core.restore import current_trial, read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from tests.core.driver import BACKBONE, Files, retried
from tests.fakes.stores.memory_files import MemoryFiles, restored


def own(experiment: str, trial: str) -> JournalKey:
    """The key of a trial's own journal."""
    return JournalKey(experiment=experiment, generation=1, trial=trial)


def begin_experiment(store: ObjectStore, journal: JournalKey) -> None:
    """Open the experiment of a trial's own journal: that comes first."""
    if journal.trial is not None and store.size(journal.of_experiment.entry_path(1)) is None:
        owner, stamp = Owner(name="search", host="here", pid=1), Stamp(write_id="search", at="")
        take_over(store, journal.of_experiment, owner, stamp, side_by_side=map)


@dataclass
class Chronicle:
    """The saves that owners requested, and those that were acknowledged; it survives every owner's crash."""

    saved: dict[str, Files] = field(default_factory=dict)
    """The expected files of a checkpoint, by its folder."""
    acknowledged: list[CheckpointKey] = field(default_factory=list)
    stamps: int = 0

    def stamp(self) -> Stamp:
        self.stamps += 1
        return Stamp(write_id=f"w{self.stamps}", at="2026-11-21T08:00:00Z")


@dataclass
class Member:
    """The owner of a trial's journal. Its fields are lost with its process; only the store remains."""

    store: ObjectStore
    chronicle: Chronicle
    journal: JournalKey
    name: str
    """The trial's name."""
    owner: str = "first"
    retention: Retention = field(default_factory=lambda: Retention(last=1))
    experiment: Experiment = field(init=False)
    head: bytes = b""

    def __post_init__(self) -> None:
        self.experiment = nothing_yet(self.journal)

    def on(self, store: ObjectStore, chronicle: Chronicle) -> Member:
        """Return the same owner, with the same fields, on another store."""
        twin = replace(self, store=store, chronicle=chronicle)
        twin.experiment = self.experiment
        return twin

    @property
    def key(self) -> TrialKey:
        return TrialKey(experiment=self.journal.experiment, generation=1, trial=self.name)

    @property
    def trial(self) -> Trial:
        return self.experiment.trial(self.name)

    # ----------------------------------------------------------------------------------------- operations

    def open(self) -> None:
        """Take the journal over."""
        stamp = self.chronicle.stamp()
        owner = Owner(name=self.owner, host="here", pid=1)
        self.experiment = retried(
            lambda: take_over(self.store, self.journal, owner, stamp, side_by_side=map, also=self._first)
        )
        if self.experiment.settled_from != self.experiment.opened_at:
            self.append(retried(lambda: adopt(self.store, self.experiment)))

    def _first(self, found: Experiment) -> Sequence[Event]:
        added = TrialAdded(trial=self.name, config={"width": 3})
        return () if self.name in found.trials else (Adopted(), added)

    def clear_away(self) -> None:
        """Delete leftovers of earlier owners, after journaling that no save may reuse them."""
        left = retried(lambda: leftover(self.store, self.key, self.trial, self.experiment.settled_from))
        if any(key.sequence >= self.trial.collected_up_to for key in left):
            self.append([Retired(trial=self.name, retires=())])
        self.clear(left)

    def clear(self, doomed: Sequence[CheckpointKey]) -> None:
        stamp = self.chronicle.stamp()
        retried(lambda: clear(self.store, self.key, self.trial, doomed, stamp, side_by_side=map))

    def clone(self, source: TrialKey) -> None:
        """Clone the newest checkpoint of another trial, like the task, and journal the clone, like the supervisor.

        Nothing is cloned if the other trial is completed, and has only the checkpoint of its end.
        """
        stamp, gone = self.chronicle.stamp(), None
        while (found := self._clonable(source)) is not None and found != gone:
            try:
                ref = retried(lambda found=found: self._clone(found, stamp))
            except CheckpointNotFound:
                gone = found
            else:
                self.tell_of(found, ref)
                return
        if found is not None:
            raise AssertionError(f"{found.folder}: is the newest checkpoint, and cannot be cloned")

    def _clonable(self, source: TrialKey) -> CheckpointKey | None:
        try:
            return retried(lambda: newest_of(self.store, source, side_by_side=map))
        except CheckpointNotFound:
            if retried(lambda: current_trial(self.store, source, side_by_side=map)).status is not Status.COMPLETED:
                raise
            return None

    def _clone(self, source: CheckpointKey, stamp: Stamp) -> CheckpointRef:
        return clone(self.store, source, self.experiment, self.name, stamp, side_by_side=map)

    def tell_of(self, source: CheckpointKey, ref: CheckpointRef) -> None:
        """Journal a clone."""
        key = CheckpointKey(trial=self.key, step=ref.step, sequence=ref.sequence)
        self.chronicle.saved[key.folder] = self.chronicle.saved[source.folder]
        self.append([Cloned(trial=self.name, checkpoint=ref, source=source, config={"width": 4}, reason="behind")])
        self.chronicle.acknowledged.append(key)

    def start(self) -> None:
        """Begin an attempt from the newest checkpoint, which must be whole."""
        newest = newest_checkpoint(self.trial)
        if (key := newest_key(self.key, self.trial)) is not None:
            manifest = retried(lambda: read_manifest(self.store, key))
            self.head = retried(lambda: restored(self.store, manifest))["head"]
        from_step, from_sequence = (newest.step, newest.sequence) if newest else (0, None)
        attempt = self.trial.attempt + 1
        self.append([Started(trial=self.name, attempt=attempt, from_step=from_step, from_sequence=from_sequence)])

    def save(self) -> None:
        """Train a step, publish, journal, and delete the checkpoints that this retires."""
        self.clear(self.save_only())

    def save_and_clear_all(self) -> None:
        """Train and save a step in a new attempt; delete all garbage."""
        self.start()
        self.save()
        self.clear_away()

    def save_only(self) -> Sequence[CheckpointKey]:
        """Train a step, publish and journal; return the checkpoints that this retires."""
        step = self.trial.step + 1
        self.head = blake2b(self.head + f"{self.name} {self.owner}".encode(), digest_size=8).digest()
        overtaken: list[CheckpointKey] = []
        while True:
            key = CheckpointKey(trial=self.key, step=step, sequence=self.experiment.number)
            try:
                return [*overtaken, *self._publish_and_journal(key)]
            except SaveOvertaken:
                self.append([Retired(trial=self.name, retires=())])
                overtaken.append(key)

    def _publish_and_journal(self, key: CheckpointKey) -> Sequence[CheckpointKey]:
        step = key.step
        files = {"backbone": BACKBONE, "cycle": 24 * (b"A" if step % 3 == 1 else b"B"), "head": self.head}
        self.chronicle.saved[key.folder] = files
        about = self._about(step)
        retried(lambda: self._commit(key, files, about))
        new = CheckpointRef(step=step, sequence=key.sequence, trained_seconds=float(step))
        live = (*self.trial.checkpoints, new)
        aside = retired_quarantined(self.trial.quarantined_checkpoints, live, self.retention)
        going = (*retired(live, self.retention), *(each.sequence for each in aside))
        report = StepReport(step=step, metrics={"step": step}, trained_seconds=float(step))
        committed = Committed(trial=self.name, checkpoint=new, retires=going)
        self.append([Reported(trial=self.name, report=report), committed])
        self.chronicle.acknowledged.append(key)
        doomed = [each for each in (*live, *aside) if each.sequence in going]
        return [CheckpointKey(trial=self.key, step=each.step, sequence=each.sequence) for each in doomed]

    def _about(self, step: int) -> About:
        stamp = self.chronicle.stamp()
        return About(
            attempt=self.trial.attempt,
            term=self.experiment.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics={"step": step},
            trained_seconds=float(step),
            reports=(StepReport(step=step, metrics={"step": step}, trained_seconds=float(step)),),
        )

    def _commit(self, key: CheckpointKey, files: Files, about: About) -> None:
        newest = parent_of_next(self.key, self.trial)
        parent = read_manifest(self.store, newest) if newest else None
        reuse = reusable(self.store, self.key, parent, reused_from(self.trial))
        commit(self.store, key, MemoryFiles(files), about, reuse=reuse, side_by_side=map)

    def append(self, events: Sequence[Event]) -> None:
        stamp = self.chronicle.stamp()
        self.experiment = retried(lambda: append(self.store, self.experiment, events, stamp))


# --------------------------------------------------------------------------------------- promises


def newest(member: Member) -> CheckpointKey:
    """Return the newest checkpoint of the trial, which has one."""
    key = newest_key(member.key, member.trial)
    assert key
    return key


def promises_broken(store: ObjectStore, chronicle: Chronicle, journals: Mapping[str, JournalKey]) -> list[str]:
    """Return every promise that the state on `store` breaks; `journals` by the names of the trials."""
    try:
        states = {name: load(store, journal, side_by_side=map).trials.get(name) for name, journal in journals.items()}
    except TuneError as error:
        return [f"I6: a journal does not hold together: {error}"]
    found = []
    for name, state in states.items():
        if state is not None:
            trial = TrialKey(experiment=journals[name].experiment, generation=1, trial=name)
            found += [*_whole(store, chronicle, trial, state), *_kept(chronicle, trial, state)]
    return found


def _whole(store: ObjectStore, chronicle: Chronicle, trial: TrialKey, state: Trial) -> Iterator[str]:
    for each in state.checkpoints:
        key = CheckpointKey(trial=trial, step=each.step, sequence=each.sequence)
        try:
            files = restored(store, read_manifest(store, key))
        except TuneError as broken:
            yield f"I1: {key.folder} is live and cannot be restored: {broken}"
            continue
        if files != chronicle.saved[key.folder]:
            yield f"I2: {key.folder} holds bytes that no owner saved: {files}"


def _kept(chronicle: Chronicle, trial: TrialKey, state: Trial) -> Iterator[str]:
    """With a retention of one, a checkpoint as new as the newest acknowledged one always exists."""
    newest = max((key.sequence for key in chronicle.acknowledged if key.trial == trial), default=0)
    known = (*state.checkpoints, *(each.checkpoint for each in state.quarantined_checkpoints))
    if newest and not any(each.sequence >= newest for each in known):
        yield f"I1: {trial.folder}: {newest} was acknowledged, and there is {state.checkpoints}"


def after_everybody_returned(
    store: ObjectStore, chronicle: Chronicle, journals: Mapping[str, JournalKey], *, tidy: bool = True
) -> list[str]:
    """Open each trial by a new owner, twice; check promises and leaks, and end all clones.

    `tidy`: no write arrived late; a late write after the deletion of its checkpoint leaves an orphan.
    """
    try:
        return list(_after_everybody_returned(store, chronicle, journals, tidy=tidy))
    except TuneError as error:
        return [f"I4: recovery failed: {type(error).__name__}: {error}"]


def _after_everybody_returned(
    store: ObjectStore, chronicle: Chronicle, journals: Mapping[str, JournalKey], *, tidy: bool
) -> Iterator[str]:
    yield from promises_broken(store, chronicle, journals)
    members = [Member(store, chronicle, journal, name, owner="late") for name, journal in journals.items()]
    for member in members:
        member.open()
        member.clear_away()
    yield from promises_broken(store, chronicle, journals)
    for member in members:
        yield from _leaks(store, member)
    for member in members:  # after two more steps no clone is live
        if member.trial.phase in ENDED:
            member.append([Requeued(trial=member.name, reason="more")])
        member.start()
        member.save()
        member.save()
    for member in members:
        member.open()
        member.clear_away()
    yield from promises_broken(store, chronicle, journals)
    for member in members:
        yield from _what_is_left(store, member, tidy=tidy)


def _leaks(store: ObjectStore, member: Member) -> Iterator[str]:
    """Unreachable objects are found as leftovers or as orphans."""
    trial, key = load(store, member.journal, side_by_side=map).trial(member.name), member.key
    known = (*trial.checkpoints, *(each.checkpoint for each in trial.quarantined_checkpoints))
    refs = {(each.step, each.sequence) for each in known} | {(each.step, each.sequence) for each in trial.claims}
    keys = [CheckpointKey(trial=key, step=step, sequence=sequence) for step, sequence in refs]
    needed = {each.manifest_path for each in keys} | {
        path for each in keys for path in read_manifest(store, each).blob_paths()
    }
    found = {each.path for each in orphans(store, key, trial, side_by_side=map)}
    found |= {each.manifest_path for each in leftover(store, key, trial, member.experiment.number)}
    found |= _manifests_aside(store, key, trial)
    young = {each.path for each in store.list(key.blobs) if blob_sequence(each.path) >= trial.collected_up_to}
    there = {each.path for folder in (key.blobs, key.checkpoints) for each in store.list(folder)}
    for path in sorted(there - needed - found - young):
        yield f"I7: {path} is unreachable, and nothing will find it"


def _what_is_left(store: ObjectStore, member: Member, *, tidy: bool) -> Iterator[str]:
    """Without a live clone, every claim is released and every retired checkpoint is deleted."""
    state = load(store, member.journal, side_by_side=map).trial(member.name)
    held = [each for each in state.claims if not any(each.sequence == live.sequence for live in state.checkpoints)]
    if held:
        yield f"I7: {member.key.folder}: held without a live clone: {held}"
    live = {CheckpointKey(trial=member.key, step=e.step, sequence=e.sequence).manifest_path for e in state.checkpoints}
    there = {each.path for each in store.list(member.key.checkpoints)} - _manifests_aside(store, member.key, state)
    for path in sorted(there - live) if tidy else ():
        yield f"I7: {path} was retired, and outlived everybody's clearing away"


def _manifests_aside(store: ObjectStore, key: TrialKey, trial: Trial) -> set[str]:
    """Quarantined checkpoints are kept for inspection."""
    found = ((each.path, CheckpointKey.from_manifest_path(key, each.path)) for each in store.list(key.checkpoints))
    return {path for path, checkpoint in found if checkpoint and checkpoint.sequence in trial.quarantined}
