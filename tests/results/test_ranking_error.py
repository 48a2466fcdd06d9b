"""The error for a search without comparable trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.experiment import nothing_yet
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Cause, Event, GaveUp, Reported, Started, TrialAdded
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.results import why_none
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after, write_curves, write_search

LOSS = Objective(metrics=("loss",), modes=("min",))


def trial(*reports: Mapping[str, object], error: str = "") -> Trial:
    """A trial with these reports; with an error, it errored after them."""
    events: list[Event] = [TrialAdded(trial="00000", config={}), Started(trial="00000", attempt=1, from_step=0)]
    reported = [StepReport(step=step, metrics=metrics) for step, metrics in enumerate(reports, 1)]
    events += [Reported(trial="00000", report=each) for each in reported]
    events += [GaveUp(trial="00000", cause=Cause.USER, reason=error)] * bool(error)
    return after(nothing_yet(first_generation("e")), events).trial("00000")


def why(*trials: Trial, scope: str = "last", curves: Sequence[Mapping[str, object]] = ()) -> str:
    return why_none(trials, LOSS, scope, {"00000": curves})


def test_where_all_errored_the_first_error_is_said() -> None:
    broken = trial(error="KeyError: 'learning_rate'\nTraceback")
    said = "all 2 errored, the first with KeyError: 'learning_rate'; see results.errors"
    assert why(broken, trial(error="another")) == said
    assert why(broken, trial()) == "nothing was reported"


@pytest.mark.parametrize(
    ("value", "said"),
    [("0.5", "text, not as a number: '0.5'"), ([0.5], "a list, not as a number: [0.5]")],
)
def test_a_value_in_place_of_a_number_is_named_by_its_kind(value: object, said: str) -> None:
    assert why(trial({"size": 1, "loss": value})) == f"trial 00000 reported 'loss' as {said}"


def test_a_metric_that_has_metrics_within_is_said_to_be_a_dict() -> None:
    assert why(trial({"loss": {"train": 1}})) == "trial 00000 reported 'loss' as a dict, not as a number: {'train': 1}"


def test_without_a_metric_the_error_of_the_best_says_where_one_is_named(tmp_path: Path) -> None:
    write_search(tmp_path / "target", "e", {"00000": 0.5}, settings={})
    said = (
        r"its reports have \['loss'\]. Name one: results.best_trial\('loss'\), or pt.load_results\(..., metric='loss'\)"
    )
    with pytest.raises(pt.InvalidInput, match=said):
        _ = pt.load_results(tmp_path / "target", "e").best


def test_a_metric_that_only_the_last_reports_lack_is_found_by_another_scope() -> None:
    reports: list[Mapping[str, object]] = [{"loss": 1.0}, {"accuracy": 0.5}]
    said = "the last reports have ['accuracy']; scope='all' looks at all reports"
    assert why(trial(*reports), curves=reports) == said
    assert why(trial(*reports), scope="avg") == "their reports have ['accuracy']"


def no_best(folder: Path, **scope: Any) -> str:
    with pytest.raises(pt.InvalidInput) as error:
        pt.load_results(folder, "e").best_trial(**scope)
    return str(error.value)


def test_a_metric_that_some_reports_have_is_not_said_to_be_in_none(tmp_path: Path) -> None:
    write_curves(tmp_path / "a", "e", [[{"loss": 1.0}, {"accuracy": 0.5}], [{"accuracy": 0.25}]], ["loss"])
    assert "no last report of its 2 trials has loss as a number: the last reports have ['accuracy']; scope='all'" in (
        no_best(tmp_path / "a")
    )
    assert pt.load_results(tmp_path / "a", "e").best_trial(scope="all").trial == "00000"
    write_curves(tmp_path / "b", "e", [[{"loss": "0.5"}]], ["loss"])
    assert "no last report of its 1 trials has loss as a number: trial 00000 reported 'loss' as text" in (
        no_best(tmp_path / "b")
    )
    write_curves(tmp_path / "c", "e", [[{"loss": 1.0}], [{"accuracy": 0.5}]], ["loss", "accuracy"])
    assert "no last report of its 2 trials has loss, accuracy as a number" in no_best(tmp_path / "c")
    assert "no report of its 2 trials has loss, accuracy as a number" in no_best(tmp_path / "c", scope="avg")
    write_curves(tmp_path / "d", "e", [[{"size": 1}], []], ["loss"])
    for scope in ("last", "all"):
        assert "none of its 2 trials has reported loss: their reports have ['size']" in no_best(
            tmp_path / "d", scope=scope
        )


def test_whoever_asks_for_another_metric_hears_which_there_are(tmp_path: Path) -> None:
    write_search(tmp_path / "target", "e", {"00000": 0.5})
    with pytest.raises(pt.InvalidInput, match=r"none of its 1 trials has reported los: their reports have \['loss'\]"):
        pt.load_results(tmp_path / "target", "e", metric="los").best_trial()


def test_a_nested_metric_is_named_as_it_is_written_and_the_similar_one_is_suggested() -> None:
    reports: Mapping[str, object] = {"eval": {"size": 3, "lost": 0.5}}
    assert (
        why(trial(reports), scope="avg") == "their reports have ['eval/lost', 'eval/size']; did you mean 'eval/lost'?"
    )
