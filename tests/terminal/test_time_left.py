"""The estimated time left equals the time that a simulated search then takes."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.experiment.trial_transitions import Phase, Status, newest_checkpoint
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Committed,
    Event,
    Finished,
    Paused,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.values import StepReport
from prefect_tune.terminal.time_left import SearchEstimate, pauses_of, resumes_paused
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.tracked_progress import TrackedProgress

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class SimulatedSearch:
    """Trials of constant speed on slots, in simulated time; a tracker follows them as in a driver."""

    def __init__(
        self, *, slots: int, trials: int, steps: int, step_seconds: float, saves_every: int = 0, starts_in: float = 0.0
    ) -> None:
        self.slots, self.trials, self.steps, self.step_seconds = slots, trials, steps, step_seconds
        self.saves_every, self.starts_in = saves_every, starts_in
        self.number = 0
        self.experiment: Experiment = nothing_yet(first_generation("e"))
        self.resume()

    def resume(self, **changes: float) -> None:
        """Begin a run, after a kill of the one before: what was not committed is trained again."""
        for trial in [each.trial for each in self.experiment.trials.values() if each.status is Status.RUNNING]:
            self.experiment = self._after(AttemptEnded(trial=trial, cause=Cause.MACHINE, message="killed"))
        self.__dict__.update(changes)
        self.now = 0.0
        self.step_of: dict[str, int] = {}
        self.next_at: dict[str, float] = {}
        outlook = SearchEstimate("e", trial_count=self.trials, step_count=self.steps, slot_count=self.slots)
        self.tracker = TrackedProgress(self.experiment, outlook, 0.0, NOON)
        self._fill()

    def left(self) -> timedelta | None:
        return self.tracker.state(self.now).left

    def run(self, until: float = float("inf")) -> float:
        """Run until this time, or until every trial has ended; return the time."""
        while self.next_at and min(self.next_at.values()) <= until:
            trial = min(self.next_at, key=self.next_at.__getitem__)
            self.now = self.next_at.pop(trial)
            self._step(trial)
            self._fill()
        self.now = until if self.next_at else self.now
        return self.now

    def happens(self, event: Event) -> None:
        self.experiment = self._after(event)
        self.tracker.happens(event, self.experiment, self.now)

    def _after(self, event: Event) -> Experiment:
        self.number += 1
        return after_event(self.experiment, event, self.number)

    def _fill(self) -> None:
        waiting = [each.trial for each in self.experiment.trials.values() if each.phase is Phase.PENDING]
        new = [f"{number:05d}" for number in range(len(self.experiment.trials), self.trials)]
        for trial in [*waiting, *new][: self.slots - len(self.next_at)]:
            if trial not in self.experiment.trials:
                self.happens(TrialAdded(trial=trial, config={}))
            state = self.experiment.trial(trial)
            newest = newest_checkpoint(state)
            step, sequence = (newest.step, newest.sequence) if newest else (0, None)
            self.happens(Started(trial=trial, attempt=state.attempt + 1, from_step=step, from_sequence=sequence))
            self.step_of[trial] = step
            self.next_at[trial] = self.now + self.starts_in + self.step_seconds

    def _step(self, trial: str) -> None:
        step = self.step_of[trial] = self.step_of[trial] + 1
        seconds = step * self.step_seconds
        report = StepReport(step=step, metrics={}, trained_seconds=seconds)
        self.tracker.reported(trial, report, self.now)
        self.happens(Reported(trial=trial, report=report))
        if self.saves_every and step % self.saves_every == 0:
            saved = CheckpointRef(step=step, sequence=self.number, trained_seconds=seconds)
            self.happens(Committed(trial=trial, checkpoint=saved))
        if step == self.steps:
            self.happens(Finished(trial=trial, reason="enough"))
        else:
            self.next_at[trial] = self.now + self.step_seconds


def require_true_estimate(search: SimulatedSearch) -> None:
    left, now = search.left(), search.now
    assert left is not None
    assert left.total_seconds() == pytest.approx(search.run() - now)


@pytest.mark.parametrize("slots", [1, 3, 4, 7])
@pytest.mark.parametrize("at", [13.0, 21.0, 64.0])
def test_the_estimate_is_true_with_any_number_of_slots(slots: int, at: float) -> None:
    search = SimulatedSearch(slots=slots, trials=7, steps=20, step_seconds=2)
    search.run(until=at)
    if any(each.status is Status.RUNNING for each in search.experiment.trials.values()):
        require_true_estimate(search)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("saves_every", [0, 7, 10])
@pytest.mark.parametrize("at", [0.0, 1.0, 5.0, 30.0, 70.0])
def test_the_estimate_is_true_after_a_resume_with_the_steps_that_are_trained_again(
    slots: int, saves_every: int, at: float
) -> None:
    search = SimulatedSearch(slots=2, trials=5, steps=20, step_seconds=2, saves_every=saves_every)
    search.run(until=57)
    search.resume(slots=slots)  # with one slot, a trial that was killed waits
    search.run(until=at)
    if at < 1:
        assert search.left() is None, "a run of no time yet"
        search.run(until=1)
    require_true_estimate(search)


def test_steps_of_an_earlier_run_that_the_journal_has_late_are_no_steps_of_this_run() -> None:
    state = after_event(nothing_yet(first_generation("e")), TrialAdded(trial="a", config={}, own_journal=True), 1)
    tracker = TrackedProgress(state, SearchEstimate("e", trial_count=1, step_count=100), 0.0, NOON)
    saved = CheckpointRef(step=50, sequence=3)
    reports = (Reported(trial="a", report=StepReport(step=step, metrics={})) for step in range(1, 51))
    entries: list[tuple[float, float, tuple[Event, ...]]] = [  # when they arrive, when they were written, events
        (0.01, -60, (Started(trial="a", attempt=1, from_step=0),)),
        (0.02, -5, (*reports, Committed(trial="a", checkpoint=saved))),
        (0.03, -1, (AttemptEnded(trial="a", cause=Cause.MACHINE, message="killed"),)),
        (0.04, 0.04, (Started(trial="a", attempt=2, from_step=50, from_sequence=3),)),
    ]
    for number, (now, at, events) in enumerate(entries, 1):
        event = Absorbed(trial="a", number=number, events=events, at=(NOON + timedelta(seconds=at)).isoformat())
        state = after_event(state, event, number + 1)
        tracker.happens(event, state, now)
    for step in range(51, 61):
        tracker.reported("a", StepReport(step=step, metrics={}), step - 50.0)
        left = tracker.state(step - 50.0).left
        assert left is not None
        assert left.total_seconds() == pytest.approx(100 - step, rel=0.05)


def test_the_pace_after_a_resume_is_that_of_the_run_that_resumed() -> None:
    search = SimulatedSearch(slots=2, trials=5, steps=20, step_seconds=2, saves_every=5)
    search.run(until=57)
    search.resume(step_seconds=7)
    search.run(until=30)
    require_true_estimate(search)


def test_the_time_in_which_attempts_start_counts_for_each_attempt_and_not_for_each_step() -> None:
    search = SimulatedSearch(slots=2, trials=6, steps=10, step_seconds=1, starts_in=30)
    search.run(until=36)
    require_true_estimate(search)


def test_without_a_number_of_steps_new_trials_train_as_many_as_the_finished_ones() -> None:
    search = SimulatedSearch(slots=2, trials=6, steps=10, step_seconds=3)
    search.tracker = TrackedProgress(
        nothing_yet(first_generation("e")), SearchEstimate("e", trial_count=6, slot_count=2), 0.0, NOON
    )
    search.experiment, search.next_at = nothing_yet(first_generation("e")), {}
    search._fill()
    search.run(until=20)
    assert search.left() is None, "no trial has finished yet"
    search.run(until=40)
    require_true_estimate(search)


@pytest.mark.parametrize("steps", [sys.maxsize, 10**400], ids=["maxsize", "no float"])
def test_a_number_of_steps_that_is_no_limit_gives_no_estimate(steps: int) -> None:
    search = SimulatedSearch(slots=2, trials=4, steps=steps, step_seconds=2)
    search.run(until=20)
    assert search.left() is None
    assert search.tracker.state(search.now).share == pytest.approx(0.0)


def test_reports_that_arrive_together_are_not_taken_for_fast_steps() -> None:
    search = SimulatedSearch(slots=1, trials=1, steps=100, step_seconds=float("inf"))
    for now, steps in ((20.0, range(1, 21)), (40.0, range(21, 41))):
        for step in steps:
            search.tracker.reported("00000", StepReport(step=step, metrics={}), now)
    search.now = 40.0
    assert search.left() == timedelta(seconds=60)


def test_a_paused_trial_trains_no_more() -> None:
    search = SimulatedSearch(slots=2, trials=2, steps=10, step_seconds=1)
    search.run(until=5)
    for trial in ("00000", "00001"):
        search.happens(Paused(trial=trial, reason="not among the best"))
    assert search.left() == timedelta(0)


def test_a_paused_member_of_a_population_has_its_steps_left() -> None:
    search = SimulatedSearch(slots=1, trials=2, steps=10, step_seconds=1, saves_every=2)
    outlook = SearchEstimate("e", trial_count=2, step_count=10, resumes_paused=True)
    search.tracker = TrackedProgress(search.experiment, outlook, 0.0, NOON)
    search.run(until=2)
    search.happens(Paused(trial="00000", reason="its turn is over"))
    assert search.tracker.state(2.0).share == 0.1
    assert search.left() == timedelta(seconds=8 + 10)


def test_trials_that_report_no_step_are_counted_by_their_time() -> None:
    search = SimulatedSearch(slots=2, trials=4, steps=10, step_seconds=float("inf"))
    search.now = 10.0
    search.happens(Finished(trial="00000", reason="returned"))
    assert search.left() == timedelta(seconds=10)


@pytest.mark.long
def test_many_waiting_trials_are_spread_over_the_slots() -> None:
    search = SimulatedSearch(slots=2, trials=1_000_000, steps=10, step_seconds=1)
    search.run(until=5)
    assert search.left() == timedelta(seconds=999_999 // 2 * 10 + 5)


@pytest.mark.parametrize(
    ("pauses", "step", "seconds"),
    [([4, 7], 2, 2 + 4), ([4, 7], 4, 4), ([4, 7], 6, 1 + 4), ([4, 7], 8, 2 + 4), ([], 2, 8 + 10)],
)
def test_where_trials_are_promoted_the_least_time_is_until_their_next_pause(
    pauses: list[int], step: int, seconds: float
) -> None:
    outlook = SearchEstimate("e", trial_count=3, step_count=10, pauses=pauses)
    search = SimulatedSearch(slots=1, trials=2, steps=10, step_seconds=1)
    search.tracker = TrackedProgress(nothing_yet(first_generation("e")), outlook, 0.0, NOON)
    search.experiment, search.next_at = nothing_yet(first_generation("e")), {}
    search._fill()
    search.run(until=1)
    search.happens(Paused(trial="00000", reason="number 2 of 2"))
    search.next_at.clear()
    search.happens(TrialAdded(trial="00001", config={}))
    search.happens(Started(trial="00001", attempt=1, from_step=0))
    for at in range(1, step + 1):
        report = StepReport(step=at, metrics={})
        search.tracker.reported("00001", report, 1.0 + at)
    shown = search.tracker.state(1.0 + step)
    assert (shown.left, shown.may_take_longer) == (timedelta(seconds=seconds), True)


def test_before_the_first_pause_of_a_promotion_search_its_time_left_is_a_least_already() -> None:
    for pauses in (pauses_of(ASHA(9, grace_period=3, variant="promotion")), ()):
        search = SimulatedSearch(slots=1, trials=1, steps=10, step_seconds=1)
        outlook = SearchEstimate("e", trial_count=1, step_count=10, pauses=pauses)
        search.tracker = TrackedProgress(nothing_yet(first_generation("e")), outlook, 0.0, NOON)
        search.experiment, search.next_at = nothing_yet(first_generation("e")), {}
        search._fill()
        search.run(until=2)
        shown = search.tracker.state(2.0)
        assert (shown.left, shown.may_take_longer) == (timedelta(seconds=(*pauses, 10)[0] - 2), bool(pauses))


def test_a_population_resumes_all_that_it_pauses_and_a_promotion_search_some() -> None:
    promotion, others = ASHA(max_t=27, grace_period=3, variant="promotion"), (Hyperband(max_t=27), FIFO(), None)
    assert resumes_paused(PBT(4, {"lr": [0.1, 0.2]}))
    assert not any(map(resumes_paused, (promotion, *others)))
    assert pauses_of(promotion) == [3, 9, 27]
    assert [pauses_of(each) for each in (ASHA(max_t=27, variant="stopping"), *others)] == [()] * 4


def test_a_promoted_trial_that_was_killed_has_the_steps_to_its_next_pause_left() -> None:
    search = SimulatedSearch(slots=1, trials=1, steps=10, step_seconds=1, saves_every=3)
    outlook = SearchEstimate("e", trial_count=1, step_count=10, pauses=[3, 9])
    search.tracker = TrackedProgress(search.experiment, outlook, 0.0, NOON)
    search.run(until=5)
    search.happens(AttemptEnded(trial="00000", cause=Cause.MACHINE, message="killed"))
    assert search.left() == timedelta(seconds=6)
