"""What one run of a drill has left: its journal and checkpoints on the target, its records on this machine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from datetime import time as TimeOfDay  # noqa: N812 - `time` is the module here
from itertools import pairwise
from math import inf, isclose, log
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events import Committed, Reported
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.drills.file_contents import compare_files
from prefect_tune.drills.probe import RunPlan, Victim
from prefect_tune.drills.values import MISSING, UNEXPECTED, FileDifference, compare_values, is_in_list, scalars_in
from prefect_tune.stores.local.staging import fetch_committed

METRICS = ""
"""The file of a difference that is in the metrics."""
CHECKPOINTS = "."
"""The file of a difference that is in which steps have a checkpoint."""
GENERATORS = ".."
"""The file of a difference that is in the state of a random generator."""
Place: TypeAlias = tuple[str, str]
"""A file, and the key of a value in it."""
_UNITS = (1.0, 1e3, 1e6, 1e9)
"""Of a time of day: seconds, ms, µs, ns."""
_CLOCK_MARGIN_SECONDS, _TIMER_MARGIN_SECONDS = 60.0, 1e-3
History = Mapping[int, object]
"""The values at a place by step."""


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
    def restarts(self) -> Sequence[Record]:
        """The first record of each attempt after the first one."""
        attempts = [1, *(record.attempt for record in self.records)]
        return [record for record, before in zip(self.records, attempts, strict=False) if record.attempt != before]

    @property
    def undisturbed_steps(self) -> int:
        """How many steps the first attempt trained that no later one trained again."""
        return min((record.resumed_from for record in self.restarts), default=max(self.metrics, default=0))


def read_run(store: ObjectStore, trial: TrialKey, plan: RunPlan) -> DrillRun:
    """Return what the run has left.

    Raises:
        StoreUnavailable, StoreRefused: the target failed.
    """
    events = [event for entry in history(store, trial.of_experiment) for event in entry.events]
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
    differences: list[Difference] = []
    for step in expected.metrics.keys() | found.metrics.keys():
        if step not in found.metrics:
            differences.append(Difference(step, FileDifference(METRICS, "", "the step was not reported")))
        elif step not in expected.metrics:
            what = FileDifference(METRICS, "", "the undisturbed run ended before this step")
            differences.append(Difference(step, what))
        else:
            unlike = compare_values(expected.metrics[step], found.metrics[step], METRICS)
            differences += [Difference(step, what) for what in unlike]
    for step in expected.manifests.keys() | found.manifests.keys():
        if step not in found.manifests:
            differences.append(Difference(step, FileDifference(CHECKPOINTS, "", "no checkpoint, expected one")))
        elif step not in expected.manifests:
            differences.append(Difference(step, FileDifference(CHECKPOINTS, "", "a checkpoint, expected none")))
        else:
            unlike = list(_of_manifests(store, expected.manifests[step], found.manifests[step]))
            differences += [Difference(step, what) for what in unlike]
    return first_of_places(differences)


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


def _of_manifests(store: ObjectStore, expected: Manifest, found: Manifest) -> Iterator[FileDifference]:
    contents = (
        {(file.path, tuple((chunk.length, chunk.digest) for chunk in file.chunks)) for file in manifest.files}
        for manifest in (expected, found)
    )
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


# --------------------------------------------------------------------------------- what differs without a kill
#
# Some of it says nothing of the training: a measured time, the time of a save, an identifier of a run. Such a value is
# left out if values that training changes are the same in spite of it. Weights are never left out: an array, an element
# of a list or a file that cannot be read is a result. A number in a checkpoint may be a weight, too, so it is left out
# only if it is a time of day, or if no metric can depend on it: each that differs is a measured time.


def result_places(
    changes: Mapping[Place, History],
    unstable: Sequence[Difference],
    undisturbed: DrillRun,
    generators: Collection[object],
) -> Collection[Place]:
    """Return the places in checkpoints that hold results: training changes them, and they do not follow from the step.

    Args:
        changes: the places in the checkpoints of the undisturbed run that change; empty if it has one checkpoint.
        unstable: what differs without a kill.
        undisturbed: the run.
        generators: the generators without a seed from which it draws.
    """
    in_files = {each.place: each for each in unstable if each.what.file != METRICS}
    candidates = changes.keys() if len(undisturbed.manifests) > 1 else in_files.keys()
    metrics_are_the_same = (
        not generators
        and bool(result_metrics(undisturbed, unstable))
        and not unexplained_metrics(undisturbed, unstable)
    )
    return {
        place
        for place in candidates
        if not (
            _may_be_left_out(in_files[place], undisturbed, metrics_are_the_same=metrics_are_the_same)
            if place in in_files
            else follows_from_step(changes[place])
        )
    }


def _may_be_left_out(difference: Difference, run: DrillRun, *, metrics_are_the_same: bool) -> bool:
    values = difference.what.scalars
    if None in values:
        return False
    if all(isinstance(value, str | date | TimeOfDay | UUID) for value in values):
        return True
    if all(_is_time_of_day(value, run) for value in values):
        return True
    return metrics_are_the_same and not is_in_list(difference.what.path)


def _is_time_of_day(value: object, run: DrillRun) -> bool:
    times = [record.at for record in run.records]
    if not times or not isinstance(value, int | float):
        return False
    begin, end = min(times) - _CLOCK_MARGIN_SECONDS, time.time()
    return any(begin <= value / unit <= end for unit in _UNITS)


def follows_from_step(values: History) -> bool:
    """Whether these are whole numbers that grow, or numbers that grow by as much, or by the same factor, at each step.

    Counts of steps and most rates of a schedule do.
    """
    numbers = {step: value for step, value in values.items() if isinstance(value, int | float)}
    if len(numbers) < max(2, len(values)) or any(isinstance(value, bool) for value in numbers.values()):
        return False
    if all(float(value).is_integer() for value in numbers.values()):
        return all(numbers[after] >= numbers[before] for before, after in pairwise(sorted(numbers)))
    has_logarithms = all(0 < value < inf for value in numbers.values())
    logarithms = {step: log(value) for step, value in numbers.items()} if has_logarithms else {}
    return _is_linear(numbers) or _is_linear(logarithms)


def _is_linear(numbers: Mapping[int, float]) -> bool:
    rates = [(numbers[after] - numbers[before]) / (after - before) for before, after in pairwise(sorted(numbers))]
    return len(rates) > 1 and all(isclose(rate, rates[0], rel_tol=1e-6) for rate in rates)


def metric_histories(run: DrillRun) -> Mapping[Place, History]:
    """Return the values of each metric by step."""
    histories: dict[Place, dict[int, object]] = {}
    for step, metrics in run.metrics.items():
        for path, value in scalars_in(metrics):
            histories.setdefault((METRICS, path), {})[step] = value
    return histories


def result_metrics(run: DrillRun, unstable: Sequence[Difference]) -> Collection[Place]:
    """Return the metrics that training changes, do not follow from the step, and do not differ without a kill."""
    differ = {each.place for each in unstable}
    return {
        place
        for place, history in metric_histories(run).items()
        if place not in differ and _has_changes(history) and not follows_from_step(history)
    }


def unexplained_metrics(run: DrillRun, unstable: Sequence[Difference]) -> Sequence[Difference]:
    """Return the metrics that differ without a kill, that training changes, and that are not measured times."""
    histories = metric_histories(run)
    return [
        each
        for each in unstable
        if _has_changes(history := histories.get(each.place, {})) and not _is_measured_time(history, run)
    ]


def _has_changes(history: History) -> bool:
    return len({repr(value) for value in history.values()}) > 1


def _is_measured_time(history: History, run: DrillRun) -> bool:
    """Whether these are times of day, times of steps, or times since some moment, as the drill has measured them."""
    records = {record.step: record for record in reversed(run.records) if not record.is_restored}
    measured = [(value, records[step]) for step, value in sorted(history.items()) if step in records]
    if len(measured) < len(history) or not all(isinstance(value, int | float) for value, _ in measured):
        return False
    numbers = [(float(value), record) for value, record in measured]  # type: ignore[arg-type]  # as checked above
    if all(_is_time_of_day(value, run) for value, _ in numbers):
        return True
    if all(0 <= value <= record.seconds + record.waited + _TIMER_MARGIN_SECONDS for value, record in numbers):
        return True
    growths = [(later[0] - value, later[1].at - record.at) for (value, record), later in pairwise(numbers)]
    return len(growths) > 1 and all(0.5 * passed <= growth <= 1.5 * passed for growth, passed in growths)


def unseeded_generators(run: DrillRun, others: Sequence[DrillRun | None]) -> Sequence[Difference]:
    """Return the generators from which the run draws, and whose states differ in another run before its first kill."""
    states = {record.step: record.states for record in reversed(run.records) if record.attempt == 1}
    names = {name for at_step in states.values() for name in at_step if name.startswith(("global ", "rng "))}
    drawn = {name for name in names if len({at_step.get(name) for at_step in states.values()}) > 1}
    differ: dict[str, int] = {}
    for other in filter(None, others):
        for record in other.records:
            if record.attempt == 1 and record.step in states:
                for name in drawn & record.states.keys():
                    if states[record.step].get(name, record.states[name]) != record.states[name]:
                        differ[name] = min(record.step, differ.get(name, record.step))
    return [
        Difference(step, FileDifference(GENERATORS, name.partition(" ")[2], "another state"))
        for name, step in sorted(differ.items(), key=lambda found: found[1])
    ]
