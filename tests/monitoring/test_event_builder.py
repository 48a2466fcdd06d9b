"""Which Prefect events an experiment emits, and at most how many; its assets and their upstream assets."""

from __future__ import annotations

import contextlib
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointOrigin,
    CheckpointRef,
    Event,
    ExperimentConfigured,
    ExperimentForked,
    ForkOrigin,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    WarmStart,
)
from prefect_tune.core.prefect_events import TokenBucket
from prefect_tune.core.search.objective import Objective, make_objective
from prefect_tune.core.values import Digest, StepReport
from prefect_tune.monitoring import event_emitter as emitter_module
from prefect_tune.monitoring.event_emitter import EventEmitter, ExperimentAddress, emitting_events
from prefect_tune.monitoring.search_observer import SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent, make_asset
from tests.fakes.checkpoints import first_generation

LOG = logging.getLogger("prefect_tune.tests.dispatches")
ADDRESS = ExperimentAddress("s3://bucket/runs", "first")
LOSS = make_objective("loss", "min")


def train_step(trial: str, sequence: int, loss: float, *, step: int) -> list[Event]:
    """A trial reports and saves a step."""
    report = StepReported(trial=trial, report=StepReport(step=step, metrics={"loss": loss}))
    ref = CheckpointRef(step=step, sequence=sequence, metrics={"loss": loss}, size_bytes=10)
    return [report, CheckpointCommitted(trial=trial, checkpoint=ref)]


def start_trial(trial: str) -> list[Event]:
    return [
        TrialAdded(trial=trial, config={}, proposed_by_search=True),
        AttemptStarted(trial=trial, attempt=1, from_step=0),
    ]


FIRST_COMMIT = [*start_trial("00000"), *train_step("00000", 2, 0.5, step=1)]


class Search:
    """An experiment, and the Prefect events that were emitted for its journal events."""

    def __init__(
        self, address: ExperimentAddress = ADDRESS, objective: Objective | None = LOSS, state: Experiment | None = None
    ) -> None:
        self.state = state or make_empty_experiment(first_generation("first"))
        self.recorder = SearchRecorder(self.state)
        self.started_at = self.now = datetime.now(UTC)
        self.built: list[PrefectEvent] = []
        self.emitter = EventEmitter(address, objective, self.recorder, LOG, self.built.append, lambda: self.now)

    def apply(self, *events: Event) -> list[PrefectEvent]:
        """Apply journal events; return the Prefect events emitted for them."""
        count = len(self.built)
        for event in events:
            self.state = apply_event(self.state, event, 1)
            self.recorder.on_event(event, self.state)
            self.emitter.on_event(event, self.state)
        return self.built[count:]

    def emit_due_events(self, after: float) -> list[PrefectEvent]:
        """Return the events that are due this many seconds after the begin."""
        count, self.now = len(self.built), self.started_at + timedelta(seconds=after)
        self.emitter.emit_due_events()
        return self.built[count:]

    def emit_end(self) -> list[PrefectEvent]:
        count = len(self.built)
        self.emitter.emit_end("finished")
        return self.built[count:]


def event_names(events: list[PrefectEvent]) -> list[str]:
    return [event.event.removeprefix("prefect-tune.") for event in events]


def upstream_assets(event: PrefectEvent) -> list[str]:
    assets = (resource for resource in event.related if resource["prefect.resource.role"] == "asset")
    return [asset["prefect.resource.id"] for asset in assets]


# ------------------------------------------------------------------------------------------------- names and assets


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket/runs/", "s3://bucket/runs/first"),
        ("s3://bucket/runs?endpoint_override=host&secret_key=s3cret", "s3://bucket/runs/first"),
        ("sftp://anna:s3cret@host/runs#part", "sftp://anna@host/runs/first"),
        ("abfss://c@account.dfs.core.windows.net/runs", "abfss://c@account.dfs.core.windows.net/runs/first"),
        ("file:///data/runs", "file:///data/runs/first"),
        ("file:///", "file:///first"),
        ("memory://", "memory://first"),
    ],
)
def test_an_experiment_is_named_by_its_place_without_secrets(uri: str, expected: str) -> None:
    address = ExperimentAddress(uri, "first")
    assert address.experiment_uri == expected
    assert address.resource["prefect.resource.id"] == f"prefect-tune.experiment.{expected}"
    checkpoints_uri = address.make_checkpoints_uri(first_generation("first").trial_key("00000"))
    texts = (address.redacted_target_uri, checkpoints_uri, address.best_model_key, address.resource)
    assert "s3cret" not in str(texts)


def test_a_place_that_prefect_takes_no_key_of_has_no_assets_and_events_all_the_same() -> None:
    search = Search(ExperimentAddress("file:///my%20runs", "first"))
    assert make_asset(ExperimentAddress("file:///my%20runs", "first").best_model_key) is None
    built = event_names(search.apply(*FIRST_COMMIT))
    assert built == ["attempt-started", "checkpoint-committed", "experiment.best"]


def test_a_commit_materializes_the_asset_of_its_trial_and_a_better_one_that_of_the_best_model() -> None:
    saved, materialized, best, referenced, model = Search().apply(*FIRST_COMMIT)[1:]
    key = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert (saved.event, upstream_assets(saved)) == ("prefect-tune.checkpoint-committed", [key])
    assert materialized.event == "prefect.asset.materialization.succeeded"
    assert materialized.resource["prefect.resource.id"] == key
    assert materialized.payload["metrics"] == {"loss": 0.5}
    assert materialized.payload["manifest"] == "first/1/trials/00000/checkpoints/0000000001-0000000002/manifest.json"
    assert materialized.related[-1] == {
        "prefect.resource.id": "prefect-tune",
        "prefect.resource.role": "asset-materialized-by",
    }
    assert best.event == "prefect-tune.experiment.best"
    assert best.resource == {**ADDRESS.resource, "prefect-tune.trial": "00000"}
    assert best.related == [{**ADDRESS.make_trial_resource("00000"), "prefect.resource.role": "trial"}]
    assert (referenced.event, referenced.resource["prefect.resource.id"]) == ("prefect.asset.referenced", key)
    assert (model.resource["prefect.resource.id"], upstream_assets(model)) == ("s3://bucket/runs/first/best", [key])


def test_an_exploit_is_an_edge_from_the_others_checkpoints_for_the_clone_and_for_what_it_becomes() -> None:
    search = Search()
    search.apply(*start_trial("00000"), *start_trial("00001"), *train_step("00000", 2, 0.5, step=1))
    paused = TrialPaused(trial="00001", reason="worse")
    origin = CheckpointOrigin(trial="00000", step=1, sequence=2)
    copy = CheckpointRef(step=1, sequence=9, metrics={"loss": 0.5}, origin=origin)
    clone = CheckpointCloned(trial="00001", checkpoint=copy, source="00000", config={}, reason="worse")
    built = search.apply(paused, clone)
    of_00000 = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert event_names(built) == ["trial-paused", "checkpoint-cloned", "prefect.asset.materialization.succeeded"]
    assert (upstream_assets(built[-1]), built[-1].payload["exploited"]) == ([of_00000], "00000")
    again = AttemptStarted(trial="00001", attempt=2, from_step=1, from_sequence=9)
    made = search.apply(TrialResumed(trial="00001"), again, *train_step("00001", 11, 0.9, step=2))
    assert upstream_assets(made[-1]) == [of_00000]


def test_the_best_model_is_made_from_the_warm_starts_and_the_origin_of_its_search() -> None:
    state = make_empty_experiment(first_generation("first"))
    origin = ForkOrigin(experiment="old", generation=1, number=3, digest=Digest("d"))
    uris = ["s3://bucket/runs/earlier", "gs://other/place/theirs"]
    names = ("earlier", "gcs-target/prod/theirs", "gs://other/place/theirs")
    sources = zip(names, [*uris, uris[1]], strict=True)
    starts = tuple(WarmStart(source=name, location=uri, trials=()) for name, uri in sources)
    first, second = (ExperimentConfigured(settings={}, warm_starts=part) for part in (starts[:1], starts[1:]))
    for event in (ExperimentForked(origin=origin), first, second):
        state = apply_event(state, event, 1)
    model = Search(state=state).apply(*FIRST_COMMIT)[-1]
    assert upstream_assets(model)[1:] == [
        "s3://bucket/runs/old/best",
        "s3://bucket/runs/earlier/best",
        "gs://other/place/theirs/best",
    ]
    assert (model.payload["warm_start"], model.payload["forked_from"]) == (uris, "old")


# --------------------------------------------------------------------------------------------------- how many


def test_a_better_model_is_told_at_most_every_half_minute_and_the_last_one_at_the_end() -> None:
    search = Search()
    search.apply(*FIRST_COMMIT)
    built = search.apply(*train_step("00000", 3, 0.4, step=2), *train_step("00000", 4, 0.3, step=3))
    assert "experiment.best" not in event_names(built)
    assert search.emit_due_events(29.0) == []
    better, *_ = search.emit_due_events(30.0)
    assert better.payload["step"] == 3
    search.apply(*train_step("00000", 5, 0.2, step=4))
    last, *_, finished = search.emit_end()
    assert (last.event, last.payload["step"]) == ("prefect-tune.experiment.best", 4)
    assert (finished.payload["best"], finished.payload["trials"]) == ("00000", {"running": 1})
    assert (finished.payload["end"], finished.resource["prefect-tune.end"]) == ("finished", "finished")


def test_events_of_trials_are_rationed_and_those_that_somebody_must_act_on_are_not() -> None:
    search = Search(objective=None)
    for number in range(300):
        search.apply(*start_trial(f"{number:05d}"))
    assert len(search.built) == 100
    died = AttemptEnded(trial="00000", cause=Cause.TRAINABLE, reason="no")
    assert event_names(search.apply(died)) == ["attempt-ended"]
    search.now += timedelta(seconds=1)
    built = [event for number in range(300, 320) for event in search.apply(*start_trial(f"{number:05d}"))]
    assert len(built) == 5
    assert search.emit_end()[-1].payload["dropped"] == 215


def test_an_event_about_the_whole_experiment_has_its_resource_and_is_not_limited() -> None:
    search = Search()
    search.emitter._allowance = TokenBucket(0, 0)
    (event,) = search.apply(StopRequested(reason="enough"))
    assert (event.event, event.resource) == ("prefect-tune.stop-requested", ADDRESS.resource)
    assert event.payload["reason"] == "enough"


MINUTE = 60.0


def test_a_trial_has_half_an_hour_for_its_first_report_and_its_silence_is_said_once() -> None:
    search = Search()
    search.apply(*start_trial("00000"))
    assert search.emit_due_events(29 * MINUTE) == []
    (stalled,) = search.emit_due_events(31 * MINUTE)
    assert (stalled.event, stalled.payload["trial"]) == ("prefect-tune.experiment.stalled", "00000")
    assert float(str(stalled.payload["silent_seconds"])) == pytest.approx(31 * MINUTE, abs=5)
    assert search.emit_due_events(32 * MINUTE) == []
    search.apply(TrialFinished(trial="00000", reason="done"))
    assert search.emit_due_events(100 * MINUTE) == []


@pytest.mark.parametrize(("gap", "limit"), [(0.1, 5.0), (4.0, 20.0)])
def test_a_trial_is_stalled_after_five_times_its_longest_gap_and_at_least_five_minutes(
    gap: float, limit: float
) -> None:
    search = Search()
    search.apply(*start_trial("00000"))
    for number in (1, 2):
        report = StepReport(step=number, metrics={})
        search.recorder._view.apply_report("00000", report, search.started_at + timedelta(minutes=number * gap))
    assert search.emit_due_events((2 * gap + limit - 0.5) * MINUTE) == []
    assert event_names(search.emit_due_events((2 * gap + limit + 0.5) * MINUTE)) == ["experiment.stalled"]


def test_an_attempt_that_outlived_its_search_is_looked_after() -> None:
    earlier = Search()
    earlier.apply(*start_trial("00000"))
    assert event_names(Search(state=earlier.state).emit_due_events(31 * MINUTE)) == ["experiment.stalled"]


# ---------------------------------------------------------------------------------------------------- the emitter


def make_emitter(emitted: list[PrefectEvent], state: Experiment | None = None) -> EventEmitter:
    recorder = SearchRecorder(state or make_empty_experiment(first_generation("first")))
    return EventEmitter(ADDRESS, LOSS, recorder, LOG, emitted.append)


def emit_events(emitter: EventEmitter, *events: Event) -> None:
    for event in events:
        emitter.on_event(event, apply_event(emitter.experiment, event, 1))


@pytest.mark.parametrize(
    ("stops", "error", "end", "message"),
    [
        (None, None, "finished", ""),
        ([StopRequested(reason="enough money")], None, "stopped", "enough money"),
        ([], None, "stopped", "asked to stop"),
        (None, Superseded("by another"), "superseded", "by another"),
        (None, ValueError("a bug"), "failed", "ValueError: a bug"),
        (None, KeyboardInterrupt(), "failed", "KeyboardInterrupt:"),
    ],
)
def test_a_run_says_how_it_ended_and_an_error_goes_on(
    stops: list[Event] | None, error: BaseException | None, end: str, message: str
) -> None:
    stop, emitted = threading.Event(), list[PrefectEvent]()
    if stops is not None:
        stop.set()
    goes_on = pytest.raises(type(error)) if error is not None else contextlib.nullcontext()
    with goes_on, emitting_events(emitter := make_emitter(emitted), stop):
        emit_events(emitter, *start_trial("00000"), *(stops or ()))
        if error is not None:
            raise error
    assert event_names(emitted)[:2] == ["experiment.started", "attempt-started"]
    last = emitted[-1]
    assert (event_names([last]), last.resource["prefect-tune.end"]) == (["experiment.ended"], end)
    assert (last.payload["end"], last.payload["message"]) == (end, message)


def test_an_attempt_that_an_earlier_owner_left_running_is_told_to_have_ended() -> None:
    earlier, emitted = Search(), list[PrefectEvent]()
    earlier.apply(*start_trial("00000"), *start_trial("00001"))
    ended = AttemptEnded(trial="00000", cause=Cause.MACHINE, reason="its owner died")
    emitter = make_emitter(emitted, apply_event(earlier.state, ended, 2))
    with emitting_events(emitter, threading.Event(), earlier.state):
        pass
    assert event_names(emitted) == ["experiment.started", "attempt-ended", "experiment.ended"]
    assert emitted[1].payload["reason"] == "its owner died"


def test_an_event_that_cannot_be_told_is_logged_and_the_next_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    emitted: list[PrefectEvent] = []

    def emit(event: PrefectEvent) -> None:
        if event.event.endswith("tune.attempt-started"):
            raise ValueError("too large")
        emitted.append(event)

    emitter = EventEmitter(ADDRESS, LOSS, SearchRecorder(make_empty_experiment(first_generation("first"))), LOG, emit)
    with caplog.at_level("ERROR"), emitting_events(emitter, threading.Event()):
        emit_events(emitter, *FIRST_COMMIT)
    assert "could not be emitted" in caplog.text
    assert "checkpoint-committed" in event_names(emitted)


def test_what_is_due_is_emitted_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter_module, "_CHECK_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(emitter_module, "_FIRST_REPORT_TIMEOUT", timedelta(seconds=0.1))
    stalled, search = threading.Event(), Search()
    search.apply(*start_trial("00000"))

    def emit(event: PrefectEvent) -> None:
        if event.event.endswith("stalled"):
            stalled.set()

    with emitting_events(EventEmitter(ADDRESS, LOSS, SearchRecorder(search.state), LOG, emit), threading.Event()):
        assert stalled.wait(20)
