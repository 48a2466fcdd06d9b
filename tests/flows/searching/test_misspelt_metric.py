"""A report without the searched metric, or without that of a stop criterion, is an error of its trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from tests.fakes.searches.failed_searches import results_of_failed
from tests.trainables.moody import Moody


def named(config: Mapping[str, Any]) -> None:
    for step in range(9):
        pt.report({config["name"]: step})


def searched(target: LocalTarget, metric: str, **options: Any) -> pt.Results:
    common: Mapping[str, Any] = {"experiment": "e", "isolation": "thread", "max_concurrent_trials": 1, "num_samples": 3}
    more = {"trainable": Moody, "space": {"x": pt.uniform(0, 1)}, "stop": {"step": 4}, **common, **options}
    found: pt.Results = pt.tune(target=target, metric=metric, **more)
    return found


def statuses(results: pt.Results) -> list[tuple[str, int]]:
    return [(str(trial.status), trial.step) for trial in results.trials.values()]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("isolation", [pytest.param("process", marks=pytest.mark.long), "thread"])
def test_a_search_with_a_misspelt_metric_fails_with_the_name_that_was_meant_and_continues_with_it(
    local_target: LocalTarget, isolation: str
) -> None:
    options: Any = {"isolation": isolation, "failures": pt.FailurePolicy(max_failures=9)}
    with pytest.raises(pt.SearchFailed) as failed:
        searched(local_target, "los", num_samples=9, **options)
    assert (
        "3 of 3 trials errored, all with: BadMetric: metrics of step 1: expected a number for metric 'los', found "
        "None; the report has ['loss']; did you mean 'loss'? If reports may lack it, pass allow_missing_metric=True "
        "(--allow-missing-metric)"
    ) in str(failed.value)
    assert statuses(failed.value.results) == [("errored", 0)] * 3
    right = searched(local_target, "loss", rerun_errored=True, **options)
    assert statuses(right) == [("completed", 4)] * 3
    assert right.best.step == 4


def rarely(config: Mapping[str, Any]) -> None:
    """Report the metric at the second of three steps."""
    for step in range(3):
        pt.report({"loss": config["x"], **({"rare": config["x"]} if step == 1 else {})})


@pytest.mark.usefixtures("no_prefect_server")
def test_reports_may_lack_the_metric_if_that_is_allowed(local_target: LocalTarget) -> None:
    allowed = searched(local_target, "rare", trainable=rarely, stop=None, allow_missing_metric=True)
    assert statuses(allowed) == [("completed", 3)] * 3
    assert allowed.best_trial(scope="all").metrics["loss"] == min(
        trial.config["x"] for trial in allowed.trials.values()
    )
    refused = pt.resume("e", target=local_target, trainable=rarely, num_samples=4, allow_missing_metric=False)
    assert statuses(refused) == [("completed", 3)] * 3 + [("errored", 0)]


def skipping(config: Mapping[str, Any]) -> None:
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
    found = searched(local_target, "accuracy", trainable=skipping, space=space, num_samples=1, stop=None, **options)
    assert [str(trial.status) for trial in found.trials.values()] == [lacking, lacking, "completed"]
    assert found.best.metrics == {"accuracy": 0.5}


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_whose_stop_needs_a_metric_that_no_report_has_fails_and_continues_with_another(
    local_target: LocalTarget,
) -> None:
    wrong = lambda: searched(local_target, "loss", stop={"stepp": 4}, num_samples=9)  # noqa: E731 - passed on
    results = results_of_failed(wrong)
    assert statuses(results) == [("errored", 1)] * 3
    error = "stop: expected metric 'stepp' in each report, found only ['loss']; did you mean 'step'?"
    assert all(error in why for why in results.errors.values())
    right = pt.resume("e", target=local_target, trainable=Moody, stop={"step": 4}, num_samples=9, rerun_errored=True)
    assert statuses(right) == [("completed", 4)] * 9


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_stop_whose_metric_some_trials_report_fails_only_those_that_do_not(local_target: LocalTarget) -> None:
    space = {"name": pt.grid_search(["loss", "other", "loss"])}
    options: Any = {"num_samples": 1, "stop": {"loss": 2}, "allow_missing_metric": True}
    results = searched(local_target, "loss", trainable=named, space=space, **options)
    assert [str(each.status) for each in results.trials.values()] == ["completed", "errored", "completed"]
    assert results.errors["00001"].startswith("bad-stop is not retried: stop: expected metric 'loss' in each report")
