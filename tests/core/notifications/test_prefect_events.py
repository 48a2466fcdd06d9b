"""Which journal events become Prefect events, and their contents."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal_events import (
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
    Question,
    Reported,
    Requeued,
    Resumed,
    Started,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.models import StepReport
from prefect_tune.core.notifications.prefect_events import (
    LABELS,
    NOT_EMITTED,
    VERSION,
    ExperimentEvent,
    TrialStalled,
    abbreviated,
    emitted_in,
    event_name,
    labels_of,
    payload_of,
    short,
)
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after

T = "00000"
ADDED = TrialAdded(trial=T, config={}, own_journal=True)
STARTED = Started(trial=T, attempt=1, from_step=0)
LONG = "x" * 1000


def reported(step: int, **metrics: object) -> Reported:
    return Reported(trial=T, report=StepReport(step=step, metrics=metrics))


def committed(step: int, sequence: int, **options: Any) -> Committed:
    checkpoint = CheckpointRef(step=step, sequence=sequence, metrics={"loss": 0.5}, size_bytes=7)
    return Committed(trial=T, checkpoint=checkpoint, **options)


def payloads(*events: Event) -> list[dict[str, object]]:
    """The payloads of all Prefect events of these journal events, one entry each, with their names as `name`."""
    state: Experiment = nothing_yet(first_generation("first"))
    found: list[dict[str, object]] = []
    for event in events:
        state = after(state, [event])
        emitted = emitted_in(event)
        found += [{"name": event_name(each), **payload_of(each, state.trials.get(T))} for each in emitted]
    return found


def names(*events: Event) -> list[str]:
    return [str(each["name"]).removeprefix("prefect-tune.") for each in payloads(*events)]


def test_an_event_of_the_journal_is_a_prefect_event_with_its_type_and_its_content() -> None:
    trained = [reported(1, loss=1.0), reported(2, loss=0.5), committed(2, 3)]
    started, saved, finished = payloads(ADDED, STARTED, *trained, Finished(trial=T, reason="done"))
    assert started == {
        "name": "prefect-tune.started",
        "version": VERSION,
        "trial": T,
        "attempt": 1,
        "from_step": 0,
        "from_sequence": None,
        "at": None,
    }
    checkpoint = committed(2, 3).model_dump(mode="json")["checkpoint"]
    assert saved == {
        "name": "prefect-tune.committed",
        "version": VERSION,
        "trial": T,
        "checkpoint": checkpoint,
        "retires": [],
        "sent_bytes": None,
        "upload_seconds": None,
        "seconds": None,
    }
    assert finished == {
        "name": "prefect-tune.finished",
        "version": VERSION,
        "trial": T,
        "reason": "done",
        "returned": False,
        "ended_early": False,
        "use": None,
        "status": "completed",
        "attempt": 1,
        "step": 2,
        "metrics": {"loss": 0.5},
        "wasted_steps": 0,
        "wasted_at_least": False,
    }


def test_the_end_of_an_attempt_says_why_and_how_the_trial_is() -> None:
    died = AttemptEnded(trial=T, cause=Cause.MACHINE, message=LONG)
    again = Started(trial=T, attempt=2, from_step=1, from_sequence=3)
    ended, restored = payloads(ADDED, STARTED, reported(1), committed(1, 3), died, again)[2:]
    assert (ended["cause"], ended["message"]) == ("machine", short(LONG))
    assert (ended["status"], ended["attempt"], ended["step"]) == ("interrupted", 1, 1)
    assert (restored["attempt"], restored["from_step"]) == (2, 1)
    (errored,) = payloads(ADDED, STARTED, GaveUp(trial=T, cause=Cause.USER, message="division by zero"))[1:]
    assert (errored["name"], errored["cause"], errored["status"]) == ("prefect-tune.gave-up", "user", "errored")


def test_a_question_and_a_reinstatement_have_names_of_their_own() -> None:
    asks = Question(key="k", question="Continue?", fields={"yes": True})
    asked = AttemptEnded(trial=T, cause=Cause.PREEMPTED, message="it asks", question=asks)
    again = [
        Quarantined(trial=T, sequence=3, reason="sha differs"),
        Quarantined(trial=T, sequence=3, quarantined=False),
    ]
    found = payloads(ADDED, STARTED, reported(1), committed(1, 3), *again, asked)[2:]
    assert [each["name"] for each in found] == [
        "prefect-tune.quarantined",
        "prefect-tune.reinstated",
        "prefect-tune.questioned",
    ]
    assert (found[-1]["question"], found[-1]["status"]) == (asks.model_dump(mode="json"), "interrupted")


def test_what_a_trials_journal_records_is_emitted_as_what_its_searchs_records() -> None:
    pause, end = Paused(trial=T, reason="others"), Finished(trial=T, reason="enough")
    absorbed = Absorbed(trial=T, number=1, events=(STARTED, reported(1), pause))
    assert names(ADDED, absorbed, Resumed(trial=T)) == ["started", "paused", "resumed"]
    more = Requeued(trial=T, reason="more")
    assert names(ADDED, STARTED, pause, end, more) == ["started", "paused", "finished", "requeued"]


def test_an_event_of_the_whole_experiment_and_one_of_an_unknown_trial_are_emitted() -> None:
    asked = StopAsked(reason="enough")
    assert list(emitted_in(asked)) == [asked]
    assert list(emitted_in(committed(1, 3))) == [committed(1, 3)]


def test_a_clone_has_the_checkpoint_that_it_was_made_from() -> None:
    source = CheckpointKey(trial=TrialKey(experiment="first", generation=1, trial="00007"), step=4, sequence=2)
    copy = CheckpointRef(step=4, sequence=2)
    (cloned,) = payloads(ADDED, Cloned(trial=T, checkpoint=copy, source=source, config={"lr": 1}, reason="worse"))
    assert cloned["source"] == {
        "trial": {"experiment": "first", "generation": 1, "trial": "00007"},
        "step": 4,
        "sequence": 2,
    }
    assert (cloned["config"], cloned["reason"]) == ({"lr": 1}, "worse")


def test_reports_and_what_only_the_journal_needs_are_not_emitted() -> None:
    opened = Opened(experiment="first", generation=1, trial=T, term=1, owner=Owner(name="a", host="b", pid=1))
    absorbed = Absorbed(trial=T, number=1, events=(opened, ADDED, STARTED, *(reported(step) for step in range(1, 99))))
    assert names(ADDED, absorbed) == ["started"]
    types = {kind.model_fields["type"].default for kind in get_args(get_args(Event)[0])}
    assert types > NOT_EMITTED


def test_texts_and_tables_are_short_and_all_is_json() -> None:
    metrics = {f"m{number}": number for number in range(50)}
    report = {"text": LONG, "metrics": {**metrics}, "list": list(range(50)), "yes": True, "none": None}
    cut = abbreviated(report)
    assert cut == {
        "text": "x" * 499 + "…",
        "metrics": {f"m{number}": number for number in range(20)},
        "list": list(range(20)),
        "yes": True,
        "none": None,
    }
    assert json.dumps(cut)


@pytest.mark.parametrize(
    ("event", "labels"),
    [
        (Quarantined(trial=T, sequence=3, reason="sha differs"), {"trial": T, "kills": "false"}),
        (Quarantined(trial=T, sequence=3, reason="it dies", kills=True), {"trial": T, "kills": "true"}),
        (AttemptEnded(trial=T, cause=Cause.OUT_OF_MEMORY, message="m"), {"trial": T, "cause": "out-of-memory"}),
        (TrialStalled(trial=T, silent_seconds=1.0), {"trial": T}),
        (StopAsked(reason="enough"), {}),
    ],
)
def test_what_an_automation_may_match_is_a_label(event: Event | ExperimentEvent, labels: dict[str, str]) -> None:
    assert labels_of(payload_of(event)) == {f"prefect-tune.{name}": value for name, value in labels.items()}


def test_no_two_events_have_one_name_and_every_label_is_a_field() -> None:
    journaled = [kind for kind in get_args(get_args(Event)[0]) if kind.model_fields["type"].default not in NOT_EMITTED]
    named = ExperimentEvent.__subclasses__()
    every = [
        *(kind.name for kind in named),
        *(f"prefect-tune.{kind.model_fields['type'].default}" for kind in journaled),
    ]
    assert len(set(every)) == len(every) == 6 + len(journaled)
    assert all(name.startswith("prefect-tune.") for name in every)
    fields = {"status"}.union(*(kind.model_fields for kind in (*named, *journaled)))
    assert fields >= set(LABELS)
