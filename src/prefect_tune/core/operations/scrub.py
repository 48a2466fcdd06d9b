"""Scrub checkpoints: read them back to find damage, all of them or a share in each maintenance round.

The checkpoints of an experiment are placed on a ring by a hash of their names. A round reads those on an arc of the
ring, and the next round begins where it ended. So with a share of 1/24, every checkpoint that exists the whole time is
read once in 24 rounds, even while others are added and deleted, at any interval between rounds. A round that runs out
of time ends at the first checkpoint that it did not read. An object that cannot be read neither stops the round nor
blocks the next one. `maintenance_state` has the state that is kept between rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prefect_tune.core.checkpoints.commit import ParallelMap
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, DeadlineExceeded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, live_keys
from prefect_tune.core.journal.tolerant_read import Unreadable, unless_unreadable
from prefect_tune.core.journal.trial_journal import trial_today
from prefect_tune.core.models import digest_of
from prefect_tune.core.recovery.restore import read_manifest, verify
from prefect_tune.core.recovery.stale_reads import is_live_now
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore

_RING = 2**52


@dataclass(frozen=True, slots=True)
class ScrubLimits:
    """How much a round reads; always at least one checkpoint, so that every round makes progress."""

    share: float = 1.0
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
    """The result of a round."""

    live: tuple[CheckpointKey, ...]
    inspected: tuple[Inspected, ...] = ()
    unread_count: int = 0
    """The number of checkpoints on its arc that were not read, for lack of time or because of `max_bytes`."""
    ends_at: int = 0
    """The place on the ring where the next round begins."""
    journals: tuple[str, ...] = ()
    """The folders of the journals that were read, and are consistent."""
    unreadable: tuple[Unreadable, ...] = ()
    """Journals and checkpoints that could not be read, or not in time."""

    @property
    def damaged(self) -> Sequence[Inspected]:
        """The checkpoints with damage."""
        return [each for each in self.inspected if each.damage is not None]


def place_of(key: CheckpointKey) -> int:
    """Return the checkpoint's place on the ring."""
    return int(digest_of(key.folder.encode())[:13], 16)


def on_arc(keys: Iterable[CheckpointKey], begins_at: int, share: float) -> Sequence[CheckpointKey]:
    """Return the keys on the arc that begins at `begins_at` and is `share` of the ring, in ring order."""
    far = {key: (place_of(key) - begins_at) % _RING for key in keys}
    return sorted((key for key in far if far[key] < _length(share)), key=lambda key: far[key])


def _length(share: float) -> int:
    return min(_RING, math.ceil(share * _RING))


@dataclass(slots=True)
class _Journals:
    """Reads trials' own journals, and collects those that are whole and those that cannot be read."""

    store: ObjectStore
    state: Experiment
    side_by_side: ParallelMap
    whole: set[str] = field(default_factory=set)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)

    def live(self, trials: Iterable[Trial]) -> Sequence[CheckpointKey]:
        """Return the live checkpoints of the trials whose journals can be read."""
        found = self.side_by_side(lambda trial: (self._place(trial).entries, self._today(trial)), trials)
        keys: list[CheckpointKey] = []
        for folder, trial in found:
            if isinstance(trial, Unreadable):
                self.unreadable[folder] = trial
            else:
                self.whole.add(folder)
                keys += _keys(self.state, trial)
        return keys

    def _today(self, trial: Trial) -> Trial | Unreadable:
        place = self._place(trial)
        look = partial(trial_today, self.store, self.state.name, trial, side_by_side=map)
        return unless_unreadable(self.store, place, place.entries, look)

    def _place(self, trial: Trial) -> JournalKey:
        return JournalKey(experiment=self.state.name, trial=trial.trial)


def _known_keys(state: Experiment, journals: _Journals) -> list[CheckpointKey]:
    """Return the live keys; for an ended trial, by the experiment's journal: reading thousands of journals is slow."""
    trials = () if state.is_removed else tuple(state.trials.values())
    ended = [key for trial in trials if trial.phase in ENDED for key in _keys(state, trial)]
    return [*ended, *journals.live(trial for trial in trials if trial.phase not in ENDED)]


def _keys(state: Experiment, trial: Trial) -> Sequence[CheckpointKey]:
    return live_keys(TrialKey(experiment=state.name, trial=trial.trial), trial)


def inspect(
    store: ObjectStore, state: Experiment, begins_at: int, limits: ScrubLimits, *, side_by_side: ParallelMap
) -> Inspection:
    """Read the live checkpoints on an arc, within `limits`; where one is damaged, all others of its trial too.

    Checkpoints of a trial share blobs, so that one damaged blob often damages several. A checkpoint that is retired
    during the read is not damaged. An object that cannot be read is reported, and the rest is read all the same.

    Raises:
        StoreUnavailable, StoreRefused: the target as a whole cannot be read.
    """
    journals = _Journals(store, state, side_by_side)
    live = _known_keys(state, journals)
    arc = on_arc(live, begins_at, limits.share)
    concerned = {key.trial.trial: state.trial(key.trial.trial) for key in arc}
    today = frozenset(journals.live(concerned.values()))
    read = _read(store, [key for key in arc if key in today], limits, side_by_side)
    suspect = {each.key.trial for each in read.inspected if each.damage is not None}
    beside = [key for key in live if key.trial in suspect and (key in read.unread or key not in arc)]
    more = _Read() if read.is_late else _read(store, beside, ScrubLimits(), side_by_side)
    return Inspection(
        tuple(live),
        (*read.inspected, *more.inspected),
        len(read.unread),
        place_of(read.unread[0]) if read.unread else (begins_at + _length(limits.share)) % _RING,
        (state.key.entries, *sorted(journals.whole)),
        (*journals.unreadable.values(), *read.unreadable, *more.unreadable),
    )


@dataclass(slots=True)
class _Read:
    inspected: list[Inspected] = field(default_factory=list)
    unread: Sequence[CheckpointKey] = ()
    """The checkpoints that the limits excluded."""
    unreadable: list[Unreadable] = field(default_factory=list)
    is_late: bool = False
    """Whether the time for the round has run out."""


def _read(store: ObjectStore, arc: Sequence[CheckpointKey], limits: ScrubLimits, side_by_side: ParallelMap) -> _Read:
    done = _Read()
    room = math.inf if limits.max_bytes is None else limits.max_bytes
    for count, key in enumerate(arc):
        if count and (room <= 0 or not limits.has_time()):
            done.unread = arc[count:]
            break
        try:
            found = _inspected(store, key, side_by_side)
        except DeadlineExceeded as late:
            _too_late(done, arc[count:], late, is_first=not count)
            break
        if isinstance(found, Unreadable):
            done.unreadable.append(found)
        else:
            done.inspected += found
            room -= sum(each.size_bytes for each in found)
    return done


def _inspected(store: ObjectStore, key: CheckpointKey, side_by_side: ParallelMap) -> Sequence[Inspected] | Unreadable:
    place = JournalKey(experiment=key.trial.experiment, trial=key.trial.trial)
    return unless_unreadable(store, place, key.folder, partial(inspect_one, store, key, side_by_side=side_by_side))


def _too_late(done: _Read, rest: Sequence[CheckpointKey], late: DeadlineExceeded, *, is_first: bool) -> None:
    """Record the timeout; if the first checkpoint took all the time, report it, and let the next round skip it."""
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
