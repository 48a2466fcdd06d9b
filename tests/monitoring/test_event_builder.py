"""Which Prefect events an experiment emits, and at most how many; its assets and their upstream assets."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from uuid import UUID

import pytest

from prefect_tune.attempt.search_link import StepReported
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.experiment.stoppers import MaxSteps, TimeBudget, TrialBudget
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Configured,
    Event,
    Finished,
    Forked,
    ForkOrigin,
    Paused,
    Reported,
    Requeued,
    Started,
    StopAsked,
    TrialAdded,
    WarmStart,
)
from prefect_tune.core.prefect_events import Allowance, Budget
from prefect_tune.core.search.objective import objective_of
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import Digest, StepReport
from prefect_tune.monitoring import event_emitter as emitter_module
from prefect_tune.monitoring.assets import ExperimentAddress
from prefect_tune.monitoring.event_emitter import EventBuilder, EventContext, EventEmitter, budgets_of, emitting_events
from prefect_tune.prefect_api.artifacts_and_assets import PrefectEvent, asset_of
from tests.fakes.checkpoints import first_generation

LOG = logging.getLogger("prefect_tune.tests.dispatches")
PLACE = ExperimentAddress("s3://bucket/runs", "first")
RUN = UUID(int=7)
SUBJECT = EventContext(PLACE, objective_of("loss", "min"), run=RUN)


def entry(trial: str, number: int, *events: Event) -> Absorbed:
    return Absorbed(trial=trial, number=number, events=events)


def step(trial: str, number: int, loss: float, *, at: int) -> Absorbed:
    """An entry that reports and commits a step."""
    report = Reported(trial=trial, report=StepReport(step=at, metrics={"loss": loss}))
    ref = CheckpointRef(step=at, sequence=number, metrics={"loss": loss}, size_bytes=10)
    return entry(trial, number, report, Committed(trial=trial, checkpoint=ref))


def begun(trial: str) -> list[Event]:
    return [
        TrialAdded(trial=trial, config={}, own_journal=True),
        entry(trial, 1, Started(trial=trial, attempt=1, from_step=0)),
    ]


class Story:
    """An experiment, and the Prefect events that were built from its journal events."""

    def __init__(self, subject: EventContext = SUBJECT, state: Experiment | None = None) -> None:
        self.state = state or nothing_yet(first_generation("first"))
        self.builder = EventBuilder(subject, self.state, 0.0)
        self.built: list[PrefectEvent] = []
        self.now = 0.0

    def goes(self, *events: Event) -> list[PrefectEvent]:
        """Apply journal events; return the Prefect events built from them."""
        built: list[PrefectEvent] = []
        for event in events:
            before, self.state = self.state, after_event(self.state, event, 1)
            built += self.builder.events_of(event, before, self.state, self.now)
        self.built += built
        return built

    def ends(self) -> list[PrefectEvent]:
        return list(self.builder.end_events("finished", self.state))


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
    assert place.uri == named
    assert place.resource["prefect.resource.id"] == f"prefect-tune.experiment.{named}"
    assert "s3cret" not in str(
        [place.target, place.checkpoints(first_generation("first").trial_key("00000")), place.best, place.related]
    )


def test_a_place_that_prefect_takes_no_key_of_has_no_assets_and_events_all_the_same() -> None:
    story = Story(EventContext(ExperimentAddress("file:///my%20runs", "first"), objective_of("loss", "min")))
    assert asset_of(ExperimentAddress("file:///my%20runs", "first").best) is None
    built = names(story.goes(*begun("00000"), step("00000", 2, 0.5, at=1)))
    assert built == ["started", "committed", "experiment.best"]


def test_a_commit_materializes_the_asset_of_its_trial_and_a_better_one_that_of_the_best_model() -> None:
    saved, made, best, known, model = Story().goes(*begun("00000"), step("00000", 2, 0.5, at=1))[1:]
    key = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert (saved.event, upstream(saved)) == ("prefect-tune.committed", [key])
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
    story.goes(*begun("00000"), *begun("00001"), step("00000", 2, 0.5, at=1))
    source = CheckpointKey(trial=TrialKey(experiment="first", generation=1, trial="00000"), step=1, sequence=2)
    ended = entry("00001", 2, Paused(trial="00001", reason="worse"))
    copy = CheckpointRef(step=1, sequence=9, metrics={"loss": 0.5})
    clone = Cloned(trial="00001", checkpoint=copy, source=source, config={}, reason="worse")
    built = story.goes(ended, entry("00001", 3, clone))
    of_00000 = "s3://bucket/runs/first/1/trials/00000/checkpoints"
    assert names(built) == ["paused", "cloned", "prefect.asset.materialization.succeeded"]
    assert (upstream(built[-1]), built[-1].payload["exploited"]) == ([of_00000], "00000")
    again = Started(trial="00001", attempt=2, from_step=1, from_sequence=9)
    made = story.goes(entry("00001", 4, again), step("00001", 10, 0.9, at=2).model_copy(update={"number": 5}))
    assert upstream(made[-1]) == [of_00000]


def test_the_best_model_is_made_from_the_warm_starts_and_the_origin_of_its_search() -> None:
    state = nothing_yet(first_generation("first"))
    origin = ForkOrigin(experiment="old", generation=1, number=3, digest=Digest("d"))
    places = ["s3://bucket/runs/earlier", "gs://other/place/theirs"]
    named = ("earlier", "gcs-target/prod/theirs", "gs://other/place/theirs")
    sources = [
        WarmStart(source=each, place=at, trials=()) for each, at in zip(named, [*places, places[1]], strict=True)
    ]
    first, second = (Configured(settings={}, warm_starts=tuple(each)) for each in (sources[:1], sources[1:]))
    for event in (Forked(origin=origin), first, second):
        state = after_event(state, event, 1)
    model = Story(state=state).goes(*begun("00000"), step("00000", 2, 0.5, at=1))[-1]
    assert upstream(model)[1:] == [
        "s3://bucket/runs/old/best",
        "s3://bucket/runs/earlier/best",
        "gs://other/place/theirs/best",
    ]
    assert (model.payload["warm_start"], model.payload["forked_from"]) == (places, "old")


# --------------------------------------------------------------------------------------------------- how many


def test_a_better_model_is_told_at_most_every_half_minute_and_the_last_one_at_the_end() -> None:
    story = Story()
    story.goes(*begun("00000"), step("00000", 2, 0.5, at=1))
    built = story.goes(step("00000", 3, 0.4, at=2), step("00000", 4, 0.3, at=3))
    assert "experiment.best" not in names(built)
    assert list(story.builder.due_events(29.0)) == []
    better, *_ = story.builder.due_events(30.0)
    assert better.payload["step"] == 3
    story.goes(step("00000", 5, 0.2, at=4))
    last, *_, finished = story.ends()
    assert (last.event, last.payload["step"]) == ("prefect-tune.experiment.best", 4)
    assert (finished.payload["best"], finished.payload["trials"]) == ("00000", {"running": 1})
    assert (finished.payload["end"], finished.resource["prefect-tune.end"]) == ("finished", "finished")


def test_events_of_trials_are_rationed_and_those_that_somebody_must_act_on_are_not() -> None:
    story = Story(EventContext(PLACE))
    for number in range(300):
        story.goes(*begun(f"{number:05d}"))
    assert len(story.built) == 100
    died = AttemptEnded(trial="00000", cause=Cause.USER, reason="no")
    assert names(story.goes(entry("00000", 2, died))) == ["attempt-ended"]
    story.now = 1.0
    built = [each for number in range(300, 320) for each in story.goes(*begun(f"{number:05d}"))]
    assert len(built) == 5
    assert story.ends()[-1].payload["dropped"] == 215


def test_what_a_run_tells_again_since_it_was_killed_is_the_same_event_and_another_runs_is_not() -> None:
    events = [*begun("00000"), step("00000", 2, 0.5, at=1)]
    first, again = (Story().goes(*events) for _ in range(2))
    other = Story(EventContext(PLACE, run=UUID(int=8))).goes(*events)
    own = [each.identity for each in first if each.event in {"prefect-tune.started", "prefect-tune.committed"}]
    assert len(own) == 2
    assert None not in own
    assert set(own) <= {each.identity for each in again}
    assert not {each.identity for each in other} & set(own)


def test_an_event_about_the_whole_experiment_has_its_resource_and_is_not_limited() -> None:
    story = Story()
    story.builder._allowance = Allowance(0, 0)
    (asked,) = story.goes(StopAsked(reason="enough"))
    assert (asked.event, asked.resource) == ("prefect-tune.stop-asked", PLACE.resource)
    assert asked.payload["reason"] == "enough"


def test_what_goes_on_for_too_long_is_reported() -> None:
    story = Story(EventContext(PLACE, budgets=[Budget("time", 46 * 60.0)], sync_period=timedelta(seconds=60)))
    story.goes(*begun("00000"))
    assert names(list(story.builder.due_events(31 * 60.0))) == ["experiment.stalled"]
    story.builder.health.reported("00000", 1, 32 * 60.0)
    assert names(list(story.builder.due_events(36 * 60.0))) == ["experiment.lag"]
    story.goes(step("00000", 2, 0.5, at=1), entry("00000", 3, Finished(trial="00000", reason="done")))
    assert names(list(story.builder.due_events(37 * 60.0))) == ["experiment.budget"]
    story.goes(Requeued(trial="00000", reason="more"))
    assert story.builder._ended == 0


def test_steps_that_the_experiments_own_journal_holds_do_not_lag() -> None:
    story = Story(EventContext(PLACE, sync_period=timedelta(seconds=60)))
    story.goes(TrialAdded(trial="00000", config={}), Started(trial="00000", attempt=1, from_step=0))
    story.builder.health.reported("00000", 1, 60.0)
    story.goes(Reported(trial="00000", report=StepReport(step=1, metrics={})))  # as a single training journals it
    assert list(story.builder.due_events(5 * 60.0)) == []


def test_an_attempt_that_outlived_its_search_is_looked_after() -> None:
    earlier = Story()
    earlier.goes(*begun("00000"))
    assert names(list(Story(state=earlier.state).builder.due_events(31 * 60.0))) == ["experiment.stalled"]


def test_the_budgets_are_those_of_the_run_and_of_its_stoppers() -> None:
    stop = MaxSteps(3) | TimeBudget(timedelta(hours=1)) | TrialBudget(5)
    found = budgets_of(stop, time=timedelta(minutes=1), trial_count=9)
    assert found == [Budget("training-time", 3600), Budget("time", 60), Budget("trials", 5)]
    assert budgets_of(MaxSteps(3), time=None, trial_count=None) == []


# ---------------------------------------------------------------------------------------------------- the emitter


@pytest.fixture
def emitted() -> list[PrefectEvent]:
    return []


@pytest.fixture
def emitter(emitted: list[PrefectEvent]) -> EventEmitter:
    return EventEmitter(SUBJECT, nothing_yet(first_generation("first")), LOG, emitted.append)


def play(emitter: EventEmitter, *events: Event) -> None:
    for event in events:
        emitter.applied(event, after_event(emitter.experiment, event, 1))


def test_events_that_the_journal_holds_do_not_lag(emitter: EventEmitter) -> None:
    play(emitter, *begun("00000"))
    emitter.wrote(emitter.experiment)
    assert list(emitter._builder.health.look(time.monotonic() + 10 * 60.0)) == []


def test_a_run_that_ends_in_order_has_finished(emitter: EventEmitter, emitted: list[PrefectEvent]) -> None:
    with emitting_events(emitter, threading.Event()):
        play(emitter, *begun("00000"))
        emitter.reported(StepReported("00000", StepReport(step=1, metrics={}), asks=False), emitter.experiment)
        emitter.wrote(emitter.experiment)
    assert names(emitted) == ["experiment.started", "started", "experiment.ended"]


@pytest.mark.parametrize(
    ("stops", "reason"), [([StopAsked(reason="enough money")], "enough money"), ([], "asked to stop")]
)
def test_a_run_that_is_asked_to_end_says_why(
    emitter: EventEmitter, emitted: list[PrefectEvent], stops: list[Event], reason: str
) -> None:
    stop = threading.Event()
    stop.set()
    with emitting_events(emitter, stop):
        play(emitter, *stops)
    assert (emitted[-1].payload["end"], emitted[-1].payload["message"]) == ("stopped", reason)


@pytest.mark.parametrize(
    ("error", "end"),
    [(Superseded("by another"), "superseded"), (ValueError("a bug"), "failed"), (KeyboardInterrupt(), "failed")],
)
def test_a_run_that_dies_of_an_error_says_so_and_the_error_goes_on(
    emitter: EventEmitter, emitted: list[PrefectEvent], error: BaseException, end: str
) -> None:
    with pytest.raises(type(error)), emitting_events(emitter, threading.Event()):
        raise error
    assert (names(emitted)[-1], emitted[-1].resource["prefect-tune.end"]) == ("experiment.ended", end)
    assert str(error) in str(emitted[-1].payload["message"])


def test_an_attempt_that_an_earlier_owner_left_running_is_told_to_have_ended(emitted: list[PrefectEvent]) -> None:
    found = Story()
    found.goes(*begun("00000"), *begun("00001"))
    emitter = EventEmitter(SUBJECT, found.state, LOG, emitted.append)
    ended = AttemptEnded(trial="00000", cause=Cause.MACHINE, reason="its owner died")
    emitter.opened(after_event(found.state, ended, 2))
    with emitting_events(emitter, threading.Event()):
        pass
    assert names(emitted) == ["experiment.started", "attempt-ended", "experiment.ended"]
    assert emitted[1].payload["reason"] == "its owner died"


def test_who_cannot_be_told_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter_module, "_PATIENCE", timedelta(seconds=0.2))
    released = threading.Event()
    emitter = EventEmitter(
        SUBJECT, nothing_yet(first_generation("first")), LOG, lambda _: bool(released.wait(30)) and None
    )
    began = time.monotonic()
    with emitting_events(emitter, threading.Event()):
        play(emitter, *begun("00000"))
    took = time.monotonic() - began
    released.set()
    assert took < 10


def test_an_event_that_cannot_be_told_is_logged_and_the_next_one_is_told(
    caplog: pytest.LogCaptureFixture, emitted: list[PrefectEvent]
) -> None:
    def emit(notice: PrefectEvent) -> None:
        if notice.event.endswith("tune.started"):
            raise ValueError("too large")
        emitted.append(notice)

    emitter = EventEmitter(SUBJECT, nothing_yet(first_generation("first")), LOG, emit)
    with caplog.at_level("ERROR"), emitting_events(emitter, threading.Event()):
        play(emitter, *begun("00000"), step("00000", 2, 0.5, at=1))
    assert "could not be emitted" in caplog.text
    assert "committed" in names(emitted)


def test_a_search_that_says_more_than_can_be_told_is_not_held_up_by_it(
    monkeypatch: pytest.MonkeyPatch, emitted: list[PrefectEvent]
) -> None:
    monkeypatch.setattr(emitter_module, "_MOST_WAITING", 10)
    emitter = EventEmitter(SUBJECT, nothing_yet(first_generation("first")), LOG, emitted.append)
    for number in range(50):
        play(emitter, *begun(f"{number:05d}"))
    with emitting_events(emitter, threading.Event()):
        pass
    assert 2 < len(emitted) < 15


def test_the_herald_looks_while_nothing_happens(monkeypatch: pytest.MonkeyPatch, emitted: list[PrefectEvent]) -> None:
    monkeypatch.setattr(emitter_module, "_CHECK_EVERY", timedelta(seconds=0.05))
    looked = threading.Event()

    def emit(notice: PrefectEvent) -> None:
        emitted.append(notice)
        if notice.event.endswith("budget"):
            looked.set()

    subject = EventContext(PLACE, budgets=[Budget("time", 0.2)])
    with emitting_events(EventEmitter(subject, nothing_yet(first_generation("first")), LOG, emit), threading.Event()):
        assert looked.wait(20)
