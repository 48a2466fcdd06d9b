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
from tests.core.happenings import NEXT_STATUS, make_event
from tests.core.histories import small_blobs
from tests.core.protocol.population import (
    SEARCH,
    Attempt,
    Chronicle,
    Search,
    check_recovery,
    find_broken_promises,
    load_trials_with_posts,
)
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore

NAMES = ("c", "d", "s")
FORKER = Owner(name="forker", host="here", pid=2)
trial_names = st.sampled_from(NAMES)


class Family(RuleBasedStateMachine):
    """Three trials of a search, its present and superseded owners, and its forks."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.slow_store = SlowStore(self.store, 0, None)
        self.chronicle = Chronicle()
        self.status = dict.fromkeys(NAMES, "pending")
        self.remote: dict[str, Attempt] = {}
        """By trial, its attempt on another machine; the status of the trial is not modelled meanwhile."""
        self.zombies: list[Search] = []
        self.fenced_off: list[Attempt] = []
        self.deferred: list[tuple[Search, Sequence[CheckpointKey]]] = []
        self.forks: dict[JournalKey, dict[str, Files]] = {}
        """By fork, the files of its checkpoints by their folders."""
        self.small_blobs_patch = small_blobs()
        self.small_blobs_patch.__enter__()

    @initialize()
    def begin(self) -> None:
        self.search = Search(self.slow_store, self.chronicle)
        self.search.open()
        self.search.add(*NAMES)

    def teardown(self) -> None:
        try:
            if hasattr(self, "search"):
                assert check_recovery(self.slow_store, self.chronicle, tidy=False) == []
                stamp = self.chronicle.stamp()
                for _ in range(3):
                    with suppress(TuneError):
                        delete_generation(self.slow_store, SEARCH, FORKER, stamp)
                assert [path for path in self.store.objects if path.startswith(SEARCH.folder)] == []
                self.what_a_fork_began_with_is_whole()
        finally:
            self.small_blobs_patch.__exit__(None, None, None)

    # --------------------------------------------------------------------------------------- operations

    @rule(name=trial_names)
    def save(self, name: str) -> None:
        self._start_here(name).save(name)

    @rule(name=trial_names)
    def save_and_delete_later(self, name: str) -> None:
        search = self._start_here(name)
        self.deferred.append((search, search.save_only(name)))

    @precondition(lambda self: self.deferred)
    @rule(index=st.integers(0, 5))
    def delete_what_was_retired(self, index: int) -> None:
        search, keys = self.deferred.pop(index % len(self.deferred))
        search.delete_checkpoints(keys)

    @rule()
    def delete_leftovers(self) -> None:
        self.search.delete_leftovers()

    @rule(name=trial_names, source=trial_names)
    def clone(self, name: str, source: str) -> None:
        self._stop_anywhere(name).clone(name, source)

    @rule(name=trial_names, index=st.integers(0, 9))
    def turn(self, name: str, index: int) -> None:
        if name not in self.remote:
            possible = sorted(NEXT_STATUS[self.status[name]])
            self._apply_event(name, possible[index % len(possible)])

    @rule(name=trial_names)
    def put_aside(self, name: str) -> None:
        """Quarantine the trial's checkpoints, as if they killed the trainable."""
        search = self._stop_anywhere(name)
        for ref in search.trial(name).checkpoints:
            search.append(
                CheckpointQuarantined(trial=name, sequence=ref.sequence, reason="poison", crashes_trainable=True)
            )
        self.chronicle.acknowledged.pop(name, None)

    def _apply_event(self, name: str, kind: str) -> None:
        self.search.append(make_event(kind, name))
        self.status[name] = NEXT_STATUS[self.status[name]][kind]

    def _start_here(self, name: str) -> Search:
        """Return the owner, with an attempt of the trial that runs here."""
        self._fence_off(name)
        for status, kind in (("finished", "requeued"), ("errored", "requeued"), ("paused", "resumed")):
            if self.status[name] == status:
                self._apply_event(name, kind)
        if self.status[name] != "running":
            self.search.start(name)
            self.status[name] = "running"
        return self.search

    def _stop_anywhere(self, name: str) -> Search:
        self._fence_off(name)
        if self.status[name] in ("finished", "errored"):
            self._apply_event(name, "requeued")
        if self.status[name] == "running":
            self._apply_event(name, "attempt-ended")
        return self.search

    # ------------------------------------------------------------------------------- attempts on other machines

    @rule(name=trial_names)
    def launch(self, name: str) -> None:
        self._stop_anywhere(name)
        if self.status[name] == "paused":
            self._apply_event(name, "resumed")
        self.remote[name] = attempt = self.search.launch(name)
        attempt.post_start()

    @precondition(lambda self: self.remote)
    @rule(index=st.integers(0, 2), times=st.integers(1, 2))
    def post_save(self, index: int, times: int) -> None:
        attempt = list(self.remote.values())[index % len(self.remote)]
        for _ in range(times):
            attempt.post_save()

    @precondition(lambda self: self.remote)
    @rule(index=st.integers(0, 2), clears=st.booleans())
    def receive(self, index: int, *, clears: bool) -> None:
        name = list(self.remote)[index % len(self.remote)]
        keys = self.search.receive(name)
        assert self.search.trial(name).model_dump(
            exclude={"last_post", "attempt_records", "clones", "launch_term"}
        ) == (self.remote[name].trial.model_dump(exclude={"last_post", "attempt_records", "clones", "launch_term"}))
        if clears:
            self.search.delete_checkpoints(keys)

    @rule(name=trial_names)
    def close(self, name: str) -> None:
        self._fence_off(name)

    def _fence_off(self, name: str) -> None:
        """Fence off the attempt on another machine, if there is one; the trial waits."""
        if (attempt := self.remote.pop(name, None)) is not None:
            self.search.fence_off(name)
            self.fenced_off.append(attempt)
            self.status[name] = "pending"

    @precondition(lambda self: self.fenced_off)
    @rule(index=st.integers(0, 5))
    def save_there_though_fenced_off(self, index: int) -> None:
        attempt = self.fenced_off[index % len(self.fenced_off)]
        # It may have published this save before.
        with pytest.raises((Superseded, AlreadyCommitted)):
            attempt.post_save()

    # --------------------------------------------------------------------------------- takeovers and crashes

    @rule(clears=st.booleans())
    def take_over(self, *, clears: bool) -> None:
        self.zombies.append(self.search)
        self._open()
        if clears:
            self.search.delete_leftovers()

    def _open(self) -> None:
        self.search = Search(self.slow_store, self.chronicle, owner=f"owner {self.chronicle.stamps}")
        self.search.open()
        for name in set(NAMES) - set(self.remote):
            if self.status[name] == "running":
                self.status[name] = "pending"

    @rule(
        name=trial_names,
        source=trial_names,
        act=st.sampled_from(["save", "clone", "clear", "receive", "close"]),
        nth=st.integers(1, 40),
        failure=st.sampled_from([Failure.CRASH_BEFORE, Failure.CRASH_AFTER, Failure.TORN]),
    )
    def die(self, name: str, source: str, act: str, nth: int, failure: Failure) -> None:
        if act == "save":
            self._start_here(name)
        elif act == "clone":
            self._stop_anywhere(name)
        dying = self.search.with_store(DyingStore(self.slow_store, nth, failure), self.chronicle)
        with suppress(Crash):
            if act == "save":
                dying.save(name)
            elif act == "clear":
                dying.delete_leftovers()
            elif act == "clone":
                dying.clone(name, source)
            else:
                dying.delete_checkpoints(dying.receive(name, closes=act == "close"))
        self.deferred = [(search, keys) for search, keys in self.deferred if search is not self.search]
        self._open()
        if act == "close":
            self._fence_off(name)

    @precondition(lambda self: self.zombies)
    @rule(index=st.integers(0, 5), name=trial_names, act=st.sampled_from(["append", "save", "clear", "receive"]))
    def wake_up(self, index: int, name: str, act: str) -> None:
        zombie = self.zombies[index % len(self.zombies)]
        if act in ("clear", "receive"):
            with suppress(Superseded):
                zombie.delete_leftovers() if act == "clear" else zombie.receive(name)
            return
        if act == "save" and name in zombie.attempts and zombie.trial(name).phase.value == "running":
            with pytest.raises((Superseded, AlreadyCommitted, CheckpointNotFound)):
                zombie.save(name)
        with pytest.raises(Superseded):
            zombie.append()

    @rule(nth=st.integers(1, 3), delay=st.sampled_from([None, 0, 2, 8]))
    def lose_a_write(self, nth: int, delay: int | None) -> None:
        """One of the next writes gets no reply; it arrives late or never."""
        self.slow_store.lose_write(nth, delay)

    @precondition(lambda self: len(self.forks) < 2)
    @rule(order=st.permutations(NAMES), count=st.integers(0, 3))
    def fork(self, order: Sequence[str], count: int) -> None:
        """Fork the search, or the fork before, after up to three trials errored, paused or finished."""
        for name, kind in list(zip(order, ("gave-up", "paused", "finished"), strict=True))[:count]:
            if name not in self.remote and kind in NEXT_STATUS[self.status[name]]:
                self._apply_event(name, kind)
        origin = next(iter(self.forks), SEARCH)
        fork_point = load_fork_point(self.slow_store, origin, None)
        key, stamp = JournalKey(experiment=f"fork{len(self.forks)}", generation=1), self.chronicle.stamp()
        for _ in range(3):
            with suppress(Exception):
                fork = begin_fork(self.slow_store, key, fork_point.origin, FORKER, stamp)
                result = complete_fork(self.slow_store, fork_point, fork, stamp)
                break
        assert result.lost_checkpoints == {}
        self.forks[key] = {}
        for name, trial in result.experiment.trials.items():
            origin_trial = fork_point.experiment.trial(name)
            assert (trial.phase.value, trial.outbox) == (origin_trial.phase.value.replace("running", "pending"), None)
            assert trial.next_sequence == origin_trial.next_sequence
            for ref in origin_trial.checkpoints:
                folder = key.trial_key(name).checkpoint_key(ref).folder
                origin_key = origin.trial_key(name).checkpoint_key(ref)
                self.forks[key][folder] = load_files(self.slow_store, read_manifest(self.slow_store, origin_key))

    # --------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_promise_is_broken(self) -> None:
        if hasattr(self, "search"):
            assert find_broken_promises(self.store, self.chronicle) == []

    @invariant()
    def they_are_where_they_are_said_to_be(self) -> None:
        for name in set(NAMES) - set(self.remote) if hasattr(self, "search") else ():
            assert self.search.trial(name).phase.value == self.status[name]

    @invariant()
    def the_journal_and_the_outboxes_are_what_attempts_elsewhere_know(self) -> None:
        if not self.remote:
            return
        posted = load_trials_with_posts(self.store, load_experiment(self.store, SEARCH))
        for name, attempt in self.remote.items():
            assert posted[name].checkpoints == attempt.trial.checkpoints
            assert posted[name].next_sequence == attempt.trial.next_sequence

    @invariant()
    def what_a_fork_began_with_is_whole(self) -> None:
        for key, files in self.forks.items():
            fork = load_experiment(self.store, key)
            live = {
                fork.trial_key(trial.id).checkpoint_key(ref)
                for trial in fork.trials.values()
                for ref in trial.checkpoints
            }
            assert {checkpoint.folder for checkpoint in live} == set(files)
            for checkpoint in live:
                assert load_files(self.store, read_manifest(self.store, checkpoint)) == files[checkpoint.folder]
