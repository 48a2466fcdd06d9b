"""Concurrent owners on one store: superseded owners that still run, owners that take over, and the outcome."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress

from prefect_tune.core.errors import Superseded
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import Session, Witness
from tests.core.protocol.invariants import after_recovery
from tests.core.protocol.matrix import Explored
from tests.core.protocol.turns import Choice, IsPoint, drawn, every_order, everywhere, in_turns
from tests.fakes.stores.memory_store import MemoryStore

Act = Callable[[Session], None]
"""What one owner does, beginning as the old owner of the experiment."""


def old_owner(checkpoints: int = 2) -> Session:
    """An owner with some checkpoints, a retired checkpoint not yet deleted, and a step not yet saved."""
    session = Session(MemoryStore(), Witness(), owner="old")
    session.open()
    session.start()
    for _ in range(checkpoints):
        session.collect(session.doomed)
        session.train()
        session.doomed = session.acknowledge(session.publish())
    session.train()
    return session


def after_a_late_upload() -> Session:
    """An owner that was superseded during its first save and still finished its upload."""
    old = old_owner(0)
    takes_over(old)
    old.publish()
    return old


def save(session: Session) -> None:
    """The old owner resumes before a save: publish, journal, delete the retired checkpoints."""
    session.save()


def uploads(session: Session) -> None:
    """The old owner resumes before a save, and dies before its entry."""
    session.publish()


def collects(session: Session) -> None:
    """The old owner resumes before the deletion of the checkpoints that it retired."""
    session.collect(session.doomed)


def takes_over(session: Session) -> None:
    """A new owner opens the experiment, adopts saves, and deletes leftovers."""
    _new(session).open()


def takes_over_and_saves(session: Session) -> None:
    """A new owner opens the experiment, starts an attempt and saves."""
    new = _new(session)
    new.open()
    new.start()
    new.train()
    new.save()


def takes_over_carelessly(session: Session) -> None:
    """The same, by an owner that deletes leftovers without journaling it first."""
    new = _new(session)
    new.clearing = "careless"
    new.open()


def takes_over_untidily_and_saves(session: Session) -> None:
    """The same, by an owner that keeps leftovers and reuses their blobs."""
    new = _new(session)
    new.clearing = "none"
    new.open()
    new.start()
    new.train()
    new.save()


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at the listing that adoption uses."""
    return method in {"create", "delete"} or (method == "list" and path.endswith("/checkpoints"))


def _new(session: Session) -> Session:
    owner = f"new{session.witness.stamps}"
    return Session(session.store, session.witness, owner=owner, retention=session.retention)


def meet_in_every_order(
    old: Session, acts: Sequence[Act], is_point: IsPoint, *, limit: int, enough: int | None = None
) -> Explored:
    """Run the owners in every order of their points, and check the promises after each order."""
    explored = Explored()

    def run(choose: Choice) -> None:
        if enough is None or len(explored.broken) < enough:
            explored.broken += _met(old, acts, choose, is_point)

    explored.points = every_order(run, limit)
    return explored


def meet_at_random(old: Session, acts: Sequence[Act], seeds: Sequence[int], *, enough: int | None = None) -> Explored:
    """Run the owners in random orders of all their operations."""
    explored = Explored()
    for seed in seeds:
        explored.points += 1
        explored.broken += [f"seed {seed}: {each}" for each in _met(old, acts, drawn(seed), everywhere)]
        if enough is not None and len(explored.broken) >= enough:
            break
    return explored


def _met(old: Session, acts: Sequence[Act], choose: Choice, is_point: IsPoint) -> list[str]:
    assert isinstance(old.store, MemoryStore)
    store = MemoryStore()
    store.objects.update(old.store.objects)
    witness = copy.deepcopy(old.witness)
    processes = [_process(old, witness, act) for act in acts]
    return [*in_turns(store, processes, choose, is_point), *after_recovery(store, witness, steps=None)]


def _process(old: Session, witness: Witness, act: Act) -> Callable[[ObjectStore], None]:
    def run(store: ObjectStore) -> None:
        with suppress(Superseded):  # a superseded owner ends
            act(dataclasses.replace(old, store=store, witness=witness, waiting=list(old.waiting)))

    return run
