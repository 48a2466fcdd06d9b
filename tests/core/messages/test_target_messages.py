"""Stop requests: the owner that each addresses applies it once, despite deletions and races."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import CommitUnknown, IllegalTransition
from prefect_tune.core.experiment.experiment import Experiment, after_event, nothing_yet
from prefect_tune.core.journal_events import (
    Cause,
    Event,
    Finished,
    FinishKind,
    GaveUp,
    Opened,
    Owner,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import (
    NodeAddress,
    StopRequest,
    ask,
    is_journaled,
    is_lost,
    newest_address,
    node_objects_up_to,
    read_request,
    stop_event,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import NodesKey, delete_numbered
from prefect_tune.core.storage.object_store import Buffer
from tests.core.driver import KEY
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

OWNER = Owner(name="first", host="here", pid=1)


def running() -> Experiment:
    state = nothing_yet(first_generation("e"))
    events: list[Event] = [
        Opened(experiment="e", generation=1, term=1, owner=OWNER),
        TrialAdded(trial="a", config={}),
        TrialAdded(trial="b", config={}),
    ]
    for event in events:
        state = after_event(state, event, 1)
    return state


def request(write_id: str = "w", *, term: int = 1, trial: str | None = None) -> StopRequest:
    return StopRequest(write_id=write_id, at="now", reason="enough", term=term, trial=trial)


def after_request(state: Experiment, asked: StopRequest) -> Experiment:
    return after_event(state, stop_event(state, asked), 2)


def test_what_is_asked_is_read_under_its_number_and_asking_again_changes_nothing() -> None:
    store, state = MemoryStore(), running()
    assert [ask(store, state, request("one")), ask(store, state, request("two"))] == [1, 2]
    assert read_request(store, first_generation("e"), 1) == request("one")
    assert read_request(store, first_generation("e"), 3) is None


class LosesReplies(MemoryStore):
    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        raise CommitUnknown(f"{path}: the reply was lost")


def test_a_reply_that_is_lost_is_no_second_request() -> None:
    store, state = LosesReplies(), running()
    numbers = [ask(store, state, request()), ask(store, state, request())]
    assert (numbers, read_request(store, first_generation("e"), 2)) == ([1, 1], None)


def test_a_trial_that_is_asked_to_stop_is_known_until_it_has_ended() -> None:
    state = after_request(running(), request(trial="a"))
    assert (dict(state.stops), state.stop_requests, state.ends) == ({"a": "enough"}, ("w",), "")
    assert after_event(state, Finished(trial="b", reason="done"), 3).stops == {"a": "enough"}
    assert after_event(state, Finished(trial="a", reason="enough", kind=FinishKind.STOPPED), 3).stops == {}
    assert after_event(state, GaveUp(trial="a", cause=Cause.USER, reason="no"), 3).stops == {}


def test_a_stop_of_the_experiment_ends_it_for_the_owner_it_was_for_and_no_later_one() -> None:
    state = after_request(running(), request())
    assert state.ends == "enough"
    later = after_event(state, Opened(experiment="e", generation=1, term=2, owner=OWNER), 3)
    assert later.ends == ""
    stale = after_request(later, request("late", term=1))
    assert (stale.ends, stale.stop_requests) == ("", ("w", "late"))
    outdated = make_reason("request-outdated", owner=1, successor=2)
    assert stop_event(later, request("late", term=1)).refused == outdated


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
    state = after_event(state, Finished(trial="a", reason="done"), 3)
    noted = stop_event(state, asked)
    after = after_event(state, noted, 4)
    assert noted.refused == refused
    assert (after.stops, len(after.stop_requests)) == ({}, 2)


def test_an_ended_trial_cannot_be_asked_to_stop() -> None:
    state = after_event(running(), Finished(trial="a", reason="done"), 2)
    with pytest.raises(IllegalTransition, match="has ended"):
        after_event(state, StopAsked(trial="a", reason="enough"), 3)


def test_a_request_that_cannot_be_read_holds_up_no_other() -> None:
    store, state = MemoryStore(), running()
    store.create(first_generation("e").request_path(1), b"{}")
    assert ask(store, state, request()) == 2
    damaged = read_request(store, first_generation("e"), 1)
    assert damaged is not None
    assert stop_event(state, damaged).refused == make_reason("request-unreadable")
    assert len(after_request(state, damaged).stop_requests) == 1


def test_what_was_heard_is_deleted_and_what_was_not_stays() -> None:
    store, state = MemoryStore(), running()
    for name in ("one", "two"):
        ask(store, state, request(name))
    delete_numbered(store, before=first_generation("e").request_path(2))
    assert (read_request(store, first_generation("e"), 1), read_request(store, first_generation("e"), 2)) == (
        None,
        request("two"),
    )
    delete_numbered(store, before=first_generation("e").request_path(2))
    assert store.operations["delete"] == 1


def test_whoever_takes_a_number_that_was_heard_and_deleted_meanwhile_finds_that_out() -> None:
    store, before = MemoryStore(), running()
    ask(store, before, request("fast"))
    after = after_request(before, request("fast"))
    delete_numbered(store, before=first_generation("e").request_path(2))
    number = ask(store, before, request("slow"))  # it listed the requests before all that
    assert number == 1
    assert is_lost(after, request("slow"), number)
    assert not is_lost(after, request("fast"), 1)
    assert ask(store, after, request("slow")) == 2
    assert is_journaled(after_request(after, request("slow")), request("slow"))


def test_the_newest_attempt_is_the_one_that_is_joined_and_older_addresses_are_found_to_be_deleted() -> None:
    store = MemoryStore()
    assert newest_address(store, KEY, 1) is None
    store.objects[f"{KEY.nodes}/notes.txt"] = b"of a person"
    keys = [NodesKey(trial=KEY, attempt=attempt) for attempt in (2, 11)]
    address = NodeAddress(host="here", port=1, request="")
    for key in keys:
        store.create(key.address_path, seal(address))
    assert newest_address(store, KEY, 3) == (keys[1], address)
    assert newest_address(store, KEY, 12) is None
    assert [listed.path for listed in node_objects_up_to(store, KEY, 10)] == [keys[0].address_path]
    store.objects[keys[1].address_path] = b"damaged"
    assert newest_address(store, KEY, 3) is None
