"""Searches in this process, function trainables, stop criteria, and metrics that reports lack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.stoppers import MaxSteps, Plateau
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.reasons import make_reason, summarize_error
from tests.fakes.searches.failed_searches import results_of_failed
from tests.flows.interruptions.trouble import Trouble
from tests.flows.training import statuses
from tests.long_cases import long_after
from tests.trainables.moody import Moody, train

MOODY = "tests.trainables.moody:Moody"


def run_search(folder: Path, trainable: Any = Moody, **options: Any) -> pt.Results:
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


@pytest.mark.usefixtures("no_prefect_server")
def test_every_point_of_a_grid_is_trained_and_the_best_one_is_found(tmp_path: Path) -> None:
    space = {"x": pt.grid_search([3.0, 1.0, 2.0])}
    results = run_search(tmp_path, train, space=space, stop=None, isolation="thread")
    assert [trial.config["x"] for trial in results.trials.values()] == [3.0, 1.0, 2.0]
    assert statuses(results) == ["completed"] * 3
    assert results.best.config == {"x": 1.0}
    assert results.errors == {}


@pytest.mark.usefixtures("no_prefect_server", "process_model")
def test_a_trial_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    results = run_search(tmp_path, space={"fails": "kill", "until": str(tmp_path / "killed")})
    (trial,) = results.trials.values()
    assert (trial.status, trial.step, trial.attempt, trial.recomputed_steps) == (Status.COMPLETED, 3, 2, 0)


def raise_key_error(config: dict[str, Any]) -> None:
    raise KeyError(config["missing"])


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_that_only_fails_ends_after_three_errors_that_are_alike_and_goes_on_if_asked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"space": {"x": pt.uniform(0, 1)}, "stop": None, "max_concurrent_trials": 1}
    options["isolation"] = "thread"
    message = r"3 of 3 trials errored, all with: KeyError: 'missing' \(test_tune"
    with pytest.raises(pt.SearchFailed, match=message) as failed:
        run_search(tmp_path, raise_key_error, num_samples=9, **options)
    results: Any = failed.value.results
    error = summarize_error(results.trials["00000"].end_reason)
    assert results.experiment.stop_reason == make_reason("same-errors", count=3, error=error)
    again = {"num_samples": 5, "fail_fast": False, **options}
    assert statuses(results_of_failed(lambda: run_search(tmp_path, raise_key_error, **again))) == ["errored"] * 5
    assert statuses(run_search(tmp_path, train, num_samples=6, **options)) == [*["errored"] * 5, "completed"]


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_with_fail_fast_the_first_error_ends_the_experiment_resumable(tmp_path: Path) -> None:
    space = {"fails": pt.grid_search(["raise", "not", "not either"])}
    results = results_of_failed(lambda: run_search(tmp_path, space=space, fail_fast=True, max_concurrent_trials=1))
    assert statuses(results) == ["errored"]
    assert statuses(run_search(tmp_path, space=space)) == ["errored", "completed", "completed"]


@pytest.mark.usefixtures("no_prefect_server")
def test_a_resume_of_what_is_not_there_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(pt.ResumeFailed, match="there is no experiment 'gone'"):
        pt.resume("gone", target=str(tmp_path / "target"))
    assert not (tmp_path / "target" / "gone").exists()


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    ("options", "message"),
    long_after(
        4,
        [
            ({"num_samples": 0}, "num_samples: expected 1 or more"),
            ({"time_budget_seconds": float("nan")}, "time_budget_seconds: Input should be a finite number, found nan"),
            ({"scheduler": {"ASHA": {"maxt": 3}}}, "scheduler: ASHA .*maxt"),
            ({"scheduler": {"ASHA": {"max_t": 3}}, "metric": None}, "metric: ASHA compares trials by a metric"),
            ({"stop": pt.MaxSteps}, "expected {'step': 100} or other limits, a function, or a stopper"),
            ({"trials": "deployment"}, "other machines must import the trainable"),
            ({"callbacks": [3]}, "callback"),
        ],
    ),
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        run_search(tmp_path, **options)
    assert not (tmp_path / "target").exists()


# A report without the searched metric, or without that of a stop criterion, is an error of its trial.


def search_by_metric(target: LocalTarget, metric: str, **options: Any) -> pt.Results:
    common: Mapping[str, Any] = {"experiment": "e", "isolation": "thread", "max_concurrent_trials": 1, "num_samples": 3}
    more = {"trainable": Moody, "space": {"x": pt.uniform(0, 1)}, "stop": {"step": 4}, **common, **options}
    return pt.tune(target=target, metric=metric, **more)


def ends_of(results: pt.Results) -> list[tuple[str, int]]:
    return [(str(trial.status), trial.step) for trial in results.trials.values()]


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_with_a_misspelt_metric_fails_with_the_name_that_was_meant_and_continues_with_it(
    local_target: LocalTarget,
) -> None:
    options: Any = {"failures": pt.FailurePolicy(max_failures=9)}
    with pytest.raises(pt.SearchFailed) as failed:
        search_by_metric(local_target, "los", num_samples=9, **options)
    assert (
        "3 of 3 trials errored, all with: BadMetric: metrics of step 1: expected a number for metric 'los', found "
        "None; the report has ['loss']; did you mean 'loss'? If reports may lack it, pass allow_missing_metric=True "
        "(--allow-missing-metric)"
    ) in str(failed.value)
    assert ends_of(failed.value.results) == [("errored", 0)] * 3
    results = search_by_metric(local_target, "loss", rerun_errored=True, **options)
    assert ends_of(results) == [("completed", 4)] * 3
    assert results.best.step == 4


def report_rarely(config: Mapping[str, Any]) -> None:
    """Report the metric at the second of three steps."""
    for step in range(3):
        pt.report({"loss": config["x"], **({"rare": config["x"]} if step == 1 else {})})


@pytest.mark.usefixtures("no_prefect_server")
def test_reports_may_lack_the_metric_if_that_is_allowed(local_target: LocalTarget) -> None:
    results = search_by_metric(local_target, "rare", trainable=report_rarely, stop=None, allow_missing_metric=True)
    assert ends_of(results) == [("completed", 3)] * 3
    assert results.best_trial(scope="all").metrics["loss"] == min(
        trial.config["x"] for trial in results.trials.values()
    )
    resumed = pt.resume("e", target=local_target, trainable=report_rarely, num_samples=4, allow_missing_metric=False)
    assert ends_of(resumed) == [("completed", 3)] * 3 + [("errored", 0)]


def report_other_metric(config: Mapping[str, Any]) -> None:
    """Report another metric, or text in its place, for the first points."""
    pt.report([{"skipped": 1}, {"accuracy": "0.5"}, {"accuracy": 0.5}][config["point"]])


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({}, "errored"),
        ({"allow_missing_metric": True}, "completed"),
        ({"allow_missing_metric": True, "scheduler": pt.ASHA(max_t=4, variant="stopping")}, "errored"),
    ],
    ids=["required", "allowed", "compared"],
)
def test_only_the_trials_that_report_no_number_for_the_metric_error(
    local_target: LocalTarget, options: Mapping[str, Any], lacking: str
) -> None:
    space = {"point": pt.grid_search([0, 1, 2])}
    results = search_by_metric(
        local_target, "accuracy", trainable=report_other_metric, space=space, num_samples=1, stop=None, **options
    )
    assert [str(trial.status) for trial in results.trials.values()] == [lacking, lacking, "completed"]
    assert results.best.metrics == {"accuracy": 0.5}


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_whose_stop_needs_a_metric_that_no_report_has_fails_and_continues_with_another(
    local_target: LocalTarget,
) -> None:
    results = results_of_failed(lambda: search_by_metric(local_target, "loss", stop={"stepp": 4}, num_samples=9))
    assert ends_of(results) == [("errored", 1)] * 3
    expected = "stop: expected metric 'stepp' in each report, found only ['loss']; did you mean 'step'?"
    assert all(expected in error for error in results.errors.values())
    resumed = pt.resume("e", target=local_target, trainable=Moody, stop={"step": 4}, num_samples=9, rerun_errored=True)
    assert ends_of(resumed) == [("completed", 4)] * 9


# Function trainables, and the stop conditions.


def test_a_function_reports_saves_and_goes_on_from_its_checkpoint(trouble: Trouble) -> None:
    trouble.trainable = "tests.trainables.troublesome:count"
    assert trouble.run(steps=13, isolation="thread").step == 13
    result = trouble.run(steps=22, isolation="thread")
    assert (result.step, result.metrics["count"], result.recomputed_steps) == (22, 22, 3)
    assert trouble.steps_of("loaded") == [10]


def test_what_a_function_returns_is_its_last_report_and_no_larger_budget_makes_it_go_on(trouble: Trouble) -> None:
    trouble.trainable = "tests.trainables.troublesome:count_and_return"
    trouble.config = {"score": 21}
    for _ in range(2):
        result = trouble.run(steps=None, isolation="thread")
        assert (result.status, result.metrics) == (Status.COMPLETED, {"score": 42, "attempt": 1})
        assert result.reason == "the trainable returned"


@pytest.mark.usefixtures("process_model")
def test_a_function_of_the_script_itself_is_taken_along(trouble: Trouble) -> None:
    factor = 3

    def scale(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"score": config["score"] * factor}

    trouble.trainable = scale
    trouble.config = {"score": 2}
    assert trouble.run(steps=None).metrics == {"score": 6}


def _is_seventh(metrics: Mapping[str, object]) -> bool:
    return metrics["count"] == 7


@pytest.mark.parametrize(
    ("stop", "step"),
    long_after(
        1,
        [
            ([{"step": 50}, MaxSteps(9) | Plateau("loss", std=0.02, reports=3)], 8),
            ({"count": 6, "step": 9}, 6),
            (_is_seventh, 7),
            ("tests.flows.searching.test_tune:_is_seventh", 7),
        ],
    ),
)
def test_a_trial_stops_when_its_criterion_is_met_and_saves_that_step(trouble: Trouble, stop: Any, step: int) -> None:
    result = trouble.run(steps=None, stop=stop, isolation="thread")
    assert (result.status, result.step) == (Status.COMPLETED, step)
    assert trouble.trial.checkpoints[-1].step == step


def test_a_trainable_may_say_itself_that_it_is_done(trouble: Trouble) -> None:
    trouble.config["done_at"] = 6
    for _ in range(2):
        result = trouble.run(steps=None, isolation="thread")
        assert (result.status, result.step, result.attempts) == (Status.COMPLETED, 6, 1)
    assert trouble.steps_of("begin") == list(range(1, 7))
