"""Free slots are filled without delaying the answers to the trials that train already."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.executors.trial_executor import Message
from tests.fakes.searches.planned_search import STEPS, PlannedSearch, UnreliableExecutor
from tests.long_cases import long_after

_AT_ONCE = 8


class _Watched(UnreliableExecutor):
    """Records how many attempts start before each poll, and how long that poll may wait."""

    def __init__(self) -> None:
        super().__init__(steps=1)
        self.starts = 0
        self.polls: list[tuple[int, timedelta]] = []

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        self.starts += 1
        super().start(spec, request)

    def poll(self, patience: timedelta) -> list[Message]:
        self.polls.append((self.starts, patience))
        self.starts = 0
        return super().poll(patience)


def test_many_free_slots_are_filled_in_turns_with_the_answers_and_without_waits(tmp_path: Path) -> None:
    executor = _Watched()
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), slots=20, executor=executor)
    state = search.run(num_samples=20, stop={"step": 1})

    assert len(state.trials) == 20
    first, second, third = executor.polls[:3]
    assert first == second == (_AT_ONCE, timedelta(0)), "the slots that are left do not wait for a message"
    assert third[0] == 20 - 2 * _AT_ONCE
    assert third[1] > timedelta(0), "with no slot left, the search waits for messages"


def test_slots_for_which_there_is_no_trial_do_not_make_the_search_poll_without_a_wait(tmp_path: Path) -> None:
    executor = _Watched()
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), slots=20, executor=executor)
    search.run(num_samples=3, stop={"step": 1})
    assert executor.polls[0][0] == 3
    assert all(patience > timedelta(0) for _, patience in executor.polls)


@pytest.mark.parametrize("seed", long_after(1, [4, 3, 0, 1, 2]))
def test_no_trial_gets_a_second_slot_after_a_pause_that_an_interrupt_cut_off(seed: int, tmp_path: Path) -> None:
    """Its open pause is carried out, and the scheduler names it for a promotion, while the same slots are filled."""
    options: dict[str, Any] = {"scheduler": ASHA(STEPS, variant="promotion", reduction_factor=2), "num_samples": 4}
    for poll in range(1, 25):
        target, executor = LocalTarget(path=str(tmp_path / str(poll))), UnreliableExecutor(seed=seed)
        search = PlannedSearch(target, slots=4, executor=executor)
        search.run(_after(poll), **options)
        assert all(each.phase in ENDED for each in search.run(**options).trials.values())


def _after(polls: int) -> Callable[[], bool]:
    asked = count()
    return lambda: next(asked) > polls
