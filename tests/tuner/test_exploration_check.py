"""When a search warns that its exploits change nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from prefect_tune.attempt.search_link import StepReported
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.journal_events import Decided, TrialAdded
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.tuner.search_checks import ExplorationCheck
from tests.fakes.checkpoints import first_generation

SAID = "trial b has exploited trial a, with another value of lr, and reports the same loss as that trial"
CURVE = {6: 0.5, 7: 0.4, 8: 0.3}


class Population:
    """A check in a search of three trials."""

    def __init__(self) -> None:
        self.check = ExplorationCheck(Objective(metrics=("loss",), modes=("min",)), logging.getLogger("a flow run"))
        self.state: Experiment = nothing_yet(first_generation("e"))
        for number, trial in enumerate("abc", 1):
            self.state = after_event(self.state, TrialAdded(trial=trial, config={"lr": 0.1}, own_journal=True), number)

    def exploits(self, trial: str, source: str, lr: float = 0.2) -> None:
        exploit = Exploit(source=source, config={"lr": lr}, reason="behind")
        report = StepReport(step=5, metrics={"loss": 1.0})
        self.check.applied(Decided(trial=trial, report=report, decision=exploit), self.state)

    def reports(self, trial: str, losses: Mapping[int, float]) -> None:
        for step, loss in losses.items():
            report = StepReport(step=step, metrics={"loss": loss, "seconds": hash(trial)})
            self.check.reported(StepReported(trial, report, asks=False), self.state)


def test_an_exploit_without_effect_is_a_warning_once_whichever_trial_reports_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        caplog.clear()
        search = Population()
        search.exploits("b", "a")
        search.reports(first, CURVE)
        assert caplog.messages == []
        search.reports(second, CURVE)
        search.exploits("c", "a")
        search.reports("a", {9: 0.2, 10: 0.1, 11: 0.0})
        search.reports("c", {9: 0.2, 10: 0.1, 11: 0.0})
        (said,) = caplog.messages
        assert said.startswith(SAID)


def test_the_equal_reports_of_several_exploits_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    search = Population()
    for step, loss in CURVE.items():  # each exploits again after one step
        search.exploits("b", "a")
        search.reports("a", {step: loss})
        search.reports("b", {step: loss})
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("lr", "of_source", "own"),
    [
        (0.2, CURVE, {6: 0.5, 7: 0.41, 8: 0.3}),  # it has an effect
        (0.1, CURVE, CURVE),  # the configuration is the source's
        (0.2, {6: 0.5, 7: 0.5, 8: 0.5}, {6: 0.5, 7: 0.5, 8: 0.5}),  # a metric that rests
        (0.2, {6: 0.5, 7: 0.4}, CURVE),  # too few
        (0.2, CURVE, {9: 0.5, 10: 0.4, 11: 0.3}),  # other steps
    ],
)
def test_what_may_be_a_coincidence_is_no_warning(
    lr: float, of_source: Mapping[int, float], own: Mapping[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    search = Population()
    search.exploits("b", "a", lr)
    search.reports("a", of_source)
    search.reports("b", own)
    assert caplog.messages == []


def test_a_source_that_exploits_another_trial_is_not_compared_any_more(caplog: pytest.LogCaptureFixture) -> None:
    search = Population()
    search.exploits("b", "a")
    search.exploits("a", "c", 0.1)
    search.reports("a", CURVE)
    search.reports("b", CURVE)
    assert caplog.messages == []
