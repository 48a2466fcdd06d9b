"""Read all checkpoints back, or a share of them each day, to find damage; quarantine and reinstate checkpoints."""

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
from prefect_tune.core.experiment.trial_transitions import (
    is_live_checkpoint,
    is_quarantined_checkpoint,
    list_live_checkpoint_keys,
)
from prefect_tune.core.journal.journal import append_as_non_owner
from prefect_tune.core.journal_events import CheckpointQuarantined, NonOwnerEvent
from prefect_tune.core.restore import is_checkpoint_live, read_manifest, verify_files
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp, hash_bytes

# Quarantine and reinstate checkpoints in the journal of another owner.
#
# A journal's owner quarantines a checkpoint if it finds damage during a restore. Any other process that finds damage
# writes an entry to the journal as a non-owner, so the owner stays the owner. From then on, the owner does not restore
# the checkpoint, and reuses neither its blobs nor those of older checkpoints, which may be the same blobs. An entry
# is best: a request would need a running owner, and a separate document would be a second source of truth.
#
# A key names a manifest. Several trials may use the same key: the trial that saved the checkpoint, and the trials that
# have a clone of it. The checkpoint is quarantined, and reinstated, in all these trials.
#
# A running save may have reused blobs of the damaged checkpoint. If the save commits after the non-owner's entry, the
# new checkpoint is quarantined at its commit, and the owner saves again. A quarantined checkpoint can be reinstated,
# because its bytes stay until the trial retires it.


def quarantine_in_journal(
    store: ObjectStore, journal: JournalKey, damaged: Mapping[CheckpointKey, str], stamp: WriteStamp
) -> Sequence[CheckpointKey]:
    """Quarantine checkpoints of an experiment, each with its damage as the reason; return the quarantined keys.

    Checkpoints that were retired meanwhile are left out. A second call changes nothing.

    Raises:
        JournalCorrupt, UnknownVersion: see `load_experiment`.
        StoreUnavailable, CommitUnknown: call again.
    """

    def quarantine_events(state: Experiment) -> Sequence[NonOwnerEvent]:
        return [
            CheckpointQuarantined(trial=trial.id, sequence=ref.sequence, reason=damaged[key])
            for trial in state.trials.values()
            for ref in trial.checkpoints
            if (key := state.trial_key(trial.id).checkpoint_key(ref)) in damaged
        ]

    after = append_as_non_owner(store, journal, quarantine_events, stamp)
    return [key for key in damaged if any(is_quarantined_checkpoint(trial, key) for trial in after.trials.values())]


def reinstate_in_journal(
    store: ObjectStore, journal: JournalKey, keys: Collection[CheckpointKey], stamp: WriteStamp
) -> Sequence[CheckpointKey]:
    """Reinstate quarantined checkpoints of an experiment; return the keys whose checkpoints are live now.

    The caller must have verified `keys`. A trial's next attempt starts from the trial's newest checkpoint, which may
    then be a reinstated one. Raises the same errors as `quarantine_in_journal`.
    """

    def reinstate_events(state: Experiment) -> Sequence[NonOwnerEvent]:
        return [
            CheckpointQuarantined(trial=trial.id, sequence=quarantined.checkpoint.sequence, quarantined=False)
            for trial in state.trials.values()
            for quarantined in trial.quarantined_checkpoints
            if state.trial_key(trial.id).checkpoint_key(quarantined.checkpoint) in keys
        ]

    after = append_as_non_owner(store, journal, reinstate_events, stamp)
    return [key for key in keys if any(is_live_checkpoint(trial, key) for trial in after.trials.values())]


@dataclass(frozen=True, slots=True)
class DailyShare:
    """The share of the checkpoints to inspect on day number `day`: one of `parts` shares of about equal count."""

    parts: int = 1
    day: int = 0

    def select_keys(self, keys: Iterable[CheckpointKey]) -> Sequence[CheckpointKey]:
        """Return the keys that belong to this share, in an order that is different each day."""
        share = (key for key in keys if _hash_key(key, self.day // self.parts) % self.parts == self.day % self.parts)
        return sorted(share, key=lambda key: _hash_key(key, self.day))


FULL_SHARE = DailyShare()
_SHARE_PATTERN = re.compile(r"1(?:/([1-9]\d{0,5}))?")


def parse_share(text: str, today: date) -> DailyShare:
    """Parse a share such as `"1/7"`, and return today's share.

    Raises:
        InvalidInput: `text` is not a share.
    """
    if (match := _SHARE_PATTERN.fullmatch(text)) is None:
        raise InvalidInput(f"share: expected one part of several, such as '1/7', found {text!r}; nothing was started")
    return DailyShare(int(match[1] or 1), today.toordinal())


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    """The result of reading a checkpoint back."""

    key: CheckpointKey
    size_bytes: int = 0
    file_count: int = 0
    damage: str | None = None
    """The damage; None if the checkpoint is intact."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect_checkpoints`."""

    live: tuple[CheckpointKey, ...]
    inspected: tuple[InspectedCheckpoint, ...] = ()
    unread_count: int = 0
    """The number of checkpoints of the share that were not read because of `max_bytes` or lack of time."""
    unreadable: tuple[UnreadableObject, ...] = ()
    """The checkpoints whose read failed, or was not finished in time."""

    @property
    def corrupt_checkpoints(self) -> Sequence[InspectedCheckpoint]:
        return [checkpoint for checkpoint in self.inspected if checkpoint.damage is not None]


def _hash_key(key: CheckpointKey, salt: int) -> int:
    return int(hash_bytes(f"{salt}/{key.folder}".encode())[:13], 16)


def inspect_checkpoints(
    store: ObjectStore,
    state: Experiment,
    share: DailyShare = FULL_SHARE,
    *,
    max_bytes: float = math.inf,
    has_time: Callable[[], bool] = lambda: True,
) -> Inspection:
    """Read the live checkpoints of a share; if one is damaged, read all live checkpoints of its trial.

    Checkpoints of a trial share blobs, so a damaged blob often damages several checkpoints. The limits `max_bytes` and
    `has_time` apply only to the share, of which at least one checkpoint is read. A checkpoint that is retired during
    the read does not count as damaged. If an object cannot be read, report it, and continue with the other objects.

    Raises:
        StoreUnavailable, StoreRefused: the whole target cannot be read.
    """
    trials = () if state.is_being_deleted else state.trials.values()
    keys = (key for trial in trials for key in list_live_checkpoint_keys(state.trial_key(trial.id), trial))
    live = list(dict.fromkeys(keys))
    inspected, unreadable = list[InspectedCheckpoint](), list[UnreadableObject]()

    def inspect_keys(keys: Sequence[CheckpointKey], max_bytes: float, has_time: Callable[[], bool]) -> tuple[int, bool]:
        """Return how many of `keys` were read or found unreadable, and whether the whole run's deadline has passed."""
        for count, key in enumerate(keys):
            if count and (max_bytes <= 0 or not has_time()):
                return count, False
            try:
                inspect = partial(inspect_live_checkpoint, store, key)
                result = run_or_report_unreadable(store, key.trial, key.folder, inspect)
            except DeadlineExceeded as late:
                if count:
                    return count, True
                # Not even the first checkpoint could be read in time, so report it.
                unreadable.append(UnreadableObject(key.folder, str(late), key.trial.trial))
                return 1, True
            if isinstance(result, UnreadableObject):
                unreadable.append(result)
            else:
                inspected.extend(result)
                max_bytes -= sum(checkpoint.size_bytes for checkpoint in result)
        return len(keys), False

    chosen = share.select_keys(live)
    count, is_late = inspect_keys(chosen, max_bytes, has_time)
    suspects = {checkpoint.key.trial for checkpoint in inspected if checkpoint.damage is not None}
    if suspects and not is_late:
        done = set(chosen[:count])
        inspect_keys([key for key in live if key.trial in suspects and key not in done], math.inf, lambda: True)
    return Inspection(tuple(live), tuple(inspected), len(chosen) - count, tuple(unreadable))


def inspect_live_checkpoint(store: ObjectStore, key: CheckpointKey) -> Sequence[InspectedCheckpoint]:
    """Read every byte of a live checkpoint. If it is damaged and no longer live, return an empty list."""
    checkpoint = inspect_checkpoint(store, key)
    return [checkpoint] if checkpoint.damage is None or is_checkpoint_live(store, key) else []


def inspect_checkpoint(store: ObjectStore, key: CheckpointKey) -> InspectedCheckpoint:
    """Read every byte of a checkpoint, live or not."""
    try:
        manifest = read_manifest(store, key)
        verify_files(store, manifest)
    except (CheckpointCorrupt, CheckpointNotFound) as damage:
        return InspectedCheckpoint(key, damage=str(damage))
    return InspectedCheckpoint(key, manifest.size_bytes, len(manifest.files))


# Turn a failure to read one object into a result, so that maintenance continues with the other objects.

_Result = TypeVar("_Result")
_MAX_TRIES = 2


@dataclass(frozen=True, slots=True)
class UnreadableObject:
    """An object on the target that could not be read, and the reason."""

    folder: str
    reason: str
    trial: str


def run_or_report_unreadable(
    store: ObjectStore, trial: TrialKey, folder: str, act: Callable[[], _Result]
) -> _Result | UnreadableObject:
    """Return `act()`, or an `UnreadableObject` if `act` cannot read the trial's objects in `folder`.

    After a store error, `act` is called a second time.

    Raises:
        StoreUnavailable, StoreRefused: other objects of the target cannot be read either, or no time is left.
    """
    reason = ""
    for _ in range(_MAX_TRIES):
        try:
            return act()
        except UnknownVersion as error:
            return UnreadableObject(folder, str(error), trial.trial)
        except DeadlineExceeded:
            raise
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            reason = f"{type(error).__name__}: {error}"
            store.size(trial.journal_key.entry_path(1))  # raises if the target is unavailable
    return UnreadableObject(folder, reason, trial.trial)
