"""Which journal events become Prefect events, and their contents."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from prefect_tune.core.experiment.experiment import Experiment, make_empty_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointOrigin,
    CheckpointQuarantined,
    CheckpointRef,
    Event,
    FinishKind,
    PostReceived,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.prefect_events import (
    LABEL_FIELDS,
    NOT_EMITTED,
    PAYLOAD_VERSION,
    BestModelTracker,
    ExperimentEvent,
    TokenBucket,
    TrialStalled,
    find_best_checkpoints,
    get_event_name,
    make_event_labels,
    make_event_payload,
    truncate_json,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.search.objective import make_objective
from prefect_tune.core.values import StepReport
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events

T = "00000"
ADDED = TrialAdded(trial=T, config={}, proposed_by_search=True)
STARTED = AttemptStarted(trial=T, attempt=1, from_step=0)
LONG = "x" * 1000


def report(step: int, **metrics: object) -> StepReported:
    return StepReported(trial=T, report=StepReport(step=step, metrics=metrics))


def commit(step: int, sequence: int, **options: Any) -> CheckpointCommitted:
    checkpoint = CheckpointRef(step=step, sequence=sequence, metrics={"loss": 0.5}, size_bytes=7)
    return CheckpointCommitted(trial=T, checkpoint=checkpoint, **options)


def make_payloads(*events: Event) -> list[dict[str, object]]:
    """Return the payloads of these journal events that become Prefect events, with their names as `name`."""
    state: Experiment = make_empty_experiment(first_generation("first"))
    results: list[dict[str, object]] = []
    for event in events:
        state = apply_events(state, [event])
        if event.type not in NOT_EMITTED:
            results.append({"name": get_event_name(event), **make_event_payload(event, state.trials.get(T))})
    return results


def event_names(*events: Event) -> list[str]:
    return [str(payload["name"]).removeprefix("prefect-tune.") for payload in make_payloads(*events)]


def event_content(event: Event) -> dict[str, object]:
    return {"version": PAYLOAD_VERSION, **event.model_dump(mode="json", exclude={"type"})}


def test_an_event_of_the_journal_is_a_prefect_event_with_its_type_and_its_content() -> None:
    events, end = ([report(1, loss=1.0), report(2, loss=0.5), commit(2, 3)], TrialFinished(trial=T, reason="done"))
    started, saved, finished = make_payloads(ADDED, STARTED, *events, end)
    assert started == {"name": "prefect-tune.attempt-started", **event_content(STARTED)}
    assert saved == {"name": "prefect-tune.checkpoint-committed", **event_content(commit(2, 3))}
    of_trial = {"status": "completed", "attempt": 1, "step": 2, "metrics": {"loss": 0.5}}
    wasted = {"recomputed_steps": 0, "recomputed_is_lower_bound": False}
    assert finished == {
        "name": "prefect-tune.trial-finished",
        **event_content(end),
        "reason_code": None,
        **of_trial,
        **wasted,
    }


def test_the_end_of_an_attempt_says_why_and_how_the_trial_is() -> None:
    died = AttemptEnded(trial=T, cause=Cause.MACHINE, reason=LONG)
    restart = AttemptStarted(trial=T, attempt=2, from_step=1, from_sequence=3)
    ended, restored = make_payloads(ADDED, STARTED, report(1), commit(1, 3), died, restart)[2:]
    assert (ended["cause"], ended["reason"]) == ("machine", truncate_json(LONG))
    assert (ended["status"], ended["attempt"], ended["step"]) == ("interrupted", 1, 1)
    assert (restored["attempt"], restored["from_step"]) == (2, 1)
    spent = make_reason("max-failures", failures=1, limit=0, error="division by zero")
    (errored,) = make_payloads(ADDED, STARTED, TrialErrored(trial=T, cause=Cause.TRAINABLE, reason=spent))[1:]
    assert [errored[key] for key in ("name", "cause", "status")] == [
        "prefect-tune.trial-errored",
        "trainable",
        "errored",
    ]
    assert (errored["reason"], errored["reason_code"]) == (str(spent), "max-failures")


def test_a_stop_request_that_is_refused_says_why() -> None:
    refused = make_reason("request-without-trial", trial="00009")
    payload = make_event_payload(StopRequested(reason="enough", request="w", refused=refused))
    assert (payload["reason"], payload["refused"]) == ("enough", str(refused))


def test_a_reinstatement_has_a_name_of_its_own() -> None:
    quarantines = [
        CheckpointQuarantined(trial=T, sequence=3, reason="sha differs"),
        CheckpointQuarantined(trial=T, sequence=3, quarantined=False),
    ]
    results = make_payloads(ADDED, STARTED, report(1), commit(1, 3), *quarantines)[2:]
    assert [payload["name"] for payload in results] == [
        "prefect-tune.checkpoint-quarantined",
        "prefect-tune.checkpoint-reinstated",
    ]


def test_every_turn_of_a_trial_is_emitted() -> None:
    pause, end = TrialPaused(trial=T, reason="others"), TrialFinished(trial=T, reason="enough")
    assert event_names(ADDED, STARTED, report(1), pause, TrialResumed(trial=T)) == [
        "attempt-started",
        "trial-paused",
        "trial-resumed",
    ]
    assert event_names(ADDED, STARTED, pause, end, TrialRequeued(trial=T, reason="more")) == [
        "attempt-started",
        "trial-paused",
        "trial-finished",
        "trial-requeued",
    ]


def test_a_clone_has_the_checkpoint_that_it_was_made_from() -> None:
    copy = CheckpointRef(step=4, sequence=2, origin=CheckpointOrigin(trial="00007", step=4, sequence=2))
    cloned = make_event_payload(
        CheckpointCloned(trial=T, checkpoint=copy, source="00007", config={"lr": 1}, reason="worse")
    )
    assert (cloned["source"], cloned["config"], cloned["reason"]) == ("00007", {"lr": 1}, "worse")
    assert cloned["checkpoint"] == copy.model_dump(mode="json")


def test_reports_and_what_only_the_journal_needs_are_not_emitted() -> None:
    launched, received = AttemptLaunched(trial=T, outbox=1), PostReceived(trial=T, post=1)
    assert event_names(ADDED, launched, received, STARTED, *(report(step) for step in range(1, 99))) == [
        "attempt-started"
    ]
    assert {kind.model_fields["type"].default for kind in get_args(get_args(Event)[0])} > NOT_EMITTED


def test_texts_and_tables_are_short_and_all_is_json() -> None:
    metrics = {f"m{number}": number for number in range(50)}
    report = {"text": LONG, "metrics": {**metrics}, "list": list(range(50)), "yes": True, "none": None}
    abbreviated = truncate_json(report)
    assert abbreviated == {
        "text": "x" * 499 + "…",
        "metrics": {f"m{number}": number for number in range(20)},
        "list": list(range(20)),
        "yes": True,
        "none": None,
    }
    assert json.dumps(abbreviated)


@pytest.mark.parametrize(
    ("event", "labels"),
    [
        (CheckpointQuarantined(trial=T, sequence=3, reason="sha differs"), {"trial": T, "crashes_trainable": "false"}),
        (
            CheckpointQuarantined(trial=T, sequence=3, reason="it dies", crashes_trainable=True),
            {"trial": T, "crashes_trainable": "true"},
        ),
        (AttemptEnded(trial=T, cause=Cause.OUT_OF_MEMORY, reason="m"), {"trial": T, "cause": "out-of-memory"}),
        (
            AttemptEnded(trial=T, cause=Cause.MACHINE, reason=make_reason("owner-vanished")),
            {"trial": T, "cause": "machine", "reason_code": "owner-vanished"},
        ),
        (TrialFinished(trial=T, reason="done", kind=FinishKind.PRUNED), {"trial": T, "kind": "pruned"}),
        (TrialStalled(trial=T, silent_seconds=1.0), {"trial": T}),
        (StopRequested(reason="enough"), {}),
    ],
)
def test_what_an_automation_may_match_is_a_label(event: Event | ExperimentEvent, labels: dict[str, str]) -> None:
    assert make_event_labels(make_event_payload(event)) == {
        f"prefect-tune.{name}": value for name, value in labels.items()
    }


def test_no_two_events_have_one_name_and_every_label_is_a_field() -> None:
    journaled = [kind for kind in get_args(get_args(Event)[0]) if kind.model_fields["type"].default not in NOT_EMITTED]
    named = ExperimentEvent.__subclasses__()
    every = [
        *(kind.name for kind in named),
        *(f"prefect-tune.{kind.model_fields['type'].default}" for kind in journaled),
    ]
    assert len(set(every)) == len(every) == 4 + len(journaled)
    assert all(name.startswith("prefect-tune.") for name in every)
    fields = {"status", "reason_code"}.union(*(kind.model_fields for kind in (*named, *journaled)))
    assert fields >= set(LABEL_FIELDS)


def test_an_allowance_is_spent_at_once_and_comes_back_with_time() -> None:
    allowance = TokenBucket(3, 2)
    assert [allowance.try_take_tokens(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.try_take_tokens(1, 10.5), allowance.try_take_tokens(1, 10.6)] == [True, False]
    assert [allowance.try_take_tokens(1, 1000.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.try_take_tokens(1, 999.0) is False  # time never goes back
    assert [allowance.try_take_tokens(2, 1000.5), allowance.try_take_tokens(2, 1001.0)] == [False, True]


# The best model so far, and when a new best is announced.

LOSS = make_objective("loss", "min")


def train_trial(state: Experiment, trial: str, *losses: float, saved: bool = True, ends: bool = False) -> Experiment:
    """Add a trial that reports and saves these losses."""
    events: list[Event] = [TrialAdded(trial=trial, config={}), AttemptStarted(trial=trial, attempt=1, from_step=0)]
    for step, loss in enumerate(losses, 1):
        metrics = {"other": 1, "loss": loss}
        events.append(StepReported(trial=trial, report=StepReport(step=step, metrics=metrics)))
        if saved:
            events.append(
                CheckpointCommitted(trial=trial, checkpoint=CheckpointRef(step=step, sequence=step, metrics=metrics))
            )
    events += [TrialFinished(trial=trial, reason="done")] if ends else []
    return apply_events(state, events)


def test_a_better_checkpoint_is_news_with_its_manifest_and_an_equal_one_is_none() -> None:
    state = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5)
    tracker = BestModelTracker(LOSS, make_empty_experiment(first_generation("first")))
    best_model = tracker.on_commit(state.trial("00000"))
    assert best_model is not None
    assert list(best_model.metrics) == ["loss", "other"]  # the objective's metric comes first
    assert (best_model.trial, best_model.step, tracker.trial) == ("00000", 1, "00000")
    assert best_model.manifest == "first/1/trials/00000/checkpoints/0000000001-0000000001/manifest.json"
    assert tracker.on_commit(state.trial("00000")) is None


def test_a_trial_that_ends_better_than_anything_that_was_saved_is_news_without_a_manifest() -> None:
    state = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5, saved=False, ends=True)
    tracker = BestModelTracker(LOSS, make_empty_experiment(first_generation("first")))
    best_model = tracker.on_trial_ended(state.trial("00000"))
    assert best_model is not None
    assert best_model.manifest is None
    assert tracker.on_trial_ended(state.trial("00000")) is None
    assert tracker.on_commit(state.trial("00000")) is None  # no checkpoint


def test_of_several_metrics_the_next_decides_between_equals() -> None:
    def find_best_after(other: float) -> object:
        metrics = {"loss": 0.5, "other": other}
        checkpoint = CheckpointRef(step=2, sequence=2, metrics=metrics)
        better = apply_events(state, [CheckpointCommitted(trial="00000", checkpoint=checkpoint)])
        return BestModelTracker(make_objective(["loss", "other"], "min"), state).on_commit(better.trial("00000"))

    state = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5)
    assert find_best_after(1.0) is None
    assert find_best_after(0.5) is not None


def test_what_was_there_before_is_no_news_and_what_is_worse_neither() -> None:
    earlier = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5, 0.1, 0.3)
    earlier = train_trial(earlier, "00001", 0.05, saved=False, ends=True)
    state = train_trial(train_trial(earlier, "00002", 0.07), "00003", 0.04)
    tracker = BestModelTracker(LOSS, earlier)
    assert tracker.trial == "00001"
    assert tracker.on_commit(state.trial("00002")) is None
    assert tracker.on_commit(state.trial("00003")) is not None


def test_without_an_objective_and_without_the_metric_nothing_is_better() -> None:
    state = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5, ends=True)
    assert BestModelTracker(None, state).on_trial_ended(state.trial("00000")) is None
    assert BestModelTracker(None, state).trial is None
    tracker = BestModelTracker(make_objective("accuracy", "max"), state)
    assert tracker.on_commit(state.trial("00000")) is None


def test_the_best_checkpoint_is_of_all_commits_and_of_equal_ones_each_trials_first() -> None:
    state = train_trial(make_empty_experiment(first_generation("first")), "00000", 0.5, 0.1, 0.1, 0.3)
    state = train_trial(train_trial(state, "00001", 0.2, ends=True), "00002", 0.4, 0.1)
    assert find_best_checkpoints(state, LOSS) == {"00000": 2, "00002": 2}
    assert find_best_checkpoints(state, None) == find_best_checkpoints(state, make_objective("accuracy", "max")) == {}
