"""Segments: snapshots of the trials that changed in a range of journal entries, read in place of those entries.

The first line of a segment is JSON that names the range and holds the experiment without its trials; then comes
one line for each trial that changed. The ranges are decimal (`core/storage/layout.py`), so that few objects are read:

    entries   1 ……………………………………………………………… 40000 …… 48000 … 48200 … 48260 · 48261 · 48262 · 48263
    read      [ segment at 40000                 ][ 48000 ][ 48200 ][ 48260 ] and three entries

The entries are the truth: a segment that is lost, damaged or of another history costs time, and nothing else. So it is
written after its last entry, by any process, late, twice or not at all, and its failures are ignored. What a reader
must check is the history: a segment counts only if the digest of its last entry is that of the entries around it. A
deleted experiment whose name is used again may have left segments of other entries behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment, TrialMap
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.storage.documents import DOCUMENT_BYTES, Document, read_document, seal, upgraded, verified
from prefect_tune.core.storage.layout import JournalKey, begin_of, is_boundary, number_in
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import Digest, canonical_json, digest_of, parse

_TRIALS = TypeAdapter(list[Trial])


class _Head(Document):
    """The first line of a segment. Its `upgrades` find the other lines in the list `trials`."""

    format: Literal["prefect-tune/segment"] = "prefect-tune/segment"
    version: Literal[2] = 2
    since: int
    """The number of the last entry before the segment."""
    digest_of_trials: Digest
    """The digest of the bytes of all other lines."""
    experiment: Experiment
    """The experiment after the segment's last entry, without trials."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The changes of a range of journal entries."""

    experiment: Experiment
    """The experiment after the last entry of the range, without trials."""
    changed: Sequence[Trial]
    """The trials that changed, in the order in which they were added."""


class UnusableSegmentError(Exception):
    """A segment is missing, damaged, or of another history: read the entries instead. Never leaves the core."""

    def __init__(self, number: int, why: object) -> None:
        super().__init__(f"segment {number}: {why}")
        self.number = number


def segment_is_due(experiment: Experiment) -> bool:
    """Return whether a segment ends with the experiment's last entry, so that `write_due_segment` writes one."""
    return is_boundary(experiment.number)


def write_due_segment(store: ObjectStore, experiment: Experiment) -> None:
    """Write the segment that ends with the experiment's last entry, if one does, and delete those within it.

    Correctness does not depend on it: the entries are written already. It may run later, in another thread,
    twice, in several processes, in any order, or not at all; therefore a failing target is ignored. A late
    deletion never removes a segment that a reader needs: a segment within a larger one stays within it for ever.
    """
    if segment_is_due(experiment):
        with suppress(StoreUnavailable, StoreRefused):  # a segment only saves time when the experiment is opened
            _write_segment(store, experiment)


def _write_segment(store: ObjectStore, experiment: Experiment) -> None:
    key, number = experiment.key, experiment.number
    if len(data := encode_segment(experiment)) > DOCUMENT_BYTES:
        return  # no reader would read it
    store.put(key.segment_path(number), data)
    within = (each for each in listed_segments(store, key, after=begin_of(number)) if each < number)
    delete_segments(store, key, frozenset(within))


def delete_segments(store: ObjectStore, key: JournalKey, numbers: frozenset[int]) -> None:
    """Delete segments that are within greater ones, or unusable."""
    if numbers:
        store.delete([key.segment_path(number) for number in sorted(numbers)])


def encode_segment(experiment: Experiment) -> bytes:
    """Return the bytes of the segment that ends with the experiment's last entry."""
    changed = experiment.trials.changed_in(experiment.number)
    # One trial at a time, so that no other thread waits long for the interpreter lock.
    lines = b"".join(trial.model_dump_json().encode() + b"\n" for trial in changed)
    head = _Head(
        since=begin_of(experiment.number),
        digest_of_trials=digest_of(lines),
        experiment=experiment.model_copy(update={"trials": TrialMap.of()}),
    )
    return seal(head) + b"\n" + lines


def decode_segment(data: Buffer, key: JournalKey, number: int) -> Segment:
    """Return the segment at `number`.

    Raises:
        JournalCorrupt: it is not what `encode_segment` wrote for this number.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    path = key.segment_path(number)
    first, _, lines = bytes(data).partition(b"\n")
    body, bare = verified(_Head, first, path, JournalCorrupt)
    if digest_of(lines) != body.get("digest_of_trials"):
        raise JournalCorrupt(f"{path}: its trials were altered since they were written ({len(lines)} bytes)")
    if body["version"] != _Head.current_version:
        bare, lines = _upgraded(body, lines, path)
    head = parse(_Head, bare, JournalCorrupt, path)
    found = head.experiment
    if (found.key, found.number, head.since) != (key, number, begin_of(number)):
        raise JournalCorrupt(f"{path}: holds entries {head.since + 1} to {found.number} of {found.key}")
    try:
        trials = _TRIALS.validate_json(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except ValidationError as invalid:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {invalid}") from invalid
    return Segment(found, trials)


def _upgraded(body: dict[str, Any], lines: bytes, path: str) -> tuple[bytes, bytes]:
    """Return the first line and the others as JSON of the current version."""
    try:
        trials = [json.loads(line) for line in lines.splitlines()]
    except ValueError as unreadable:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {unreadable}") from unreadable
    body = upgraded(_Head, {**body, "trials": trials}, path, JournalCorrupt)
    lines = b"\n".join(canonical_json(trial) for trial in body.pop("trials"))
    return canonical_json(body), lines


def read_segment(store: ObjectStore, key: JournalKey, number: int) -> Segment:
    """Read and decode the segment at `number`.

    Raises:
        UnusableSegmentError: it does not exist, or is damaged.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    try:
        return decode_segment(read_document(store, key.segment_path(number), JournalCorrupt), key, number)
    except (ObjectNotFound, JournalCorrupt) as unusable:
        raise UnusableSegmentError(number, unusable) from unusable


def after_segment(experiment: Experiment, segment: Segment, known: Mapping[int, Digest]) -> Experiment:
    """Return the experiment after the next segment; `known` maps entry numbers to the digests of this history.

    Raises:
        UnusableSegmentError: the segment is of another history.
    """
    after = segment.experiment
    if known.get(after.number) != after.digest:
        raise UnusableSegmentError(after.number, f"entry {after.number} has another digest in this journal")
    return after.model_copy(update={"trials": experiment.trials.with_segment(after.number, segment.changed)})


def listed_segments(store: ObjectStore, key: JournalKey, *, after: int = 0) -> frozenset[int]:
    """Return the numbers of the segments that are listed after `after`; they may be stale or unusable."""
    listed = store.list(key.segments, after=key.segment_path(after) if after else "")
    numbers = (number_in(key.segments, each.path, "jsonl") for each in listed)
    return frozenset(number for number in numbers if number and is_boundary(number))


def steps(listed: frozenset[int], last: int) -> Iterator[int]:
    """Yield the numbers to read, in order, to get from nothing to entry `last`: the widest `listed` segments first.

    A step to the next number means that entry; a longer step means the segment that ends there.
    """
    widest = {begin_of(each): each for each in sorted(listed) if each <= last}
    number = 0
    while number < last:
        number = widest.get(number, number + 1)
        yield number
