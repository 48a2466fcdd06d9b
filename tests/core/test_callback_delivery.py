"""Delivery positions of callbacks: no event twice, none omitted, from whichever source it comes first."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.callback_delivery import Delivered, DeliveryTracker
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Entry,
    Event,
    Finished,
    Paused,
    Reported,
    Started,
)
from prefect_tune.core.values import StepReport

BEGUN = Started(trial="a", attempt=1, from_step=0)


def said(step: int) -> StepReport:
    return StepReport(step=step, metrics={"loss": 1 / step})


def steps(news: Sequence[Delivered]) -> list[int]:
    return [each.report.step for each in news if isinstance(each, Reported)]


def absorbed(number: int, *events: Event) -> Absorbed:
    return Absorbed(trial="a", number=number, events=events)  # type: ignore[arg-type]  # given events of one trial


def entry(number: int, *events: Event) -> Entry:
    return Entry.model_construct(number=number, events=events)


def test_what_was_told_as_it_happened_is_not_told_again_when_the_journal_has_it() -> None:
    tracker = DeliveryTracker()
    assert list(tracker.news(absorbed(1, BEGUN))) == [BEGUN]
    assert tracker.report("a", said(1))
    assert not tracker.report("a", said(1))
    late = absorbed(2, Reported(trial="a", report=said(1)), Reported(trial="a", report=said(2)))
    assert steps(list(tracker.news(late))) == [2]
    assert list(tracker.news(late)) == []
    assert list(tracker.news(absorbed(1, BEGUN))) == []


def test_steps_that_are_trained_again_are_told_again() -> None:
    tracker = DeliveryTracker()
    reported = [Reported(trial="a", report=said(step)) for step in (1, 2)]
    died = AttemptEnded(trial="a", cause=Cause.MACHINE, reason="killed")
    again = Started(trial="a", attempt=2, from_step=1)
    assert list(tracker.news(absorbed(1, BEGUN, *reported, died, again, reported[1]))) == [
        BEGUN,
        *reported,
        died,
        again,
        reported[1],
    ]
    assert not tracker.report("a", said(2))
    assert tracker.report("a", said(3))


def test_an_end_is_told_once_and_a_trial_that_goes_on_has_another() -> None:
    tracker = DeliveryTracker()
    end = Finished(trial="a", reason="enough")
    assert list(tracker.news(end)) == [end]
    assert list(tracker.news(end)) == []
    more = Started(trial="a", attempt=2, from_step=3)
    assert list(tracker.news(absorbed(1, more, end))) == [more, end]


def test_who_comes_back_is_told_what_it_has_missed_and_no_more() -> None:
    first = DeliveryTracker()
    paused = Paused(trial="b", reason="for others")
    delivered_first = entry(1, absorbed(1, BEGUN, Reported(trial="a", report=said(1))), paused)
    assert steps(list(first.replay(delivered_first))) == [1]
    assert first.report("a", said(2))
    kept = first.position
    assert kept.number == 1

    second = DeliveryTracker(kept)
    assert list(second.replay(delivered_first)) == []
    missed = entry(2, absorbed(2, *(Reported(trial="a", report=said(step)) for step in (2, 3))))
    assert steps(list(second.replay(missed))) == [3]
    assert second.number == 2


def test_what_is_kept_does_not_grow_with_what_the_journal_has() -> None:
    tracker = DeliveryTracker()
    events = [absorbed(1, BEGUN, Reported(trial="a", report=said(1)), Finished(trial="a", reason="enough"))]
    assert len(list(tracker.replay(entry(1, *events)))) == 3
    assert tracker.position.marks == {}
