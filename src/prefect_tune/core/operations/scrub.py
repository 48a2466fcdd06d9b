"""Find damaged checkpoints by reading them back, all of them or a share a day, and quarantine or reinstate them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TypeVar

from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CommitUnknown,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import is_live, is_quarantined, live_keys
from prefect_tune.core.journal.journal import append_as_guest
from prefect_tune.core.journal_events import GuestEvent, Quarantined
from prefect_tune.core.restore import is_live_now, read_manifest, verify
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, digest_of

# Quarantine a damaged checkpoint, or reinstate one, in a journal of another owner.
#
# The owner of a trial quarantines a checkpoint when it finds damage during a restore. A process that finds damage
# at any other time writes an entry to the journal as a guest: the owner stays the owner. From then on it neither
# restores the checkpoint nor reuses its blobs, nor those of any checkpoint as old: they may share the damaged ones. The
# alternatives are worse: a request to the owner needs a running owner, and a document of its own would be a second
# source of truth that every reader has to check.
#
# A key names a manifest, which several trials may use: the one that saved it, and those with a clone of it. It is
# quarantined, and reinstated, in all of them.
#
# A running save may have reused blobs of the damaged checkpoint: committed after the guest's entry, it is quarantined
# by that commit, and its owner saves again. Nothing is deleted: the bytes stay until the trial retires the checkpoint,
# so that it can be reinstated.


def quarantine(
    store: ObjectStore, journal: JournalKey, damaged: Mapping[CheckpointKey, str], stamp: Stamp
) -> Sequence[CheckpointKey]:
    """Quarantine checkpoints of an experiment, each for the reason given; return those that are quarantined now.

    One that was retired meanwhile is not among them. Idempotent.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """

    def events(state: Experiment) -> Sequence[GuestEvent]:
        return [
            Quarantined(trial=trial.trial, sequence=ref.sequence, reason=damaged[key])
            for trial in state.trials.values()
            for ref in trial.checkpoints
            if (key := state.trial_key(trial.trial).checkpoint_key(ref)) in damaged
        ]

    after = append_as_guest(store, journal, events, stamp)
    return [key for key in damaged if any(is_quarantined(trial, key) for trial in after.trials.values())]


def reinstate(
    store: ObjectStore, journal: JournalKey, keys: Collection[CheckpointKey], stamp: Stamp
) -> Sequence[CheckpointKey]:
    """Reinstate quarantined checkpoints of an experiment; return those that are live now.

    The caller has verified them. If one is a trial's newest, the trial's next attempt starts from it.
    Raises as `quarantine`.
    """

    def events(state: Experiment) -> Sequence[GuestEvent]:
        return [
            Quarantined(trial=trial.trial, sequence=quarantined.checkpoint.sequence, quarantined=False)
            for trial in state.trials.values()
            for quarantined in trial.quarantined_checkpoints
            if state.trial_key(trial.trial).checkpoint_key(quarantined.checkpoint) in keys
        ]

    after = append_as_guest(store, journal, events, stamp)
    return [key for key in keys if any(is_live(trial, key) for trial in after.trials.values())]


@dataclass(frozen=True, slots=True)
class DailyShare:
    """One of `parts` equal parts of the checkpoints: that of a day, counted from any fixed date."""

    parts: int = 1
    day: int = 0

    def chosen(self, keys: Iterable[CheckpointKey]) -> Sequence[CheckpointKey]:
        """Return the keys of this part, in the order of this day."""
        part = (key for key in keys if _hash(key, self.day // self.parts) % self.parts == self.day % self.parts)
        return sorted(part, key=lambda key: _hash(key, self.day))


EVERYTHING = DailyShare()
_SHARE = re.compile(r"1(?:/([1-9]\d{0,5}))?")


def share_of(text: str, today: date) -> DailyShare:
    """Return today's part of a share such as `"1/7"`.

    Raises:
        InvalidInput: it is no such share.
    """
    if (found := _SHARE.fullmatch(text)) is None:
        raise InvalidInput(f"share: expected one part of several, such as '1/7', found {text!r}; nothing was begun")
    return DailyShare(int(found[1] or 1), today.toordinal())


@dataclass(frozen=True, slots=True)
class Inspected:
    """The result of reading a checkpoint."""

    key: CheckpointKey
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of a run."""

    live: tuple[CheckpointKey, ...]
    inspected: tuple[Inspected, ...] = ()
    unread_count: int = 0
    """The number of checkpoints of its share that were not read, for lack of time or because of `max_bytes`."""
    unreadable: tuple[Unreadable, ...] = ()
    """Checkpoints that could not be read, or not in time."""

    @property
    def damaged(self) -> Sequence[Inspected]:
        """The checkpoints with damage."""
        return [each for each in self.inspected if each.damage is not None]


def _hash(key: CheckpointKey, salt: int) -> int:
    return int(digest_of(f"{salt}/{key.folder}".encode())[:13], 16)


def inspect(
    store: ObjectStore,
    state: Experiment,
    share: DailyShare = EVERYTHING,
    *,
    max_bytes: float = math.inf,
    has_time: Callable[[], bool] = lambda: True,
) -> Inspection:
    """Read the live checkpoints of a share; where one is damaged, all others of its trial too.

    The limits, `max_bytes` and `has_time`, end the reading of the share, after one checkpoint at least. Checkpoints of
    a trial share blobs, so that one damaged blob often damages several. A checkpoint that is retired during the read is
    not damaged. An object that cannot be read is reported, and the rest is read all the same.

    Raises:
        StoreUnavailable, StoreRefused: the target as a whole cannot be read.
    """
    trials = () if state.is_removed else state.trials.values()
    live = list(dict.fromkeys(key for trial in trials for key in live_keys(state.trial_key(trial.trial), trial)))
    inspected, unreadable = list[Inspected](), list[Unreadable]()

    def read(keys: Sequence[CheckpointKey], max_bytes: float, has_time: Callable[[], bool]) -> tuple[int, bool]:
        """Return how many of `keys` were read or reported, and whether the time for the whole run is over."""
        for count, key in enumerate(keys):
            if count and (max_bytes <= 0 or not has_time()):
                return count, False
            try:
                found = unless_unreadable(store, key.trial, key.folder, partial(inspect_one, store, key))
            except DeadlineExceeded as late:
                if count:
                    return count, True
                unreadable.append(Unreadable(key.folder, str(late), key.trial.trial))  # it took all the time
                return 1, True
            if isinstance(found, Unreadable):
                unreadable.append(found)
            else:
                inspected.extend(found)
                max_bytes -= sum(each.size_bytes for each in found)
        return len(keys), False

    chosen = share.chosen(live)
    count, is_late = read(chosen, max_bytes, has_time)
    suspects = {each.key.trial for each in inspected if each.damage is not None}
    if suspects and not is_late:
        done = set(chosen[:count])
        read([key for key in live if key.trial in suspects and key not in done], math.inf, lambda: True)
    return Inspection(tuple(live), tuple(inspected), len(chosen) - count, tuple(unreadable))


def inspect_one(store: ObjectStore, key: CheckpointKey) -> Sequence[Inspected]:
    """Read every byte of a live checkpoint; the result is empty if it is damaged but no longer live."""
    found = read_one(store, key)
    return [found] if found.damage is None or is_live_now(store, key) else []


def read_one(store: ObjectStore, key: CheckpointKey) -> Inspected:
    """Read every byte of a checkpoint, live or not."""
    try:
        manifest = read_manifest(store, key)
        verify(store, manifest)
    except (CheckpointCorrupt, CheckpointNotFound) as damage:
        return Inspected(key, damage=str(damage))
    return Inspected(key, manifest.size_bytes, len(manifest.files))


# Turn a failure to read one object into a result, so that maintenance continues with the others.

_Result = TypeVar("_Result")
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that could not be read, and the reason."""

    folder: str
    """Its folder on the target."""
    why: str
    trial: str


def unless_unreadable(
    store: ObjectStore, trial: TrialKey, folder: str, act: Callable[[], _Result]
) -> _Result | Unreadable:
    """Return `act()`, or, if it cannot read the objects in `folder` (of the trial), an `Unreadable`.

    After a failure of the store `act` is called a second time.

    Raises:
        StoreUnavailable, StoreRefused: other objects of the target cannot be read either, or the time is up.
    """
    reason = ""
    for _ in range(_TRIES):
        try:
            return act()
        except UnknownVersion as error:
            return Unreadable(folder, str(error), trial.trial)
        except DeadlineExceeded:
            raise
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            reason = f"{type(error).__name__}: {error}"
            store.size(trial.of_experiment.entry_path(1))  # raises if the target is unavailable
    return Unreadable(folder, reason, trial.trial)
