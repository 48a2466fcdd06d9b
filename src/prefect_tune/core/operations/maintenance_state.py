"""The state that one maintenance round leaves to the next: where to continue, and which damage was reported or not yet.

It is stored on the target as numbered documents, each written once, so that a round that dies loses nothing. A
checkpoint that is quarantined is not found damaged by later rounds: so its damage is stored here as not yet reported
before it is quarantined, and removed from there once it was reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound, StoreUnavailable, UnknownVersion
from prefect_tune.core.models import Stamp, Value
from prefect_tune.core.operations.scrub import Inspection
from prefect_tune.core.storage.conditional_create import create_or_recognize, require_conditional_create
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, maintenance_folder, maintenance_path, number_in
from prefect_tune.core.storage.object_store import ObjectStore

_RACES = 16


class UnreportedDamage(Value):
    """Damage that was found, and is not reported yet."""

    trial: str | None = None
    """None for the experiment's journal."""
    step: int | None = None
    """None for a journal."""
    folder: str
    damage: str
    is_aside: bool = False
    """Whether it was quarantined, or about to be by a round that died: then it is aside now, or is found again."""


class Round(Document):
    """The state after one round."""

    format: Literal["prefect-tune/maintenance"] = "prefect-tune/maintenance"
    version: Literal[1] = 1
    write_id: str
    at: str
    begins_at: int = 0
    """The place on the ring at which the next round begins."""
    told: tuple[str, ...] = ()
    """The folders of checkpoints and journals that are known to be damaged, and still are."""
    untold: tuple[UnreportedDamage, ...] = ()
    """The damage that the next round has to report, even if it is repaired by then."""


NOTHING_YET = Round(write_id="", at="")
Change = Callable[[Round], Round]
"""Returns a round's state, given that of the round before it; `leave_round` adds the stamp."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The number of an experiment's last round, 0 where there was none, and its state, empty if that is unreadable."""

    number: int = 0
    last: Round = NOTHING_YET


def last_number(store: ObjectStore, experiment: str) -> int:
    """Return the number of the last round; 0 where there was none."""
    return max(_numbers(store, experiment), default=0)


def last_round(store: ObjectStore, experiment: str) -> Remembered:
    """Return the state that the last round left."""
    for _ in range(_RACES):
        number = last_number(store, experiment)
        path = maintenance_path(experiment, number)
        try:
            return Remembered(number, read_sealed(store, Round, path, JournalCorrupt)) if number else Remembered()
        except (JournalCorrupt, UnknownVersion):
            return Remembered(number)  # then some checkpoints are read too early, and some damage is reported twice
        except ObjectNotFound:
            continue  # a later round deletes it
    return Remembered(number)


def leave_round(store: ObjectStore, experiment: str, known: Remembered, stamp: Stamp, change: Change) -> Remembered:
    """Write the state of the round after `known`, the last one, as `change` returns it; return what was written.

    If another process was faster, `change` is called again with the state that it left, so that neither loses damage
    that the other has to report. Older states are deleted. For a deleted experiment nothing is written.

    Raises:
        StoreRefused: the target supports one writer only: see `conditional_create`.
        StoreUnavailable: other writers were faster 16 times.
        CommitUnknown: the target did not say whether it wrote; call again with the same arguments.
    """
    if store.size(JournalKey(experiment=experiment).entry_path(1)) is None:
        return known
    require_conditional_create(store, maintenance_folder(experiment))
    for _ in range(_RACES):
        number = known.number + 1
        left = change(known.last).model_copy(update={"write_id": stamp.write_id, "at": stamp.at})
        if _is_last(store, experiment, number, left):
            return Remembered(number, left)
        known = last_round(store, experiment)
    raise StoreUnavailable(f"{maintenance_folder(experiment)}: {_RACES} other writers were faster; try again")


def _is_last(store: ObjectStore, experiment: str, number: int, left: Round) -> bool:
    """Write the state, and return whether it is the last: a later one may exist, and have deleted this number."""
    try:
        create_or_recognize(store, maintenance_path(experiment, number), seal(left))
    except AlreadyExists:
        return False
    there = _numbers(store, experiment)
    if max(there, default=number) > number:
        return False
    if older := [maintenance_path(experiment, each) for each in there if each < number]:
        store.delete(older)
    return True


def _numbers(store: ObjectStore, experiment: str) -> Sequence[int]:
    folder = maintenance_folder(experiment)
    return [number for each in store.list(folder) if (number := number_in(folder, each.path))]


# ----------------------------------------------------------------------------------------------- state changes


def reported_folders(last: Round) -> frozenset[str]:
    """Return the folders of damaged objects that were reported."""
    return frozenset(last.told) - {each.folder for each in last.untold}


def next_round(
    last: Round,
    inspection: Inspection,
    quarantined: Collection[CheckpointKey],
    unreported: Sequence[UnreportedDamage] = (),
) -> Round:
    """Return the state after a round with this `inspection`; `quarantined` checkpoints no longer count as damage."""
    live = {key.folder for key in inspection.live}
    seen = {each.key.folder for each in inspection.inspected}.union(inspection.journals)
    still = {folder for folder in {*last.told} - seen if folder in live or folder.endswith("/journal")}
    now = {each.key.folder for each in inspection.damaged if each.key not in quarantined}
    journals = {each.folder for each in inspection.unreadable if each.is_damage}
    told = tuple(sorted({*still, *now, *journals}))
    return amended(last.model_copy(update={"begins_at": inspection.ends_at, "told": told}), unreported=unreported)


def amended(last: Round, *, known: Collection[str] = (), unreported: Sequence[UnreportedDamage] = ()) -> Round:
    """Return the last state with `known` and `unreported` damage added, for a round that has read nothing yet."""
    both = {each.folder: each for each in (*last.untold, *unreported)}
    told = tuple(sorted({*last.told, *known}))
    return last.model_copy(update={"told": told, "untold": tuple(both.values())})


def after_report(last: Round, folders: Collection[str]) -> Round:
    """Return the state after the damage of `folders` was reported."""
    untold = tuple(each for each in last.untold if each.folder not in folders)
    return last.model_copy(update={"untold": untold})
