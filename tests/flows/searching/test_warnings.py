"""Warnings and errors of a search that would otherwise complete without a useful result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.journal_events import Cause, DecisionMade, Event, ExperimentConfigured, TrialAdded, TrialErrored
from prefect_tune.core.values import StepReport
from prefect_tune.parameters.plan_checks import (
    RETRY_KEEPS_CONFIGURATION,
    require_compatible_settings,
    warn_of_constant_space,
    warn_of_errored_trials,
    warn_of_space_change,
    warn_of_too_few_samples,
    warn_of_unusual_mode,
    warn_of_unusual_stop_limits,
)
from prefect_tune.parameters.search_plan import SearchPlan
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events
from tests.fakes.searches.failed_searches import results_of_failed
from tests.trainables.moody import Moody, train

LOG = logging.getLogger("a flow run")
SPACE: Mapping[str, Any] = {"x": pt.uniform(0, 1)}


def make_plan(trainable: Any = train, **options: Any) -> SearchPlan:
    return SearchPlan(trainable=trainable, target="./nowhere", **{"space": SPACE, "num_samples": 3, **options})


def make_experiment(plan: SearchPlan, *events: Event) -> Experiment:
    """An experiment of three trials with this plan."""
    name = plan.trainable.__name__
    added = [
        TrialAdded(trial=f"0000{n}", config={}, fingerprint={"trainable": name}, proposed_by_search=True)
        for n in range(3)
    ]
    return apply_events(
        make_empty_experiment(first_generation("e")), [ExperimentConfigured(settings=plan.settings), *added, *events]
    )


def error_events(*trials: str) -> list[Event]:
    return [TrialErrored(trial=trial, cause=Cause.TRAINABLE, reason="KeyError: 'lr'") for trial in trials]


# ---------------------------------------------------------------------------------------------------- starting


def test_rays_name_of_the_step_is_a_warning_before_any_trial_begins(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unusual_stop_limits(make_plan(stop={"step": 5}).stopper, None, LOG)
    assert caplog.messages == []
    warn_of_unusual_stop_limits(make_plan(stop={"training_iteration": 5}).stopper, None, LOG)
    (message,) = caplog.messages
    assert message.endswith("fails. The equivalent of Ray Tune's training_iteration is 'step'")


@pytest.mark.parametrize(
    ("metric", "mode", "expected"),
    [
        ("accuracy", None, "Did you mean mode='max'? If not, pass mode='min' to silence this warning"),
        ("accuracy", "min", None),
        ("loss", None, None),
        ("loss", "max", "Did you mean mode='min'? If not, pass mode=['max'] to silence this warning"),
        ("loss", ["max"], None),
        (["loss", "f1"], None, "f1: the name suggests that large values are good, but the search prefers the smallest"),
        (["loss", "f1"], "max", "loss: the name suggests that small values are good, but the search prefers the large"),
        (["loss", "f1"], ["max", "min"], None),
        (None, None, None),
    ],
)
def test_a_metric_whose_name_says_the_other_direction_is_a_warning_unless_the_mode_is_given(
    metric: str | list[str] | None, mode: Any, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unusual_mode(make_plan(metric=metric, mode=mode), LOG)
    assert [expected in message if expected else message for message in caplog.messages] == [True] * (
        expected is not None
    )


def test_a_given_mode_that_is_the_default_changes_no_search() -> None:
    report = StepReport(step=1, metrics={"accuracy": 0.5})
    decision = DecisionMade(trial="00000", report=report, decision=pt.Continue())
    state = make_experiment(make_plan(metric="accuracy"), decision)
    require_compatible_settings(state, make_plan(metric="accuracy", mode="min").settings)
    require_compatible_settings(state, make_plan(metric=["accuracy"], mode=["min"]).settings)
    with pytest.raises(pt.InvalidInput, match="begun with 'min', and this run passes 'max'"):
        require_compatible_settings(state, make_plan(metric="accuracy", mode="max").settings)


# ---------------------------------------------------------------------------------------------------- resuming


def test_trials_that_errored_and_are_not_tried_again_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = make_experiment(make_plan(), *error_events("00000", "00002"))
    warn_of_errored_trials(state, make_plan(rerun_errored=True), LOG)
    warn_of_errored_trials(make_experiment(make_plan()), make_plan(), LOG)
    assert caplog.messages == []
    warn_of_errored_trials(state, make_plan(), LOG)
    assert caplog.messages[0].startswith("2 trials that errored in an earlier run are not retried: to retry ")
    assert caplog.messages[0].endswith(RETRY_KEEPS_CONFIGURATION)
    caplog.clear()
    all_errored = make_experiment(make_plan(), *error_events("00000", "00001", "00002"))
    warn_of_errored_trials(all_errored, make_plan(), LOG)
    assert caplog.messages == [], "the error of the search says it"
    warn_of_errored_trials(all_errored, make_plan(num_samples=4), LOG)
    assert caplog.messages[0].startswith("3 trials that errored in an earlier run are not retried: to retry ")


def test_fewer_samples_than_trials_are_reported_as_of_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    state = make_experiment(make_plan())
    for count in (None, 3, 4):
        warn_of_too_few_samples(state, make_plan(num_samples=count), LOG)
    assert caplog.messages == []
    warn_of_too_few_samples(state, make_plan(num_samples=2), LOG)
    (message,) = caplog.messages
    assert message.startswith(
        "num_samples=2 has no effect: it is the total (2 trials), and the experiment already has 3."
    )


def test_another_space_under_the_same_name_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = make_experiment(make_plan())
    warn_of_space_change(state, make_plan(), LOG)
    warn_of_space_change(state, make_plan(space={"x": {"uniform": [0, 1]}}), LOG)
    warn_of_space_change(make_empty_experiment(first_generation("e")), make_plan(), LOG)
    assert caplog.messages == []
    other = {"x": pt.uniform(0, 2)}
    warn_of_space_change(state, make_plan(space=other), LOG)
    warn_of_space_change(state, make_plan(space=other, num_samples=4), LOG)
    warning = "the search space has changed; 3 earlier trials were drawn from the old one"
    assert caplog.messages == [
        f"{warning}, and the search proposes only 3 in total: raise num_samples to draw from the new space",
        warning,
    ]


def test_a_space_that_no_journal_holds_is_compared_with_none(caplog: pytest.LogCaptureFixture) -> None:
    in_code = {"x": pt.sample_from(lambda _config: 1)}
    warn_of_space_change(make_experiment(make_plan(space=in_code)), make_plan(), LOG)
    warn_of_space_change(make_experiment(make_plan()), make_plan(space=in_code), LOG)
    assert caplog.messages == []


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_that_trains_nothing_says_why(local_target: LocalTarget, caplog: pytest.LogCaptureFixture) -> None:
    common: dict[str, Any] = {"target": local_target, "experiment": "e", "metric": "loss", "isolation": "thread"}
    broken = results_of_failed(lambda: pt.tune(Moody, {"fails": "raise"}, num_samples=1, **common))
    assert list(broken.errors) == ["00000"]
    assert "not retried" not in caplog.text
    with pytest.raises(pt.SearchFailed, match=r"^experiment 'e': 1 errored trial was not retried: to retry "):
        pt.tune(Moody, {"fails": "raise"}, num_samples=1, **common)
    assert "not retried" not in caplog.text, "the error says it"
    results_of_failed(lambda: pt.tune(Moody, {"fails": "not"}, num_samples=1, **common))
    warning = (
        "the search space has changed; 1 earlier trial was drawn from the old one, and the search proposes only 1 in"
    )
    assert warning in caplog.text
    (*_, last) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert last.startswith("e: 1 errored of 1 after ")


# ---------------------------------------------------------------------------------------------------- the space


@pytest.mark.parametrize(
    ("space", "count", "warning"),
    [
        ({}, None, "all 10 trials train the same configuration. To train it once: num_samples=1. Otherwise: draw"),
        ({"x": 1}, 3, "all 3 trials train the same configuration. To train it once: num_samples=1. Otherwise: draw"),
        ({"x": 1}, -1, "all trials train the same configuration"),
        (
            {"x": 1, "model": {"depth": (1, 2)}},
            3,
            "model/depth=[1, 2] is one value; did you mean pt.choice([1, 2]) or pt.grid_search([1, 2])?",
        ),
        ({"x": [1, 2]}, 1, ""),
        ({"x": [1, 2], "y": pt.uniform(0, 1)}, 3, ""),
        ({"x": [1, pt.choice([1, 2])]}, 3, ""),
    ],
)
def test_a_space_of_constants_is_reported_where_several_trials_would_train_it(
    space: Mapping[str, object], count: int | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_constant_space(make_plan(space=space, num_samples=count), LOG)
    assert len(caplog.messages) == bool(warning)
    assert warning in caplog.text


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_of_constants_says_so_once(local_target: LocalTarget, caplog: pytest.LogCaptureFixture) -> None:
    pt.tune(train, {"x": 1}, target=local_target, experiment="e", num_samples=2, isolation="thread")
    assert caplog.text.count("the space has no distribution, so all 2 trials train the same configuration") == 1
    assert caplog.text.count("no metric: trials are not compared") == 1


# -------------------------------------------------------------------------------------------------- no checkpoint


def train_without_saving(_config: Mapping[str, Any]) -> None:
    """Report two steps and save none, until a scheduler has it pause."""
    for _ in range(2):
        pt.report({"loss": 1.0})


@pytest.mark.usefixtures("no_prefect_server")
def test_a_trial_that_never_saved_says_that_it_goes_on_from_nothing(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    common: dict[str, Any] = {"target": local_target, "experiment": "e", "metric": "loss", "isolation": "thread"}
    scheduler = pt.ASHA(max_t=2, grace_period=1, reduction_factor=2, variant="promotion")
    pt.tune(train_without_saving, {}, num_samples=2, scheduler=scheduler, max_concurrent_trials=1, **common)
    warning = "without a committed checkpoint, 1 step is trained again; save, or use ASHA(variant='stopping')"
    assert warning in caplog.text
