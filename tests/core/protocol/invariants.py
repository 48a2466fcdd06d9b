"""Checks of the promises I1 to I8 on the state of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import curve
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import Committed, Entry, Opened, Quarantined, Retired
from prefect_tune.core.messages.target_messages import node_objects_up_to
from prefect_tune.core.operations.checkpoint_gc import leftover, orphans
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import KEY, NAME, Session, Witness, run_to
from tests.core.histories import fold
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_files import restored


def after_recovery(
    store: ObjectStore, witness: Witness, steps: int | None, *, alone: bool = False, tidy: bool = True
) -> list[str]:
    """Open the experiment twice, check, continue to `steps` (if any) and check again; return broken promises.

    `alone`: there was never more than one owner at a time. `tidy`: no write arrived late; a late write
    after the deletion of its checkpoint leaves an orphan.
    """
    try:
        return list(_recovered(store, witness, steps, alone=alone, tidy=tidy))
    except TuneError as error:
        return [f"I4: recovery failed: {type(error).__name__}: {error}"]


def _recovered(store: ObjectStore, witness: Witness, steps: int | None, *, alone: bool, tidy: bool) -> Iterator[str]:
    second, third, last = (Session(store, witness, owner=name) for name in ("second", "third", "last"))
    second.open()
    yield from violations(store, witness, second.experiment)
    if alone:
        yield from nothing_published_is_lost(second.trial, witness)
    once = (_lasting(second), _objects(store))
    third.open()
    if once != (twice := (_lasting(third), _objects(store))):
        yield f"I8: recovering twice is not recovering once: {once}, then {twice}"
    if steps is None:
        yield from _leaks(store, third, witness, tidy=tidy)
        return
    run_to(last, steps)
    yield from violations(store, witness, last.experiment)
    if last.trial.step < steps:
        yield f"I6: continuing ended as {last.trial.phase} at step {last.trial.step}"
    yield from _leaks(store, last, witness, tidy=tidy)


def _objects(store: ObjectStore) -> list[str]:
    return [each.path for each in store.list(KEY.folder)]


def _lasting(session: Session) -> object:
    """The part of a trial that opening and closing the experiment does not change."""
    return session.trial.model_dump(exclude={"collected_up_to", "next_sequence"})


def violations(store: ObjectStore, witness: Witness, experiment: Experiment) -> list[str]:
    """Return every promise that the state on `store` breaks, given the acknowledged saves.

    `experiment` is the state that the last owner loaded.
    """
    entries = journal.history(store, first_generation(NAME), side_by_side=map)
    trial = experiment.trial(KEY.trial)
    return [
        *_epochs(entries),
        *_acknowledged(entries, trial, witness),
        *_whole(store, trial, witness),
        *_history(entries, trial, witness),
        *_snapshot(store),
    ]


def _epochs(entries: Sequence[Entry]) -> Iterator[str]:
    opened = [entry.term for entry in entries if any(isinstance(event, Opened) for event in entry.events)]
    if opened != list(range(1, len(opened) + 1)) or [e.term for e in entries] != sorted(e.term for e in entries):
        yield f"I5: terms {[entry.term for entry in entries]}, opened {opened}"


def _acknowledged(entries: Sequence[Entry], trial: Trial, witness: Witness) -> Iterator[str]:
    events = [event for entry in entries for event in entry.events]
    committed = {(e.checkpoint.step, e.checkpoint.sequence) for e in events if isinstance(e, Committed)}
    gone = {sequence for e in events if isinstance(e, Committed | Retired) for sequence in e.retires}
    live = {(each.step, each.sequence) for each in trial.checkpoints}
    for step, sequence in witness.acknowledged:
        if (step, sequence) not in committed:
            yield f"I1: step {step} ({sequence}) was acknowledged, and the journal does not know it"
        if (step, sequence) not in live and sequence not in gone:
            yield f"I1: step {step} ({sequence}) was acknowledged, is not live, and was not retired"
    newest = max((sequence for _, sequence in witness.acknowledged), default=0)
    if newest and not any(sequence >= newest for _, sequence in live):
        yield f"I1: the newest acknowledged checkpoint ({newest}) is gone, and there is none after it"
    for event in events:
        if isinstance(event, Quarantined):
            yield f"I3: an undamaged store, and yet: {event.reason}"


def _whole(store: ObjectStore, trial: Trial, witness: Witness) -> Iterator[str]:
    sequences = [each.sequence for each in trial.checkpoints]
    if sequences != sorted(set(sequences)):
        yield f"I6: live checkpoints out of order, or twice: {sequences}"
    for each in trial.checkpoints:
        key = CheckpointKey(trial=KEY, step=each.step, sequence=each.sequence)
        try:
            found = restored(store, read_manifest(store, key))
        except TuneError as broken:
            yield f"I1: step {each.step} ({each.sequence}) is live and cannot be restored: {broken}"
            continue
        if found not in witness.saved.get((each.step, each.sequence), []):
            yield f"I2: step {each.step} ({each.sequence}) holds bytes that no owner saved: {found}"


def _history(entries: Sequence[Entry], trial: Trial, witness: Witness) -> Iterator[str]:
    reports = curve(entries, KEY.trial)
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


def _snapshot(store: ObjectStore) -> Iterator[str]:
    by_snapshot, by_entries = journal.load(store, first_generation(NAME), side_by_side=map), fold(store)
    if by_snapshot != by_entries:
        yield f"I6: the snapshot yields {by_snapshot}, and the entries {by_entries}"


def nothing_published_is_lost(trial: Trial, witness: Witness) -> Iterator[str]:
    """Without a superseded owner, every created manifest counts, with or without an entry."""
    newest = max((step for step, _ in witness.published), default=0)
    if newest > max((each.step for each in trial.checkpoints), default=0):
        yield f"I4: step {newest} was published, and the newest checkpoint is {trial.checkpoints[-1:]}"


def _leaks(store: ObjectStore, last: Session, witness: Witness, *, tidy: bool) -> Iterator[str]:
    """Unreachable objects are found: as leftovers by the next owner, or later as orphans."""
    for path in what_lies_about(store, last.trial):
        yield f"I7: {path} is unreachable, and nothing will find it"
    live = {(each.step, each.sequence) for each in last.trial.checkpoints}
    needed = {path for key, paths in witness.published.items() if key in live for path in paths}
    retired = {path for key in witness.acknowledged for path in witness.published[key]} - needed
    for path in sorted(retired & set(_objects(store))) if tidy else ():
        yield f"I7: {path} was retired, and outlived the next owner's clearing away"


def what_lies_about(store: ObjectStore, trial: Trial) -> list[str]:
    """Return the objects that no live checkpoint needs and that no search for leftovers or orphans finds."""
    known = (*trial.checkpoints, *(each.checkpoint for each in trial.quarantined_checkpoints))
    live = [CheckpointKey(trial=KEY, step=each.step, sequence=each.sequence) for each in known]
    manifests = [each for key in live for each in _readable(store, key)]
    needed = {key.manifest_path for key in live} | {path for each in manifests for path in each.blob_paths()}
    found = {each.path for each in orphans(store, KEY, trial, side_by_side=map)}
    found |= {each.path for each in node_objects_up_to(store, KEY, trial.attempt)}
    settled = trial.model_copy(update={"settled_from": 10**9})  # no save is under way at the end
    found |= {key.manifest_path for key in leftover(store, KEY, settled)}
    reusable = {each.path for each in store.list(KEY.blobs) if blob_sequence(each.path) >= trial.collected_up_to}
    return sorted(each for each in set(_objects(store)) - needed - found - reusable if not _aside(each, trial))


def _readable(store: ObjectStore, key: CheckpointKey) -> Iterator[Manifest]:
    """Skip a damaged manifest: it may be the reason for a quarantine."""
    with suppress(CheckpointCorrupt, CheckpointNotFound):
        yield read_manifest(store, key)


def _aside(path: str, trial: Trial) -> bool:
    """Quarantined checkpoints are kept for inspection; the trial lists them."""
    key = CheckpointKey.from_manifest_path(KEY, path)
    return key is not None and key.sequence in trial.quarantined
