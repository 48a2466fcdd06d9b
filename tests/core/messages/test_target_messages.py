"""Objects on the target: a stop request is applied once, despite deletions and races; the newest live status counts."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from prefect_tune.core.errors import CommitUnknown, IllegalTransition, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    Event,
    FinishKind,
    Owner,
    OwnerChanged,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointPart,
    CheckpointSaved,
    MeanMetrics,
    RankMetrics,
    Start,
    StepDone,
    TrainableLoaded,
    TrainingEnded,
    from_trial_adapter,
    to_trial_adapter,
)
from prefect_tune.core.messages.target_messages import (
    LastKnownReports,
    LiveStatus,
    NodeAddress,
    RunningAttempt,
    StopRequest,
    delete_live_status,
    find_newest_address,
    is_request_journaled,
    is_request_lost,
    list_node_objects,
    make_stop_event,
    read_last_reports,
    read_newest_live_status,
    read_stop_request,
    read_view,
    write_live_status,
    write_stop_request,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import NodesKey, delete_older_documents
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import StepReport, Value
from tests.core.driver import JOURNAL, KEY
from tests.fakes.outcomes import make_failure
from tests.fakes.searches.experiments import apply_events
from tests.fakes.stores.memory_store import MemoryStore

OWNER = Owner(name="first", host="here", pid=1)


def make_experiment() -> Experiment:
    events = [TrialAdded(trial=trial, config={}) for trial in ("a", "b")]
    owner_changed = OwnerChanged(experiment="e", generation=1, term=1, owner=OWNER)
    return apply_events(make_empty_experiment(JOURNAL), [owner_changed, *events])


def make_request(write_id: str = "w", *, term: int = 1, trial: str | None = None) -> StopRequest:
    return StopRequest(write_id=write_id, at="now", reason="enough", term=term, trial=trial)


def apply_request(state: Experiment, request: StopRequest) -> Experiment:
    return apply_event(state, make_stop_event(state, request), 2)


def test_what_is_asked_is_read_under_its_number_and_asking_again_changes_nothing() -> None:
    store, state = MemoryStore(), make_experiment()
    assert [write_stop_request(store, state, make_request(name)) for name in ("one", "two")] == [1, 2]
    assert read_stop_request(store, JOURNAL, 1) == make_request("one")
    assert read_stop_request(store, JOURNAL, 3) is None


class ReplyLosingStore(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        raise CommitUnknown(f"{path}: the reply was lost")


def test_a_reply_that_is_lost_is_no_second_request() -> None:
    store, state = ReplyLosingStore(), make_experiment()
    numbers = [write_stop_request(store, state, make_request()) for _ in range(2)]
    assert (numbers, read_stop_request(store, JOURNAL, 2)) == ([1, 1], None)


def test_a_trial_that_is_asked_to_stop_is_known_until_it_has_ended() -> None:
    state = apply_request(make_experiment(), make_request(trial="a"))
    assert (dict(state.pending_stops), state.stop_requests, state.stop_reason) == ({"a": "enough"}, ("w",), "")
    assert apply_event(state, TrialFinished(trial="b", reason="done"), 3).pending_stops == {"a": "enough"}
    assert apply_event(state, TrialFinished(trial="a", reason="enough", kind=FinishKind.STOPPED), 3).pending_stops == {}
    assert apply_event(state, TrialErrored(trial="a", cause=Cause.TRAINABLE, reason="no"), 3).pending_stops == {}


def test_a_stop_of_the_experiment_ends_it_for_the_owner_it_was_for_and_no_later_one() -> None:
    state = apply_request(make_experiment(), make_request())
    assert state.stop_reason == "enough"
    later = apply_event(state, OwnerChanged(experiment="e", generation=1, term=2, owner=OWNER), 3)
    assert later.stop_reason == ""
    stale = apply_request(later, make_request("late", term=1))
    assert (stale.stop_reason, stale.stop_requests) == ("", ("w", "late"))
    outdated = make_reason("request-outdated", owner=1, successor=2)
    assert make_stop_event(later, make_request("late", term=1)).refused == outdated


@pytest.mark.parametrize(
    ("stop_request", "refused"),
    [
        (make_request(trial="nobody"), make_reason("request-without-trial", trial="nobody")),
        (make_request(trial="a"), make_reason("request-for-ended-trial", trial="a", status="completed")),
        (make_request("before", trial="b"), make_reason("request-repeated")),
    ],
)
def test_what_cannot_be_done_is_heard_and_comes_to_nothing(stop_request: StopRequest, refused: Reason) -> None:
    state = apply_request(make_experiment(), make_request("before"))
    state = apply_event(state, TrialFinished(trial="a", reason="done"), 3)
    event = make_stop_event(state, stop_request)
    updated = apply_event(state, event, 4)
    assert event.refused == refused
    assert (updated.pending_stops, len(updated.stop_requests)) == ({}, 2)


def test_an_ended_trial_cannot_be_asked_to_stop() -> None:
    state = apply_event(make_experiment(), TrialFinished(trial="a", reason="done"), 2)
    with pytest.raises(IllegalTransition, match="has ended"):
        apply_event(state, StopRequested(trial="a", reason="enough"), 3)


def test_a_request_that_cannot_be_read_holds_up_no_other() -> None:
    store, state = MemoryStore(), make_experiment()
    store.create(JOURNAL.request_path(1), b"{}")
    assert write_stop_request(store, state, make_request()) == 2
    damaged = read_stop_request(store, JOURNAL, 1)
    assert damaged is not None
    assert make_stop_event(state, damaged).refused == make_reason("request-unreadable")
    assert len(apply_request(state, damaged).stop_requests) == 1


def test_what_was_heard_is_deleted_and_what_was_not_stays() -> None:
    store, state = MemoryStore(), make_experiment()
    for name in ("one", "two"):
        write_stop_request(store, state, make_request(name))
    delete_older_documents(store, before=JOURNAL.request_path(2))
    assert read_stop_request(store, JOURNAL, 1) is None
    assert read_stop_request(store, JOURNAL, 2) == make_request("two")
    delete_older_documents(store, before=JOURNAL.request_path(2))
    assert store.operations["delete"] == 1


def test_whoever_takes_a_number_that_was_heard_and_deleted_meanwhile_finds_that_out() -> None:
    store, before = MemoryStore(), make_experiment()
    write_stop_request(store, before, make_request("fast"))
    later = apply_request(before, make_request("fast"))
    delete_older_documents(store, before=JOURNAL.request_path(2))
    number = write_stop_request(store, before, make_request("slow"))  # its list of requests is old
    assert number == 1
    assert is_request_lost(later, make_request("slow"), number)
    assert not is_request_lost(later, make_request("fast"), 1)
    assert write_stop_request(store, later, make_request("slow")) == 2
    assert is_request_journaled(apply_request(later, make_request("slow")), make_request("slow"))


def test_the_newest_attempt_is_the_one_that_is_joined_and_older_addresses_are_found_to_be_deleted() -> None:
    store = MemoryStore()
    assert find_newest_address(store, KEY, 1) is None
    store.objects[f"{KEY.nodes_folder}/notes.txt"] = b"of a user"
    keys = [NodesKey(trial=KEY, attempt=attempt) for attempt in (2, 11)]
    address = NodeAddress(host="here", port=1, request="")
    for key in keys:
        store.create(key.address_path, seal(address))
    assert find_newest_address(store, KEY, 3) == (keys[1], address)
    assert find_newest_address(store, KEY, 12) is None
    assert [listed.path for listed in list_node_objects(store, KEY, 10)] == [keys[0].address_path]
    store.objects[keys[1].address_path] = b"damaged"
    assert find_newest_address(store, KEY, 3) is None


# The live status: only the newest object of the present owner counts, and the journal prevails.

BEGAN_AT = "2026-11-23T01:00:00+00:00"
REPORTED_AT = "2026-11-23T01:02:20+00:00"


def make_training(*events: Event, term: int = 1) -> Experiment:
    owners = [OwnerChanged(experiment="e", generation=1, term=number + 1, owner=OWNER) for number in range(term)]
    started: list[Event] = [TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0)]
    return apply_events(make_empty_experiment(JOURNAL), [*owners, *started, *events])


def make_status(number: int, *, term: int = 1, attempt: int = 1, step: int = 59, owner: Owner = OWNER) -> LiveStatus:
    report = StepReport(step=step, metrics={"loss": 0.5})
    times = {"began_at": BEGAN_AT, "reported_at": REPORTED_AT}
    trial = RunningAttempt(trial="a", attempt=attempt, host="h", report=report, **times)
    return LiveStatus(term=term, owner=owner, number=number, at=REPORTED_AT, period_seconds=5, trials=(trial,))


@pytest.mark.parametrize("seconds", [0, 24 * 3600 + 1, float("inf")])
def test_a_period_that_no_owner_has_is_refused(seconds: float) -> None:
    with pytest.raises(ValidationError):
        LiveStatus(term=1, owner=OWNER, number=1, at=REPORTED_AT, period_seconds=seconds, trials=())


def test_only_the_newest_object_stays_at_one_put_and_one_delete_each() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, make_status(1))
    store.operations.clear()
    for number in range(2, 12):
        write_live_status(store, JOURNAL, make_status(number))
    assert store.operations == {"put": 10, "delete": 10}
    assert list(store.objects) == ["e/1/live/0000000001-0000000011.json"]
    assert read_newest_live_status(store, JOURNAL) == make_status(11)


def test_a_new_owner_deletes_what_a_killed_one_has_left_and_counts_from_its_first_object_on() -> None:
    store = MemoryStore()
    for term, number in ((0, 2), (1, 6), (1, 7)):
        store.put(JOURNAL.live_status_path(term, number), b"left by a kill")
    for name in (".keep", "notes.txt"):
        store.put(f"{JOURNAL.live_folder}/{name}", b"a foreign file")
    write_live_status(store, JOURNAL, make_status(1, term=2))
    assert read_newest_live_status(store, JOURNAL) == make_status(1, term=2)
    assert len(store.objects) == 3
    write_live_status(store, JOURNAL, make_status(8, term=1))  # a paused machine resumes
    assert read_newest_live_status(store, JOURNAL) == make_status(1, term=2)


def test_the_end_of_an_owner_deletes_its_own_and_earlier_ones_and_no_later_ones() -> None:
    store = MemoryStore()
    for term in (1, 2, 3):
        store.put(JOURNAL.live_status_path(term, 4), b"")
    delete_live_status(store, JOURNAL, 2)
    assert list(store.objects) == [JOURNAL.live_status_path(3, 4)]


def test_a_view_has_the_newest_step_its_host_and_its_time() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, make_status(1))
    view = read_view(store, make_training(), BEGAN_AT)
    assert (view.experiment.trial("a").step, view.experiment.trial("a").metrics) == (59, {"loss": 0.5})
    assert (view.as_of, view.get_running_attempt("a")) == (REPORTED_AT, make_status(1).trials[0])


@pytest.mark.parametrize(
    ("state", "written"),
    [
        (make_training(term=2), make_status(1)),  # of an earlier owner
        (make_training(), make_status(1, owner=Owner(name="o", host="h", pid=2))),  # of a deleted experiment
        (make_training(), make_status(1, attempt=2)),  # of an attempt that the journal does not name yet
        (make_training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost")), make_status(1)),
    ],
)
def test_the_journal_decides_which_attempts_run(state: Experiment, written: LiveStatus) -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, written)
    view = read_view(store, state, BEGAN_AT)
    assert view.get_running_attempt("a") is None
    assert view.experiment == state


def test_an_attempt_that_has_ended_is_not_running_while_another_trial_is() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, make_status(1))
    another = (TrialAdded(trial="b", config={}), AttemptStarted(trial="b", attempt=1, from_step=0))
    state = make_training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"), *another)
    view = read_view(store, state, BEGAN_AT)
    assert view.live is not None
    assert (view.get_running_attempt("a"), view.experiment.trial("a").step) == (None, 0)


def test_a_step_that_the_journal_knows_is_not_replaced_by_an_older_one() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, make_status(1, step=3))
    state = make_training()
    trial = state.trial("a").model_copy(update={"step": 4})
    state = state.model_copy(update={"trials": state.trials.with_trial(trial)})
    assert read_view(store, state, BEGAN_AT).experiment.trial("a").step == 4


def test_the_last_steps_that_a_killed_owner_has_left_are_known_to_the_next_one() -> None:
    store = MemoryStore()
    assert read_last_reports(store, make_training(term=2)) == LastKnownReports()
    write_live_status(store, JOURNAL, make_status(1))
    last = read_last_reports(store, make_training(term=2))
    assert ({name: report.step for name, report in last.reports.items()}, last.at) == ({"a": 59}, make_status(1).at)
    ended = make_training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert read_last_reports(store, ended) == LastKnownReports()


@pytest.mark.parametrize("damage", [b"torn", b'{"format":"prefect-tune/live-status","version":9}'])
def test_one_that_cannot_be_read_leaves_the_journals_view(damage: bytes) -> None:
    store = MemoryStore()
    store.put(JOURNAL.live_status_path(1, 1), damage)
    view = read_view(store, make_training(), BEGAN_AT)
    assert (view.as_of, view.live) == (BEGAN_AT, None)


def test_an_experiment_without_a_running_trial_costs_no_request() -> None:
    store = MemoryStore()
    ended = make_training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert read_view(store, ended, BEGAN_AT).experiment == ended
    assert not store.operations


def test_one_that_is_replaced_while_it_is_read_is_read_again() -> None:
    class ReplacingStore(MemoryStore):
        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if path == JOURNAL.live_status_path(1, 1):
                write_live_status(self, JOURNAL, make_status(2))
            return super().read(path, offset=offset, length=length)

    store = ReplacingStore()
    write_live_status(store, JOURNAL, make_status(1))
    assert read_newest_live_status(store, JOURNAL) == make_status(2)


def test_a_write_that_the_target_refuses_leaves_the_one_before() -> None:
    class FullStore(MemoryStore):
        def put(self, path: str, data: Buffer) -> None:
            if self.objects:
                raise StoreUnavailable(f"{path}: full")
            super().put(path, data)

    store = FullStore()
    write_live_status(store, JOURNAL, make_status(1))
    with pytest.raises(StoreUnavailable):
        write_live_status(store, JOURNAL, make_status(2))
    assert read_newest_live_status(store, JOURNAL) == make_status(1)


# Messages between a trial's process and its supervisor.

REPORT = StepReport(step=3, metrics={"loss": 0.1, "note": "é\n"}, trained_seconds=1.5)
START = Start(
    experiment="e",
    trial="t",
    attempt=1,
    trainable="module:name",
    stopper="",
    import_path=("/a", "/b"),
    config={"width": 3, "nested": {"x": [1, None]}},
    directory="/d",
    staging="/s",
    restored_directory=None,
    from_step=0,
    trained_seconds=0.0,
    reports=(REPORT,),
    cadence=Cadence(every_steps=2),
    async_commit=True,
)


@pytest.mark.parametrize(
    "message", [START, CheckpointSaved(step=3), CheckpointAndStop(), MeanMetrics(step=3, metrics={"loss": 0.5})]
)
def test_the_trial_hears_what_the_supervisor_said(message: Value) -> None:
    assert to_trial_adapter.validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize(
    "message",
    [
        TrainableLoaded(pid=7, source_digest="abc"),
        StepDone(report=REPORT, checkpoint="/staging/3", is_owned_by_supervisor=True),
        StepDone(report=REPORT),
        CheckpointPart(step=3, directory="/staging/3"),
        RankMetrics(step=3, metrics={"loss": 0.5}),
        TrainingEnded(outcome=TrialFinished(trial="t", reason="enough", kind=FinishKind.RETURNED)),
        TrainingEnded(outcome=TrialPaused(trial="t", reason=make_reason("turn-over", step=3)), awaits_reuse=True),
        TrainingEnded(outcome=make_failure("x", Cause.TRAINABLE, type="ValueError", traceback="..."), raised=True),
    ],
)
def test_the_supervisor_hears_what_the_trial_said(message: Value) -> None:
    assert from_trial_adapter.validate_json(message.model_dump_json()) == message


def test_a_nan_is_not_turned_into_a_null_on_the_way() -> None:
    message = StepDone(report=StepReport(step=1, metrics={"loss": math.nan}))
    received = from_trial_adapter.validate_json(message.model_dump_json())
    assert isinstance(received, StepDone)
    assert math.isnan(received.report.metrics["loss"])  # type: ignore[arg-type]  # a float, or the test fails


@pytest.mark.parametrize("message", [b"", b"{}", b'{"type":"unheard-of"}', b'{"type":"saved"}', b"\x80\x04."])
def test_what_neither_says_is_refused(message: bytes) -> None:
    for adapter in (to_trial_adapter, from_trial_adapter):
        with pytest.raises(ValidationError):
            adapter.validate_json(message)
