"""Runs that add samples to those of earlier runs: each run adds its samples once; unfinished trials come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.journal_events import ExperimentConfigured
from prefect_tune.journal_access import read_experiment_to_resume
from prefect_tune.parameters.plan_checks import with_added_samples
from prefect_tune.parameters.search_plan import SearchPlan, plan_from_settings
from prefect_tune.prefect_api.call_paths import current_call_path
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events
from tests.flows.training import experiment_at
from tests.trainables.digits_table import ROWS

DIGITS = "tests.trainables.digits_table:DigitsTable"


def make_plan(**options: Any) -> SearchPlan:
    return SearchPlan(trainable=DIGITS, target="/runs", metric="error", **options)


def begin_experiment(**options: Any) -> Experiment:
    """Return an experiment after a run without `samples_per_run`."""
    event = ExperimentConfigured(settings=make_plan(**options).settings)
    return apply_events(make_empty_experiment(first_generation("nightly")), [event])


def add_run(state: Experiment, run_id: str, **options: Any) -> Experiment:
    """Return the experiment after a run with this id has acquired it."""
    plan, extensions = with_added_samples(make_plan(**options), state, lambda: run_id)
    return apply_events(state, [ExperimentConfigured(settings=plan.settings, extensions=extensions)])


def _fail_on_request() -> str:
    raise AssertionError("the id of the run was requested without need")


def num_samples_of(state: Experiment) -> object:
    return state.settings["num_samples"]


def test_each_run_adds_its_samples_and_a_run_that_starts_again_adds_none() -> None:
    state = make_empty_experiment(first_generation("nightly"))
    for run_id, expected in (("a", 5), ("a", 5), ("b", 10), ("a", 10), ("b", 10), ("c", 15)):
        state = add_run(state, run_id, samples_per_run=5)
        assert num_samples_of(state) == expected
    assert state.extensions == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize(
    ("before", "samples"),
    [
        ({"num_samples": 20}, 25),
        ({}, 15),  # ten are the default
        ({"search": {"OptunaSearch": {"num_samples": 40}}}, 45),
        ({"search": {"OptunaSearch": {"num_samples": 40}}, "num_samples": 7}, 12),
    ],
)
def test_what_was_begun_by_hand_is_extended_from_there(before: Mapping[str, Any], samples: int) -> None:
    assert num_samples_of(add_run(begin_experiment(**before), "a", samples_per_run=5)) == samples


GRID = {"space": {"row": pt.grid_search([1, 2, 3])}}
UNLIMITED_SEARCHES = [
    None,
    "RandomSearch",
    {"RandomSearch": {"constant_grid_search": True}},
    pt.RandomSearch(points_to_evaluate=[]),
]


def trial_count_of(state: Experiment, **options: Any) -> int | None:
    """Return the total number of trials to run."""
    plan, _ = with_added_samples(make_plan(**options), state, _fail_on_request)
    return plan.trial_count


@pytest.mark.parametrize("search", UNLIMITED_SEARCHES)
def test_a_grid_alone_is_tried_once_today_and_again_whenever_it_goes_on(search: object) -> None:
    state = make_empty_experiment(first_generation("grid"))
    for run_id in ("a", "b", "c"):
        assert trial_count_of(state, search=search, **GRID) == 3
        state = add_run(state, run_id, search=search, **GRID)
        assert num_samples_of(state) == 1
    resumed = plan_from_settings(state.settings, {"target": "/runs"}, {})
    assert resumed.trial_count == 3
    assert num_samples_of(add_run(state, "d", samples_per_run=5, search=search, **GRID)) == 6


@pytest.mark.parametrize("search", UNLIMITED_SEARCHES)
def test_a_grid_that_was_begun_when_ten_were_the_default_keeps_them_whenever_it_goes_on(search: object) -> None:
    written = make_plan(search=search, **GRID).settings
    assert "num_samples" not in written
    state = apply_events(make_empty_experiment(first_generation("grid")), [ExperimentConfigured(settings=written)])
    resumed, _ = with_added_samples(
        plan_from_settings(state.settings, {"target": "/runs"}, {}), state, _fail_on_request
    )
    assert resumed.trial_count == 30
    assert num_samples_of(add_run(state, "d", samples_per_run=5, search=search, **GRID)) == 15
    for run_id in ("a", "b", "c"):
        assert trial_count_of(state, search=search, **GRID) == 30
        state = add_run(state, run_id, search=search, **GRID)


@pytest.mark.parametrize("options", [{"num_samples": 4}, {"search": {"RandomSearch": {"num_samples": 4}}}])
def test_a_number_that_is_given_holds_for_a_grid_alone(options: Any) -> None:
    old = apply_events(
        make_empty_experiment(first_generation("grid")), [ExperimentConfigured(settings=make_plan(**GRID).settings)]
    )
    for state in (make_empty_experiment(first_generation("grid")), old):
        assert trial_count_of(state, **GRID, **options) == 12


def test_a_grid_beside_something_drawn_is_tried_ten_times_as_ever() -> None:
    space = {"row": pt.grid_search([1, 2, 3]), "x": pt.uniform(0, 1)}
    state = add_run(make_empty_experiment(first_generation("grid")), "a", space=space)
    assert "num_samples" not in state.settings
    assert trial_count_of(state, space=space) == 30


def test_a_run_that_adds_nothing_asks_for_what_it_says_as_ever() -> None:
    state = add_run(make_empty_experiment(first_generation("nightly")), "a", samples_per_run=5)
    plan, extensions = with_added_samples(make_plan(num_samples=3), state, _fail_on_request)
    assert (plan.num_samples, extensions) == (3, {})


@pytest.mark.parametrize("before", [{"num_samples": -1}, {"search": {"RandomSearch": {"num_samples": -1}}}])
def test_what_has_no_end_is_not_extended(before: Mapping[str, Any]) -> None:
    state = apply_events(make_empty_experiment(first_generation("nightly")), [ExperimentConfigured(settings=before)])
    with pytest.raises(pt.InvalidInput, match="samples_per_run: experiment 'nightly' has no fixed number of samples"):
        with_added_samples(make_plan(samples_per_run=5), state, lambda: "a")


@pytest.mark.parametrize(("options", "message"), [({"num_samples": 3}, "pass only one of them"), ({}, "found -2")])
@pytest.mark.usefixtures("no_prefect_server")
def test_how_many_there_are_to_be_is_said_once(options: Any, message: str, local_target: LocalTarget) -> None:
    count = {"samples_per_run": 3} if options else {"samples_per_run": -2}
    with pytest.raises(pt.InvalidInput, match=message):
        pt.tune(DIGITS, {"row": 1}, target=local_target, **count, **options)
    with pytest.raises(pt.InvalidInput, match=message):
        pt.resume("nightly", target=local_target, **count, **options)
    assert not Path(local_target.path).exists()


# --------------------------------------------------------------------------------------------------- real searches


def run_search(target: LocalTarget, **options: Any) -> pt.Results:
    common: dict[str, Any] = {
        "space": {"row": pt.randint(0, ROWS)},
        "target": target,
        "experiment": "nightly",
        "metric": "error",
        "stop": {"step": 2},
        "max_concurrent_trials": 1,
        "isolation": "thread",
    }
    return pt.tune(DIGITS, **{**common, **options})


def rows_of(results: pt.Results) -> Sequence[object]:
    return [trial.config["row"] for trial in results.trials.values()]


@pytest.mark.usefixtures("no_prefect_server")
def test_three_runs_try_what_one_would_have_tried(local_target: LocalTarget, tmp_path: Path) -> None:
    counts = [len(run_search(local_target, samples_per_run=2).trials) for _ in range(2)]
    third = pt.resume("nightly", target=local_target, samples_per_run=2)
    assert [*counts, len(third.trials)] == [2, 4, 6]
    assert list(third.experiment.extensions.values()) == [2, 2, 2]
    single = run_search(LocalTarget(path=str(tmp_path / "at-once")), num_samples=6)
    assert rows_of(third) == rows_of(single)


class _RunDied(Exception):
    """The error of a flow run before a Retry."""


@pytest.mark.usefixtures("no_prefect_server")
def test_what_a_run_left_over_comes_first_in_the_next_one(local_target: LocalTarget) -> None:
    assert len(run_search(local_target, samples_per_run=3, stop={"step": 2, "TrialBudget": {"trials": 1}}).trials) == 1
    assert len(run_search(local_target, samples_per_run=2).trials) == 5
    assert sorted(experiment_at(local_target, "nightly").extensions.values()) == [2, 3]


@flow
def _read_call_path() -> str:
    return current_call_path().key


@pytest.mark.usefixtures("prefect_server")
def test_a_task_that_calls_the_search_is_tried_again_in_the_same_place() -> None:
    paths: list[str] = []

    @task(retries=1)
    def read_path() -> None:
        paths.append(_read_call_path())
        if len(paths) == 1:
            raise _RunDied

    @flow
    def parent() -> None:
        read_path()

    parent()
    assert paths[0] == paths[1]


@pytest.mark.usefixtures("no_prefect_server")
def test_a_run_that_reads_the_journal_just_before_another_one_adds_to_what_both_have_added(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_search(local_target, samples_per_run=1)
    read_before = read_experiment_to_resume(local_target, "nightly")
    run_search(local_target, samples_per_run=1)
    with monkeypatch.context() as patch:
        patch.setattr("prefect_tune.tuner.run_search.read_experiment_to_resume", lambda *_: read_before)
        assert len(run_search(local_target, samples_per_run=1).trials) == 3
    assert experiment_at(local_target, "nightly").settings["num_samples"] == 3
