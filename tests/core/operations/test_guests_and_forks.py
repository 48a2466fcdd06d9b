"""What a guest's quarantine does to the entries that follow it: a fork's past, and a clone."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.checkpoints.commit import Reusable, commit
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial import clone_for
from prefect_tune.core.journal.journal import append, load, take_over
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Cloned,
    Committed,
    Configured,
    Event,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.operations.fork_experiment import begin_fork, fork, past_of
from prefect_tune.core.operations.scrub import quarantine
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from tests.core.histories import ME, stamp
from tests.fakes.stores.memory_files import MemoryFiles
from tests.fakes.stores.memory_store import MemoryStore

KEY = JournalKey(experiment="e", generation=1)


def opened(store: ObjectStore) -> Experiment:
    events: Sequence[Event] = [
        Configured(settings={"seed": 1}),
        TrialAdded(trial="a", config={}, of_search=True),
        TrialAdded(trial="b", config={}, of_search=True),
        Started(trial="a", attempt=1, from_step=0),
    ]
    return take_over(store, KEY, ME, stamp("open"), side_by_side=map, also=lambda _: events)


def save(store: ObjectStore, state: Experiment, step: int) -> tuple[CheckpointKey, Sequence[Event]]:
    """Publish a checkpoint of trial a; return its key, and the events of its entry."""
    trial = state.trial("a")
    key = CheckpointKey(trial=state.trial_key("a"), step=step, sequence=trial.next_sequence)
    about = About(attempt=1, term=1, write_id=f"save-{step}", created_at="", metrics={})
    files = MemoryFiles({"head": f"step {step}".encode()})
    commit(store, key, files, about, reuse=Reusable(), side_by_side=map)
    report = Reported(trial="a", report=StepReport(step=step, metrics={}))
    return key, [report, Committed(trial="a", checkpoint=CheckpointRef(step=step, sequence=key.sequence))]


def with_two_saves(store: ObjectStore) -> tuple[Experiment, CheckpointKey]:
    """An experiment whose trial has saved two steps."""
    state = opened(store)
    _, events = save(store, state, 1)
    state = append(store, state, events, stamp("1"))
    key, events = save(store, state, 2)
    return append(store, state, events, stamp("2")), key


def test_a_search_can_be_forked_in_which_a_guest_has_quarantined_a_checkpoint_during_a_save() -> None:
    store = MemoryStore()
    state, second = with_two_saves(store)
    _, third = save(store, state, 3)
    quarantine(store, KEY, {second: "damaged"}, stamp("guest"), side_by_side=map)
    append(store, state, third, stamp("3"))
    origin = load(store, KEY, side_by_side=map)
    assert [each.step for each in origin.trial("a").checkpoints] == [1]
    past = past_of(store, KEY, None, side_by_side=map)
    into = JournalKey(experiment="new", generation=1)
    made = fork(
        store,
        past,
        begin_fork(store, into, past.origin, ME, stamp("f"), side_by_side=map),
        stamp("f"),
        side_by_side=map,
    ).experiment
    assert [each.step for each in made.trial("a").checkpoints] == [1]


def test_an_owner_may_clone_a_checkpoint_that_a_guest_quarantines_at_the_same_time() -> None:
    store = MemoryStore()
    state, second = with_two_saves(store)
    a, b = state.trial("a"), state.trial("b")
    clone = Cloned(trial="b", checkpoint=clone_for(b, a.checkpoints[-1], "a"), source="a")
    quarantine(store, KEY, {second: "damaged"}, stamp("guest"), side_by_side=map)
    after = append(store, state, [clone], stamp("clone"))
    assert [each.step for each in after.trial("b").checkpoints] == [2]
