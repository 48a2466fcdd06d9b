"""What a search logs when it opens its experiment."""

from __future__ import annotations

import pytest

from prefect_tune.core.journal.journal import append
from prefect_tune.core.journal_events.experiment_events import Adopted, Started, TrialAdded
from prefect_tune.tuner.opening_summary import warn_of_takeover
from tests.core.histories import opened, stamp
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.trial_processes import LogRecorder, log_to


@pytest.mark.parametrize(("started", "lines"), [(0, 0), (1, 1)])
def test_a_takeover_names_the_run_that_may_be_alive(started: int, lines: int) -> None:
    store, recorder = MemoryStore(), LogRecorder()
    events = [
        Adopted(),
        TrialAdded(trial="t", config={}),
        Started(trial="t", attempt=1, from_step=0, from_sequence=None),
    ]
    state = append(store, opened(store), events[: 2 + started], stamp("begun"))
    warn_of_takeover(state, log_to(recorder))
    assert len(recorder.lines) == lines
    for line in recorder.lines:
        assert line.startswith(f"takes over from {state.owner}, which left 1 trial running")
