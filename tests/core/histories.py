"""Journals with many minimal entries: their number matters, their content does not; and small limits for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce

import pytest

from prefect_tune.core.checkpoints import commit, manifest
from prefect_tune.core.experiment.experiment import Experiment, apply_entry, make_empty_experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointsAdopted,
    Event,
    Owner,
    StepReported,
    TrialAdded,
)
from prefect_tune.core.storage import documents
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp, hash_bytes, parse_json
from tests.core.driver import JOURNAL

ME = Owner(name="me", host="here", pid=1)


def stamp(write_id: object) -> WriteStamp:
    return WriteStamp(write_id=str(write_id), at="2026-11-21")


@contextmanager
def snapshots_every(entries: int) -> Iterator[None]:
    """Write a snapshot every few entries, which usually takes hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_MIN_SNAPSHOT_INTERVAL", entries)
        yield


@contextmanager
def small_blobs(chunk_bytes: int = 8, blob_bytes: int = 24) -> Iterator[None]:
    """Set the sizes of a chunk and of a blob."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "split_files", lambda files: manifest.split_files(files, chunk_bytes))
        patch.setattr(commit, "pack_ranges", lambda cut: manifest.pack_ranges(cut, blob_bytes))
        patch.setattr(manifest, "BLOB_BYTES", blob_bytes)
        yield


@contextmanager
def caching_decoded_documents() -> Iterator[None]:
    """Decode equal bytes of a document once: of a thousand orders, each reads mostly what the others have read."""
    verify, parse_once = (lru_cache(maxsize=10_000)(function) for function in (documents.verify_document, parse_json))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "verify_document", lambda model, data, *rest: verify(model, bytes(data), *rest))
        patch.setattr(documents, "parse_json", parse_once)
        yield


def open_experiment(store: ObjectStore, key: JournalKey = JOURNAL, write_id: str = "open") -> Experiment:
    return journal.acquire_ownership(store, key, ME, stamp(write_id))


def make_next_event(experiment: Experiment, trial: str) -> Event:
    """Return a trial's next event: added, started, reported, committed, reported, ..."""
    if trial not in experiment.trials:
        return TrialAdded(trial=trial, config={"of": trial, "width": [1, 2.5, None, "ä"]})
    state = experiment.trial(trial)
    if state.attempt == 0:
        return AttemptStarted(trial=trial, attempt=1, from_step=0)
    if state.step == len(state.checkpoints):
        return StepReported(trial=trial, report=StepReport(step=state.step + 1, metrics={"loss": 1 / (state.step + 1)}))
    retired = tuple(ref.sequence for ref in state.checkpoints[:-3])
    checkpoint = CheckpointRef(step=state.step, sequence=state.next_sequence)
    return CheckpointCommitted(trial=trial, checkpoint=checkpoint, retired_sequences=retired)


def append_next_entry(store: ObjectStore, experiment: Experiment, trials: Sequence[str]) -> Experiment:
    """Write the next entry: one event for each of the trials, or no event."""
    events = [make_next_event(experiment, trial) for trial in dict.fromkeys(trials)] or [CheckpointsAdopted()]
    return journal.append_events(store, experiment, events, stamp(f"{experiment.entry_count + 1}"))


def fold_entries(store: ObjectStore, key: JournalKey = JOURNAL) -> Experiment:
    """Apply every entry, without a snapshot."""
    entries = journal.read_entries(store, key)
    digests = [hash_bytes(store.read(key.entry_path(entry.number))) for entry in entries]
    return reduce(
        lambda state, pair: apply_entry(state, *pair), zip(entries, digests, strict=True), make_empty_experiment(key)
    )
