"""What one run of a drill has left: its journal and checkpoints on the target, its records on this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from prefect_tune.core.checkpoints.manifest import FileRef, Manifest
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events import Committed, Reported
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.drills.file_contents import FileDifference, compare_files, value_differences
from prefect_tune.drills.probe import RunPlan, Victim
from prefect_tune.drills.values import leaves
from prefect_tune.stores.local.download import fetch_committed

METRICS = ""
"""The file of a difference that is in the metrics."""
CHECKPOINTS = "."
"""The file of a difference that is in which steps have a checkpoint."""
GENERATORS = ".."
"""The file of a difference that is in the state of a random generator."""
MISSING, UNEXPECTED = "missing", "not in the undisturbed run"
"""What differs about a file that only one of two checkpoints has."""
Place: TypeAlias = tuple[str, str]
"""A file, and the key of a value in it."""


@dataclass(frozen=True, slots=True)
class Record:
    """The state of the training after a step, or after the checkpoint of that step was loaded."""

    step: int
    attempt: int
    is_restored: bool
    at: float
    """The time of day, in seconds."""
    seconds: float
    """The time of the step."""
    waited: float
    """The time between the step before and this one, in which the training waited: mostly for its save."""
    states: Mapping[str, str]
    """A value or a digest, by kind and name; see `probe.states`."""

    @property
    def resumed_from(self) -> int:
        """The step after which an attempt resumed, of its first record."""
        return self.step if self.is_restored else self.step - 1


@dataclass(frozen=True, slots=True)
class MeasuredSave:
    """A committed save."""

    step: int
    size_bytes: int
    sent_bytes: int
    upload_seconds: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill, and what followed it."""

    victim: Victim
    step: int
    """The last step that was trained before it."""
    resumed_from: int
    """The step after which training resumed."""
    seconds: float
    """From the kill to the end of the next step."""
    kept_bytes: int = 0
    """Of an upload that was killed: the bytes that had arrived, and were not sent again."""

    @property
    def steps_again(self) -> int:
        """Steps that were trained again."""
        return max(0, self.step - self.resumed_from)


@dataclass(frozen=True)
class DrillRun:
    """One run of a drill, when it has ended."""

    metrics: Mapping[int, Mapping[str, object]]
    """The last report of each step."""
    manifests: Mapping[int, Manifest]
    """Of the newest checkpoint of each step that has one."""
    saves: Sequence[MeasuredSave]
    records: Sequence[Record]
    kills: Sequence[Kill]

    @property
    def undisturbed_steps(self) -> int:
        """How many steps the first attempt trained that no later one trained again."""
        restarts = [each.resumed_from for each in first_records(self)]
        return min(restarts, default=max(self.metrics, default=0))


def first_records(run: DrillRun) -> Iterator[Record]:
    """Yield the first record of each attempt after the first one."""
    attempt = 1
    for each in run.records:
        if each.attempt != attempt:
            attempt = each.attempt
            yield each


def read_run(store: ObjectStore, trial: TrialKey, plan: RunPlan) -> DrillRun:
    """Return what the run has left.

    Raises:
        StoreUnavailable, StoreRefused: the target failed.
    """
    events = [event for entry in history(store, trial.of_experiment, side_by_side=map) for event in entry.events]
    commits = [each for each in events if isinstance(each, Committed)]
    keys = {each.checkpoint.step: trial.checkpoint_key(each.checkpoint) for each in commits}
    records = list(read_records(plan.records))
    return DrillRun(
        {each.report.step: each.report.metrics for each in events if isinstance(each, Reported)},
        {step: read_manifest(store, key) for step, key in keys.items()},
        [
            MeasuredSave(
                each.checkpoint.step, each.checkpoint.size_bytes, each.sent_bytes or 0, each.upload_seconds or 0.0
            )
            for each in commits
        ],
        records,
        list(kills_in(plan, records)),
    )


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records; the last line of a process that was killed may be cut."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        found["is_restored"] = found.pop("restored")
        yield Record(**found)


def kills_in(plan: RunPlan, records: Sequence[Record]) -> Iterator[Kill]:
    """Yield the kills that were made, each with what followed it."""
    trained = [each for each in records if not each.is_restored]
    for victim, at in plan.kills_made():
        killed = next((each.attempt for each in reversed(trained) if each.at <= at), 1)
        # After the death of another rank, rank 0 may train on until it is ended.
        place = next((place for place, each in enumerate(trained) if each.at > at and each.attempt > killed), None)
        if place is not None:
            after, step = trained[place], trained[place - 1].step if place else 0
            yield Kill(victim, step, after.step - 1, after.at - at)


# ---------------------------------------------------------------------------------------------- compare two runs


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that differs between two runs after the same step."""

    step: int
    what: FileDifference

    @property
    def place(self) -> Place:
        """The file and the key: the same thing at every step."""
        return self.what.file, self.what.path or self.what.key

    @property
    def is_absence(self) -> bool:
        """Whether one of the runs lacks the report, the checkpoint or the file."""
        return self.place in {(METRICS, ""), (CHECKPOINTS, "")} or self.what.what in {MISSING, UNEXPECTED}

    def __str__(self) -> str:
        """Name the step, the place and the difference."""
        texts = {
            METRICS: f"metric `{self.what.key}`: {self.what.what}",
            CHECKPOINTS: self.what.what,
            GENERATORS: f"random generator `{self.what.key}`: {self.what.what}",
        }
        return f"step {self.step}: {texts.get(self.what.file, self.what)}"


def compare(store: ObjectStore, expected: DrillRun, found: DrillRun) -> Sequence[Difference]:
    """Return the first difference of each metric, file, tensor or key between two runs, by step."""
    return first_of_places([*_of_metrics(expected, found), *_of_checkpoints(store, expected, found)])


def first_of_places(differences: Sequence[Difference]) -> Sequence[Difference]:
    """Return the first difference at each place, by step."""
    first: dict[tuple[str, str], Difference] = {}
    for each in sorted(differences, key=lambda each: (each.step, each.what.file != METRICS)):
        first.setdefault(each.place, each)
    return list(first.values())


def changes_of(store: ObjectStore, run: DrillRun) -> Mapping[Place, Mapping[int, object]]:
    """Return the places in the checkpoints of a run that change from one to the next, with the scalars there by step.

    What only one of two checkpoints has, such as the last entry of a log, is not changed.
    """
    changes: dict[Place, dict[int, object]] = {}
    for before, after in pairwise(sorted(run.manifests)):
        for what in _of_manifests(store, run.manifests[before], run.manifests[after]):
            if what.what not in {MISSING, UNEXPECTED}:
                history = changes.setdefault(Difference(after, what).place, {})
                history[before], history[after] = what.scalars
    return changes


def _of_metrics(expected: DrillRun, found: DrillRun) -> Iterator[Difference]:
    for step in sorted(expected.metrics.keys() | found.metrics.keys()):
        metrics, others = expected.metrics.get(step), found.metrics.get(step)
        if metrics is None or others is None:
            what = "the step was not reported" if others is None else "the undisturbed run ended before this step"
            yield Difference(step, FileDifference(METRICS, "", what))
            continue
        for difference in value_differences(dict(leaves(metrics)), dict(leaves(others)), METRICS):
            yield Difference(step, difference)


def _of_checkpoints(store: ObjectStore, expected: DrillRun, found: DrillRun) -> Iterator[Difference]:
    for step in sorted(expected.manifests.keys() & found.manifests.keys()):
        for each in _of_manifests(store, expected.manifests[step], found.manifests[step]):
            yield Difference(step, each)
    for step in sorted(expected.manifests.keys() ^ found.manifests.keys()):
        what = "no checkpoint, expected one" if step in expected.manifests else "a checkpoint, expected none"
        yield Difference(step, FileDifference(CHECKPOINTS, "", what))


def _of_manifests(store: ObjectStore, expected: Manifest, found: Manifest) -> Iterator[FileDifference]:
    contents = ({_content(each) for each in manifest.files} for manifest in (expected, found))
    unlike = {file for file, _ in set.symmetric_difference(*contents)}
    if not unlike:
        return
    with tempfile.TemporaryDirectory(prefix="prefect-tune-drill-") as folder:
        places = Path(folder, "expected"), Path(folder, "found")
        for manifest, place in zip((expected, found), places, strict=True):
            fetch_committed(store, manifest, place)
        for file in sorted(unlike):
            there = [(place / file).is_file() for place in places]
            if all(there):
                yield from compare_files(places[0] / file, places[1] / file, file)
            else:
                yield FileDifference(file, "", MISSING if there[0] else UNEXPECTED)


def _content(file: FileRef) -> tuple[str, tuple[tuple[int, str], ...]]:
    return file.path, tuple((chunk.length, chunk.digest) for chunk in file.chunks)
