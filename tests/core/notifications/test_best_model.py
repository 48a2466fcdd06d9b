"""The best model so far, and when a new best is announced."""

from __future__ import annotations

from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Committed,
    Event,
    Finished,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.models import StepReport
from prefect_tune.core.notifications.prefect_events import BestSoFar, best_checkpoints
from prefect_tune.core.search.objective import objective_of
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after

LOSS = objective_of("loss", "min")


def trained(state: Experiment, trial: str, *losses: float, saved: bool = True, ends: bool = False) -> Experiment:
    """A trial that reports and saves these losses."""
    events: list[Event] = [TrialAdded(trial=trial, config={}), Started(trial=trial, attempt=1, from_step=0)]
    for step, loss in enumerate(losses, 1):
        metrics = {"other": 1, "loss": loss}
        events.append(Reported(trial=trial, report=StepReport(step=step, metrics=metrics)))
        if saved:
            events.append(Committed(trial=trial, checkpoint=CheckpointRef(step=step, sequence=step, metrics=metrics)))
    events += [Finished(trial=trial, reason="done")] if ends else []
    return after(state, events)


def test_a_better_checkpoint_is_news_with_its_manifest_and_an_equal_one_is_none() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5)
    best = BestSoFar(LOSS, nothing_yet(first_generation("first")))
    found = best.committed(state.trial("00000"))
    assert found is not None
    assert list(found.metrics) == ["loss", "other"]  # the objective's metric comes first
    assert (found.trial, found.step, best.trial) == ("00000", 1, "00000")
    assert found.manifest == "first/1/trials/00000/checkpoints/0000000001-0000000001/manifest.json"
    assert best.committed(state.trial("00000")) is None


def test_a_trial_that_ends_better_than_anything_that_was_saved_is_news_without_a_manifest() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, saved=False, ends=True)
    best = BestSoFar(LOSS, nothing_yet(first_generation("first")))
    found = best.ended(state.trial("00000"))
    assert found is not None
    assert found.manifest is None
    assert best.ended(state.trial("00000")) is None
    assert best.committed(state.trial("00000")) is None  # no checkpoint


def test_of_several_metrics_the_next_decides_between_equals() -> None:
    def committed(other: float) -> object:
        metrics = {"loss": 0.5, "other": other}
        checkpoint = CheckpointRef(step=2, sequence=2, metrics=metrics)
        better = after(state, [Committed(trial="00000", checkpoint=checkpoint)])
        return BestSoFar(objective_of(["loss", "other"], "min"), state).committed(better.trial("00000"))

    state = trained(nothing_yet(first_generation("first")), "00000", 0.5)
    assert committed(1.0) is None
    assert committed(0.5) is not None


def test_what_was_there_before_is_no_news_and_what_is_worse_neither() -> None:
    earlier = trained(nothing_yet(first_generation("first")), "00000", 0.5, 0.1, 0.3)
    earlier = trained(earlier, "00001", 0.05, saved=False, ends=True)
    state = trained(trained(earlier, "00002", 0.07), "00003", 0.04)
    best = BestSoFar(LOSS, earlier)
    assert best.trial == "00001"
    assert best.committed(state.trial("00002")) is None
    assert best.committed(state.trial("00003")) is not None


def test_without_an_objective_and_without_the_metric_nothing_is_better() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, ends=True)
    assert BestSoFar(None, state).ended(state.trial("00000")) is None
    assert BestSoFar(None, state).trial is None
    elsewhere = BestSoFar(objective_of("accuracy", "max"), state)
    assert elsewhere.committed(state.trial("00000")) is None


def test_the_best_checkpoint_is_of_all_commits_and_of_equal_ones_each_trials_first() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, 0.1, 0.1, 0.3)
    state = trained(trained(state, "00001", 0.2, ends=True), "00002", 0.4, 0.1)
    assert best_checkpoints(state, LOSS) == {"00000": 2, "00002": 2}
    assert best_checkpoints(state, None) == best_checkpoints(state, objective_of("accuracy", "max")) == {}
