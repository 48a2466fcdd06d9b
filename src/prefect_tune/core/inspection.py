"""Read checkpoints back for no other reason than to see whether they are whole: all of them, or a share at a time.

The checkpoints of an experiment lie on a ring, each at a place that hangs on its name alone. A round reads those on an
arc of the ring, and the next round begins where it ended. So with a share of 1/24 every checkpoint that is
there all the while is read once in 24 rounds, whatever comes and goes meanwhile, however rarely the rounds are, and
whatever cuts one short: a round that had no time for all of its arc ends at the first one that it did not
read. What is to be remembered from one round to the next lies on the target, numbered, each written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    CheckpointNotFound,
    JournalCorrupt,
    ObjectNotFound,
    UnknownVersion,
)
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import load
from prefect_tune.core.layout import (
    CheckpointKey,
    JournalKey,
    TrialKey,
    maintenance_folder,
    maintenance_path,
    number_in,
)
from prefect_tune.core.restore import read_manifest, verify
from prefect_tune.core.sealed import seal, unseal
from prefect_tune.core.settle import create_or_recognize
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import ENDED, Trial, is_live
from prefect_tune.core.trial_journal import trial_today
from prefect_tune.core.values import Stamp, Value, digest_of

__all__ = [
    "Inspected",
    "Inspection",
    "Limits",
    "Round",
    "inspect",
    "inspect_one",
    "last_round",
    "leave_round",
    "live_keys",
    "next_round",
    "on_arc",
    "place_of",
    "read_one",
    "told_before",
]

_RING = 2**52


class Round(Value):
    """What one round leaves to the next."""

    format: Literal["prefect-tune/maintenance"] = "prefect-tune/maintenance"
    version: Literal[1] = 1
    write_id: str
    at: str
    begins_at: int = 0
    """The place on the ring at which the next round begins."""
    told: tuple[str, ...] = ()
    """The folders of checkpoints whose damage was told of, and is still there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a round reads; at least one checkpoint, so that no limit keeps it from getting round."""

    share: float = 1.0
    max_bytes: int | None = None
    has_time: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Inspected:
    """What reading a checkpoint found."""

    key: CheckpointKey
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a round read."""

    live: tuple[CheckpointKey, ...]
    inspected: tuple[Inspected, ...] = ()
    unread_count: int = 0
    """Those on its arc for which there was no time, or which would have been too many bytes."""
    ends_at: int = 0
    """Where the next round begins."""

    @property
    def damaged(self) -> Sequence[Inspected]:
        """Those that are not whole."""
        return [each for each in self.inspected if each.damage is not None]


def place_of(key: CheckpointKey) -> int:
    """Return where on the ring the checkpoint lies."""
    return int(digest_of(key.folder.encode())[:13], 16)


def on_arc(keys: Iterable[CheckpointKey], begins_at: int, share: float) -> Sequence[CheckpointKey]:
    """Return those that lie on the arc of that share which begins there, in their order."""
    far = {key: (place_of(key) - begins_at) % _RING for key in keys}
    return sorted((key for key in far if far[key] < _length(share)), key=lambda key: far[key])


def _length(share: float) -> int:
    return min(_RING, math.ceil(share * _RING))


def live_keys(
    store: ObjectStore, state: Experiment, trials: Iterable[Trial], *, side_by_side: Mapper
) -> Sequence[CheckpointKey]:
    """Return the live checkpoints of `trials`, as their own journals tell them."""
    today = side_by_side(lambda trial: trial_today(store, state.name, trial, side_by_side=map), trials)
    return [key for trial in today for key in _keys(state, trial)]


def _known_keys(store: ObjectStore, state: Experiment, side_by_side: Mapper) -> list[CheckpointKey]:
    """Of a trial that has ended, as the experiment's journal tells it: to ask thousands takes long."""
    trials = () if state.is_removed else tuple(state.trials.values())
    ended = [key for trial in trials if trial.status in ENDED for key in _keys(state, trial)]
    rest = (trial for trial in trials if trial.status not in ENDED)
    return [*ended, *live_keys(store, state, rest, side_by_side=side_by_side)]


def _keys(state: Experiment, trial: Trial) -> Sequence[CheckpointKey]:
    folder = TrialKey(experiment=state.name, trial=trial.trial)
    return [CheckpointKey(trial=folder, step=each.step, sequence=each.sequence) for each in trial.checkpoints]


def inspect(
    store: ObjectStore, state: Experiment, begins_at: int, limits: Limits, *, side_by_side: Mapper
) -> Inspection:
    """Read the live checkpoints on an arc, within `limits`; where one is damaged, all others of its trial too.

    Checkpoints of a trial share bytes, so that what damages one often damages its neighbours. What is retired
    while it is read is not damaged.

    Raises:
        JournalCorrupt, UnknownVersion, StoreUnavailable: as `load`.
    """
    live = _known_keys(store, state, side_by_side)
    arc = on_arc(live, begins_at, limits.share)
    concerned = {key.trial.trial: state.trial(key.trial.trial) for key in arc}
    today = frozenset(live_keys(store, state, concerned.values(), side_by_side=side_by_side))
    read, unread = _read(store, [key for key in arc if key in today], limits, side_by_side)
    suspect = {each.key.trial for each in read if each.damage is not None}
    beside = [key for key in live if key.trial in suspect and (key in unread or key not in arc)]
    read += [each for key in beside for each in inspect_one(store, key, side_by_side=side_by_side)]
    ends_at = place_of(unread[0]) if unread else (begins_at + _length(limits.share)) % _RING
    return Inspection(tuple(live), tuple(read), len(unread), ends_at)


def _read(
    store: ObjectStore, arc: Sequence[CheckpointKey], limits: Limits, side_by_side: Mapper
) -> tuple[list[Inspected], Sequence[CheckpointKey]]:
    """What was read, and those for which the limits left no room."""
    read: list[Inspected] = []
    room = math.inf if limits.max_bytes is None else limits.max_bytes
    for count, key in enumerate(arc):
        if count and (room <= 0 or not limits.has_time()):
            return read, arc[count:]
        found = inspect_one(store, key, side_by_side=side_by_side)
        read += found
        room -= sum(each.size_bytes for each in found)
    return read, ()


def inspect_one(store: ObjectStore, key: CheckpointKey, *, side_by_side: Mapper) -> Sequence[Inspected]:
    """Read every byte of a live checkpoint; nothing is found where it turns out to be none any more."""
    found = read_one(store, key, side_by_side=side_by_side)
    return [found] if found.damage is None or _is_one_still(store, key, side_by_side) else []


def read_one(store: ObjectStore, key: CheckpointKey, *, side_by_side: Mapper) -> Inspected:
    """Read every byte of a checkpoint, live or not."""
    try:
        manifest = read_manifest(store, key)
        verify(store, manifest, side_by_side=side_by_side)
    except (CheckpointCorrupt, CheckpointNotFound) as damage:
        return Inspected(key, damage=str(damage))
    return Inspected(key, manifest.size_bytes, len(manifest.files))


def _is_one_still(store: ObjectStore, key: CheckpointKey, side_by_side: Mapper) -> bool:
    """What has been retired while it was read is not damaged, nor what is deleted with its experiment."""
    state = load(store, key.trial.experiment, side_by_side=side_by_side)
    known = None if state.is_removed else state.trials.get(key.trial.trial)
    return known is not None and is_live(trial_today(store, state.name, known, side_by_side=side_by_side), key)


# ------------------------------------------------------------------------------------ from one round to the next


def last_round(store: ObjectStore, experiment: str) -> tuple[int, Round | None]:
    """Return the number of the last round, 0 where there was none, and what it left, if that can be read."""
    folder = maintenance_folder(experiment)
    number = max((number_in(folder, each.path) or 0 for each in store.list(folder)), default=0)
    path = maintenance_path(experiment, number)
    try:
        return number, unseal(Round, store.read(path), path, JournalCorrupt) if number else None
    except (JournalCorrupt, UnknownVersion, ObjectNotFound):
        return number, None  # it only costs reading some checkpoints sooner than they are due


def leave_round(store: ObjectStore, experiment: str, number: int, left: Round) -> None:
    """Leave it to round `number` + 1, and delete what earlier ones left.

    Where somebody else was round `number`, theirs stands. Nothing is written beside an experiment that is gone.
    """
    if store.size(JournalKey(experiment=experiment).entry_path(1)) is None:
        return
    with suppress(AlreadyExists):
        create_or_recognize(store, maintenance_path(experiment, number), seal(left))
    folder = maintenance_folder(experiment)
    older = [each.path for each in store.list(folder) if 0 < (number_in(folder, each.path) or 0) < number]
    if older:
        store.delete(older)


def next_round(last: Round | None, stamp: Stamp, inspection: Inspection, aside: Collection[CheckpointKey]) -> Round:
    """Return what a round leaves that found this, and put those `aside`: they are no damage of the experiment's now."""
    seen = {each.key for each in inspection.inspected}
    known = told_before(last)
    still = {key.folder for key in inspection.live if key.folder in known and key not in seen}
    now = {each.key.folder for each in inspection.damaged if each.key not in aside}
    return Round(write_id=stamp.write_id, at=stamp.at, begins_at=inspection.ends_at, told=tuple(sorted({*still, *now})))


def told_before(last: Round | None) -> frozenset[str]:
    """Return the folders of what was told of as damaged, and left."""
    return frozenset(last.told) if last else frozenset()
