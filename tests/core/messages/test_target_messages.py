"""Objects on the target: a stop request is applied once, despite deletions and races; the newest live status counts."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from prefect_tune.core.errors import CommitUnknown, IllegalTransition, StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment, apply_event, empty_experiment
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
    TrialEnded,
    from_trial_adapter,
    to_trial_adapter,
)
from prefect_tune.core.messages.target_messages import (
    LastKnownReports,
    LiveStatus,
    NodeAddress,
    RunningTrial,
    StopRequest,
    delete_live_status,
    find_newest_address,
    is_request_journaled,
    is_request_lost,
    list_node_objects_up_to,
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


def running() -> Experiment:
    opened = OwnerChanged(experiment="e", generation=1, term=1, owner=OWNER)
    return apply_events(
        empty_experiment(JOURNAL), [opened, TrialAdded(trial="a", config={}), TrialAdded(trial="b", config={})]
    )


def request(write_id: str = "w", *, term: int = 1, trial: str | None = None) -> StopRequest:
    return StopRequest(write_id=write_id, at="now", reason="enough", term=term, trial=trial)


def after_request(state: Experiment, asked: StopRequest) -> Experiment:
    return apply_event(state, make_stop_event(state, asked), 2)


def test_what_is_asked_is_read_under_its_number_and_asking_again_changes_nothing() -> None:
    store, state = MemoryStore(), running()
    assert [write_stop_request(store, state, request("one")), write_stop_request(store, state, request("two"))] == [
        1,
        2,
    ]
    assert read_stop_request(store, JOURNAL, 1) == request("one")
    assert read_stop_request(store, JOURNAL, 3) is None


class LosesReplies(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        raise CommitUnknown(f"{path}: the reply was lost")


def test_a_reply_that_is_lost_is_no_second_request() -> None:
    store, state = LosesReplies(), running()
    numbers = [write_stop_request(store, state, request()), write_stop_request(store, state, request())]
    assert (numbers, read_stop_request(store, JOURNAL, 2)) == ([1, 1], None)


def test_a_trial_that_is_asked_to_stop_is_known_until_it_has_ended() -> None:
    state = after_request(running(), request(trial="a"))
    assert (dict(state.pending_stops), state.stop_requests, state.stop_reason) == ({"a": "enough"}, ("w",), "")
    assert apply_event(state, TrialFinished(trial="b", reason="done"), 3).pending_stops == {"a": "enough"}
    assert apply_event(state, TrialFinished(trial="a", reason="enough", kind=FinishKind.STOPPED), 3).pending_stops == {}
    assert apply_event(state, TrialErrored(trial="a", cause=Cause.TRAINABLE, reason="no"), 3).pending_stops == {}


def test_a_stop_of_the_experiment_ends_it_for_the_owner_it_was_for_and_no_later_one() -> None:
    state = after_request(running(), request())
    assert state.stop_reason == "enough"
    later = apply_event(state, OwnerChanged(experiment="e", generation=1, term=2, owner=OWNER), 3)
    assert later.stop_reason == ""
    stale = after_request(later, request("late", term=1))
    assert (stale.stop_reason, stale.stop_requests) == ("", ("w", "late"))
    outdated = make_reason("request-outdated", owner=1, successor=2)
    assert make_stop_event(later, request("late", term=1)).refused == outdated


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (request(trial="nobody"), make_reason("request-without-trial", trial="nobody")),
        (request(trial="a"), make_reason("request-for-ended-trial", trial="a", status="completed")),
        (request("before", trial="b"), make_reason("request-repeated")),
    ],
)
def test_what_cannot_be_done_is_heard_and_comes_to_nothing(asked: StopRequest, refused: Reason) -> None:
    state = after_request(running(), request("before"))
    state = apply_event(state, TrialFinished(trial="a", reason="done"), 3)
    noted = make_stop_event(state, asked)
    then = apply_event(state, noted, 4)
    assert noted.refused == refused
    assert (then.pending_stops, len(then.stop_requests)) == ({}, 2)


def test_an_ended_trial_cannot_be_asked_to_stop() -> None:
    state = apply_event(running(), TrialFinished(trial="a", reason="done"), 2)
    with pytest.raises(IllegalTransition, match="has ended"):
        apply_event(state, StopRequested(trial="a", reason="enough"), 3)


def test_a_request_that_cannot_be_read_holds_up_no_other() -> None:
    store, state = MemoryStore(), running()
    store.create(JOURNAL.request_path(1), b"{}")
    assert write_stop_request(store, state, request()) == 2
    damaged = read_stop_request(store, JOURNAL, 1)
    assert damaged is not None
    assert make_stop_event(state, damaged).refused == make_reason("request-unreadable")
    assert len(after_request(state, damaged).stop_requests) == 1


def test_what_was_heard_is_deleted_and_what_was_not_stays() -> None:
    store, state = MemoryStore(), running()
    for name in ("one", "two"):
        write_stop_request(store, state, request(name))
    delete_older_documents(store, before=JOURNAL.request_path(2))
    assert (read_stop_request(store, JOURNAL, 1), read_stop_request(store, JOURNAL, 2)) == (
        None,
        request("two"),
    )
    delete_older_documents(store, before=JOURNAL.request_path(2))
    assert store.operations["delete"] == 1


def test_whoever_takes_a_number_that_was_heard_and_deleted_meanwhile_finds_that_out() -> None:
    store, before = MemoryStore(), running()
    write_stop_request(store, before, request("fast"))
    later = after_request(before, request("fast"))
    delete_older_documents(store, before=JOURNAL.request_path(2))
    number = write_stop_request(store, before, request("slow"))  # it listed the requests before all that
    assert number == 1
    assert is_request_lost(later, request("slow"), number)
    assert not is_request_lost(later, request("fast"), 1)
    assert write_stop_request(store, later, request("slow")) == 2
    assert is_request_journaled(after_request(later, request("slow")), request("slow"))


def test_the_newest_attempt_is_the_one_that_is_joined_and_older_addresses_are_found_to_be_deleted() -> None:
    store = MemoryStore()
    assert find_newest_address(store, KEY, 1) is None
    store.objects[f"{KEY.nodes_folder}/notes.txt"] = b"of a person"
    keys = [NodesKey(trial=KEY, attempt=attempt) for attempt in (2, 11)]
    address = NodeAddress(host="here", port=1, request="")
    for key in keys:
        store.create(key.address_path, seal(address))
    assert find_newest_address(store, KEY, 3) == (keys[1], address)
    assert find_newest_address(store, KEY, 12) is None
    assert [listed.path for listed in list_node_objects_up_to(store, KEY, 10)] == [keys[0].address_path]
    store.objects[keys[1].address_path] = b"damaged"
    assert find_newest_address(store, KEY, 3) is None


# The live status: only the newest object is kept, only the present owner's counts, and the journal prevails.

WRITTEN = "2026-11-23T01:00:00+00:00"
LATER = "2026-11-23T01:02:20+00:00"


def training(*events: Event, term: int = 1) -> Experiment:
    opened = [OwnerChanged(experiment="e", generation=1, term=each, owner=OWNER) for each in range(1, term + 1)]
    begun: list[Event] = [TrialAdded(trial="a", config={}), AttemptStarted(trial="a", attempt=1, from_step=0)]
    return apply_events(empty_experiment(JOURNAL), [*opened, *begun, *events])


def status(number: int, *, term: int = 1, attempt: int = 1, step: int = 59, owner: Owner = OWNER) -> LiveStatus:
    report = StepReport(step=step, metrics={"loss": 0.5})
    trial = RunningTrial(trial="a", attempt=attempt, began_at=WRITTEN, host="h", report=report, reported_at=LATER)
    return LiveStatus(term=term, owner=owner, number=number, at=LATER, period_seconds=5, trials=(trial,))


@pytest.mark.parametrize("seconds", [0, 24 * 3600 + 1, float("inf")])
def test_a_period_that_no_owner_has_is_refused(seconds: float) -> None:
    with pytest.raises(ValidationError):
        LiveStatus(term=1, owner=OWNER, number=1, at=LATER, period_seconds=seconds, trials=())


def test_only_the_newest_object_stays_at_one_put_and_one_delete_each() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, status(1))
    store.operations.clear()
    for number in range(2, 12):
        write_live_status(store, JOURNAL, status(number))
    assert store.operations == {"put": 10, "delete": 10}
    assert list(store.objects) == ["e/1/live/0000000001-0000000011.json"]
    assert read_newest_live_status(store, JOURNAL) == status(11)


def test_a_new_owner_deletes_what_a_killed_one_has_left_and_counts_from_its_first_object_on() -> None:
    store = MemoryStore()
    for term, number in ((0, 2), (1, 6), (1, 7)):
        store.put(JOURNAL.live_status_path(term, number), b"left by a kill")
    for name in (".keep", "notes.txt"):
        store.put(f"{JOURNAL.live_folder}/{name}", b"a foreign file")
    write_live_status(store, JOURNAL, status(1, term=2))
    assert read_newest_live_status(store, JOURNAL) == status(1, term=2)
    assert len(store.objects) == 3
    write_live_status(store, JOURNAL, status(8, term=1))  # a paused machine resumes
    assert read_newest_live_status(store, JOURNAL) == status(1, term=2)


def test_the_end_of_an_owner_deletes_its_own_and_earlier_ones_and_no_later_ones() -> None:
    store = MemoryStore()
    for term in (1, 2, 3):
        store.put(JOURNAL.live_status_path(term, 4), b"")
    delete_live_status(store, JOURNAL, 2)
    assert list(store.objects) == [JOURNAL.live_status_path(3, 4)]


def test_a_view_has_the_newest_step_its_host_and_its_time() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, status(1))
    view = read_view(store, training(), WRITTEN)
    assert (view.experiment.trial("a").step, view.experiment.trial("a").metrics) == (59, {"loss": 0.5})
    assert (view.as_of, view.running_attempt("a")) == (LATER, status(1).trials[0])


@pytest.mark.parametrize(
    ("state", "written"),
    [
        (training(term=2), status(1)),  # of an earlier owner
        (training(), status(1, owner=Owner(name="o", host="h", pid=2))),  # of a deleted experiment of this name
        (training(), status(1, attempt=2)),  # of an attempt that the journal does not name yet
        (training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost")), status(1)),
    ],
)
def test_the_journal_decides_which_attempts_run(state: Experiment, written: LiveStatus) -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, written)
    view = read_view(store, state, WRITTEN)
    assert view.running_attempt("a") is None
    assert view.experiment == state


def test_an_attempt_that_has_ended_is_not_running_while_another_trial_is() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, status(1))
    another = (TrialAdded(trial="b", config={}), AttemptStarted(trial="b", attempt=1, from_step=0))
    state = training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"), *another)
    view = read_view(store, state, WRITTEN)
    assert view.live is not None
    assert (view.running_attempt("a"), view.experiment.trial("a").step) == (None, 0)


def test_a_step_that_the_journal_knows_is_not_replaced_by_an_older_one() -> None:
    store = MemoryStore()
    write_live_status(store, JOURNAL, status(1, step=3))
    state = training()
    state = state.model_copy(
        update={"trials": state.trials.with_trial(state.trial("a").model_copy(update={"step": 4}))}
    )
    assert read_view(store, state, WRITTEN).experiment.trial("a").step == 4


def test_the_last_steps_that_a_killed_owner_has_left_are_known_to_the_next_one() -> None:
    store = MemoryStore()
    assert read_last_reports(store, training(term=2)) == LastKnownReports()
    write_live_status(store, JOURNAL, status(1))
    last = read_last_reports(store, training(term=2))
    assert ({name: each.step for name, each in last.reports.items()}, last.at) == ({"a": 59}, status(1).at)
    ended = training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert read_last_reports(store, ended) == LastKnownReports()


@pytest.mark.parametrize("damage", [b"torn", b'{"format":"prefect-tune/live-status","version":9}'])
def test_one_that_cannot_be_read_leaves_the_journals_view(damage: bytes) -> None:
    store = MemoryStore()
    store.put(JOURNAL.live_status_path(1, 1), damage)
    view = read_view(store, training(), WRITTEN)
    assert (view.as_of, view.live) == (WRITTEN, None)


def test_an_experiment_without_a_running_trial_costs_no_request() -> None:
    store = MemoryStore()
    ended = training(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert read_view(store, ended, WRITTEN).experiment == ended
    assert not store.operations


def test_one_that_is_replaced_while_it_is_read_is_read_again() -> None:
    class Replaced(MemoryStore):
        def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if path == JOURNAL.live_status_path(1, 1):
                write_live_status(self, JOURNAL, status(2))
            return super().read(path, offset=offset, length=length)

    store = Replaced()
    write_live_status(store, JOURNAL, status(1))
    assert read_newest_live_status(store, JOURNAL) == status(2)


def test_a_write_that_the_target_refuses_leaves_the_one_before() -> None:
    class Full(MemoryStore):
        def put(self, path: str, data: Buffer) -> None:
            if self.objects:
                raise StoreUnavailable(f"{path}: full")
            super().put(path, data)

    store = Full()
    write_live_status(store, JOURNAL, status(1))
    with pytest.raises(StoreUnavailable):
        write_live_status(store, JOURNAL, status(2))
    assert read_newest_live_status(store, JOURNAL) == status(1)


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
    "said", [START, CheckpointSaved(step=3), CheckpointAndStop(), MeanMetrics(step=3, metrics={"loss": 0.5})]
)
def test_the_trial_hears_what_the_supervisor_said(said: Value) -> None:
    assert to_trial_adapter.validate_json(said.model_dump_json()) == said


@pytest.mark.parametrize(
    "said",
    [
        TrainableLoaded(pid=7, source_digest="abc"),
        StepDone(report=REPORT, checkpoint="/staging/3", is_owned_by_supervisor=True),
        StepDone(report=REPORT),
        CheckpointPart(step=3, directory="/staging/3"),
        RankMetrics(step=3, metrics={"loss": 0.5}),
        TrialEnded(outcome=TrialFinished(trial="t", reason="enough", kind=FinishKind.RETURNED)),
        TrialEnded(outcome=TrialPaused(trial="t", reason=make_reason("turn-over", step=3)), awaits_reuse=True),
        TrialEnded(outcome=make_failure("x", Cause.TRAINABLE, type="ValueError", traceback="..."), raised=True),
    ],
)
def test_the_supervisor_hears_what_the_trial_said(said: Value) -> None:
    assert from_trial_adapter.validate_json(said.model_dump_json()) == said


def test_a_nan_is_not_turned_into_a_null_on_the_way() -> None:
    said = StepDone(report=StepReport(step=1, metrics={"loss": math.nan}))
    received = from_trial_adapter.validate_json(said.model_dump_json())
    assert isinstance(received, StepDone)
    assert math.isnan(received.report.metrics["loss"])  # type: ignore[arg-type]  # a float, or the test fails


@pytest.mark.parametrize("said", [b"", b"{}", b'{"type":"unheard-of"}', b'{"type":"saved"}', b"\x80\x04."])
def test_what_neither_says_is_refused(said: bytes) -> None:
    for ear in (to_trial_adapter, from_trial_adapter):
        with pytest.raises(ValidationError):
            ear.validate_json(said)
