"""A superseded search that has not noticed it yet takes no trial back from the new owner."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreUnavailable, Superseded
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal.journal import append_as_guest
from prefect_tune.core.journal_events import Opened, Quarantined
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.executors.trial_executor import AttemptExited
from prefect_tune.journal_access import Opening, current_owner, new_write_id, open_journal
from tests.fakes.searches.planned_search import PlannedSearch, UnreliableExecutor
from tests.tuner.altered_journals import entries_of

TRIAL = "00000"
KEY = JournalKey(experiment="e", generation=1)


class Losing(UnreliableExecutor):
    """An executor that loses its first attempt; another owner may open the experiment then."""

    def __init__(self, *, is_taken_over: bool) -> None:
        super().__init__()
        self._is_taken_over = is_taken_over
        self.requests: list[AttemptRequest] = []

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        super().start(spec, request)
        self.requests.append(request)
        if len(self.requests) > 1:
            return
        if self._is_taken_over:
            with spec.target.open(timeout=timedelta(minutes=1)) as store:  # a guest takes nothing over
                gone = [Quarantined(trial=TRIAL, sequence=1)]
                append_as_guest(store, KEY, lambda _: gone, new_write_id(), side_by_side=map)
            open_journal(spec.target, KEY, Opening(current_owner(), new_write_id()))
        self._inbox.clear()
        self._inbox.append(AttemptExited(TRIAL, StoreUnavailable("its process is gone")))


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path))


def test_a_search_that_was_taken_over_ends_with_the_first_attempt_it_loses_and_starts_none(target: LocalTarget) -> None:
    executor = Losing(is_taken_over=True)
    with pytest.raises(Superseded, match="took over"):
        PlannedSearch(target, executor=executor).run(num_samples=1)
    assert len(executor.requests) == 1


def test_a_search_that_was_not_taken_over_starts_again_what_it_has_lost(target: LocalTarget) -> None:
    open_journal(target, KEY, Opening(current_owner(), new_write_id()))
    executor = Losing(is_taken_over=False)
    state = PlannedSearch(target, executor=executor).run(num_samples=1)
    assert state.trial(TRIAL).phase is Phase.FINISHED
    assert [(each.search_term, each.attempt) for each in executor.requests] == [(2, 1), (2, 1)]
    events = [event for entry in entries_of(Path(target.path), KEY) for event in entry.events]
    assert sum(isinstance(event, Opened) for event in events) == 2
