"""Differences without a kill that say nothing about the training, and those that do."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from prefect_tune.drills.evidence import (
    METRICS,
    Difference,
    DrillRun,
    ProbeRecord,
    ValueHistory,
    find_result_locations,
    find_unseeded_generators,
    is_derived_from_step,
)
from prefect_tune.drills.values import FileDifference
from tests.drills.test_findings import CHANGED, DIGESTS, MANIFEST

START_TIME = time.time()
LOSS = [1.7, 1.2, 1.9, 1.4]
LOCATION = ("s.json", "it")


def make_run(**metrics: list[Any]) -> DrillRun:
    reports = {step: {name: values[step - 1] for name, values in metrics.items()} for step in range(1, 5)}
    records = [ProbeRecord(step, 1, False, START_TIME - 9 + step, 0.5, 0.0, {}) for step in range(1, 5)]
    return DrillRun(reports, {2: MANIFEST, 4: CHANGED}, [], records, [])


def make_diff(expected: Any, actual: Any, path: str = "") -> Difference:
    return Difference(2, FileDifference("s.json", "it", "differs", path=path, scalars=(expected, actual)))


def holds_a_result(
    difference: Difference, run: DrillRun, *more: Difference, history: ValueHistory | None = None, draws: bool = False
) -> bool:
    changes: Mapping[Any, ValueHistory] = {difference.location: history or {2: 1.5, 4: 7.25}}
    generators = ["a generator"] if draws else []
    return difference.location in find_result_locations(changes, [difference, *more], run, generators)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (START_TIME - 5, START_TIME - 2),
        ((START_TIME - 5) * 1e3, (START_TIME - 2) * 1e3),
        (int((START_TIME - 5) * 1e9), int((START_TIME - 2) * 1e9)),
        ("f1a0b0a0-0000-4000-8000-000000000001", "f1a0b0a0-0000-4000-8000-000000000002"),
        ("2026-01-01T00:00:01", "2026-01-01T00:00:02"),
        ("node-1:417", "node-1:518"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
        (UUID(int=1), UUID(int=2)),
    ],
    ids=["seconds", "milliseconds", "nanoseconds", "uuid-text", "date-text", "host", "datetime", "uuid"],
)
def test_a_time_of_day_and_a_short_text_hold_no_result(expected: Any, actual: Any) -> None:
    loss = Difference(1, FileDifference(METRICS, "loss", "differs"))
    for run, more in ((make_run(loss=LOSS), []), (make_run(loss=LOSS), [loss])):
        assert not holds_a_result(make_diff(expected, actual), run, *more)


def test_a_number_holds_no_result_only_if_no_metric_can_depend_on_it() -> None:
    loss, seconds = (Difference(1, FileDifference(METRICS, name, "differs")) for name in ("loss", "seconds"))
    number = make_diff(0.71, 0.32)
    run = make_run(loss=LOSS, seconds=[0.1, 0.2, 0.1, 0.3], epoch=[1, 2, 3, 4])
    assert not holds_a_result(number, run)
    assert not holds_a_result(number, run, seconds)
    assert holds_a_result(number, run, loss), "it may be a weight"
    assert holds_a_result(number, make_run(epoch=[1, 2, 3, 4])), "no metric shows that none depends on it"
    assert holds_a_result(number, run, draws=True)
    assert holds_a_result(make_diff(0.71, 0.32, path="it.#3"), run), "one of many weights"


@pytest.mark.parametrize("scalars", [(None, None), (0.5, None)])
def test_an_array_and_a_file_that_cannot_be_read_hold_results(scalars: Any) -> None:
    assert holds_a_result(make_diff(*scalars), make_run(loss=LOSS))


def test_what_training_does_not_change_holds_no_result() -> None:
    path = make_diff("/tmp/a", "/tmp/b")
    assert path.location not in find_result_locations({}, [path], make_run(loss=LOSS), [])


def test_a_count_of_steps_that_is_the_same_holds_no_result() -> None:
    changes = {
        ("s.json", "step"): {2: 2, 4: 4},
        ("s.json", "weight"): {2: 0.3, 4: 0.9},
        ("m.npz", "w"): {2: None, 4: None},
    }
    assert find_result_locations(changes, [], make_run(loss=LOSS), []) == {("s.json", "weight"), ("m.npz", "w")}


@pytest.mark.parametrize(
    ("values", "is_one"),
    [
        ({1: 1, 2: 2, 3: 3}, True),
        ({2: 64, 4: 128}, True),
        ({1: 0, 2: 0, 3: 1, 4: 1}, True),
        ({1: 0.1, 2: 0.2, 3: 0.3}, True),
        ({1: 1.0, 2: 2.0, 4: 4.0}, True),
        ({2: 0.09, 4: 0.09 * 0.9**2, 6: 0.09 * 0.9**4}, True),
        ({1: -0.5, 2: -0.25, 3: -0.125}, False),
        ({1: 5, 2: 3, 3: 4}, False),
        ({1: 0.1, 2: 0.2}, False),
        ({1: 0.1, 2: 0.3, 3: 0.4}, False),
        ({1: True, 2: False}, False),
        ({1: 1}, False),
        ({1: 1, 2: None}, False),
        ({1: "a", 2: "b"}, False),
        ({1: float("nan"), 2: float("inf"), 3: 1.0}, False),
    ],
)
def test_counts_and_rates_follow_from_the_step(values: dict[int, object], is_one: bool) -> None:
    assert is_derived_from_step(values) is is_one


def test_a_generator_without_a_seed_is_one_that_training_uses_and_that_differs_before_the_first_kill() -> None:
    def make_generator_run(first: int, *, attempt: int = 1) -> DrillRun:
        records = []
        for step in range(1, 5):
            states = {"global random": DIGESTS[first], "rng own": DIGESTS[first + step], "rng seeded": DIGESTS[step]}
            records.append(ProbeRecord(step, attempt, False, 0.0, 0.0, 0.0, {**states, "state w": "1"}))
        return DrillRun({}, {}, [], records, [])

    (own,) = find_unseeded_generators(make_generator_run(10), [make_generator_run(30), None])
    assert str(own) == "step 1: random generator `own`: another state"
    assert find_unseeded_generators(make_generator_run(10), [make_generator_run(10), None]) == []
    assert find_unseeded_generators(make_generator_run(10), [make_generator_run(30, attempt=2)]) == []
