"""Observers that only show a search cannot end it."""

from __future__ import annotations

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.monitoring.search_observer import DisplayGroup, SearchObserver
from tests.core.histories import opened
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.trial_processes import LogRecorder, log_to


class Counts(SearchObserver):
    def __init__(self, fails_at: int = 0) -> None:
        self.calls = 0
        self._fails_at = fails_at

    def wrote(self, experiment: Experiment) -> None:
        del experiment
        self.calls += 1
        if self.calls == self._fails_at:
            raise OverflowError("date value out of range")


def test_one_that_fails_is_logged_once_and_called_no_more_while_the_others_are() -> None:
    recorder, state = LogRecorder(), opened(MemoryStore())
    bad, good = Counts(fails_at=2), Counts()
    group = DisplayGroup([bad, good], log_to(recorder))
    for _ in range(4):
        group.wrote(state)
    assert (bad.calls, good.calls) == (2, 4)
    assert recorder.lines == ["Counts failed, and shows nothing from now on; the search continues"]
