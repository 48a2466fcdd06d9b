"""A search fails as soon as it is certain that no report has its metric, and continues with the right metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.reasons import make_reason
from prefect_tune.integrations.optuna import OptunaSearch
from tests.fakes.searches.failed_searches import results_of_failed
from tests.long_cases import long_after
from tests.trainables.moody import Moody


def train_forever(config: Mapping[str, Any]) -> None:
    while True:
        pt.report({"loss": config["x"]})


def named(config: Mapping[str, Any]) -> None:
    for step in range(9):
        pt.report({config["name"]: step})


def searched(target: LocalTarget, metric: str, **options: Any) -> pt.Results:
    common: Mapping[str, Any] = {"experiment": "e", "isolation": "thread", "max_concurrent_trials": 1, "num_samples": 3}
    more = {"trainable": Moody, "space": {"x": pt.uniform(0, 1)}, "stop": {"step": 4}, **common, **options}
    found: pt.Results = pt.tune(target=target, metric=metric, **more)
    return found


def statuses(results: pt.Results) -> list[tuple[str, int, int]]:
    return [(str(each.status), each.step, each.attempt) for each in results.trials.values()]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    ("options", "ended", "continued"),
    long_after(
        1,
        [
            ({}, ("completed", 4, 1), 1),
            ({"search": OptunaSearch(sampler="TPESampler")}, ("completed", 4, 1), 1),
            (
                {"scheduler": pt.ASHA(max_t=4, grace_period=1, reduction_factor=2, variant="stopping")},
                ("interrupted", 1, 1),
                2,
            ),
            ({"scheduler": pt.PBT(perturbation_interval=2, hyperparam_mutations={"x": pt.uniform(0, 1)})}, None, 2),
        ],
    ),
    ids=["random", "TPE", "ASHA", "PBT"],
)
def test_a_search_with_a_misspelt_metric_fails_at_once_and_continues_with_the_right_one(
    local_target: LocalTarget, options: Any, ended: tuple[str, int, int] | None, continued: int
) -> None:
    with pytest.raises(pt.SearchFailed) as failed:
        searched(local_target, "los", **options)
    assert str(failed.value) == (
        "experiment 'e': expected the metric 'los', found 'loss' in the reports; did you mean 'loss'? Run the search "
        "again under the same experiment name with metric='loss': completed trials are kept, the others continue from "
        "their checkpoints"
    )
    results = failed.value.results
    assert isinstance(results, pt.Results)
    assert statuses(results) == [ended or ("interrupted", 2, 1)]
    right = searched(local_target, "loss", **options)
    assert len(right.trials) == 3
    assert right.trials["00000"].attempt == continued
    assert right.best.step == 4
    assert not right.errors


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_that_is_complete_fails_too_until_its_metric_is_right(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the second run has nothing to train
        results_of_failed(lambda: searched(local_target, "los", num_samples=1))
    assert caplog.text.count("trial 00000 begins") == 1
    assert searched(local_target, "loss", num_samples=1).best.attempt == 1


def rarely(config: Mapping[str, Any]) -> None:
    """Report the metric at the second of three steps."""
    for step in range(3):
        pt.report({"loss": config["x"], **({"rare": config["x"]} if step == 1 else {})})


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_whose_trials_report_the_metric_rarely_completes(local_target: LocalTarget) -> None:
    common: Mapping[str, Any] = {"target": local_target, "experiment": "e", "metric": "rare", "isolation": "thread"}
    for samples in (2, 2, 3):  # the second run has nothing to train
        found = pt.tune(rarely, {"x": pt.uniform(0, 1)}, num_samples=samples, max_concurrent_trials=1, **common)
    assert [str(each.status) for each in found.trials.values()] == ["completed"] * 3


def skipping(config: Mapping[str, Any]) -> None:
    """Report another metric for the first point."""
    pt.report({"accuracy": 0.5} if config["point"] else {"skipped": 1})


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    ("scheduler", "first"),
    [(None, "completed"), (pt.ASHA(max_t=4, variant="stopping"), "errored")],
    ids=["none", "ASHA"],
)
def test_a_search_whose_first_trial_reports_something_else_goes_on(
    local_target: LocalTarget, scheduler: pt.ASHA | None, first: str
) -> None:
    space, common = {"point": pt.grid_search([0, 1, 2])}, {"isolation": "thread", "max_concurrent_trials": 1}
    asked: Mapping[str, Any] = {"target": local_target, "metric": "accuracy", "scheduler": scheduler, **common}
    found = pt.tune(skipping, space, experiment="e", num_samples=1, **asked)
    assert [str(each.status) for each in found.trials.values()] == [first, "completed", "completed"]
    assert found.best.metrics == {"accuracy": 0.5}


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("trainable", [Moody, train_forever])
def test_a_search_whose_stop_needs_a_metric_that_no_report_has_fails_at_the_first_report_and_continues_with_another(
    local_target: LocalTarget, isolation: str, trainable: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"isolation": isolation, "failures": pt.FailurePolicy(max_failures=9), "trainable": trainable}
    with pytest.raises(pt.SearchFailed) as failed:
        searched(local_target, "loss", stop={"stepp": 4}, **options)
    error = "stop: expected metric 'stepp' in each report, found only ['loss']; did you mean 'step'?"
    assert str(failed.value) == (
        f"experiment 'e': trial 00000 errored at step 1: {error} Run the search again under the same experiment name "
        "with another stop: completed trials are kept, the others continue from their checkpoints"
    )
    assert f"trial 00000 errored at step 1: {error}" in caplog.messages
    results = failed.value.results
    assert isinstance(results, pt.Results)
    assert statuses(results) == [("interrupted", 1, 1)]
    assert results.experiment.ends == make_reason("missing-stop-metrics", metrics=["stepp"])
    right = pt.resume("e", target=local_target, trainable=trainable, stop={"step": 4})
    assert statuses(right) == [("completed", 4, 2), ("completed", 4, 1), ("completed", 4, 1)]


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_stop_whose_metric_some_trials_report_fails_only_those_that_do_not(local_target: LocalTarget) -> None:
    space = {"name": pt.grid_search(["loss", "other", "loss"])}
    results = searched(local_target, "loss", trainable=named, space=space, num_samples=1, stop={"loss": 2})
    assert [str(each.status) for each in results.trials.values()] == ["completed", "errored", "completed"]
    assert results.errors["00001"].startswith("bad-stop is not retried: stop: expected metric 'loss' in each report")
