"""An attempt that posts while owners receive and close its outbox: every order, lost replies, crashes, late posts.

The model: what the attempt was told is durable must be in the journal once the outbox is closed, once and in order; and
nothing that is posted later may count as durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest

from prefect_tune.core.errors import CommitUnknown, JournalCorrupt, StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_experiment, read_entries
from prefect_tune.core.journal.outbox import (
    Post,
    close_outbox,
    delete_posts,
    list_journaled_posts,
    read_posts,
    write_post,
)
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    Event,
    OutboxClosed,
    Owner,
    PostReceived,
    StepReported,
    TrialAdded,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from tests.core.protocol.exploring import Choice, explore_orders, random_choice, run_in_turns
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore

KEY = JournalKey(experiment="e", generation=1)
TRIAL = KEY.trial_key("t")
_MAX_RETRIES = 5
pytestmark = pytest.mark.usefixtures("decode_cache")
_Result = TypeVar("_Result")


def stamp(name: str) -> WriteStamp:
    return WriteStamp(write_id=name, at="now")


def owner(name: str) -> Owner:
    return Owner(name=name, host="h", pid=1)


@dataclass
class World:
    """An experiment with one launched attempt, the posts that were acknowledged to it, and how it was told to stop."""

    store: MemoryStore = field(default_factory=MemoryStore)
    acknowledged: list[int] = field(default_factory=list)
    stopped_by: str = ""

    def __post_init__(self) -> None:
        events: list[Event] = [TrialAdded(trial="t", config={}), AttemptLaunched(trial="t", outbox=1)]
        acquire_ownership(self.store, KEY, owner("first"), stamp("first"), events_for=lambda _: events)

    def attempt(self, store: ObjectStore, last: int = 3, name: str = "attempt") -> None:
        """Post a start and reports, each again while its outcome is unknown."""
        for number in range(1, last + 1):
            event = AttemptStarted(trial="t", attempt=1, from_step=0) if number == 1 else make_report(number)
            post = Post(write_id=f"{name}-{number}", at="now", events=(event,))
            try:
                _retry(lambda post=post, number=number: write_post(store, TRIAL, 1, number, post))
            except Superseded as error:
                self.stopped_by = str(error)
                return
            self.acknowledged.append(number)

    def receive(self, store: ObjectStore, name: str, *, opens: bool = True, closes: bool = True) -> None:
        """Own the experiment, receive the posts once or until the outbox is closed, and delete what is journaled."""
        with suppress(Superseded):
            state = load_experiment(store, KEY)
            if opens:
                state = _retry(lambda: acquire_ownership(store, KEY, owner(name), stamp(name)))
            outbox, received = state.trial("t").outbox, state.trial("t").last_post
            if outbox is None:
                return
            if closes:
                posts = _retry(lambda: close_outbox(store, TRIAL, 1, received, name, stamp(f"{name}-end"))).posts
            else:
                posts = read_posts(store, TRIAL, 1, received)
            events = make_receive_events(posts, received, closes=closes)
            state = _retry(lambda: append_events(store, state, events, stamp(f"{name}-in")))
            delete_posts(store, [(TRIAL, 1, number) for number in range(received + 1, state.trial("t").last_post + 1)])

    def require_kept(self) -> Experiment:
        """Check, after a last owner has closed the outbox, that each acknowledged post is journaled once, in order."""
        self.receive(self.store, "last")
        state = load_experiment(self.store, KEY)
        entries = read_entries(self.store, KEY)
        received = [event.post for entry in entries for event in entry.events if isinstance(event, PostReceived)]
        assert received == list(range(1, len(received) + 1))
        assert self.acknowledged == list(range(1, len(self.acknowledged) + 1))
        assert len(received) >= len(self.acknowledged), f"acknowledged {self.acknowledged}, journaled {received}"
        assert state.trial("t").outbox is None
        acknowledged_count = len(self.acknowledged)
        self.attempt(self.store, len(received) + 1, "zombie")
        assert len(self.acknowledged) == acknowledged_count, "a post after the end counts as durable"
        return state


def make_report(step: int) -> StepReported:
    return StepReported(trial="t", report=StepReport(step=step, metrics={}))


def make_receive_events(posts: Sequence[Post], received: int, *, closes: bool) -> Sequence[Event]:
    events: list[Event] = []
    for number, post in enumerate(posts, received + 1):
        events += [PostReceived(trial="t", post=number), *post.events]
    return [*events, OutboxClosed(trial="t")] if closes else events


def _retry(act: Callable[[], _Result]) -> _Result:
    for _ in range(_MAX_RETRIES):
        with suppress(CommitUnknown, StoreUnavailable):
            return act()
    return act()


def at_posts_and_entries(method: str, path: str) -> bool:
    """Switch processes where they meet: at what is read, created and deleted in the outbox, and at new entries."""
    return "/outbox/" in path or (method == "create" and "/journal/" in path)


def run_acts(choose: Choice, *, owners: int, last: int = 2) -> None:
    """Let an attempt and owners that close its outbox run in turns, and check what is kept."""
    world = World()
    processes = [lambda store: world.attempt(store, last)]
    processes += [lambda store, name=f"owner {n}": world.receive(store, name) for n in range(owners)]
    assert run_in_turns(world.store, processes, choose, at_posts_and_entries) == []
    world.require_kept()


def test_each_acknowledged_post_is_journaled_in_every_order_of_an_attempt_and_an_owner_that_closes_its_outbox() -> None:
    assert explore_orders(partial(run_acts, owners=1, last=3), limit=2_000, merges=True) > 50


@pytest.mark.parametrize("seed", range(60))
def test_two_owners_that_close_an_outbox_at_once_lose_no_post(seed: int) -> None:
    run_acts(random_choice(seed), owners=2, last=4)


@pytest.mark.deep
def test_two_owners_close_an_outbox_in_every_order() -> None:
    assert explore_orders(partial(run_acts, owners=2), limit=10_000, merges=True) > 1_000


def test_an_attempt_that_meets_the_end_is_told_who_has_ended_it() -> None:
    world = World()
    world.attempt(world.store, 1)
    world.receive(world.store, "the new owner")
    world.attempt(world.store, 2)
    assert "the new owner has ended this attempt" in world.stopped_by


def test_what_an_owner_receives_while_the_attempt_trains_is_journaled_once() -> None:
    world = World()
    for last in (1, 2, 4):
        for number in range(len(world.acknowledged) + 1, last + 1):
            event = AttemptStarted(trial="t", attempt=1, from_step=0) if number == 1 else make_report(number)
            write_post(world.store, TRIAL, 1, number, Post(write_id=f"w{number}", at="now", events=(event,)))
            world.acknowledged.append(number)
        world.receive(world.store, "first", opens=False, closes=False)
        world.receive(world.store, "first", opens=False, closes=False)
    assert [listed.path for listed in world.store.list(TRIAL.outboxes_folder)] == [TRIAL.post_path(1, 1)]
    assert world.require_kept().trial("t").step == 4


FAULTS: Sequence[Failure | int | None] = (*Failure, None, 0, 3)
"""How a request fails, or how many requests later a write arrives; None is never."""


def fail_request(process: str, nth: int, fault: Failure | int | None) -> int:
    """Let a request of the attempt or of the owner fail, and check what is kept; return the number of requests."""
    world = World()
    slow = SlowStore(world.store, *((0, None) if isinstance(fault, Failure) else (nth, fault)))
    store = DyingStore(slow, *((nth, fault) if isinstance(fault, Failure) else (0,)))
    with suppress(Crash, StoreUnavailable):
        if process == "attempt":
            world.attempt(store)
        else:
            world.attempt(world.store)
            world.receive(store, "failing")
    world.require_kept()
    return store.total


REQUESTS = [
    (process, nth) for process in ("attempt", "owner") for nth in range(1, fail_request(process, 0, Failure.TORN) + 1)
]


@pytest.mark.parametrize(("process", "nth"), REQUESTS)
def test_a_process_that_fails_at_any_request_loses_no_acknowledged_post(process: str, nth: int) -> None:
    for fault in FAULTS:
        fail_request(process, nth, fault)


@pytest.mark.parametrize(("received", "journaled"), [(0, 2), (1, 2), (1, 0)], ids=["twice", "again", "with a gap"])
def test_a_post_is_not_journaled_twice_or_before_the_one_before_it(received: int, journaled: int) -> None:
    world = World()
    world.attempt(world.store, 2)
    posts = read_posts(world.store, TRIAL, 1, 0)
    state = load_experiment(world.store, KEY)
    if journaled:
        state = append_events(world.store, state, make_receive_events(posts, 0, closes=False), stamp("once"))
    with pytest.raises(JournalCorrupt, match=r"cannot follow post [0-9] of outbox 1"):
        append_events(world.store, state, [PostReceived(trial="t", post=received + 1)], stamp("again"))


def test_a_post_that_arrives_a_day_later_changes_nothing() -> None:
    world = World()
    world.attempt(world.store)
    late = {path: bytes(data) for path, data in world.store.objects.items() if "/outbox/" in path}
    state = world.require_kept()
    for path, data in late.items():  # the store or a proxy repeats each request
        with suppress(Exception):
            world.store.create(path, data)
    assert load_experiment(world.store, KEY).trial("t") == state.trial("t")
    world.receive(world.store, "the next owner")
    assert load_experiment(world.store, KEY).trial("t").step == state.trial("t").step


def test_maintenance_with_an_older_state_deletes_no_post_of_a_newer_outbox() -> None:
    world = World()
    world.attempt(world.store)
    read_by_maintenance = world.require_kept().trial("t")
    state = load_experiment(world.store, KEY)
    state = append_events(world.store, state, [AttemptEnded(trial="t", cause=Cause.MACHINE, reason="x")], stamp("end"))
    append_events(world.store, state, [AttemptLaunched(trial="t", outbox=2)], stamp("again"))
    for number in range(1, 4):
        write_post(world.store, TRIAL, 2, number, Post(write_id=f"w{number}", at="", events=(make_report(9 + number),)))
    world.store.delete([listed.path for listed in list_journaled_posts(world.store, TRIAL, read_by_maintenance)])
    assert len(read_posts(world.store, TRIAL, 2, 0)) == 3, "acknowledged posts that no entry holds were deleted"


def test_a_second_process_with_the_same_request_stops_at_its_first_post_even_after_the_attempt_has_ended() -> None:
    world = World()
    world.attempt(world.store, 2)
    world.receive(world.store, "first", opens=False, closes=False)
    before = len(world.acknowledged)
    world.attempt(world.store, 1, "second")
    assert "another process trains this attempt" in world.stopped_by
    assert len(world.acknowledged) == before


def test_a_post_after_the_deletion_of_the_experiment_is_refused_and_removed() -> None:
    world = World()
    world.attempt(world.store, 1)
    for path in [path for path in world.store.objects if "/journal/" in path]:
        del world.store.objects[path]
    with pytest.raises(StoreUnavailable, match="first entry is missing"):
        write_post(world.store, TRIAL, 1, 2, Post(write_id="w", at="now", events=(make_report(2),)))
    assert TRIAL.post_path(1, 2) not in world.store.objects


def test_the_posts_before_a_damaged_one_are_received_and_the_attempt_is_fenced_off_after_the_last() -> None:
    world = World()
    world.attempt(world.store, 4)
    world.store.objects[TRIAL.post_path(1, 3)] = b"damaged"
    closed = close_outbox(world.store, TRIAL, 1, 0, "the owner", stamp("end"))
    assert [post.write_id for post in closed.posts] == ["attempt-1", "attempt-2"]
    assert "0000000003.json" in closed.damage
    with pytest.raises(Superseded, match="the owner has ended this attempt"):
        write_post(world.store, TRIAL, 1, 5, Post(write_id="w", at="now", events=(make_report(5),)))
    assert close_outbox(world.store, TRIAL, 1, 0, "another", stamp("other")) == closed


def test_what_was_posted_for_days_after_a_damaged_post_is_not_read_to_end_an_outbox() -> None:
    world = World()
    world.attempt(world.store, 300)
    world.store.objects[TRIAL.post_path(1, 3)] = b"damaged"
    before = world.store.operations["read"]
    closed = close_outbox(world.store, TRIAL, 1, 0, "the owner", stamp("end"))
    assert (len(closed.posts), closed.damage != "") == (2, True)
    assert world.store.operations["read"] - before < 9
    assert close_outbox(world.store, TRIAL, 1, 0, "another", stamp("other")) == closed
    assert TRIAL.post_path(1, 302) not in world.store.objects, "a second end would let the first one be deleted"
    with pytest.raises(Superseded, match="the owner has ended this attempt"):
        write_post(world.store, TRIAL, 1, 301, Post(write_id="w", at="now", events=(make_report(301),)))
