"""A state machine of trials that clone each other, of the search that absorbs their journals, and of its forks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefect_tune.core.errors import AlreadyCommitted, CheckpointNotFound, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import append, entries_beyond, load, take_over
from prefect_tune.core.journal_events import (
    Absorbed,
    OneTrialsEvent,
    Opened,
    Owner,
    Quarantined,
    TrialAdded,
)
from prefect_tune.core.operations.fork_experiment import begin_fork, fork, past_of
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from tests.core.happenings import AFTER, happening
from tests.core.protocol.cut import cut_small
from tests.core.protocol.population import Chronicle, Member, after_everybody_returned, own, promises_broken
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.fakes.stores.memory_files import restored
from tests.fakes.stores.memory_store import MemoryStore
from tests.fakes.stores.slow_store import SlowStore

NAMES = ("c", "d", "s")
_UNLIKE = ("own_journal", "absorbed", "past", "collected_up_to", "config", "proposed")
OWNER = Owner(name="search", host="here", pid=1)
names = st.sampled_from(NAMES)


class Family(RuleBasedStateMachine):
    """Three trials with their own journals, their present and superseded owners, and their search."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.wire = SlowStore(self.store, 0, None)
        self.chronicle = Chronicle()
        self.status = dict.fromkeys(NAMES, "pending")
        self.zombies: list[Member] = []
        self.late: list[tuple[Member, Sequence[CheckpointKey]]] = []
        self.forks: list[Experiment] = []
        self.small = cut_small()
        self.small.__enter__()

    @initialize()
    def begin(self) -> None:
        self.members = {name: Member(self.wire, self.chronicle, own("e", name), name) for name in NAMES}
        found = take_over(self.wire, first_generation("e"), OWNER, self.chronicle.stamp(), side_by_side=map)
        for member in self.members.values():
            member.open()
        added = [TrialAdded(trial=name, config={"width": 3}, own_journal=True) for name in NAMES]
        self.search = append(self.wire, found, added, self.chronicle.stamp())

    def teardown(self) -> None:
        try:
            for name in self.status if hasattr(self, "search") else ():
                self._waiting(name)
            if self.forks:  # forks keep their first clones for ever, so clones never end
                assert promises_broken(self.wire, self.chronicle, self._journals) == []
            elif hasattr(self, "search"):
                assert after_everybody_returned(self.wire, self.chronicle, self._journals, tidy=False) == []
        finally:
            self.small.__exit__(None, None, None)

    @property
    def _journals(self) -> dict[str, JournalKey]:
        return {name: own("e", name) for name in NAMES}

    # --------------------------------------------------------------------------------------- operations

    @rule(name=names)
    def save(self, name: str) -> None:
        self._running(name).save()

    @rule(name=names)
    def save_and_delete_later(self, name: str) -> None:
        member = self._running(name)
        self.late.append((member, member.save_only()))

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 5))
    def delete_what_was_retired(self, which: int) -> None:
        member, doomed = self.late.pop(which % len(self.late))
        member.clear(doomed)

    @rule(into=names, source=names)
    def clone(self, into: str, source: str) -> None:
        if into != source and self.members[source].trial.checkpoints:
            self._waiting(into).clone(self.members[source].key)

    @rule(name=names, which=st.integers(0, 9))
    def turn(self, name: str, which: int) -> None:
        possible = sorted(AFTER[self.status[name]])
        self._turn(name, possible[which % len(possible)])

    @rule(name=names)
    def put_aside(self, name: str) -> None:
        """Quarantine the trial's only checkpoint, as if it killed the trainable."""
        member = self._waiting(name)
        for each in member.trial.checkpoints:
            member.append([Quarantined(trial=name, sequence=each.sequence, reason="poison", kills=True)])
        gone = [key for key in self.chronicle.acknowledged if key.trial == member.key]
        for key in gone:
            self.chronicle.acknowledged.remove(key)

    def _turn(self, name: str, what: str) -> None:
        self.members[name].append([happening(what, name)])
        self.status[name] = AFTER[self.status[name]][what]

    def _running(self, name: str) -> Member:
        if self.status[name] in ("finished", "errored"):
            self._turn(name, "requeued")
        if self.status[name] != "running":
            self.members[name].start()
            self.status[name] = "running"
        return self.members[name]

    def _waiting(self, name: str) -> Member:
        if self.status[name] in ("finished", "errored"):
            self._turn(name, "requeued")
        if self.status[name] == "running":
            self._turn(name, "attempt-ended")
        return self.members[name]

    # --------------------------------------------------------------------------------- takeovers and crashes

    @rule(name=names, clears=st.booleans())
    def take_over(self, name: str, *, clears: bool) -> None:
        self.zombies.append(self.members[name])
        self._open(name)
        if clears:
            self.members[name].clear_away()

    def _open(self, name: str) -> None:
        owner = f"owner {self.chronicle.stamps}"
        self.members[name] = Member(self.wire, self.chronicle, own("e", name), name, owner=owner)
        self.members[name].open()
        if self.status[name] == "running":
            self.status[name] = "pending"

    @rule(
        name=names,
        source=names,
        act=st.sampled_from(["save", "clone", "clear"]),
        nth=st.integers(1, 40),
        way=st.sampled_from([Way.CRASH_BEFORE, Way.CRASH_AFTER, Way.TORN]),
    )
    def die(self, name: str, source: str, act: str, nth: int, way: Way) -> None:
        member = self._running(name) if act == "save" else self._waiting(name)
        member.store = DyingStore(self.wire, nth, way)
        with suppress(Crash):
            if act == "save":
                member.save()
            elif act == "clear":
                member.clear_away()
            elif name != source and self.members[source].trial.checkpoints:
                member.clone(self.members[source].key)
        self.late = [(each, doomed) for each, doomed in self.late if each is not member]
        self._open(name)

    @precondition(lambda self: self.zombies)
    @rule(which=st.integers(0, 5), act=st.sampled_from(["append", "save", "clear"]))
    def wake_up(self, which: int, act: str) -> None:
        zombie = self.zombies[which % len(self.zombies)]
        if act == "clear":
            with suppress(Superseded):
                zombie.clear_away()
            return
        trains = zombie.trial.phase.value == "running"
        if act == "save" and trains:
            # Its parent may be deleted, and its key taken by its own save of an earlier call.
            with pytest.raises((Superseded, AlreadyCommitted, CheckpointNotFound)):
                zombie.save()
        with pytest.raises(Superseded):
            zombie.append([])

    @rule(soon=st.integers(1, 3), delay=st.sampled_from([None, 0, 2, 8]))
    def lose_a_write(self, soon: int, delay: int | None) -> None:
        """One of the next writes gets no reply; it arrives late or never."""
        self.wire.lose(soon, delay)

    # ------------------------------------------------------------------------------------------- the search

    @rule()
    def absorb(self) -> None:
        for name in NAMES:
            known = self.search.trial(name).absorbed
            entries = entries_beyond(self.wire, own("e", name), known, side_by_side=map)
            taken = [Absorbed(trial=name, number=each.number, events=_own(each.events)) for each in entries]
            if taken:
                self._append(taken)
            self._same_as_its_own(name)

    def _append(self, events: Sequence[Absorbed]) -> None:
        stamp = self.chronicle.stamp()
        for _ in range(3):
            with suppress(Exception):
                self.search = append(self.wire, self.search, events, stamp)
                return
        raise AssertionError("three tries were not enough")

    def _same_as_its_own(self, name: str) -> None:
        journaled = load(self.wire, own("e", name), side_by_side=map).trial(name)
        kept = self.search.trial(name)
        unlike: dict[str, Any] = dict.fromkeys(_UNLIKE, True)
        unlike["records"] = {"__all__": {"term"}}  # the owner of the journal that is read
        assert kept.model_dump(exclude=unlike) == journaled.model_dump(exclude=unlike)
        assert kept.phase.value == self.status[name]

    @precondition(lambda self: len(self.forks) < 2)
    @rule(order=st.permutations(NAMES), count=st.integers(0, 3))
    def fork(self, order: Sequence[str], count: int) -> None:
        """Fork the search after up to three trials errored, paused or finished."""
        for name, what in list(zip(order, ("gave-up", "paused", "finished"), strict=True))[:count]:
            if what in AFTER[self.status[name]]:
                self._turn(name, what)
        self.absorb()
        past = past_of(self.wire, first_generation("e"), None, side_by_side=map)
        name, stamp = f"fork{len(self.forks)}", self.chronicle.stamp()
        for _ in range(3):
            with suppress(Exception):
                begun = begin_fork(self.wire, first_generation(name), past.origin, OWNER, stamp, side_by_side=map)
                self.forks.append(fork(self.wire, past, begun, stamp, side_by_side=map).experiment)
                break
        made = self.forks[-1]
        for trial in NAMES:
            before = self.status[trial]
            assert made.trial(trial).phase.value == ("pending" if before == "running" else before)

    # --------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_promise_is_broken(self) -> None:
        if hasattr(self, "search"):
            assert promises_broken(self.store, self.chronicle, self._journals) == []

    @invariant()
    def they_are_where_they_are_said_to_be(self) -> None:
        for name in NAMES if hasattr(self, "search") else ():
            assert self.members[name].trial.phase.value == self.status[name]

    @invariant()
    def what_a_fork_began_with_is_whole(self) -> None:
        for made in self.forks:
            for trial in made.trials.values():
                for each in trial.checkpoints:
                    folder = TrialKey(experiment=made.name, generation=1, trial=trial.trial)
                    key = CheckpointKey(trial=folder, step=each.step, sequence=each.sequence)
                    assert restored(self.store, read_manifest(self.store, key))


def _own(events: Sequence[object]) -> tuple[OneTrialsEvent | Opened, ...]:
    return tuple(event for event in events if not isinstance(event, Absorbed))  # type: ignore[misc]  # as in the search driver
