"""A snapshot: the whole experiment after an entry, read in place of the entries up to that one.

The first line is JSON that holds the experiment without its trials; then comes one line for each trial.

The entries are the truth: a snapshot that is lost, damaged, or of another history or version costs time, and nothing
else. So it is written after its entry, by any process, late, twice or not at all, and its failures are ignored. What a
reader must check is the history: a snapshot counts only if its digest is that of its entry. A deleted experiment whose
name is used again may have left a snapshot of other entries behind.

The interval between two snapshots grows with the experiment, so that writing them costs about as much as the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound, StoreRefused, StoreUnavailable, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment, TrialMap
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.storage.documents import DOCUMENT_BYTES, Document, read_document, seal, verified
from prefect_tune.core.storage.layout import JournalKey, number_in
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import Digest, digest_of, parse

_TRIALS = TypeAdapter(list[Trial])
_INTERVAL = 200
_TRIALS_PER_ENTRY = 4


class _Head(Document):
    """The first line of a snapshot."""

    format: Literal["prefect-tune/snapshot"] = "prefect-tune/snapshot"
    version: Literal[1] = 1
    digest_of_trials: Digest
    """The digest of the bytes of all other lines."""
    experiment: Experiment
    """The experiment without trials."""


def interval_of(experiment: Experiment) -> int:
    """Return how many entries apart snapshots are: 200, 400, 800 … for up to 800, 1600, 3200 … trials."""
    interval = _INTERVAL
    while interval * _TRIALS_PER_ENTRY < len(experiment.trials):
        interval *= 2
    return interval


def snapshot_is_due(experiment: Experiment, before: int) -> bool:
    """Return whether an interval has ended after entry `before`: a guest may have written the entry that ended it."""
    interval = interval_of(experiment)
    return experiment.number // interval > before // interval


def write_snapshot(store: ObjectStore, experiment: Experiment) -> None:
    """Write the snapshot of `experiment`, and delete earlier ones; a failing target is ignored.

    It may run later, in another thread, twice, in several processes, in any order.
    """
    key, number = experiment.key, experiment.number
    if len(data := encode_snapshot(experiment)) > DOCUMENT_BYTES:
        return  # no reader would read it
    with suppress(StoreUnavailable, StoreRefused):
        store.put(key.snapshot_path(number), data)
        if earlier := [key.snapshot_path(each) for each in list_snapshots(store, key) if each < number]:
            store.delete(earlier)


def list_snapshots(store: ObjectStore, key: JournalKey) -> Sequence[int]:
    """Return the numbers of the snapshots that are listed, the last one first; they may be stale or unusable."""
    numbers = (number_in(key.snapshots, listed.path, "jsonl") for listed in store.list(key.snapshots))
    return sorted((number for number in numbers if number), reverse=True)


def encode_snapshot(experiment: Experiment) -> bytes:
    """Return the bytes of the snapshot of `experiment`."""
    # One trial at a time, so that no other thread waits long for the interpreter lock.
    lines = b"".join(trial.model_dump_json().encode() + b"\n" for trial in experiment.trials.values())
    bare = experiment.model_copy(update={"trials": TrialMap.of()})
    return seal(_Head(digest_of_trials=digest_of(lines), experiment=bare)) + b"\n" + lines


def read_snapshot(store: ObjectStore, key: JournalKey, number: int) -> Experiment | None:
    """Return the experiment in snapshot `number`; None if it does not exist, is damaged or has another version."""
    try:
        return decode_snapshot(read_document(store, key.snapshot_path(number), JournalCorrupt), key, number)
    except (ObjectNotFound, JournalCorrupt, UnknownVersion):
        return None


def decode_snapshot(data: Buffer, key: JournalKey, number: int) -> Experiment:
    """Return the experiment in snapshot `number`.

    Raises:
        JournalCorrupt: it is not what `encode_snapshot` returned for this number.
        UnknownVersion: another version of prefect-tune wrote it.
    """
    path = key.snapshot_path(number)
    first, _, lines = bytes(data).partition(b"\n")
    body, bare = verified(_Head, first, path, JournalCorrupt)
    if digest_of(lines) != body.get("digest_of_trials"):
        raise JournalCorrupt(f"{path}: its trials were altered since they were written ({len(lines)} bytes)")
    experiment = parse(_Head, bare, JournalCorrupt, path).experiment
    if (experiment.key, experiment.number) != (key, number):
        raise JournalCorrupt(f"{path}: holds {experiment.key} after entry {experiment.number}")
    try:
        trials = _TRIALS.validate_json(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except ValidationError as invalid:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {invalid}") from invalid
    return experiment.model_copy(update={"trials": TrialMap.of(trials)})
