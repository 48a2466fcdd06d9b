"""Which journal events become Prefect events, and their contents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events.experiment_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Event,
    Finished,
    GaveUp,
    Opened,
    Owner,
    Paused,
    Quarantined,
    Reported,
    Requeued,
    Resumed,
    Started,
    TrialAdded,
)
from prefect_tune.core.models import StepReport
from prefect_tune.core.notifications.prefect_events import (
    LifecycleEvent,
    TrialLifecycleEvent,
    few,
    lifecycle_events_of,
    short,
)
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from tests.fakes.searches.experiments import after

T = "00000"
ADDED = TrialAdded(trial=T, config={}, apart=True)
STARTED = Started(trial=T, attempt=1, from_step=0)
LONG = "x" * 1000


def reported(step: int, **metrics: object) -> Reported:
    return Reported(trial=T, report=StepReport(step=step, metrics=metrics))


def committed(step: int, sequence: int, **options: Any) -> Committed:
    checkpoint = CheckpointRef(step=step, sequence=sequence, metrics={"loss": 0.5}, size_bytes=7)
    return Committed(trial=T, checkpoint=checkpoint, **options)


def lifecycle_events_in(*events: Event) -> list[TrialLifecycleEvent]:
    """All lifecycle events of these journal events, one entry each."""
    return [news for each in walk(*events) for news in each]


def walk(*events: Event) -> list[list[TrialLifecycleEvent]]:
    state: Experiment = nothing_yet("first")
    found = []
    for event in events:
        before, state = state, after(state, [event])
        name = getattr(event, "trial", T)
        found.append(list(lifecycle_events_of(event, "first", before.trials.get(name), state.trial(name))))
    return found


def names(*events: Event) -> list[str]:
    return [each.name.removeprefix("prefect-tune.") for each in lifecycle_events_in(*events)]


def test_a_trial_that_starts_trains_and_finishes_is_news_at_its_ends_and_at_its_commits() -> None:
    trained = [reported(1, loss=1.0), reported(2, loss=0.5), committed(2, 3)]
    started, saved, finished = lifecycle_events_in(ADDED, STARTED, *trained, Finished(trial=T, reason="done"))
    assert started.payload() == {"version": 1, "trial": T, "status": "running", "attempt": 1}
    assert saved.payload() == {
        "version": 1,
        "trial": T,
        "attempt": 1,
        "step": 2,
        "sequence": 3,
        "metrics": {"loss": 0.5},
        "size_bytes": 7,
        "manifest": "first/trials/00000/checkpoints/0000000002-0000000003/manifest.json",
        "parent": None,
    }
    assert finished.payload() == {
        "version": 1,
        "trial": T,
        "status": "completed",
        "step": 2,
        "metrics": {"loss": 0.5},
        "attempts": 1,
        "wasted_steps": 0,
        "wasted_at_least": False,
        "reason": "done",
    }


def test_a_commit_names_the_one_before_it_also_where_that_is_retired_in_the_same_entry() -> None:
    saves = [reported(1), committed(1, 3), reported(2), committed(2, 5, retires=(3,))]
    first, second = lifecycle_events_in(ADDED, STARTED, *saves)[1:]
    assert (first.payload()["parent"], second.payload()["parent"]) == (None, "0000000001-0000000003")


def test_an_attempt_that_dies_and_the_next_one_from_a_checkpoint_are_news() -> None:
    died = AttemptEnded(trial=T, cause=Cause.MACHINE, message=LONG)
    again = Started(trial=T, attempt=2, from_step=1, from_sequence=3)
    ended, restored = lifecycle_events_in(ADDED, STARTED, reported(1), committed(1, 3), died, again)[2:]
    known = {"version": 1, "trial": T, "status": "interrupted", "attempt": 1, "step": 1, "cause": "machine"}
    assert ended.payload() == {**known, "message": short(LONG)}
    assert restored.payload() == {"version": 1, "trial": T, "status": "running", "attempt": 2, "step": 1}


def test_what_the_search_and_the_trial_both_say_is_news_once() -> None:
    pause, end = Paused(trial=T, reason="others"), Finished(trial=T, reason="enough")
    twice = Absorbed(trial=T, number=1, events=(STARTED, reported(1), Paused(trial=T, reason="others")))
    assert names(ADDED, twice, Resumed(trial=T), Resumed(trial=T)) == ["trial.started", "trial.paused", "trial.resumed"]
    assert names(
        ADDED, STARTED, pause, end, Requeued(trial=T, reason="more"), Requeued(trial=T, reason="continues")
    ) == [
        "trial.started",
        "trial.paused",
        "trial.finished",
        "trial.requeued",
    ]


def test_events_that_cannot_follow_each_other_in_one_journal_are_news_once_all_the_same() -> None:
    state = after(nothing_yet("first"), [ADDED, STARTED, Finished(trial=T, reason="enough")])
    finished = state.trial(T)
    errored = after(state, [GaveUp(trial=T, cause=Cause.USER, message="no")]).trial(T)
    paused = finished.model_copy(update={"phase": Phase.PAUSED})
    for event, trial in [
        (Finished(trial=T, reason="again"), finished),
        (GaveUp(trial=T, cause=Cause.USER, message="no"), errored),
        (Paused(trial=T, reason="again"), paused),
    ]:
        assert list(lifecycle_events_of(event, "first", trial, trial)) == []


def test_a_trial_that_is_given_up_says_why() -> None:
    (_, errored) = lifecycle_events_in(ADDED, STARTED, GaveUp(trial=T, cause=Cause.USER, message="division by zero"))
    assert (errored.name, errored.payload()["cause"]) == ("prefect-tune.trial.errored", "user")
    assert errored.is_urgent


@pytest.mark.parametrize(("kills", "name"), [(False, "checkpoint.corrupt"), (True, "checkpoint.quarantined")])
def test_a_checkpoint_that_is_put_aside_is_news_with_its_step(kills: bool, name: str) -> None:
    aside = Quarantined(trial=T, sequence=3, reason="sha differs", kills=kills)
    assert names(ADDED, STARTED, reported(1), committed(1, 3), aside)[-1] == name
    assert lifecycle_events_in(ADDED, STARTED, reported(1), committed(1, 3), aside)[-1].payload()["step"] == 1
    assert lifecycle_events_in(ADDED, STARTED, aside)[-1].payload()["step"] is None


def test_a_checkpoint_of_a_trial_that_nobody_knew_is_news_too() -> None:
    state = after(nothing_yet("first"), [ADDED, STARTED, reported(1), committed(1, 3)])
    (saved,) = lifecycle_events_of(committed(1, 3), "first", None, state.trial(T))
    (aside,) = lifecycle_events_of(Quarantined(trial=T, sequence=3, reason="bad"), "first", None, state.trial(T))
    assert (saved.payload()["parent"], aside.payload()["step"]) == (None, None)


def test_a_clone_says_whose_checkpoint_it_is() -> None:
    source = CheckpointKey(trial=TrialKey(experiment="first", trial="00007"), step=4, sequence=2)
    clone = Cloned(
        trial=T, checkpoint=CheckpointRef(step=4, sequence=2), source=source, config={"lr": 1}, reason="worse"
    )
    (exploited,) = lifecycle_events_in(ADDED, clone)
    assert exploited.payload() == {"version": 1, "trial": T, "step": 4, "source": "00007", "reason": "worse"}


def test_reports_and_what_only_the_journal_needs_are_no_news() -> None:
    opened = Opened(experiment="first", trial=T, epoch=1, owner=Owner(name="a", host="b", pid=1))
    absorbed = Absorbed(trial=T, number=1, events=(opened, ADDED, STARTED, *(reported(step) for step in range(1, 99))))
    assert names(ADDED, absorbed) == ["trial.started"]


def test_texts_and_metrics_are_short_and_all_is_json() -> None:
    metrics = few({f"m{number}": number for number in range(50)} | {"text": LONG})
    assert list(metrics) == [f"m{number}" for number in range(20)]
    assert few({"text": LONG})["text"] == short(LONG) == "x" * 499 + "…"
    assert json.dumps(dict(metrics))


def test_no_two_kinds_have_one_name() -> None:
    kinds = [kind for kind in every(LifecycleEvent) if "name" in vars(kind)]
    assert len({kind.name for kind in kinds}) == len(kinds) == 21
    assert all(kind.name.startswith("prefect-tune.") and kind.__doc__ for kind in kinds)


def every(kind: type[LifecycleEvent]) -> list[type[LifecycleEvent]]:
    return [found for each in kind.__subclasses__() for found in (each, *every(each))]
