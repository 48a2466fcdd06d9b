"""Delete a whole experiment: what it needs of others is let go, and what others need of it is not touched.

The journal says first that it is being removed, so that nobody goes on with it, and is deleted last: what was
cut short in between is found, and finished, by doing it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefect_tune.core.clone import let_go, settle
from prefect_tune.core.commit import Mapper
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput, JournalCorrupt
from prefect_tune.core.events import Claim, Event, Owner, RemovalBegun
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import load, next_entry, take_over
from prefect_tune.core.layout import CheckpointKey, JournalKey, TrialKey, number_in
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import Trial
from prefect_tune.core.trial_journal import trial_today
from prefect_tune.core.values import Stamp

__all__ = ["needed_by", "remove"]


def remove(store: ObjectStore, experiment: str, owner: Owner, stamp: Stamp, *, side_by_side: Mapper) -> int:
    """Delete `experiment`, and return how many objects that were; whoever runs it is superseded.

    Killed at any time, it is finished by calling it again.

    Raises:
        InvalidInput: other experiments refer to bytes of its checkpoints; nothing was deleted.
        JournalCorrupt: it cannot be read; nothing was deleted.
        StoreUnavailable, CommitUnknown: call again, with the same stamp.
    """
    found = _unless_removed(store, experiment, side_by_side)
    if found is not None and found.number:
        _require_unneeded(store, found, stamp, side_by_side)
        take_over(store, experiment, owner, stamp, side_by_side=side_by_side, also=_unless_said)
    deleted = _delete_clones(store, experiment, stamp, side_by_side)
    journal = JournalKey(experiment=experiment)
    paths = [each.path for each in store.list(experiment)]
    rest = [path for path in paths if not path.startswith(f"{journal.entries}/")]
    store.delete(rest)
    for path in sorted(set(paths) - set(rest)):  # the last one says what has become of those before it
        store.delete([path])
    return deleted + len(paths)


def _unless_removed(store: ObjectStore, experiment: str, side_by_side: Mapper) -> Experiment | None:
    """The experiment; None where its deletion has begun, and perhaps reached the journal."""
    key = JournalKey(experiment=experiment)
    try:
        found = load(store, key, side_by_side=side_by_side)
    except JournalCorrupt:
        last = max(number_in(key.entries, each.path) or 0 for each in store.list(key.entries))
        entry = next_entry(store, key, last - 1)
        if entry is None or not any(isinstance(event, RemovalBegun) for event in entry.events):
            raise
        return None
    return None if found.is_removed else found


def needed_by(store: ObjectStore, experiment: Experiment, stamp: Stamp, *, side_by_side: Mapper) -> Sequence[Claim]:
    """Return by which clones in other experiments the bytes of its checkpoints are needed."""
    claims = side_by_side(lambda trial: _claims(store, experiment.name, trial, stamp), experiment.trials.values())
    return [claim for found in claims for claim in found if claim.clone.trial.experiment != experiment.name]


def _require_unneeded(store: ObjectStore, found: Experiment, stamp: Stamp, side_by_side: Mapper) -> None:
    if needed := needed_by(store, found, stamp, side_by_side=side_by_side):
        others = ", ".join(sorted({repr(claim.clone.trial.experiment) for claim in needed}))
        raise InvalidInput(
            f"experiment {found.name!r} holds the bytes of {len(needed)} checkpoints of {others}: delete these "
            "first, or keep it"
        )


def _unless_said(found: Experiment) -> Sequence[Event]:
    return () if found.is_removed else (RemovalBegun(),)


def _claims(store: ObjectStore, experiment: str, known: Trial, stamp: Stamp) -> Sequence[Claim]:
    """Those that are not over."""
    key = TrialKey(experiment=experiment, trial=known.trial)
    state = trial_today(store, experiment, known, side_by_side=map)
    if not state.claims:
        return ()
    named = [CheckpointKey(trial=key, step=each.step, sequence=each.sequence) for each in state.claims]
    return settle(store, key, named, stamp, side_by_side=map).claims


def _delete_clones(store: ObjectStore, experiment: str, stamp: Stamp, side_by_side: Mapper) -> int:
    """Delete what refers to bytes in other experiments, and say there that they are not needed."""
    pairs = list(side_by_side(lambda key: _origin(store, key), _manifests(store, experiment)))
    foreign = [(key, origin) for key, origin in pairs if origin and origin.trial.experiment != experiment]
    return sum(let_go(store, stamp, map, key, origin) for key, origin in foreign)


def _manifests(store: ObjectStore, experiment: str) -> Iterator[CheckpointKey]:
    for each in store.list(f"{experiment}/trials"):
        trial = TrialKey(experiment=experiment, trial=each.path.split("/")[2])
        if (key := CheckpointKey.from_manifest_path(trial, each.path)) is not None:
            yield key


def _origin(store: ObjectStore, key: CheckpointKey) -> tuple[CheckpointKey, CheckpointKey | None]:
    try:
        return key, read_manifest(store, key).origin
    except (CheckpointNotFound, CheckpointCorrupt):
        return key, None
