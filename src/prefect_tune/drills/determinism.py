"""Whether a training is deterministic: what two runs without a kill do not share, and what that says.

Some of it says nothing of the training: a measured time, the time of a save, an identifier of a run. Such a value is
left out if values that training changes are the same in spite of it. Weights are never left out: an array, an element
of a list or a file that cannot be read is a result. A number in a checkpoint may be a weight, too, so it is left out
only if it is a time of day, or if no metric can depend on it: each that differs is a measured time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from datetime import time as TimeOfDay  # noqa: N812 - `time` is the module here
from itertools import pairwise
from math import inf, isclose, log
from uuid import UUID

from prefect_tune.drills.evidence import GENERATORS, METRICS, Difference, DrillRun, Place
from prefect_tune.drills.file_contents import FileDifference
from prefect_tune.drills.values import Container, canonical_text, is_in_list, leaves, scalar_of

_UNITS = (1.0, 1e3, 1e6, 1e9)
"""Of a time of day: seconds, ms, µs, ns."""
_CLOCK_MARGIN_SECONDS, _TIMER_MARGIN_SECONDS = 60.0, 1e-3
History = Mapping[int, object]
"""The values at a place by step."""


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
        for path, value in leaves(metrics):
            if not isinstance(value, Container):
                histories.setdefault((METRICS, canonical_text(path)), {})[step] = scalar_of(value)
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
