"""What opening reads instead of thousands of entries: the present value of what changed in a stretch of the journal.

A segment is a line of JSON that says which stretch, and the experiment without its trials; then one line
for each trial that changed. The journal is the truth: a segment that is lost, damaged or of another
history costs time, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound, StoreRefused, StoreUnavailable
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.layout import JournalKey, number_in
from prefect_tune.core.sealed import seal, unseal
from prefect_tune.core.spans import begin_of, is_boundary
from prefect_tune.core.store import Buffer, ObjectStore
from prefect_tune.core.trial import Trial
from prefect_tune.core.trials import Trials
from prefect_tune.core.values import Digest, Value, digest_of

__all__ = [
    "Segment",
    "UnusableSegmentError",
    "after_segment",
    "decode_segment",
    "delete_segments",
    "encode_segment",
    "listed_segments",
    "read_segment",
    "segment_is_due",
    "steps",
    "write_due_segment",
]

_TRIALS = TypeAdapter(list[Trial])


class _Head(Value):
    """The first line of a segment."""

    format: Literal["prefect-tune/segment"] = "prefect-tune/segment"
    version: Literal[1] = 1
    since: int
    """The number of the last entry before it."""
    digest_of_trials: Digest
    """Of the bytes of all other lines."""
    experiment: Experiment
    """With no trials."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What changed in a stretch of the journal."""

    experiment: Experiment
    """After its last entry, but with no trials."""
    changed: Sequence[Trial]
    """In the order in which they were added."""


class UnusableSegmentError(Exception):
    """A segment is not there, not whole, or of another history: go on without it. Does not leave the core."""

    def __init__(self, number: int, why: object) -> None:
        super().__init__(f"segment {number}: {why}")
        self.number = number


def segment_is_due(experiment: Experiment) -> bool:
    """Return whether a segment ends with the experiment's last entry: whether `write_due_segment` does anything."""
    return is_boundary(experiment.number)


def write_due_segment(store: ObjectStore, experiment: Experiment) -> None:
    """Write the segment that ends with the experiment's last entry, if one does, and delete those within it.

    Nothing that matters depends on it: the entries are written. It may be done later, in another thread,
    twice, by several processes, in any order, or not at all, so that a target that fails is not
    complained of. What is deleted late is never what opening needs: a segment within another one is so
    for ever.
    """
    if segment_is_due(experiment):
        with suppress(StoreUnavailable, StoreRefused):  # it only saves time, when the experiment is opened
            _write_segment(store, experiment)


def _write_segment(store: ObjectStore, experiment: Experiment) -> None:
    key, number = experiment.key, experiment.number
    store.put(key.segment_path(number), encode_segment(experiment))
    within = (each for each in listed_segments(store, key, after=begin_of(number)) if each < number)
    delete_segments(store, key, frozenset(within))


def delete_segments(store: ObjectStore, key: JournalKey, numbers: frozenset[int]) -> None:
    """Delete segments that are within greater ones, or unusable."""
    if numbers:
        store.delete([key.segment_path(number) for number in sorted(numbers)])


def encode_segment(experiment: Experiment) -> bytes:
    """Return the segment that ends with the experiment's last entry, as it lies on the target."""
    changed = experiment.trials.changed_in(experiment.number)
    # One by one, so that no other thread waits long for the interpreter.
    lines = b"".join(trial.model_dump_json().encode() + b"\n" for trial in changed)
    head = _Head(
        since=begin_of(experiment.number),
        digest_of_trials=digest_of(lines),
        experiment=experiment.model_copy(update={"trials": Trials.of()}),
    )
    return seal(head) + b"\n" + lines


def decode_segment(data: Buffer, key: JournalKey, number: int) -> Segment:
    """Return the segment at `number`.

    Raises:
        JournalCorrupt: it is not what `encode_segment` wrote for this place.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    path = key.segment_path(number)
    first, _, lines = bytes(data).partition(b"\n")
    head = unseal(_Head, first, path, JournalCorrupt)
    found = head.experiment
    if (found.key, found.number, head.since) != (key, number, begin_of(number)):
        raise JournalCorrupt(f"{path}: holds entries {head.since + 1} to {found.number} of {found.key}")
    if digest_of(lines) != head.digest_of_trials:
        raise JournalCorrupt(f"{path}: its trials are not as they were written ({len(lines)} bytes)")
    try:
        trials = _TRIALS.validate_json(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except ValidationError as invalid:
        raise JournalCorrupt(f"{path}: its trials cannot be read: {invalid}") from invalid
    return Segment(found, trials)


def read_segment(store: ObjectStore, key: JournalKey, number: int) -> Segment:
    """Read and decode the segment at `number`.

    Raises:
        UnusableSegmentError: it is not there, or damaged.
        UnknownVersion: a newer prefect-tune wrote it.
    """
    try:
        return decode_segment(store.read(key.segment_path(number)), key, number)
    except (ObjectNotFound, JournalCorrupt) as unusable:
        raise UnusableSegmentError(number, unusable) from unusable


def after_segment(experiment: Experiment, segment: Segment, known: Mapping[int, Digest]) -> Experiment:
    """Return the experiment after the next segment; `known` are digests of entries in the history that is wanted.

    Raises:
        UnusableSegmentError: it is of another history.
    """
    after = segment.experiment
    if known.get(after.number) != after.digest:
        raise UnusableSegmentError(after.number, f"entry {after.number} is another one now")
    return after.model_copy(update={"trials": experiment.trials.with_segment(after.number, segment.changed)})


def listed_segments(store: ObjectStore, key: JournalKey, *, after: int = 0) -> frozenset[int]:
    """Return the numbers of the segments that are there, or seem to be, beyond `after`."""
    listed = store.list(key.segments, after=key.segment_path(after) if after else "")
    numbers = (number_in(key.segments, each.path, "jsonl") for each in listed)
    return frozenset(number for number in numbers if number and is_boundary(number))


def steps(listed: frozenset[int], last: int) -> Iterator[int]:
    """Return the way from nothing to entry `last`, by the widest segments of those `listed`, and else by entries.

    A step to the next number is an entry, and every other a segment.
    """
    widest = {begin_of(each): each for each in sorted(listed) if each <= last}
    number = 0
    while number < last:
        number = widest.get(number, number + 1)
        yield number
