"""Attempts that outlive their search: the next owner finds them, answers their questions, and can stop them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events import Finished, Paused
from prefect_tune.core.messages.process_messages import Leave, Proceed, StopAndSave
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Decision, Exploit, Schedule, Scheduler, TrialReport
from prefect_tune.core.search.objective import Objective
from prefect_tune.executors.remote_executor import RemoteExecutor
from tests.fakes.outcomes import make_leave
from tests.fakes.searches.far_attempts import FarAttempt
from tests.fakes.searches.far_searches import Death, FarSearch, nothing
from tests.fakes.searches.limits import limits_of

TRIAL = "00000"


@pytest.fixture
def attempt(target: LocalTarget) -> FarAttempt:
    return FarAttempt(target)


def test_one_that_has_reported_nothing_yet_gets_a_request_to_stop(target: LocalTarget, attempt: FarAttempt) -> None:
    FarSearch(target).live(nothing, attempt.starts, nothing)
    resumed = FarSearch(target)
    resumed.live(nothing, lambda: resumed.stop(TRIAL), nothing)
    assert resumed.machines.started == [(TRIAL, 1, None)]
    assert attempt.answer() == make_leave("enough", save=True, trial=TRIAL)


def test_one_that_was_to_stop_while_no_search_ran_gets_the_request_and_ends_by_itself(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).live(nothing, attempt.starts, lambda: attempt.reports(1), nothing)
    resumed = FarSearch(target)
    resumed.stop(TRIAL)
    running = resumed.live(nothing, lambda: attempt.reports(2), nothing)
    assert attempt.answer() == make_leave("enough", save=True, trial=TRIAL)
    assert (running.trial(TRIAL).phase, running.trial(TRIAL).step) == (Phase.RUNNING, 2)


def test_they_are_all_found_and_stopped_with_the_search_however_few_slots_there_are_now(target: LocalTarget) -> None:
    attempts = [FarAttempt(target, trial) for trial in ("00000", "00001")]
    FarSearch(target, samples=2).live(nothing, *(each.starts for each in attempts), nothing)
    resumed = FarSearch(target, samples=2, limits=limits_of(1))
    resumed.live(nothing, resumed.stop, nothing)
    assert [each.answer() for each in attempts] == [StopAndSave()] * 2
    assert resumed.machines.is_withdrawn


# ------------------------------------------------------------------------------- resumed as another search


@pytest.mark.parametrize(
    ("before", "now", "reports", "answer", "decided"),
    [
        (ASHA(27, grace_period=3, variant="stopping"), FIFO(), [2, 3], Proceed(milestone=None), []),
        (
            ASHA(27, grace_period=3, variant="stopping"),
            ASHA(27, grace_period=5, variant="stopping"),
            [2, 3],
            Proceed(milestone=5),
            [],
        ),
        (
            ASHA(27, grace_period=5, variant="stopping"),
            ASHA(27, grace_period=3, variant="stopping"),
            [2, 3, 4, 5],
            Proceed(milestone=9),
            [5],
        ),
    ],
    ids=["asked-no-more", "asked-later", "asked-earlier"],
)
def test_one_that_asks_where_an_earlier_owner_wanted_it_to_is_answered_by_todays_scheduler(
    target: LocalTarget,
    attempt: FarAttempt,
    before: Scheduler,
    now: Scheduler,
    reports: list[int],
    answer: Proceed,
    decided: list[int],
) -> None:
    FarSearch(target, before).live(nothing, attempt.starts, lambda: attempt.reports(1), nothing)
    resumed = FarSearch(target, now)
    state = resumed.live(nothing, lambda: attempt.reports(*reports, asks=True), nothing, nothing)
    assert attempt.answer(reports[-1]) == answer
    assert [each.report.step for each in state.trial(TRIAL).past if each.report] == decided


class Exploiting(Scheduler):
    """A scheduler by which a trial exploits another one at step 2."""

    def begin(self, objective: Objective, seed: int) -> Schedule:
        del objective, seed
        return _ExploitingSchedule()


class _ExploitingSchedule(Schedule):
    saves_first = True

    def added(self, trial: str, config: Mapping[str, object]) -> None:
        del trial, config

    def milestone(self, trial: str, step: int) -> int | None:
        del trial
        return step + 2

    def decide(self, report: TrialReport) -> Decision:
        del report
        return Exploit(source="00001", config={}, reason="better")

    def ended(self, trial: str) -> None:
        del trial


def test_one_that_was_to_exploit_another_and_got_no_answer_leaves_for_it(
    target: LocalTarget, attempt: FarAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise Death

    monkeypatch.setattr(RemoteExecutor, "answer", dies)
    died = FarSearch(target, Exploiting()).live(nothing, attempt.starts, lambda: attempt.saves(2, asks=True), nothing)
    assert (died.trial(TRIAL).exploits is not None, attempt.answer(2)) == (True, None)
    monkeypatch.undo()
    FarSearch(target, Exploiting()).live(nothing, nothing)
    assert attempt.answer(2) == Leave(outcome=Paused(trial=TRIAL, reason="better"), save=False)


def test_one_that_ends_by_what_was_enough_before_goes_on_where_more_is_wanted_today(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).live(nothing, attempt.starts, lambda: attempt.saves(1), nothing)
    limits = limits_of(2, has_had_enough=lambda trial: trial.step >= 4)
    resumed = FarSearch(target, limits=limits)

    def ends() -> None:
        attempt.saves(2)
        attempt.writes(Finished(trial=TRIAL, reason="2 steps are done"))
        resumed.machines.end(TRIAL)

    state = resumed.live(nothing, ends, nothing, nothing)
    assert resumed.machines.started == [(TRIAL, 1, None), (TRIAL, 2, None)]
    assert (state.trial(TRIAL).phase, state.trial(TRIAL).step) == (Phase.PENDING, 2)


def test_one_that_had_not_begun_when_its_search_was_stopped_is_stopped_no_more_when_that_goes_on(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    search = FarSearch(target)
    search.live(nothing, search.stop, nothing)
    assert attempt.answer(attempt=1) == StopAndSave()
    resumed = FarSearch(target)
    resumed.live(nothing)
    assert resumed.machines.started == [(TRIAL, 1, None)]
    assert attempt.answer(attempt=1) is None
