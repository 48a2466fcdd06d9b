"""Searches in this process, against a real server: trials, retries, results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.reasons import make_reason, summarize_error
from tests.fakes.searches.failed_searches import results_of_failed
from tests.flows.training import statuses
from tests.long_cases import long_after
from tests.trainables.moody import Moody, train

pytestmark = pytest.mark.usefixtures("no_prefect_server")

MOODY = "tests.trainables.moody:Moody"


def searched(folder: Path, trainable: Any = Moody, **options: Any) -> pt.Results:
    """Search with the common options of these tests."""
    common: dict[str, Any] = {
        "target": str(folder / "target"),
        "experiment": "e",
        "metric": "loss",
        "stop": {"step": 3},
        "checkpoint": pt.Cadence(every_steps=1),
        "max_concurrent_trials": 2,
        "num_samples": 1,
    }
    return pt.tune(trainable, **{**common, **options})


def test_every_point_of_a_grid_is_trained_and_the_best_one_is_found(tmp_path: Path) -> None:
    results = searched(tmp_path, train, space={"x": pt.grid_search([3.0, 1.0, 2.0])}, stop=None)
    assert [each.config["x"] for each in results.trials.values()] == [3.0, 1.0, 2.0]
    assert statuses(results) == ["completed"] * 3
    assert results.best.config == {"x": 1.0}
    assert results.errors == {}


@pytest.mark.long
def test_a_trial_that_errors_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    space = {"fails": pt.grid_search(["raise", "not"])}
    results = searched(tmp_path, space=space)
    assert statuses(results) == ["errored", "completed"]
    assert "in a mood" in results.errors["00000"]
    again = searched(tmp_path, space=space)
    assert (statuses(again), again.trials["00000"].attempt) == (["errored", "completed"], 1)
    mended = {**space, "until": "nowhere"}
    rerun = searched(tmp_path, "tests.trainables.moody:Moody", space=mended, rerun_errored=True)
    assert (statuses(rerun), rerun.trials["00000"].attempt) == (["errored", "completed"], 2)


def test_a_trial_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    results = searched(tmp_path, space={"fails": "kill", "until": str(tmp_path / "killed")})
    (trial,) = results.trials.values()
    assert (trial.status, trial.step, trial.attempt, trial.wasted_steps) == (Status.COMPLETED, 3, 2, 0)


@pytest.mark.long
def test_with_fail_fast_the_first_error_ends_the_experiment_resumable(tmp_path: Path) -> None:
    space = {"fails": pt.grid_search(["raise", "not", "not either"])}
    results = results_of_failed(lambda: searched(tmp_path, space=space, fail_fast=True, max_concurrent_trials=1))
    assert statuses(results) == ["errored"]
    assert statuses(searched(tmp_path, space=space)) == ["errored", "completed", "completed"]


def careless(config: dict[str, Any]) -> None:
    raise KeyError(config["missing"])


def test_a_search_that_only_fails_ends_after_three_errors_that_are_alike_and_goes_on_if_asked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"space": {"x": pt.uniform(0, 1)}, "stop": None, "max_concurrent_trials": 1}
    with pytest.raises(
        pt.SearchFailed, match=r"3 of 3 trials errored, all with: KeyError: 'missing' \(test_tune"
    ) as failed:
        searched(tmp_path, careless, num_samples=9, **options)
    results: Any = failed.value.results
    error = summarize_error(results.trials["00000"].end_reason)
    assert results.experiment.ends == make_reason("same-errors", count=3, error=error)
    going_on = lambda: searched(tmp_path, careless, num_samples=5, fail_fast=False, **options)  # noqa: E731 - passed on
    assert statuses(results_of_failed(going_on)) == ["errored"] * 5
    assert statuses(searched(tmp_path, train, num_samples=6, **options)) == [*["errored"] * 5, "completed"]


@pytest.mark.long
def test_a_search_is_resumed_by_its_name_and_extended(tmp_path: Path) -> None:
    first = searched(tmp_path, MOODY, space={"x": pt.uniform(0, 1)}, num_samples=2)
    proposed = [each.config for each in first.trials.values()]
    more = pt.resume("e", target=str(tmp_path / "target"), num_samples=4, stop={"step": 5})
    assert statuses(more) == ["completed"] * 4
    assert [each.step for each in more.trials.values()] == [5] * 4
    assert [each.attempt for each in more.trials.values()] == [2, 2, 1, 1]
    assert [each.config for each in more.trials.values()][:2] == proposed
    whole = searched(tmp_path / "at once", MOODY, space={"x": pt.uniform(0, 1)}, num_samples=4)
    assert [each.config for each in whole.trials.values()] == [each.config for each in more.trials.values()]


@pytest.mark.long
def test_a_search_is_spelled_in_json_as_a_form_does(tmp_path: Path) -> None:
    results = searched(
        tmp_path,
        MOODY,
        space={"x": {"grid_search": [2.0, 1.0, 0.0]}},
        scheduler={"ASHA": {"max_t": 3, "grace_period": 1, "variant": "promotion"}},
        stop=None,
        max_concurrent_trials=1,
    )
    assert statuses(results) == ["pruned", "pruned", "completed"]
    assert [each.step for each in results.trials.values()] == [1, 1, 3]


def test_a_resume_of_what_is_not_there_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(pt.ResumeFailed, match="there is no experiment 'gone'"):
        pt.resume("gone", target=str(tmp_path / "target"))
    assert not (tmp_path / "target" / "gone").exists()


@pytest.mark.long
def test_what_only_the_code_knows_is_asked_for_by_name_and_taken(tmp_path: Path) -> None:
    def trains(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"loss": config["x"]}

    searched(tmp_path, trains, space={"x": 1.0}, stop=lambda _metrics: False)
    with pytest.raises(pt.InvalidInput, match="'trainable', 'stop'"):
        pt.resume("e", target=str(tmp_path / "target"))
    more = pt.resume("e", target=str(tmp_path / "target"), trainable=trains, stop={"step": 9}, num_samples=2)
    assert statuses(more) == ["completed"] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    long_after(
        5,
        [
            ({"num_samples": 0}, "num_samples: expected 1 or more"),
            (
                {"max_concurrent_trials": 0},
                "max_concurrent_trials: Input should be greater than or equal to 1",
            ),
            ({"time_budget_seconds": float("nan")}, "time_budget_seconds: Input should be a finite number, found nan"),
            ({"silence_timeout_seconds": 1e300}, r"silence_timeout_seconds: Input should be less .*, found 1e\+300"),
            ({"scheduler": {"ASHA": {"maxt": 3}}}, "scheduler: ASHA .*maxt"),
            ({"scheduler": {"ASHA": {"max_t": 3}}, "metric": None}, "metric: ASHA compares trials by a metric"),
            ({"search": 3}, "search: expected an object"),
            ({"stop": pt.MaxSteps}, "expected {'step': 100} or other limits, a function, or a stopper"),
            ({"trials": "deployment"}, "another machine has to import the trainable"),
            ({"callbacks": [3]}, "callback"),
        ],
    ),
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainable = options.pop("trainable", Moody)
    with pytest.raises(pt.InvalidInput, match=said):
        searched(tmp_path, trainable, **options)
    assert not (tmp_path / "target").exists()


@pytest.mark.long
def test_what_was_decided_by_one_metric_does_not_go_on_by_another(tmp_path: Path) -> None:
    searched(tmp_path, train, space={"x": 1.0}, stop=None)
    with pytest.raises(pt.InvalidInput, match="metric: experiment 'e' was begun with 'loss'"):
        searched(tmp_path, train, space={"x": 1.0}, stop=None, metric="other")
