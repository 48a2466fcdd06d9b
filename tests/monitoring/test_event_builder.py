"""Which Prefect events an experiment emits, and at most how many; its assets and their upstream assets."""

from __future__ import annotations

import contextlib
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment, apply_event, empty_experiment
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
PLACE = ExperimentAddress("s3://bucket/runs", "first")
LOSS = make_objective("loss", "min")


def step(trial: str, sequence: int, loss: float, *, at: int) -> list[Event]:
    """A trial reports and saves a step."""
    report = StepReported(trial=trial, report=StepReport(step=at, metrics={"loss": loss}))
    ref = CheckpointRef(step=at, sequence=sequence, metrics={"loss": loss}, size_bytes=10)
    return [report, CheckpointCommitted(trial=trial, checkpoint=ref)]


def begun(trial: str) -> list[Event]:
    return [
        TrialAdded(trial=trial, config={}, proposed_by_search=True),
        AttemptStarted(trial=trial, attempt=1, from_step=0),
    ]


class Story:
    """An experiment, and the Prefect events that were emitted for its journal events."""

    def __init__(
        self, place: ExperimentAddress = PLACE, objective: Objective | None = LOSS, state: Experiment | None = None
    ) -> None:
        self.state = state or empty_experiment(first_generation("first"))
        self.recorder = SearchRecorder(self.state)
        self.began = self.now = datetime.now(UTC)
        self.built: list[PrefectEvent] = []
        self.emitter = EventEmitter(place, objective, self.recorder, LOG, self.built.append, lambda: self.now)

    def goes(self, *events: Event) -> list[PrefectEvent]:
        """Apply journal events; return the Prefect events emitted for them."""
        count = len(self.built)
        for event in events:
            self.state = apply_event(self.state, event, 1)
            self.recorder.on_event(event, self.state)
            self.emitter.on_event(event, self.state)
        return self.built[count:]

    def due(self, after: float) -> list[PrefectEvent]:
        """Return the events that are due this many seconds after the begin."""
        count, self.now = len(self.built), self.began + timedelta(seconds=after)
        self.emitter.emit_due_events()
        return self.built[count:]

    def ends(self) -> list[PrefectEvent]:
        count = len(self.built)
        self.emitter.emit_end("finished")
        return self.built[count:]


def names(notices: list[PrefectEvent]) -> list[str]:
    return [each.event.removeprefix("prefect-tune.") for each in notices]


def upstream(notice: PrefectEvent) -> list[str]:
    return [each["prefect.resource.id"] for each in notice.related if each["prefect.resource.role"] == "asset"]


# ------------------------------------------------------------------------------------------------- names and assets


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("s3://bucket/runs/", "s3://bucket/runs/first"),
        ("s3://bucket/runs?endpoint_override=host&secret_key=s3cret", "s3://bucket/runs/first"),
        ("sftp://anna:s3cret@host/runs#part", "sftp://anna@host/runs/first"),
        (
            "abfss://container@account.dfs.core.windows.net/runs",
            "abfss://container@account.dfs.core.windows.net/runs/first",
        ),
        ("file:///data/runs", "file:///data/runs/first"),
        ("file:///", "file:///first"),
        ("memory://", "memory://first"),
    ],
)
def test_an_experiment_is_named_by_its_place_without_secrets(uri: str, named: str) -> None:
    place = ExperimentAddress(uri, "first")
    assert place.experiment_uri == named
    assert place.resource["prefect.resource.id"] == f"prefect-tune.experiment.{named}"
    assert "s3cret" not in str(
        [
            place.redacted_target_uri,
            place.checkpoints_uri(first_generation("first").trial_key("00000")),
            place.best_model_key,
            {**place.resource, "prefect.resource.role": "experiment"},
        ]
    )


def test_a_place_that_prefect_takes_no_key_of_has_no_assets_and_events_all_the_same() -> None:
    story = Story(ExperimentAddress("file:///my%20runs", "first"))
    assert make_asset(ExperimentAddress("file:///my%20runs", "first").best_model_key) is None
    built = names(story.goes(*begun("00000"), *step("00000", 2, 0.5, at=1)))
    assert built == ["attempt-started", "checkpoint-committed", "experiment.best"]


def test_a_commit_materializes_the_asset_of_its_trial_and_a_better_one_that_of_the_best_model() -> None:
    saved, made, best, known, model = Story().goes(*begun("00000"), *step("00000", 2, 0.5, at=1))[1:]
    key = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert (saved.event, upstream(saved)) == ("prefect-tune.checkpoint-committed", [key])
    assert (made.event, made.resource["prefect.resource.id"]) == ("prefect.asset.materialization.succeeded", key)
    assert made.payload["metrics"] == {"loss": 0.5}
    assert made.payload["manifest"] == "first/1/trials/00000/checkpoints/0000000001-0000000002/manifest.json"
    assert made.related[-1] == {"prefect.resource.id": "prefect-tune", "prefect.resource.role": "asset-materialized-by"}
    assert best.event == "prefect-tune.experiment.best"
    assert best.resource == {**PLACE.resource, "prefect-tune.trial": "00000"}
    assert best.related == [{**PLACE.trial_resource("00000"), "prefect.resource.role": "trial"}]
    assert (known.event, known.resource["prefect.resource.id"]) == ("prefect.asset.referenced", key)
    assert (model.resource["prefect.resource.id"], upstream(model)) == ("s3://bucket/runs/first/best", [key])


def test_an_exploit_is_an_edge_from_the_others_checkpoints_for_the_clone_and_for_what_it_becomes() -> None:
    story = Story()
    story.goes(*begun("00000"), *begun("00001"), *step("00000", 2, 0.5, at=1))
    ended = TrialPaused(trial="00001", reason="worse")
    origin = CheckpointOrigin(trial="00000", step=1, sequence=2)
    copy = CheckpointRef(step=1, sequence=9, metrics={"loss": 0.5}, origin=origin)
    clone = CheckpointCloned(trial="00001", checkpoint=copy, source="00000", config={}, reason="worse")
    built = story.goes(ended, clone)
    of_00000 = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert names(built) == ["trial-paused", "checkpoint-cloned", "prefect.asset.materialization.succeeded"]
    assert (upstream(built[-1]), built[-1].payload["exploited"]) == ([of_00000], "00000")
    again = AttemptStarted(trial="00001", attempt=2, from_step=1, from_sequence=9)
    made = story.goes(TrialResumed(trial="00001"), again, *step("00001", 11, 0.9, at=2))
    assert upstream(made[-1]) == [of_00000]


def test_the_best_model_is_made_from_the_warm_starts_and_the_origin_of_its_search() -> None:
    state = empty_experiment(first_generation("first"))
    origin = ForkOrigin(experiment="old", generation=1, number=3, digest=Digest("d"))
    places = ["s3://bucket/runs/earlier", "gs://other/place/theirs"]
    named = ("earlier", "gcs-target/prod/theirs", "gs://other/place/theirs")
    sources = [
        WarmStart(source=each, location=at, trials=()) for each, at in zip(named, [*places, places[1]], strict=True)
    ]
    first, second = (ExperimentConfigured(settings={}, warm_starts=tuple(each)) for each in (sources[:1], sources[1:]))
    for event in (ExperimentForked(origin=origin), first, second):
        state = apply_event(state, event, 1)
    model = Story(state=state).goes(*begun("00000"), *step("00000", 2, 0.5, at=1))[-1]
    assert upstream(model)[1:] == [
        "s3://bucket/runs/old/best",
        "s3://bucket/runs/earlier/best",
        "gs://other/place/theirs/best",
    ]
    assert (model.payload["warm_start"], model.payload["forked_from"]) == (places, "old")


# --------------------------------------------------------------------------------------------------- how many


def test_a_better_model_is_told_at_most_every_half_minute_and_the_last_one_at_the_end() -> None:
    story = Story()
    story.goes(*begun("00000"), *step("00000", 2, 0.5, at=1))
    built = story.goes(*step("00000", 3, 0.4, at=2), *step("00000", 4, 0.3, at=3))
    assert "experiment.best" not in names(built)
    assert story.due(29.0) == []
    better, *_ = story.due(30.0)
    assert better.payload["step"] == 3
    story.goes(*step("00000", 5, 0.2, at=4))
    last, *_, finished = story.ends()
    assert (last.event, last.payload["step"]) == ("prefect-tune.experiment.best", 4)
    assert (finished.payload["best"], finished.payload["trials"]) == ("00000", {"running": 1})
    assert (finished.payload["end"], finished.resource["prefect-tune.end"]) == ("finished", "finished")


def test_events_of_trials_are_rationed_and_those_that_somebody_must_act_on_are_not() -> None:
    story = Story(objective=None)
    for number in range(300):
        story.goes(*begun(f"{number:05d}"))
    assert len(story.built) == 100
    died = AttemptEnded(trial="00000", cause=Cause.TRAINABLE, reason="no")
    assert names(story.goes(died)) == ["attempt-ended"]
    story.now += timedelta(seconds=1)
    built = [each for number in range(300, 320) for each in story.goes(*begun(f"{number:05d}"))]
    assert len(built) == 5
    assert story.ends()[-1].payload["dropped"] == 215


def test_an_event_about_the_whole_experiment_has_its_resource_and_is_not_limited() -> None:
    story = Story()
    story.emitter._allowance = TokenBucket(0, 0)
    (asked,) = story.goes(StopRequested(reason="enough"))
    assert (asked.event, asked.resource) == ("prefect-tune.stop-requested", PLACE.resource)
    assert asked.payload["reason"] == "enough"


MINUTE = 60.0


def test_a_trial_has_half_an_hour_for_its_first_report_and_its_silence_is_said_once() -> None:
    story = Story()
    story.goes(*begun("00000"))
    assert story.due(29 * MINUTE) == []
    (stalled,) = story.due(31 * MINUTE)
    assert (stalled.event, stalled.payload["trial"]) == ("prefect-tune.experiment.stalled", "00000")
    assert float(str(stalled.payload["silent_seconds"])) == pytest.approx(31 * MINUTE, abs=5)
    assert story.due(32 * MINUTE) == []
    story.goes(TrialFinished(trial="00000", reason="done"))
    assert story.due(100 * MINUTE) == []


@pytest.mark.parametrize(("gap", "limit"), [(0.1, 5.0), (4.0, 20.0)])
def test_a_trial_is_stalled_after_five_times_its_longest_gap_and_at_least_five_minutes(
    gap: float, limit: float
) -> None:
    story = Story()
    story.goes(*begun("00000"))
    for number in (1, 2):
        report = StepReport(step=number, metrics={})
        story.recorder._view.apply_report("00000", report, story.began + timedelta(minutes=number * gap))
    assert story.due((2 * gap + limit - 0.5) * MINUTE) == []
    assert names(story.due((2 * gap + limit + 0.5) * MINUTE)) == ["experiment.stalled"]


def test_an_attempt_that_outlived_its_search_is_looked_after() -> None:
    earlier = Story()
    earlier.goes(*begun("00000"))
    assert names(Story(state=earlier.state).due(31 * MINUTE)) == ["experiment.stalled"]


# ---------------------------------------------------------------------------------------------------- the emitter


def emitter_of(emitted: list[PrefectEvent], state: Experiment | None = None) -> EventEmitter:
    recorder = SearchRecorder(state or empty_experiment(first_generation("first")))
    return EventEmitter(PLACE, LOSS, recorder, LOG, emitted.append)


def play(emitter: EventEmitter, *events: Event) -> None:
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
    with goes_on, emitting_events(emitter := emitter_of(emitted), stop):
        play(emitter, *begun("00000"), *(stops or ()))
        if error is not None:
            raise error
    assert names(emitted)[:2] == ["experiment.started", "attempt-started"]
    last = emitted[-1]
    assert (names([last]), last.resource["prefect-tune.end"]) == (["experiment.ended"], end)
    assert (last.payload["end"], last.payload["message"]) == (end, message)


def test_an_attempt_that_an_earlier_owner_left_running_is_told_to_have_ended() -> None:
    found, emitted = Story(), list[PrefectEvent]()
    found.goes(*begun("00000"), *begun("00001"))
    ended = AttemptEnded(trial="00000", cause=Cause.MACHINE, reason="its owner died")
    emitter = emitter_of(emitted, apply_event(found.state, ended, 2))
    with emitting_events(emitter, threading.Event(), found.state):
        pass
    assert names(emitted) == ["experiment.started", "attempt-ended", "experiment.ended"]
    assert emitted[1].payload["reason"] == "its owner died"


def test_an_event_that_cannot_be_told_is_logged_and_the_next_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    emitted: list[PrefectEvent] = []

    def emit(notice: PrefectEvent) -> None:
        if notice.event.endswith("tune.attempt-started"):
            raise ValueError("too large")
        emitted.append(notice)

    emitter = EventEmitter(PLACE, LOSS, SearchRecorder(empty_experiment(first_generation("first"))), LOG, emit)
    with caplog.at_level("ERROR"), emitting_events(emitter, threading.Event()):
        play(emitter, *begun("00000"), *step("00000", 2, 0.5, at=1))
    assert "could not be emitted" in caplog.text
    assert "checkpoint-committed" in names(emitted)


def test_what_is_due_is_emitted_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter_module, "_CHECK_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(emitter_module, "_FIRST_REPORT_TIMEOUT", timedelta(seconds=0.1))
    stalled, story = threading.Event(), Story()
    story.goes(*begun("00000"))

    def emit(event: PrefectEvent) -> None:
        if event.event.endswith("stalled"):
            stalled.set()

    with emitting_events(EventEmitter(PLACE, LOSS, SearchRecorder(story.state), LOG, emit), threading.Event()):
        assert stalled.wait(20)
