"""Find damaged checkpoints by reading them back, all of them or a share a day, and quarantine or reinstate them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import TypeVar

from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CommitUnknown,
    DeadlineExceeded,
    InvalidInput,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, is_live, is_quarantined, live_keys
from prefect_tune.core.journal.journal import append_as_guest, load, trial_today
from prefect_tune.core.journal_events import GuestEvent, Quarantined
from prefect_tune.core.restore import is_live_now, journal_of, read_manifest, trial_in, verify
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap
from prefect_tune.core.values import Stamp, digest_of

# Quarantine a damaged checkpoint, or reinstate one, in a journal of another owner.
#
# The owner of a trial quarantines a checkpoint when it finds damage during a restore. A process that finds damage
# at any other time writes an entry to the trial's journal as a guest, as for a claim: the owner stays the
# owner. From then on it neither restores the checkpoint nor reuses its blobs, nor those of any checkpoint as old:
# they may share the damaged ones. The alternatives are worse: a request to the owner needs a running owner, and a
# document of its own would be a second source of truth that every reader has to check.
#
# A running save may have reused blobs of the damaged checkpoint; it is not committed after the guest's entry
# (`SaveOvertaken`), and its owner saves again. Nothing is deleted: the bytes stay until the trial retires the
# checkpoint, so that it can be reinstated.


def quarantine(
    store: ObjectStore,
    trial: TrialKey,
    damaged: Mapping[CheckpointKey, str],
    stamp: Stamp,
    *,
    side_by_side: ParallelMap,
) -> Sequence[CheckpointKey]:
    """Quarantine checkpoints of `trial`, each for the reason given; return those that are quarantined now.

    One that was retired meanwhile is not among them. Idempotent.

    Raises:
        JournalCorrupt, UnknownVersion: as `load`.
        StoreUnavailable, CommitUnknown: call again.
    """

    def events(state: Experiment) -> Sequence[GuestEvent]:
        found = trial_in(state, trial)
        live = {key: reason for key, reason in damaged.items() if found and is_live(found, key)}
        return [Quarantined(trial=trial.trial, sequence=key.sequence, reason=live[key]) for key in live]

    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in damaged if found and is_quarantined(found, key)]


def reinstate(
    store: ObjectStore, trial: TrialKey, keys: Collection[CheckpointKey], stamp: Stamp, *, side_by_side: ParallelMap
) -> Sequence[CheckpointKey]:
    """Reinstate quarantined checkpoints of `trial`; return those that are live now.

    The caller has verified them. If one is the trial's newest, its next attempt starts from it.
    Raises as `quarantine`.
    """

    def events(state: Experiment) -> Sequence[GuestEvent]:
        found = trial_in(state, trial)
        known = [key for key in keys if found and is_quarantined(found, key)]
        return [Quarantined(trial=trial.trial, sequence=key.sequence, quarantined=False) for key in known]

    after = append_as_guest(store, journal_of(store, trial), events, stamp, side_by_side=side_by_side)
    found = after.trials.get(trial.trial)
    return [key for key in keys if found and is_live(found, key)]


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
class ScrubLimits:
    """How much of its share a run reads: at least one checkpoint."""

    max_bytes: int | None = None
    has_time: Callable[[], bool] = lambda: True


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
    """Journals and checkpoints that could not be read, or not in time."""

    @property
    def damaged(self) -> Sequence[Inspected]:
        """The checkpoints with damage."""
        return [each for each in self.inspected if each.damage is not None]


def _hash(key: CheckpointKey, salt: int) -> int:
    return int(digest_of(f"{salt}/{key.folder}".encode())[:13], 16)


@dataclass(slots=True)
class _Journals:
    """Reads trials' own journals, and collects those that cannot be read."""

    store: ObjectStore
    state: Experiment
    side_by_side: ParallelMap
    unreadable: dict[str, Unreadable] = field(default_factory=dict)

    def live(self, trials: Iterable[Trial]) -> Sequence[CheckpointKey]:
        """Return the live checkpoints of the trials whose journals can be read."""
        found = self.side_by_side(lambda trial: (self._place(trial).entries, self._today(trial)), trials)
        keys: list[CheckpointKey] = []
        for folder, trial in found:
            if isinstance(trial, Unreadable):
                self.unreadable[folder] = trial
            else:
                keys += _keys(self.state, trial)
        return keys

    def _today(self, trial: Trial) -> Trial | Unreadable:
        place = self._place(trial)
        look = partial(trial_today, self.store, self.state.key, trial, side_by_side=map)
        return unless_unreadable(self.store, place, place.entries, look)

    def _place(self, trial: Trial) -> JournalKey:
        return self.state.key.of_trial(trial.trial)


def _known_keys(state: Experiment, journals: _Journals) -> list[CheckpointKey]:
    """Return the live keys; for an ended trial, by the experiment's journal: reading thousands of journals is slow."""
    trials = () if state.is_removed else tuple(state.trials.values())
    ended = [key for trial in trials if trial.phase in ENDED for key in _keys(state, trial)]
    return [*ended, *journals.live(trial for trial in trials if trial.phase not in ENDED)]


def _keys(state: Experiment, trial: Trial) -> Sequence[CheckpointKey]:
    return live_keys(state.trial_key(trial.trial), trial)


def inspect(
    store: ObjectStore, state: Experiment, share: DailyShare, limits: ScrubLimits, *, side_by_side: ParallelMap
) -> Inspection:
    """Read the live checkpoints of a share, within `limits`; where one is damaged, all others of its trial too.

    Checkpoints of a trial share blobs, so that one damaged blob often damages several. A checkpoint that is retired
    during the read is not damaged. An object that cannot be read is reported, and the rest is read all the same.

    Raises:
        StoreUnavailable, StoreRefused: the target as a whole cannot be read.
    """
    journals = _Journals(store, state, side_by_side)
    live = _known_keys(state, journals)
    chosen = share.chosen(live)
    concerned = {key.trial.trial: state.trial(key.trial.trial) for key in chosen}
    today = frozenset(journals.live(concerned.values()))
    read = _read(store, [key for key in chosen if key in today], limits, side_by_side)
    suspect = {each.key.trial for each in read.inspected if each.damage is not None}
    beside = [key for key in live if key.trial in suspect and (key in read.unread or key not in chosen)]
    more = _Read() if read.is_late else _read(store, beside, ScrubLimits(), side_by_side)
    return Inspection(
        tuple(live),
        (*read.inspected, *more.inspected),
        len(read.unread),
        (*journals.unreadable.values(), *read.unreadable, *more.unreadable),
    )


@dataclass(slots=True)
class _Read:
    inspected: list[Inspected] = field(default_factory=list)
    unread: Sequence[CheckpointKey] = ()
    """The checkpoints that the limits excluded."""
    unreadable: list[Unreadable] = field(default_factory=list)
    is_late: bool = False
    """Whether the time for the run has run out."""


def _read(store: ObjectStore, chosen: Sequence[CheckpointKey], limits: ScrubLimits, side_by_side: ParallelMap) -> _Read:
    done = _Read()
    room = math.inf if limits.max_bytes is None else limits.max_bytes
    for count, key in enumerate(chosen):
        if count and (room <= 0 or not limits.has_time()):
            done.unread = chosen[count:]
            break
        try:
            found = _inspected(store, key, side_by_side)
        except DeadlineExceeded as late:
            _too_late(done, chosen[count:], late, is_first=not count)
            break
        if isinstance(found, Unreadable):
            done.unreadable.append(found)
        else:
            done.inspected += found
            room -= sum(each.size_bytes for each in found)
    return done


def _inspected(store: ObjectStore, key: CheckpointKey, side_by_side: ParallelMap) -> Sequence[Inspected] | Unreadable:
    place = key.trial.journal
    return unless_unreadable(store, place, key.folder, partial(inspect_one, store, key, side_by_side=side_by_side))


def _too_late(done: _Read, rest: Sequence[CheckpointKey], late: DeadlineExceeded, *, is_first: bool) -> None:
    """Record the timeout; if the first checkpoint took all the time, report it."""
    done.is_late = True
    if is_first:
        done.unreadable.append(Unreadable(rest[0].folder, str(late), rest[0].trial.trial))
    done.unread = rest[1:] if is_first else rest


def inspect_one(store: ObjectStore, key: CheckpointKey, *, side_by_side: ParallelMap) -> Sequence[Inspected]:
    """Read every byte of a live checkpoint; the result is empty if it is damaged but no longer live."""
    found = read_one(store, key, side_by_side=side_by_side)
    return [found] if found.damage is None or is_live_now(store, key, side_by_side=side_by_side) else []


def read_one(store: ObjectStore, key: CheckpointKey, *, side_by_side: ParallelMap) -> Inspected:
    """Read every byte of a checkpoint, live or not."""
    try:
        manifest = read_manifest(store, key)
        verify(store, manifest, side_by_side=side_by_side)
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
    trial: str | None = None
    is_damage: bool = False
    """Whether it is a journal that was read and is corrupt."""


def unless_unreadable(
    store: ObjectStore, place: JournalKey, folder: str, act: Callable[[], _Result]
) -> _Result | Unreadable:
    """Return `act()`, or, if it cannot read the objects in `folder` (of the journal `place`), an `Unreadable`.

    After a failure of the store `act` is called a second time.

    Raises:
        StoreUnavailable, StoreRefused: other objects of the target cannot be read either, or the time is up.
    """
    why = ""
    for _ in range(_TRIES):
        try:
            return act()
        except (JournalCorrupt, UnknownVersion) as error:
            is_damage = isinstance(error, JournalCorrupt) and _is_there(store, place.of_experiment)
            return Unreadable(folder, str(error), place.trial, is_damage=is_damage)
        except DeadlineExceeded:
            raise
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            why = f"{type(error).__name__}: {error}"
            store.size(place.of_experiment.entry_path(1))  # raises if the target is unavailable
    return Unreadable(folder, why, place.trial)


def _is_there(store: ObjectStore, experiment: JournalKey) -> bool:
    """Return whether the experiment exists and is not being deleted: a journal being deleted is not damaged."""
    try:
        state = load(store, experiment, side_by_side=map)
    except (JournalCorrupt, Superseded):
        return False
    return state.number > 0 and not state.is_removed
