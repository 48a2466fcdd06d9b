"""Maintenance that read the journal before a trial was launched again deletes no post that no entry holds."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal.outbox import Post, read_posts, received_posts, write_post
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Event,
    Launched,
    Received,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from tests.core.histories import ME, stamp
from tests.fakes.stores.memory_store import MemoryStore

KEY = JournalKey(experiment="e", generation=1)
TRIAL = KEY.trial_key("t")


def test_maintenance_with_an_older_state_deletes_no_post_of_a_newer_outbox() -> None:
    store = MemoryStore()
    events: Sequence[Event] = [
        TrialAdded(trial="t", config={}),
        Launched(trial="t", outbox=1),
        Received(trial="t", post=1),
        Started(trial="t", attempt=1, from_step=0),
        AttemptEnded(trial="t", cause=Cause.MACHINE, reason="x"),
    ]
    state = take_over(store, KEY, ME, stamp("open"), side_by_side=map, also=lambda _: events)
    read_by_maintenance = state.trial("t")
    append(store, state, [Launched(trial="t", outbox=2)], stamp("again"))
    posted: Sequence[Event] = [
        Started(trial="t", attempt=2, from_step=0),
        *(Reported(trial="t", report=StepReport(step=step, metrics={})) for step in (1, 2, 3)),
    ]
    for number, event in enumerate(posted, 1):
        write_post(store, TRIAL, 2, number, Post(write_id=f"p{number}", at="", events=(event,)))
    store.delete([listed.path for listed in received_posts(store, TRIAL, read_by_maintenance)])
    assert len(read_posts(store, TRIAL, 2, 0)) == 4, "acknowledged posts that no entry holds were deleted"
