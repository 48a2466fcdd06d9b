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
    FinishKind,
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
from prefect_tune.core.prefect_events import (
    LABELS,
    NOT_EMITTED,
    VERSION,
    Allowance,
    BestSoFar,
    Budget,
    BudgetNearlySpent,
    ExperimentEvent,
    HealthMonitor,
    HealthThresholds,
    SyncLagged,
    TrialStalled,
    abbreviated,
    best_checkpoints,
    emitted_in,
    event_name,
    labels_of,
    payload_of,
    short,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.search.objective import objective_of
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import StepReport
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
        "reason_code": None,
        "kind": "criterion",
        "use": None,
        "status": "completed",
        "attempt": 1,
        "step": 2,
        "metrics": {"loss": 0.5},
        "wasted_steps": 0,
        "wasted_at_least": False,
    }


def test_the_end_of_an_attempt_says_why_and_how_the_trial_is() -> None:
    died = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=LONG)
    again = Started(trial=T, attempt=2, from_step=1, from_sequence=3)
    ended, restored = payloads(ADDED, STARTED, reported(1), committed(1, 3), died, again)[2:]
    assert (ended["cause"], ended["reason"]) == ("machine", short(LONG))
    assert (ended["status"], ended["attempt"], ended["step"]) == ("interrupted", 1, 1)
    assert (restored["attempt"], restored["from_step"]) == (2, 1)
    spent = make_reason("max-failures", failures=1, limit=0, error="division by zero")
    (errored,) = payloads(ADDED, STARTED, GaveUp(trial=T, cause=Cause.USER, reason=spent))[1:]
    assert (errored["name"], errored["cause"], errored["status"]) == ("prefect-tune.gave-up", "user", "errored")
    assert (errored["reason"], errored["reason_code"]) == (str(spent), "max-failures")


def test_a_stop_request_that_is_refused_says_why() -> None:
    refused = make_reason("request-without-trial", trial="00009")
    payload = payload_of(StopAsked(reason="enough", request="w", refused=refused))
    assert (payload["reason"], payload["refused"]) == ("enough", str(refused))


def test_a_question_and_a_reinstatement_have_names_of_their_own() -> None:
    asks = Question(key="k", question="Continue?", fields={"yes": True})
    asked = AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="it asks", question=asks)
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
        (AttemptEnded(trial=T, cause=Cause.OUT_OF_MEMORY, reason="m"), {"trial": T, "cause": "out-of-memory"}),
        (
            AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished")),
            {"trial": T, "cause": "machine", "reason_code": "owner-vanished"},
        ),
        (Finished(trial=T, reason="done", kind=FinishKind.PRUNED), {"trial": T, "kind": "pruned"}),
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
    fields = {"status", "reason_code"}.union(*(kind.model_fields for kind in (*named, *journaled)))
    assert fields >= set(LABELS)


# When a running experiment is reported as stale or lagging, and that it is reported once.

MINUTE = 60.0


@pytest.fixture
def health() -> HealthMonitor:
    made = HealthMonitor(0.0)
    made.started(T, 0, 0.0)
    return made


def events_at(health: HealthMonitor, now: float) -> list[ExperimentEvent]:
    return list(health.look(now))


def test_a_trial_is_stale_after_five_times_its_longest_silence_and_that_is_said_once(health: HealthMonitor) -> None:
    for minutes in (2, 4, 6):
        health.reported(T, minutes, minutes * MINUTE)
        health.journaled(T, minutes)
    assert events_at(health, 15 * MINUTE) == []
    assert events_at(health, 17 * MINUTE) == [TrialStalled(trial=T, silent_seconds=660.0)]
    assert events_at(health, 18 * MINUTE) == []
    health.reported(T, 7, 19 * MINUTE)
    health.journaled(T, 7)
    assert events_at(health, 40 * MINUTE) == []  # it was silent for 13 minutes before


def test_a_trial_of_fast_steps_is_not_stale_within_five_minutes(health: HealthMonitor) -> None:
    health.reported(T, 1, 0.1)
    health.journaled(T, 1)
    assert events_at(health, 4.9 * MINUTE) == []
    assert events_at(health, 5.1 * MINUTE) == [TrialStalled(trial=T, silent_seconds=305.9)]


def test_a_trial_has_half_an_hour_for_its_first_report(health: HealthMonitor) -> None:
    assert events_at(health, 29 * MINUTE) == []
    assert events_at(health, 31 * MINUTE) == [TrialStalled(trial=T, silent_seconds=1860.0)]


def test_an_attempt_that_has_ended_is_not_looked_at(health: HealthMonitor) -> None:
    health.ended(T)
    health.ended(T)
    health.reported(T, 1, 1.0)
    health.journaled(T, 1)
    health.committed(T, 1.0)
    assert events_at(health, 100 * MINUTE) == []


def test_saves_lag_where_they_take_five_times_as_long_as_ever_while_the_trial_goes_on(health: HealthMonitor) -> None:
    health.committed(T, 1 * MINUTE)
    health.reported(T, 1, 1.5 * MINUTE)
    assert events_at(health, 3 * MINUTE) == []  # one save yields no typical duration
    health.committed(T, 3 * MINUTE)
    assert events_at(health, 4 * MINUTE) == []  # nothing to save
    for minute in range(4, 15):
        health.reported(T, minute, minute * MINUTE)
        health.journaled(T, minute)
    assert events_at(health, 12.5 * MINUTE) == []
    assert events_at(health, 14 * MINUTE) == [SyncLagged(what="checkpoint", seconds=660.0, trial=T)]
    assert events_at(health, 14.5 * MINUTE) == []


def test_the_journal_of_a_trial_lags_where_what_it_reported_is_not_in_it(health: HealthMonitor) -> None:
    health.reported(T, 1, 1 * MINUTE)
    health.journaled(T, 1)
    health.reported(T, 1, 1.5 * MINUTE)  # journaled before its report arrived: a trial on another machine
    for minute in range(2, 10):
        health.reported(T, minute, minute * MINUTE)
    assert events_at(health, 8.9 * MINUTE) == []
    assert events_at(health, 9.1 * MINUTE) == [SyncLagged(what="journal", seconds=426.0, trial=T)]
    assert events_at(health, 9.2 * MINUTE) == []


def test_the_experiments_journal_lags_where_it_is_not_written(health: HealthMonitor) -> None:
    health.queued(0.0)
    health.wrote()
    assert events_at(health, 10 * MINUTE) == []
    health.queued(11 * MINUTE)
    health.queued(12 * MINUTE)
    assert events_at(health, 18.1 * MINUTE) == [SyncLagged(what="journal", seconds=426.0, trial=None)]


def test_each_budget_is_reported_once_at_eighty_percent() -> None:
    health = HealthMonitor(100.0, [Budget("time", 10), Budget("training-time", 1000), Budget("trials", 5)])
    assert list(health.look(107.0, 790, 3)) == []
    assert list(health.look(108.0, 800, 4)) == [
        BudgetNearlySpent(what="time", spent=8.0, budget=10),
        BudgetNearlySpent(what="training-time", spent=800, budget=1000),
        BudgetNearlySpent(what="trials", spent=4, budget=5),
    ]
    assert list(health.look(109.0, 900, 5)) == []


def test_of_a_few_trials_none_says_that_they_are_nearly_done_when_all_have_ended() -> None:
    health = HealthMonitor(0.0, [Budget("trials", 3)])
    assert [list(health.look(1.0, 0, ended)) for ended in (2, 3)] == [[], []]


def test_patience_grows_with_what_was_seen() -> None:
    assert [HealthThresholds().limit(each) for each in (None, 1.0, 100.0)] == [1800.0, 300.0, 500.0]


def test_an_allowance_is_spent_at_once_and_comes_back_with_time() -> None:
    allowance = Allowance(3, 2)
    assert [allowance.take(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(1, 10.5), allowance.take(1, 10.6)] == [True, False]
    assert [allowance.take(1, 1000.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take(1, 999.0) is False  # time never goes back
    assert [allowance.take(2, 1000.5), allowance.take(2, 1001.0)] == [False, True]


# The best model so far, and when a new best is announced.

LOSS = objective_of("loss", "min")


def trained(state: Experiment, trial: str, *losses: float, saved: bool = True, ends: bool = False) -> Experiment:
    """A trial that reports and saves these losses."""
    events: list[Event] = [TrialAdded(trial=trial, config={}), Started(trial=trial, attempt=1, from_step=0)]
    for step, loss in enumerate(losses, 1):
        metrics = {"other": 1, "loss": loss}
        events.append(Reported(trial=trial, report=StepReport(step=step, metrics=metrics)))
        if saved:
            events.append(Committed(trial=trial, checkpoint=CheckpointRef(step=step, sequence=step, metrics=metrics)))
    events += [Finished(trial=trial, reason="done")] if ends else []
    return after(state, events)


def test_a_better_checkpoint_is_news_with_its_manifest_and_an_equal_one_is_none() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5)
    best = BestSoFar(LOSS, nothing_yet(first_generation("first")))
    found = best.committed(state.trial("00000"))
    assert found is not None
    assert list(found.metrics) == ["loss", "other"]  # the objective's metric comes first
    assert (found.trial, found.step, best.trial) == ("00000", 1, "00000")
    assert found.manifest == "first/1/trials/00000/checkpoints/0000000001-0000000001/manifest.json"
    assert best.committed(state.trial("00000")) is None


def test_a_trial_that_ends_better_than_anything_that_was_saved_is_news_without_a_manifest() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, saved=False, ends=True)
    best = BestSoFar(LOSS, nothing_yet(first_generation("first")))
    found = best.ended(state.trial("00000"))
    assert found is not None
    assert found.manifest is None
    assert best.ended(state.trial("00000")) is None
    assert best.committed(state.trial("00000")) is None  # no checkpoint


def test_of_several_metrics_the_next_decides_between_equals() -> None:
    def committed(other: float) -> object:
        metrics = {"loss": 0.5, "other": other}
        checkpoint = CheckpointRef(step=2, sequence=2, metrics=metrics)
        better = after(state, [Committed(trial="00000", checkpoint=checkpoint)])
        return BestSoFar(objective_of(["loss", "other"], "min"), state).committed(better.trial("00000"))

    state = trained(nothing_yet(first_generation("first")), "00000", 0.5)
    assert committed(1.0) is None
    assert committed(0.5) is not None


def test_what_was_there_before_is_no_news_and_what_is_worse_neither() -> None:
    earlier = trained(nothing_yet(first_generation("first")), "00000", 0.5, 0.1, 0.3)
    earlier = trained(earlier, "00001", 0.05, saved=False, ends=True)
    state = trained(trained(earlier, "00002", 0.07), "00003", 0.04)
    best = BestSoFar(LOSS, earlier)
    assert best.trial == "00001"
    assert best.committed(state.trial("00002")) is None
    assert best.committed(state.trial("00003")) is not None


def test_without_an_objective_and_without_the_metric_nothing_is_better() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, ends=True)
    assert BestSoFar(None, state).ended(state.trial("00000")) is None
    assert BestSoFar(None, state).trial is None
    elsewhere = BestSoFar(objective_of("accuracy", "max"), state)
    assert elsewhere.committed(state.trial("00000")) is None


def test_the_best_checkpoint_is_of_all_commits_and_of_equal_ones_each_trials_first() -> None:
    state = trained(nothing_yet(first_generation("first")), "00000", 0.5, 0.1, 0.1, 0.3)
    state = trained(trained(state, "00001", 0.2, ends=True), "00002", 0.4, 0.1)
    assert best_checkpoints(state, LOSS) == {"00000": 2, "00002": 2}
    assert best_checkpoints(state, None) == best_checkpoints(state, objective_of("accuracy", "max")) == {}
