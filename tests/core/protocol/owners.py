"""Concurrent owners on one store: superseded owners that still run, owners that take over, and the outcome."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from prefect_tune.core.errors import Superseded
from tests.core.driver import Session, Witness
from tests.fakes.stores.memory_store import MemoryStore


def make_old_owner(checkpoints: int = 2) -> Session:
    """An owner with some checkpoints, a retired checkpoint not yet deleted, and a step not yet saved."""
    session = Session(MemoryStore(), Witness(), owner="old")
    session.open()
    session.start()
    for _ in range(checkpoints):
        session.delete_checkpoints(session.to_delete)
        session.train()
        session.to_delete = session.acknowledge(session.publish())
    session.train()
    return session


def make_late_uploader() -> Session:
    """An owner that was superseded during its first save and still finished its upload."""
    old = make_old_owner(0)
    take_over(old)
    old.publish()
    return old


# What one owner does, beginning as the old owner of the experiment; a superseded one ends.


def save(session: Session) -> None:
    """The old owner resumes before a save: publish, journal, delete the retired checkpoints."""
    with suppress(Superseded):
        session.save()


def upload(session: Session) -> None:
    """The old owner resumes before a save, and dies before its entry."""
    session.publish()


def delete_retired(session: Session) -> None:
    """The old owner resumes before the deletion of the checkpoints that it retired."""
    with suppress(Superseded):
        session.delete_checkpoints(session.to_delete)


def take_over(session: Session, cleanup: Literal["careful", "careless", "none"] = "careful") -> None:
    """A new owner opens the experiment, adopts saves, and deletes leftovers."""
    with suppress(Superseded):
        _make_new_owner(session, cleanup).open()


def take_over_and_save(session: Session, cleanup: Literal["careful", "careless", "none"] = "careful") -> None:
    """A new owner opens the experiment, starts an attempt and saves."""
    with suppress(Superseded):
        new = _make_new_owner(session, cleanup)
        new.open()
        new.start()
        new.train()
        new.save()


def _make_new_owner(session: Session, cleanup: Literal["careful", "careless", "none"]) -> Session:
    owner = f"new{session.witness.stamps}"
    return Session(session.store, session.witness, owner=owner, retention=session.retention, cleanup=cleanup)


def at_decisions(method: str, path: str) -> bool:
    """Switch processes at operations that others can see, and at the listing that adoption uses."""
    return method in {"create", "delete"} or (method == "list" and path.endswith("/checkpoints"))
