"""The evidence of a drill's run: the journal and checkpoints on the target, and the probe's records on this machine."""

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
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import CheckpointCommitted, StepReported
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.drills.file_contents import compare_files
from prefect_tune.drills.probe import RunPlan, Victim
from prefect_tune.drills.values import (
    MISSING,
    UNEXPECTED,
    FileDifference,
    compare_values,
    is_list_element,
    iter_scalars,
)
from prefect_tune.stores.local.staging import fetch_checkpoint

METRICS = ""
"""The `FileDifference.file` of a difference in the metrics."""
CHECKPOINTS = "."
"""The `FileDifference.file` of a step at which only one of the runs has a checkpoint."""
GENERATORS = ".."
"""The `FileDifference.file` of a difference in the state of a random generator."""
ValueLocation: TypeAlias = tuple[str, str]
"""A file, and the key of a value in the file."""
_TIME_UNITS = (1.0, 1e3, 1e6, 1e9)
"""The units in which a number may be a Unix time (s, ms, µs, ns), each as the number of units per second."""
_CLOCK_MARGIN_SECONDS, _TIMER_MARGIN_SECONDS = 60.0, 1e-3
ValueHistory = Mapping[int, object]
"""The values at one location, by step."""


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """The state of the training after a step, or after loading the checkpoint of that step."""

    step: int
    attempt: int
    is_restored: bool
    ended_at: float
    """The Unix time at the end of the step."""
    seconds: float
    """The duration of the step."""
    wait_seconds: float
    """The time that the training waited between the previous step and this step, mostly for the previous save."""
    states: Mapping[str, str]
    """The states of objects and generators: values or digests, by kind and name; see `probe.collect_states`."""

    @property
    def resumed_from(self) -> int:
        """The step from which the attempt resumed; valid only for the first record of an attempt."""
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
    """A kill, and the resume after it."""

    victim: Victim
    step: int
    """The last step that was trained before the kill."""
    resumed_from: int
    """The step from which training resumed."""
    seconds: float
    """The time from the kill to the end of the first step after the resume."""
    kept_bytes: int = 0
    """The bytes that the target had already stored when an upload was killed; they were not sent again."""

    @property
    def repeated_steps(self) -> int:
        """The number of steps that were trained again."""
        return max(0, self.step - self.resumed_from)


@dataclass(frozen=True)
class DrillRun:
    """A completed run of a drill."""

    metrics: Mapping[int, Mapping[str, object]]
    """The last report of each step."""
    manifests: Mapping[int, Manifest]
    """For each step that has a checkpoint: the manifest of the step's newest checkpoint."""
    saves: Sequence[MeasuredSave]
    records: Sequence[ProbeRecord]
    kills: Sequence[Kill]

    @property
    def restart_records(self) -> Sequence[ProbeRecord]:
        """The first record of each attempt after attempt 1."""
        attempts = [1, *(record.attempt for record in self.records)]
        return [record for record, before in zip(self.records, attempts, strict=False) if record.attempt != before]

    @property
    def undisturbed_steps(self) -> int:
        """The number of steps, from step 1, that only the first attempt trained."""
        return min((record.resumed_from for record in self.restart_records), default=max(self.metrics, default=0))


def read_run(store: ObjectStore, trial: TrialKey, plan: RunPlan) -> DrillRun:
    """Read the evidence of a run.

    Raises:
        StoreUnavailable, StoreRefused: the target failed.
    """
    events = [event for entry in read_entries(store, trial.journal_key) for event in entry.events]
    metrics = {event.report.step: event.report.metrics for event in events if isinstance(event, StepReported)}
    commits = [(event, event.checkpoint) for event in events if isinstance(event, CheckpointCommitted)]
    saves = [
        MeasuredSave(ref.step, ref.size_bytes, commit.sent_bytes or 0, commit.upload_seconds or 0.0)
        for commit, ref in commits
    ]
    records = list(read_records(plan.records_path))
    keys = {ref.step: trial.checkpoint_key(ref) for _, ref in commits}
    manifests = {step: read_manifest(store, key) for step, key in keys.items()}
    return DrillRun(metrics, manifests, saves, records, list(find_kills(plan, records)))


def read_records(path: Path) -> Iterator[ProbeRecord]:
    """Yield the records; skip incomplete lines, which killed processes may have left."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        fields["is_restored"] = fields.pop("restored")
        yield ProbeRecord(**fields)


def find_kills(plan: RunPlan, records: Sequence[ProbeRecord]) -> Iterator[Kill]:
    """Yield the kills of a run, each with the resume after it."""
    trained = [record for record in records if not record.is_restored]
    for victim, killed_at in plan.read_kills():
        attempt = next((record.attempt for record in reversed(trained) if record.ended_at <= killed_at), 1)
        # Skip the killed attempt: if another rank was killed, rank 0 may train until the supervisor ends the attempt.
        later = (i for i, record in enumerate(trained) if record.ended_at > killed_at and record.attempt > attempt)
        if (index := next(later, None)) is not None:
            next_record, step = trained[index], trained[index - 1].step if index else 0
            yield Kill(victim, step, next_record.step - 1, next_record.ended_at - killed_at)


# ---------------------------------------------------------------------------------------------- compare two runs


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs after the same step."""

    step: int
    detail: FileDifference

    @property
    def location(self) -> ValueLocation:
        """The file and the key of the value, which are the same at every step."""
        return self.detail.file, self.detail.path or self.detail.key

    @property
    def is_missing_in_one_run(self) -> bool:
        """Whether one of the runs lacks the report, the checkpoint, the file or the value."""
        return self.location in {(METRICS, ""), (CHECKPOINTS, "")} or self.detail.description in {MISSING, UNEXPECTED}

    def __str__(self) -> str:
        texts = {
            METRICS: f"metric `{self.detail.key}`: {self.detail.description}",
            CHECKPOINTS: self.detail.description,
            GENERATORS: f"random generator `{self.detail.key}`: {self.detail.description}",
        }
        return f"step {self.step}: {texts.get(self.detail.file, self.detail)}"


def compare_runs(store: ObjectStore, expected: DrillRun, actual: DrillRun) -> Sequence[Difference]:
    """Return the first difference of each metric, file, tensor or key between two runs, in the order of steps."""
    differences: list[Difference] = []
    for step in expected.metrics.keys() | actual.metrics.keys():
        if step not in actual.metrics:
            differences.append(Difference(step, FileDifference(METRICS, "", "the step was not reported")))
        elif step not in expected.metrics:
            detail = FileDifference(METRICS, "", "the undisturbed run ended before this step")
            differences.append(Difference(step, detail))
        else:
            details = compare_values(expected.metrics[step], actual.metrics[step], METRICS)
            differences += [Difference(step, detail) for detail in details]
    for step in expected.manifests.keys() | actual.manifests.keys():
        if step not in actual.manifests:
            differences.append(Difference(step, FileDifference(CHECKPOINTS, "", "no checkpoint, expected one")))
        elif step not in expected.manifests:
            differences.append(Difference(step, FileDifference(CHECKPOINTS, "", "a checkpoint, expected none")))
        else:
            details = list(_compare_manifests(store, expected.manifests[step], actual.manifests[step]))
            differences += [Difference(step, detail) for detail in details]
    return select_first_differences(differences)


def select_first_differences(differences: Sequence[Difference]) -> Sequence[Difference]:
    """Return the first difference at each location, in the order of steps."""
    first: dict[tuple[str, str], Difference] = {}
    for difference in sorted(differences, key=lambda difference: (difference.step, difference.detail.file != METRICS)):
        first.setdefault(difference.location, difference)
    return list(first.values())


def find_changing_values(store: ObjectStore, run: DrillRun) -> Mapping[ValueLocation, Mapping[int, object]]:
    """Return the scalars, by step, at each location whose value changes between consecutive checkpoints of a run.

    A value that only one of two checkpoints has, such as the last entry of a log, does not count as changed.
    """
    changes: dict[ValueLocation, dict[int, object]] = {}
    for before, after in pairwise(sorted(run.manifests)):
        for detail in _compare_manifests(store, run.manifests[before], run.manifests[after]):
            if detail.description not in {MISSING, UNEXPECTED}:
                history = changes.setdefault(Difference(after, detail).location, {})
                history[before], history[after] = detail.scalars
    return changes


def _compare_manifests(store: ObjectStore, expected: Manifest, actual: Manifest) -> Iterator[FileDifference]:
    contents = (
        {(file.path, tuple((chunk.length, chunk.digest) for chunk in file.chunks)) for file in manifest.files}
        for manifest in (expected, actual)
    )
    file_names = {file for file, _ in set.symmetric_difference(*contents)}
    if not file_names:
        return
    with tempfile.TemporaryDirectory(prefix="prefect-tune-drill-") as folder:
        folders = Path(folder, "expected"), Path(folder, "found")
        for manifest, folder_path in zip((expected, actual), folders, strict=True):
            fetch_checkpoint(store, manifest, folder_path)
        for file in sorted(file_names):
            exists = [(folder_path / file).is_file() for folder_path in folders]
            if all(exists):
                yield from compare_files(folders[0] / file, folders[1] / file, file)
            else:
                yield FileDifference(file, "", MISSING if exists[0] else UNEXPECTED)


# -------------------------------------------------------------------------------- differences without a kill
#
# Some values differ even without a kill, but say nothing about the training: a measured time, the time of a save, the
# id of a run. Such values are ignored. Weights are never ignored, so an array, an element of a list or an unreadable
# file always counts. A number in a checkpoint may be a weight, too. It is ignored only if it is a Unix time, or if
# training hardly depends on it, because all generators are seeded, and the metrics differ only in measured times.


def find_result_locations(
    changes: Mapping[ValueLocation, ValueHistory],
    unstable: Sequence[Difference],
    undisturbed: DrillRun,
    generators: Collection[object],
) -> Collection[ValueLocation]:
    """Return the locations of results in checkpoints: values that change in training and do not follow from the step.

    Args:
        changes: the values that change in the undisturbed run's checkpoints; empty if there is only one checkpoint.
        unstable: the differences that occurred without a kill.
        undisturbed: the undisturbed run.
        generators: the unseeded generators from which the run draws.
    """
    in_files = {diff.location: diff for diff in unstable if diff.detail.file != METRICS}
    candidates = changes.keys() if len(undisturbed.manifests) > 1 else in_files.keys()
    has_result_metrics = bool(find_result_metrics(undisturbed, unstable))
    metrics_are_the_same = has_result_metrics and not (
        generators or find_unexplained_differences(undisturbed, unstable)
    )
    return {
        location
        for location in candidates
        if not (
            _can_be_ignored(in_files[location], undisturbed, metrics_are_the_same=metrics_are_the_same)
            if location in in_files
            else is_derived_from_step(changes[location])
        )
    }


def _can_be_ignored(difference: Difference, run: DrillRun, *, metrics_are_the_same: bool) -> bool:
    scalars = difference.detail.scalars
    if None in scalars:
        return False
    is_identifier = all(isinstance(value, str | date | TimeOfDay | UUID) for value in scalars)
    if is_identifier or all(_is_time_of_day(value, run) for value in scalars):
        return True
    return metrics_are_the_same and not is_list_element(difference.detail.path)


def _is_time_of_day(value: object, run: DrillRun) -> bool:
    times = [record.ended_at for record in run.records]
    if not times or not isinstance(value, int | float):
        return False
    begin, end = min(times) - _CLOCK_MARGIN_SECONDS, time.time()
    return any(begin <= value / unit <= end for unit in _TIME_UNITS)


def is_derived_from_step(values: ValueHistory) -> bool:
    """Return whether the values are integers that never fall, or numbers with a constant difference or ratio per step.

    Examples are counts of steps, and the learning rates of most schedules.
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


def collect_metric_histories(run: DrillRun) -> Mapping[ValueLocation, ValueHistory]:
    """Return the values of each metric, by step."""
    histories: dict[ValueLocation, dict[int, object]] = {}
    for step, metrics in run.metrics.items():
        for path, value in iter_scalars(metrics):
            histories.setdefault((METRICS, path), {})[step] = value
    return histories


def find_result_metrics(run: DrillRun, unstable: Sequence[Difference]) -> Collection[ValueLocation]:
    """Return the metrics that training changes, except those that follow from the step or differ without a kill."""
    differing = {difference.location for difference in unstable}
    return {
        location
        for location, history in collect_metric_histories(run).items()
        if location not in differing and _has_changes(history) and not is_derived_from_step(history)
    }


def find_unexplained_differences(run: DrillRun, unstable: Sequence[Difference]) -> Sequence[Difference]:
    """Return those differences of `unstable` whose metric changes during training and is not a measured time."""
    histories = collect_metric_histories(run)
    return [
        difference
        for difference in unstable
        if _has_changes(history := histories.get(difference.location, {})) and not _is_measured_time(history, run)
    ]


def _has_changes(history: ValueHistory) -> bool:
    return len({repr(value) for value in history.values()}) > 1


def _is_measured_time(history: ValueHistory, run: DrillRun) -> bool:
    """Return whether the values match the drill's measurements: Unix times, durations of steps, or elapsed times."""
    records = {record.step: record for record in reversed(run.records) if not record.is_restored}
    pairs = [(value, records[step]) for step, value in sorted(history.items()) if step in records]
    if len(pairs) < len(history) or not all(isinstance(value, int | float) for value, _ in pairs):
        return False
    numbers = [(float(value), record) for value, record in pairs]  # type: ignore[arg-type]  # as checked above
    if all(_is_time_of_day(value, run) for value, _ in numbers):
        return True
    if all(0 <= value <= record.seconds + record.wait_seconds + _TIMER_MARGIN_SECONDS for value, record in numbers):
        return True
    growths = [(later[0] - value, later[1].ended_at - record.ended_at) for (value, record), later in pairwise(numbers)]
    return len(growths) > 1 and all(0.5 * elapsed <= growth <= 1.5 * elapsed for growth, elapsed in growths)


def find_unseeded_generators(run: DrillRun, others: Sequence[DrillRun | None]) -> Sequence[Difference]:
    """Return a difference for each generator that `run` uses and whose state differs in another run's first attempt."""
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
        for name, step in sorted(differ.items(), key=lambda item: item[1])
    ]
