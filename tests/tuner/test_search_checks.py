"""When it is certain that no report has its metric, or that exploits change nothing; what a failed search says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from prefect_tune.attempt.search_link import StepReported
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Decided,
    Event,
    Finished,
    GaveUp,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.metrics import storable
from prefect_tune.core.reasons import Reason, format_error, make_reason
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.parameters.resume_compatibility import KEEPS_CONFIGURATIONS
from prefect_tune.results import Results
from prefect_tune.tuner.search_checks import ExplorationCheck, MetricCheck, failure_of
from tests.fakes.checkpoints import first_generation

LOG = logging.getLogger("a flow run")
T = "00000"
FIRST = "trial 00000 reported ['loss'], without the metric 'los'; the search ends if no report has it by the time"
SILENT = ", and all that train then have reported"
CERTAIN = make_reason("missing-metrics", metrics=["los"])
NO_ACCURACY = make_reason("missing-metrics", metrics=["accuracy"])


class Search:
    """A metric check in a search of one trial, with the events that it receives."""

    def __init__(self, *metrics: str) -> None:
        self.check = MetricCheck(Objective(metrics=metrics, modes=("min",) * len(metrics)), LOG)
        self.state: Experiment = after_event(
            nothing_yet(first_generation("e")), TrialAdded(trial=T, config={}, own_journal=True), 1
        )

    def reports(self, trial: str = T, **metrics: object) -> None:
        self.check.reported(StepReported(trial, StepReport(step=1, metrics=metrics), asks=False), self.state)

    def happens(self, *events: Event) -> None:
        for event in events:
            self.state = after_event(self.state, event, self.state.number + 1)
            self.check.applied(event, self.state)

    @property
    def why_end(self) -> Reason | None:
        return self.check.why_end(self.state)


def trial(steps: Sequence[Mapping[str, object]], *, name: str = T, attempt: int = 1) -> list[Event]:
    """The events of a trial that completes with these reports."""
    reports = [StepReport(step=number, metrics=metrics) for number, metrics in enumerate(steps, 1)]
    return [
        Started(trial=name, attempt=attempt, from_step=0),
        *(Reported(trial=name, report=report) for report in reports),
        Finished(trial=name, reason="the trainable returned"),
    ]


def test_a_metric_that_the_first_report_lacks_is_named_once_with_the_one_that_was_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = Search("los")
    for _ in range(3):
        search.reports(loss=1.0)
    assert caplog.messages == [f"{FIRST} a trial completes{SILENT}; did you mean 'loss'?"]
    assert not search.why_end


def test_it_is_certain_once_a_trial_has_completed() -> None:
    search = Search("los")
    *before, last = trial([{"loss": 1.0}])
    search.happens(*before)
    assert not search.why_end
    search.happens(last)
    assert search.why_end == CERTAIN


def test_one_trial_without_the_metric_and_without_a_similar_one_is_no_proof_but_a_second_one_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = Search("accuracy")
    search.happens(*trial([{"skipped": 1}]))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(
        f"the search ends if no report has it by the time two trials have completed{SILENT}"
    )
    *before, last = trial([{"skipped": 1}], name="00001")
    search.happens(TrialAdded(trial="00001", config={}, own_journal=True), *before)
    assert not search.why_end
    search.happens(last)
    assert search.why_end == NO_ACCURACY


def test_a_search_ends_only_once_the_trials_that_train_meanwhile_have_reported_too() -> None:
    search = Search("los")
    names = "00001", "00002"
    search.happens(*(TrialAdded(trial=name, config={}, own_journal=True) for name in names))
    search.happens(*(Started(trial=name, attempt=1, from_step=0) for name in names))
    search.happens(*trial([{"loss": 1.0}]))
    search.happens(TrialAdded(trial="00003", config={}, own_journal=True))  # it began later
    assert not search.why_end
    search.happens(AttemptEnded(trial="00001", cause=Cause.PREEMPTED, reason=""))
    assert not search.why_end
    search.reports("00002", loss=1.0)
    assert search.why_end == CERTAIN
    before = search.check.came_late
    search.reports("00003", los=1.0)
    assert (before, search.check.came_late) == (False, True)
    assert search.why_end == CERTAIN


def test_a_search_continues_if_a_trial_that_trains_meanwhile_reports_the_metric() -> None:
    search = Search("loss")
    other = "00001"
    search.happens(TrialAdded(trial=other, config={}, own_journal=True), Started(trial=other, attempt=1, from_step=0))
    search.happens(*trial([{"val_loss": 1.0}]))
    assert not search.why_end
    search.reports(other, loss=1.0)
    search.happens(Finished(trial=other, reason="the trainable returned"))
    assert not search.why_end


def test_a_trial_that_reports_something_else_ends_no_search_whose_next_trial_has_the_metric() -> None:
    search = Search("accuracy")
    search.happens(*trial([{"skipped": 1}]))
    others: Mapping[str, Mapping[str, object]] = {"00001": {"accuracy": 0.5}, "00002": {"skipped": 1}}
    for name, metrics in others.items():
        search.happens(TrialAdded(trial=name, config={}, own_journal=True), *trial([metrics], name=name))
    assert not search.why_end


def test_also_in_the_journal_of_a_trial_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    search = Search("los")
    search.happens(Absorbed(trial=T, number=1, events=tuple(trial([{"loss": 1.0}, {"loss": 0.5}]))))
    assert search.why_end == CERTAIN
    assert len(caplog.messages) == 1


def test_a_metric_of_every_nth_step_is_none_that_is_missing() -> None:
    search = Search("los")
    search.happens(*trial([{"loss": 1.0}, {"loss": 1.0, "los": 0.5}, {"loss": 1.0}]))
    assert not search.why_end


def test_a_trial_that_began_in_an_earlier_run_may_have_reported_it_there() -> None:
    search = Search("los")
    for event in (Started(trial=T, attempt=1, from_step=0), AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="")):
        search.state = after_event(search.state, event, 2)
    search.happens(*trial([{"loss": 1.0}], attempt=2))
    assert not search.why_end


def test_it_is_certain_when_the_scheduler_cannot_decide_for_lack_of_the_first_metric() -> None:
    search = Search("los", "size")
    search.reports(loss=1.0)
    assert search.check.why_end(search.state, T) == CERTAIN


def test_a_scheduler_that_cannot_decide_about_one_trial_without_a_similar_metric_is_no_proof_but_a_second_one_is() -> (
    None
):
    search = Search("accuracy")
    search.reports(skipped=1)
    for _ in range(2):  # of the same trial
        assert not search.check.why_end(search.state, T)
    assert search.check.why_end(search.state, "00001") == NO_ACCURACY


def test_a_scheduler_that_cannot_decide_about_one_trial_ends_no_search_that_knows_the_metric() -> None:
    search = Search("loss", "size")
    search.reports(loss=1.0)
    assert not search.check.why_end(search.state, T)


@pytest.mark.parametrize(("value", "kind"), [("1.0", "text"), ([1.0], "a list"), ({"train": 1.0}, "a dict")])
def test_a_metric_that_is_no_number_is_reported_as_such(
    value: object, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    Search("los").reports(los=value)
    assert caplog.messages == [f"trial 00000 reported the metric 'los' as {kind}, not as a number: {value!r}"]


def test_nothing_is_said_of_a_metric_that_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    search = Search("los")
    search.reports(los=float("nan"))
    search.reports(loss=1.0)
    assert caplog.messages == []


def test_each_trial_that_completes_without_a_metric_that_others_report_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = Search("loss")
    steps: Mapping[str, Sequence[Mapping[str, object]]] = {
        "00001": [],
        "00002": [{"loss": 1.0}, {"other": 1.0}],
        "00003": [{"other": 1.0}],
    }
    search.happens(*trial([{"other": 1.0}]))
    caplog.clear()
    for name, reports in steps.items():
        search.happens(TrialAdded(trial=name, config={}, own_journal=True), *trial(reports, name=name))
    lacking = (T, "00001", "00003")
    assert caplog.messages == [
        f"trial {each} completed and never reported the metric 'loss', which others have reported" for each in lacking
    ]


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


_BAD = make_reason("raised", type="ValueError", text="bad", traceback="Traceback (most recent call last):\n  ...")


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        (
            make_reason("max-failures", failures=1, limit=0, error=_BAD),
            "Traceback: prefect-tune show file:///runs e --trial 0",
        ),
        (make_reason("process-ended", exit_code=3), KEEPS_CONFIGURATIONS),
    ],
)
def test_it_refers_to_a_traceback_if_there_is_one(reason: Reason, ends: str) -> None:
    state = nothing_yet(first_generation("e"))
    events: list[Event] = [TrialAdded(trial="0", config={}), Started(trial="0", attempt=1, from_step=0)]
    for number, event in enumerate([*events, GaveUp(trial="0", cause=Cause.USER, reason=reason)], 1):
        state = after_event(state, event, number)
    error = failure_of(Results(state, LocalTarget(path="/runs"), None), None, MetricCheck(None, logging.getLogger()))
    assert error is not None
    assert str(error).endswith(ends)
    again = "run the search again: pass experiment='e' and rerun_errored=True; a retried"
    assert again in str(error), "no command finds the function of a script"


def test_a_metric_that_is_nan_is_said_without_retries_and_with_how_a_bad_trial_ends() -> None:
    with pytest.raises(BadMetric) as refused:
        storable({"loss": float("nan")}, "metrics of step 1")
    error = make_reason("raised", type="BadMetric", text=str(refused.value))
    assert format_error(make_reason("not-retried", cause="bad-metric", error=error)) == (
        "BadMetric: metrics of step 1: 'loss': found nan; training has diverged, or the metric divides by zero. For a "
        "trial that counts as a bad one: report a bad finite value, such as 1e9 for a loss, and return"
    )
