"""A state machine of a search whose trials clone each other, here and on other machines, and of its forks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefect_tune.core.errors import AlreadyCommitted, CheckpointNotFound, Superseded, TuneError
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import CheckpointQuarantined, Owner
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.fork_experiment import begin_fork, complete_fork, load_fork_point
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from tests.core.driver import Files
from tests.core.happenings import AFTER, happening
from tests.core.histories import cut_small
from tests.core.protocol.population import (
    SEARCH,
    Attempt,
    Chronicle,
    Search,
    after_everybody_returned,
    promises_broken,
    trials_with_posts,
)
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore

NAMES = ("c", "d", "s")
FORKER = Owner(name="forker", host="here", pid=2)
names = st.sampled_from(NAMES)


class Family(RuleBasedStateMachine):
    """Three trials of a search, its present and superseded owners, and its forks."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.wire = SlowStore(self.store, 0, None)
        self.chronicle = Chronicle()
        self.status = dict.fromkeys(NAMES, "pending")
        self.there: dict[str, Attempt] = {}
        """By trial, its attempt on another machine; the status of the trial is not modelled meanwhile."""
        self.zombies: list[Search] = []
        self.fenced_off: list[Attempt] = []
        self.late: list[tuple[Search, Sequence[CheckpointKey]]] = []
        self.forks: dict[JournalKey, dict[str, Files]] = {}
        """By fork, the files of its checkpoints by their folders."""
        self.small = cut_small()
        self.small.__enter__()

    @initialize()
    def begin(self) -> None:
        self.search = Search(self.wire, self.chronicle)
        self.search.open()
        self.search.add(*NAMES)

    def teardown(self) -> None:
        try:
            if hasattr(self, "search"):
                assert after_everybody_returned(self.wire, self.chronicle, tidy=False) == []
                stamp = self.chronicle.stamp()
                for _ in range(3):
                    with suppress(TuneError):
                        delete_generation(self.wire, SEARCH, FORKER, stamp)
                assert [path for path in self.store.objects if path.startswith(SEARCH.folder)] == []
                self.what_a_fork_began_with_is_whole()
        finally:
            self.small.__exit__(None, None, None)

    # --------------------------------------------------------------------------------------- operations

    @rule(name=names)
    def save(self, name: str) -> None:
        self._running(name).save(name)

    @rule(name=names)
    def save_and_delete_later(self, name: str) -> None:
        search = self._running(name)
        self.late.append((search, search.save_only(name)))

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 5))
    def delete_what_was_retired(self, which: int) -> None:
        search, doomed = self.late.pop(which % len(self.late))
        search.clear(doomed)

    @rule()
    def clear_away(self) -> None:
        self.search.clear_away()

    @rule(into=names, source=names)
    def clone(self, into: str, source: str) -> None:
        self._waiting(into).clone(into, source)

    @rule(name=names, which=st.integers(0, 9))
    def turn(self, name: str, which: int) -> None:
        if name not in self.there:
            possible = sorted(AFTER[self.status[name]])
            self._turn(name, possible[which % len(possible)])

    @rule(name=names)
    def put_aside(self, name: str) -> None:
        """Quarantine the trial's checkpoints, as if they killed the trainable."""
        search = self._waiting(name)
        for ref in search.trial(name).checkpoints:
            search.append(
                CheckpointQuarantined(trial=name, sequence=ref.sequence, reason="poison", crashes_trainable=True)
            )
        self.chronicle.acknowledged.pop(name, None)

    def _turn(self, name: str, what: str) -> None:
        self.search.append(happening(what, name))
        self.status[name] = AFTER[self.status[name]][what]

    def _running(self, name: str) -> Search:
        """Return the owner, with an attempt of the trial that runs here."""
        self._settle(name)
        for status, what in (("finished", "requeued"), ("errored", "requeued"), ("paused", "resumed")):
            if self.status[name] == status:
                self._turn(name, what)
        if self.status[name] != "running":
            self.search.start(name)
            self.status[name] = "running"
        return self.search

    def _waiting(self, name: str) -> Search:
        self._settle(name)
        if self.status[name] in ("finished", "errored"):
            self._turn(name, "requeued")
        if self.status[name] == "running":
            self._turn(name, "attempt-ended")
        return self.search

    # ------------------------------------------------------------------------------- attempts on other machines

    @rule(name=names)
    def launch(self, name: str) -> None:
        self._waiting(name)
        if self.status[name] == "paused":
            self._turn(name, "resumed")
        self.there[name] = attempt = self.search.launch(name)
        attempt.begin_there()

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 2), times=st.integers(1, 2))
    def save_there(self, which: int, times: int) -> None:
        attempt = list(self.there.values())[which % len(self.there)]
        for _ in range(times):
            attempt.save_there()

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 2), clears=st.booleans())
    def receive(self, which: int, *, clears: bool) -> None:
        name = list(self.there)[which % len(self.there)]
        doomed = self.search.receive(name)
        assert self.search.trial(name).model_dump(
            exclude={"last_post", "attempt_records", "clones", "launch_term"}
        ) == (self.there[name].trial.model_dump(exclude={"last_post", "attempt_records", "clones", "launch_term"}))
        if clears:
            self.search.clear(doomed)

    @rule(name=names)
    def close(self, name: str) -> None:
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Fence off the attempt on another machine, if there is one; the trial waits."""
        if (attempt := self.there.pop(name, None)) is not None:
            self.search.settle(name)
            self.fenced_off.append(attempt)
            self.status[name] = "pending"

    @precondition(lambda self: self.fenced_off)
    @rule(which=st.integers(0, 5))
    def save_there_though_fenced_off(self, which: int) -> None:
        attempt = self.fenced_off[which % len(self.fenced_off)]
        # It may have published this save before.
        with pytest.raises((Superseded, AlreadyCommitted)):
            attempt.save_there()

    # --------------------------------------------------------------------------------- takeovers and crashes

    @rule(clears=st.booleans())
    def take_over(self, *, clears: bool) -> None:
        self.zombies.append(self.search)
        self._open()
        if clears:
            self.search.clear_away()

    def _open(self) -> None:
        self.search = Search(self.wire, self.chronicle, owner=f"owner {self.chronicle.stamps}")
        self.search.open()
        for name in set(NAMES) - set(self.there):
            if self.status[name] == "running":
                self.status[name] = "pending"

    @rule(
        name=names,
        source=names,
        act=st.sampled_from(["save", "clone", "clear", "receive", "close"]),
        nth=st.integers(1, 40),
        way=st.sampled_from([Failure.CRASH_BEFORE, Failure.CRASH_AFTER, Failure.TORN]),
    )
    def die(self, name: str, source: str, act: str, nth: int, way: Failure) -> None:
        if act == "save":
            self._running(name)
        elif act == "clone":
            self._waiting(name)
        dying = self.search.on(DyingStore(self.wire, nth, way), self.chronicle)
        with suppress(Crash):
            if act == "save":
                dying.save(name)
            elif act == "clear":
                dying.clear_away()
            elif act == "clone":
                dying.clone(name, source)
            else:
                dying.clear(dying.receive(name, closes=act == "close"))
        self.late = [(search, doomed) for search, doomed in self.late if search is not self.search]
        self._open()
        if act == "close":
            self._settle(name)

    @precondition(lambda self: self.zombies)
    @rule(which=st.integers(0, 5), name=names, act=st.sampled_from(["append", "save", "clear", "receive"]))
    def wake_up(self, which: int, name: str, act: str) -> None:
        zombie = self.zombies[which % len(self.zombies)]
        if act in ("clear", "receive"):
            with suppress(Superseded):
                zombie.clear_away() if act == "clear" else zombie.receive(name)
            return
        if act == "save" and name in zombie.attempts and zombie.trial(name).phase.value == "running":
            with pytest.raises((Superseded, AlreadyCommitted, CheckpointNotFound)):
                zombie.save(name)
        with pytest.raises(Superseded):
            zombie.append()

    @rule(soon=st.integers(1, 3), delay=st.sampled_from([None, 0, 2, 8]))
    def lose_a_write(self, soon: int, delay: int | None) -> None:
        """One of the next writes gets no reply; it arrives late or never."""
        self.wire.lose_write(soon, delay)

    @precondition(lambda self: len(self.forks) < 2)
    @rule(order=st.permutations(NAMES), count=st.integers(0, 3))
    def fork(self, order: Sequence[str], count: int) -> None:
        """Fork the search, or the fork before, after up to three trials errored, paused or finished."""
        for name, what in list(zip(order, ("gave-up", "paused", "finished"), strict=True))[:count]:
            if name not in self.there and what in AFTER[self.status[name]]:
                self._turn(name, what)
        origin = next(iter(self.forks), SEARCH)
        past = load_fork_point(self.wire, origin, None)
        key, stamp = JournalKey(experiment=f"fork{len(self.forks)}", generation=1), self.chronicle.stamp()
        for _ in range(3):
            with suppress(Exception):
                begun = begin_fork(self.wire, key, past.origin, FORKER, stamp)
                made = complete_fork(self.wire, past, begun, stamp)
                break
        assert made.lost_checkpoints == {}
        self.forks[key] = {}
        for name, trial in made.experiment.trials.items():
            before = past.experiment.trial(name)
            assert (trial.phase.value, trial.outbox) == (before.phase.value.replace("running", "pending"), None)
            assert trial.next_sequence == before.next_sequence
            for ref in before.checkpoints:
                folder = key.trial_key(name).checkpoint_key(ref).folder
                there = origin.trial_key(name).checkpoint_key(ref)
                self.forks[key][folder] = load_files(self.wire, read_manifest(self.wire, there))

    # --------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_promise_is_broken(self) -> None:
        if hasattr(self, "search"):
            assert promises_broken(self.store, self.chronicle) == []

    @invariant()
    def they_are_where_they_are_said_to_be(self) -> None:
        for name in set(NAMES) - set(self.there) if hasattr(self, "search") else ():
            assert self.search.trial(name).phase.value == self.status[name]

    @invariant()
    def the_journal_and_the_outboxes_are_what_attempts_elsewhere_know(self) -> None:
        if not self.there:
            return
        posted = trials_with_posts(self.store, load_experiment(self.store, SEARCH))
        for name, attempt in self.there.items():
            assert posted[name].checkpoints == attempt.trial.checkpoints
            assert posted[name].next_sequence == attempt.trial.next_sequence

    @invariant()
    def what_a_fork_began_with_is_whole(self) -> None:
        for key, files in self.forks.items():
            made = load_experiment(self.store, key)
            live = {
                made.trial_key(trial.id).checkpoint_key(ref)
                for trial in made.trials.values()
                for ref in trial.checkpoints
            }
            assert {own.folder for own in live} == set(files)
            for own in live:
                assert load_files(self.store, read_manifest(self.store, own)) == files[own.folder]
