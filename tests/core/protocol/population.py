"""A search whose trials clone each other's checkpoints, here and on other machines, and the promises for all."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import blake2b
from typing import ClassVar, Self

from prefect_tune.core.checkpoints.commit import commit_checkpoint, find_reusable_bytes
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.experiment.retention import Retention, find_checkpoints_to_retire
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Phase,
    Trial,
    apply_trial_event,
    find_clonable_checkpoint,
    is_live_checkpoint,
    min_reusable_sequence,
    newest_checkpoint,
    newest_checkpoint_key,
    parent_of_next_save,
)
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_experiment
from prefect_tune.core.journal.outbox import Post, close_outbox, delete_posts, read_posts, write_post
from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointOrigin,
    CheckpointRef,
    CheckpointsRetired,
    Event,
    OutboxClosed,
    Owner,
    PostReceived,
    StepReported,
    TrialAdded,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.operations.trial_gc import (
    delete_retired_objects,
    find_collectable_origins,
    find_leftover_manifests,
    find_orphan_blobs,
)
from prefect_tune.core.restore import make_adoption_events, read_manifest, read_manifest_or_none
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from tests.core.driver import BACKBONE, Files, retry
from tests.fakes.stores.memory_files import MemoryFiles, load_files

SEARCH = JournalKey(experiment="e", generation=1)


@dataclass
class Chronicle:
    """The saves that attempts requested, and those that were acknowledged; it survives every crash."""

    saved: dict[str, Files] = field(default_factory=dict)
    """The expected files of a checkpoint, by the folder of its manifest."""
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By trial, the sequence of the newest acknowledged checkpoint."""
    stamps: int = 0

    def stamp(self) -> WriteStamp:
        self.stamps += 1
        return WriteStamp(write_id=f"w{self.stamps}", at="2026-11-21T08:00:00Z")


@dataclass
class Attempt:
    """An attempt of a trial: what it knows of the trial, and its model."""

    store: ObjectStore
    chronicle: Chronicle
    key: TrialKey
    trial: Trial
    term: int
    owner: str = "first"
    retention: Retention = field(default_factory=lambda: Retention(last=1))
    head: bytes = b""
    posted: int = 0
    """How many posts an attempt on another machine has written."""

    def start(self) -> AttemptStarted:
        """Restore the newest checkpoint, which must be whole, and return the event that begins the attempt."""
        newest = newest_checkpoint(self.trial)
        if (key := newest_checkpoint_key(self.key, self.trial)) is not None:
            manifest = retry(lambda: read_manifest(self.store, key))
            self.head = retry(lambda: load_files(self.store, manifest))["head"]
        step, sequence = (newest.step, newest.sequence) if newest else (0, None)
        return AttemptStarted(
            trial=self.trial.id, attempt=self.trial.attempt + 1, from_step=step, from_sequence=sequence
        )

    def train(self) -> StepReported:
        """Train a step, and return its report."""
        step, name = self.trial.step + 1, self.trial.id
        self.head = blake2b(self.head + f"{name} {self.owner}".encode(), digest_size=8).digest()
        return StepReported(
            trial=name, report=StepReport(step=step, metrics={"step": step}, trained_seconds=float(step))
        )

    def publish(self, report: StepReport) -> tuple[CheckpointCommitted, Sequence[CheckpointRef]]:
        """Publish the step of a report; return the event of its commit, and the checkpoints that it retires."""
        step = report.step
        key = CheckpointKey(trial=self.key, step=step, sequence=self.trial.next_sequence)
        self.upload(key, self.files(step), report)
        ref = CheckpointRef(step=step, sequence=key.sequence, metrics=report.metrics, trained_seconds=float(step))
        retired = find_checkpoints_to_retire(self.trial, ref, self.retention)
        sequences = tuple(old.sequence for old in retired)
        return CheckpointCommitted(trial=self.trial.id, checkpoint=ref, retired_sequences=sequences), retired

    def files(self, step: int) -> Files:
        return {"backbone": BACKBONE, "cycle": 24 * (b"A" if step % 3 == 1 else b"B"), "head": self.head}

    def upload(self, key: CheckpointKey, files: Files, *reports: StepReport) -> None:
        """Publish files as a checkpoint, without a journal entry."""
        self.chronicle.saved[key.folder] = files
        stamp = self.chronicle.stamp()
        metadata = CheckpointMetadata(
            attempt=self.trial.attempt,
            term=self.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics={"step": key.step},
            trained_seconds=float(key.step),
            reports=reports,
        )
        retry(lambda: self._commit(key, files, metadata))

    def _commit(self, key: CheckpointKey, files: Files, metadata: CheckpointMetadata) -> None:
        parent = read_manifest_or_none(self.store, parent_of_next_save(self.key, self.trial))
        reuse = find_reusable_bytes(self.store, self.key, parent, min_reusable_sequence(self.trial))
        commit_checkpoint(self.store, key, MemoryFiles(files), metadata, reuse=reuse)

    # ------------------------------------------------------------------------------- on another machine

    def post(self, *events: AnyTrialEvent) -> None:
        """Write the next post; then its events are durable."""
        outbox, stamp = self.trial.outbox, self.chronicle.stamp()
        assert outbox is not None
        trial = reduce(apply_trial_event, events, self.trial)
        post = Post(write_id=stamp.write_id, at=stamp.at, events=events)
        retry(lambda: write_post(self.store, self.key, outbox, self.posted + 1, post))
        self.posted += 1
        self.trial = trial

    def post_start(self) -> None:
        self.post(self.start())

    def post_save(self) -> None:
        """Train, publish and post a step. It deletes nothing."""
        reported = self.train()
        committed, _ = self.publish(reported.report)
        self.post(reported, committed)
        self.chronicle.acknowledged[self.trial.id] = self.trial.checkpoints[-1].sequence

    def with_store(self, store: ObjectStore, chronicle: Chronicle) -> Attempt:
        return replace(self, store=store, chronicle=chronicle)


@dataclass
class Search:
    """The owner of the experiment. Its fields are lost with its process; only the store remains."""

    store: ObjectStore
    chronicle: Chronicle
    journal: JournalKey = SEARCH
    owner: str = "first"
    retention: Retention = field(default_factory=lambda: Retention(last=1))
    state: Experiment = field(init=False)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    attempt_class: ClassVar[type[Attempt]] = Attempt

    def __post_init__(self) -> None:
        self.state = make_empty_experiment(self.journal)

    def with_store(self, store: ObjectStore, chronicle: Chronicle) -> Self:
        """Return the same owner, with the same fields, on another store."""
        twin = copy.copy(self)
        twin.store, twin.chronicle = store, chronicle
        twin.attempts = {name: attempt.with_store(store, chronicle) for name, attempt in self.attempts.items()}
        return twin

    def key(self, name: str) -> TrialKey:
        return self.state.trial_key(name)

    def trial(self, name: str) -> Trial:
        return self.state.trial(name)

    def append(self, *events: Event) -> None:
        stamp = self.chronicle.stamp()
        self.state = retry(lambda: append_events(self.store, self.state, events, stamp))

    def open(self) -> None:
        """Acquire the experiment, and adopt saves of attempts that ended with the last owner."""
        stamp, owner = self.chronicle.stamp(), Owner(name=self.owner, host="here", pid=1)
        self.state = retry(lambda: acquire_ownership(self.store, self.journal, owner, stamp))
        self.append(*retry(lambda: make_adoption_events(self.store, self.state)))

    def add(self, *names: str) -> None:
        self.append(*(TrialAdded(trial=name, config={"width": 3}, proposed_by_search=True) for name in names))

    # ------------------------------------------------------------------------------------ attempts here

    def attempt(self, name: str) -> Attempt:
        """Return a new attempt of a trial, which has not begun."""
        arguments = self.key(name), self.trial(name), self.state.term, self.owner, self.retention
        return self.attempt_class(self.store, self.chronicle, *arguments)

    def start(self, name: str) -> None:
        attempt = self.attempt(name)
        self.append(attempt.start())
        self.attempts[name] = attempt

    def save(self, name: str) -> None:
        """Train a step, publish, journal, and delete the checkpoints that this retires."""
        self.delete_checkpoints(self.save_only(name))

    def save_only(self, name: str) -> Sequence[CheckpointKey]:
        """Train a step, publish and journal, again if it was overtaken; return the keys that may now be deleted."""
        attempt = self.attempts[name]
        attempt.trial = self.trial(name)
        reported = attempt.train()
        events: tuple[Event, ...] = (reported,)
        while True:
            committed, retired = attempt.publish(reported.report)
            self.append(*events, committed)
            attempt.trial, events = self.trial(name), ()
            if committed.checkpoint in attempt.trial.checkpoints:
                self.chronicle.acknowledged[name] = committed.checkpoint.sequence
                return self.deletable_keys(name, retired)

    def deletable_keys(self, name: str, retired: Sequence[CheckpointRef]) -> Sequence[CheckpointKey]:
        own = [self.key(name).checkpoint_key(ref) for ref in retired if ref.origin is None]
        return [*own, *find_collectable_origins(self.state, retired)]

    def delete_checkpoints(self, keys: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired."""
        for name in dict.fromkeys(key.trial.trial for key in keys):
            retry(lambda name=name: delete_retired_objects(self.store, self.key(name), self.trial(name), keys))

    def delete_leftovers(self) -> None:
        """Delete leftovers, after journaling that no save may reuse them."""
        for name in self.state.trials:
            keys = retry(lambda name=name: find_leftover_manifests(self.store, self.key(name), self.trial(name)))
            trial = self.trial(name)
            if trial.outbox is None and any(key.sequence >= trial.collected_up_to for key in keys):
                self.append(CheckpointsRetired(trial=name, retired_sequences=()))
            self.delete_checkpoints(keys)

    def end(self, name: str, cause: Cause = Cause.PREEMPTED) -> None:
        """End the attempt that runs here."""
        self.append(AttemptEnded(trial=name, cause=cause, reason="x"))
        del self.attempts[name]

    def clone(self, name: str, source: str) -> None:
        """Continue a waiting trial from the newest checkpoint of another; nothing where it has none."""
        if (ref := find_clonable_checkpoint(self.trial(source))) is None:
            return
        origin = ref.origin or CheckpointOrigin(trial=source, step=ref.step, sequence=ref.sequence)
        copy = ref.model_copy(update={"sequence": self.trial(name).next_sequence, "origin": origin})
        self.append(CheckpointCloned(trial=name, checkpoint=copy, source=source, config={"width": 4}, reason="behind"))
        self.chronicle.acknowledged[name] = copy.sequence

    # --------------------------------------------------------------------------- attempts on other machines

    def launch(self, name: str) -> Attempt:
        """Request an attempt on another machine, and return it; it has not begun."""
        self.append(AttemptLaunched(trial=name, outbox=self.trial(name).outbox_count + 1))
        return self.attempt(name)

    def receive(self, name: str, *, closes: bool = False) -> Sequence[CheckpointKey]:
        """Journal the posts of a trial, one entry for all, and delete them; return what they have retired."""
        trial, key, stamp = self.trial(name), self.key(name), self.chronicle.stamp()
        if (outbox := trial.outbox) is None:
            return []
        if closes:
            posts = retry(lambda: close_outbox(self.store, key, outbox, trial.last_post, self.owner, stamp)).posts
        else:
            posts = retry(lambda: read_posts(self.store, key, outbox, trial.last_post))
        events: list[Event] = []
        for number, post in enumerate(posts, trial.last_post + 1):
            events += [PostReceived(trial=name, post=number), *post.events]
        if closes:
            events.append(OutboxClosed(trial=name))
        if not events:
            return []
        self.append(*events)
        received = [(key, outbox, number) for number, _ in enumerate(posts, trial.last_post + 1)]
        retry(lambda: delete_posts(self.store, received))
        refs = {ref.sequence: ref for ref in trial.checkpoints}
        refs |= {
            e.checkpoint.sequence: e.checkpoint
            for post in posts
            for e in post.events
            if isinstance(e, CheckpointCommitted)
        }
        trial_now = self.trial(name)
        return self.deletable_keys(
            name, [ref for ref in refs.values() if not is_live_checkpoint(trial_now, key.checkpoint_key(ref))]
        )

    def fence_off(self, name: str) -> None:
        """End the attempt of a trial wherever it runs, so that the trial waits."""
        self.receive(name, closes=True)
        if self.trial(name).phase is Phase.RUNNING:
            self.append(*retry(lambda: make_adoption_events(self.store, self.state, trials=[name])))
        self.attempts.pop(name, None)


# --------------------------------------------------------------------------------------- promises


def load_trials_with_posts(store: ObjectStore, state: Experiment) -> Mapping[str, Trial]:
    """Return the trials as they are once the journal has every post."""
    trials = {}
    for name, journaled in state.trials.items():
        trial = journaled
        if trial.outbox is not None:
            for post in read_posts(store, state.trial_key(name), trial.outbox, trial.last_post):
                trial = reduce(apply_trial_event, post.events, trial)
        trials[name] = trial
    return trials


def find_broken_promises(store: ObjectStore, chronicle: Chronicle, journal: JournalKey = SEARCH) -> list[str]:
    """Return every promise that the state on `store` breaks."""
    try:
        state = load_experiment(store, journal)
        trials = {"journaled": state.trials, "posted": load_trials_with_posts(store, state)}
    except TuneError as error:
        return [f"I6: the journal does not hold together: {error}"]
    problems = []
    for trial in (trial for trials_by_name in trials.values() for trial in trials_by_name.values()):
        problems += _find_unreadable(store, chronicle, state.trial_key(trial.id), trial)
    for name, trial in trials["posted"].items():
        newest = chronicle.acknowledged.get(name, 0)
        refs = (*trial.checkpoints, *(quarantined.checkpoint for quarantined in trial.quarantined_checkpoints))
        if newest and not any(ref.sequence >= newest for ref in refs):
            problems.append(f"I1: {name}: {newest} was acknowledged, and there is {trial.checkpoints}")
    return problems


def _find_unreadable(store: ObjectStore, chronicle: Chronicle, key: TrialKey, trial: Trial) -> Iterator[str]:
    for checkpoint in (key.checkpoint_key(ref) for ref in trial.checkpoints):
        try:
            files = load_files(store, read_manifest(store, checkpoint))
        except TuneError as broken:
            yield f"I1: {checkpoint.folder} is live in {trial.id} and cannot be restored: {broken}"
            continue
        if files != chronicle.saved[checkpoint.folder]:
            yield f"I2: {checkpoint.folder} holds bytes that no attempt saved: {files}"


def check_recovery(
    store: ObjectStore, chronicle: Chronicle, journal: JournalKey = SEARCH, *, tidy: bool = True
) -> list[str]:
    """Open the search by a new owner, twice; check promises and leaks, and end all clones.

    `tidy`: no write arrived late; a late write after the deletion of its checkpoint leaves an orphan.
    """
    try:
        return list(_iter_violations(store, chronicle, journal, tidy=tidy))
    except TuneError as error:
        return [f"I4: recovery failed: {type(error).__name__}: {error}"]


def _iter_violations(store: ObjectStore, chronicle: Chronicle, journal: JournalKey, *, tidy: bool) -> Iterator[str]:
    yield from find_broken_promises(store, chronicle, journal)
    search = Search(store, chronicle, journal, owner="late")
    search.open()
    for name in search.state.trials:
        search.fence_off(name)
    search.delete_leftovers()
    yield from find_broken_promises(store, chronicle, journal)
    for name in search.state.trials:
        yield from _find_leaks(store, search, name)
    for name in search.state.trials:  # after two more steps no clone is live
        if search.trial(name).phase in ENDED_PHASES:
            search.append(TrialRequeued(trial=name, reason="more"))
        if search.trial(name).phase is Phase.PAUSED:
            search.append(TrialResumed(trial=name))
        search.start(name)
        search.save(name)
        search.save(name)
    last = Search(store, chronicle, journal, owner="last")
    last.open()
    last.delete_leftovers()
    last.delete_leftovers()  # a limit that a trial has got after another one's clones ended
    yield from find_broken_promises(store, chronicle, journal)
    for name in last.state.trials:
        yield from _find_undeleted(store, last, name, tidy=tidy)


def _find_leaks(store: ObjectStore, search: Search, name: str) -> Iterator[str]:
    """Check that unreachable objects are found as leftovers or as orphans."""
    trial, key = search.trial(name), search.key(name)
    refs = (*trial.checkpoints, *(quarantined.checkpoint for quarantined in trial.quarantined_checkpoints))
    keys = {key.checkpoint_key(ref) for ref in refs}
    keys |= {CheckpointKey(trial=key, step=clone.step, sequence=clone.sequence) for clone in trial.clones}
    needed = {owned.manifest_path for owned in keys} | {
        path for owned in keys for path in read_manifest(store, owned).blob_paths()
    }
    findable = {blob.path for blob in find_orphan_blobs(store, key, trial)}
    settled = trial.model_copy(update={"adopted_up_to": 10**9})  # a later attempt's, or that of maintenance
    findable |= {leftover.manifest_path for leftover in find_leftover_manifests(store, key, settled)}
    findable |= _quarantine_paths(store, key, trial)
    reusable = {blob.path for blob in store.list(key.blobs_folder) if blob_sequence(blob.path) >= trial.collected_up_to}
    present = {listed.path for folder in (key.blobs_folder, key.checkpoints_folder) for listed in store.list(folder)}
    for path in sorted(present - needed - findable - reusable):
        yield f"I7: {path} is unreachable, and nothing will find it"


def _find_undeleted(store: ObjectStore, search: Search, name: str, *, tidy: bool) -> Iterator[str]:
    """Check that every retired checkpoint is deleted when no clone is live."""
    trial, key = search.trial(name), search.key(name)
    if trial.clones:
        yield f"I7: {name}: held without a live clone: {trial.clones}"
    live = {key.checkpoint_key(ref).manifest_path for ref in trial.checkpoints}
    present = {listed.path for listed in store.list(key.checkpoints_folder)} - _quarantine_paths(store, key, trial)
    for path in sorted(present - live) if tidy else ():
        yield f"I7: {path} was retired, and outlived everybody's clearing away"


def _quarantine_paths(store: ObjectStore, key: TrialKey, trial: Trial) -> set[str]:
    """Return the manifests of quarantined checkpoints, which are kept for inspection."""
    keys = (
        (listed.path, CheckpointKey.from_manifest_path(key, listed.path))
        for listed in store.list(key.checkpoints_folder)
    )
    return {path for path, own in keys if own and own.sequence in trial.quarantined_sequences}
