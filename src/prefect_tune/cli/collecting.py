"""`gc`: what lies on a target and is needed by nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_tune.cli.app import BYTES, AsJson, ExperimentName, Target, TrialName, app
from prefect_tune.cli.looking import chosen_trials, opened
from prefect_tune.core.errors import CheckpointCorrupt
from prefect_tune.terminal.printing import columns, plain, shown

if TYPE_CHECKING:
    from prefect_tune.core.commit import Mapper
    from prefect_tune.core.experiment import Experiment
    from prefect_tune.core.layout import CheckpointKey, TrialKey
    from prefect_tune.core.store import Listed, ObjectStore
    from prefect_tune.core.trial import Trial

__all__: list[str] = []


@app.command(rich_help_panel=BYTES)
def gc(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Otherwise it is only listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what of an experiment nobody needs any more: retired checkpoints, and blobs of saves that were cut short.

    What a checkpoint or a clone refers to is never touched, nor what a save
    that is under way may still use: it can be run beside a running search.
    Blobs of checkpoints that were put aside go too.
    """
    with opened(target, experiment) as (store, state):
        found = list(_found(store, state, chosen_trials(state, trial), deletes=delete))
    if as_json:
        print(json.dumps({"deleted": delete, "trials": [asdict(each) for each in found]}, indent=2))
    else:
        _print(found, deleted=delete)
    if any(each.damage for each in found):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Found:
    """What of a trial can be collected."""

    trial: str
    checkpoints: tuple[int, ...] = ()
    """The steps of those that are none any more."""
    orphan_count: int = 0
    orphan_bytes: int = 0
    undecided_count: int = 0
    """Objects that a save under way may still use; the trial's next retirement decides."""
    damage: str | None = None


@dataclass(frozen=True)
class _Place:
    """A trial as its own journal tells it, which is ahead of the experiment's."""

    store: ObjectStore
    key: TrialKey
    journal: Experiment
    side_by_side: Mapper

    @property
    def trial(self) -> Trial:
        return self.journal.trial(self.key.trial)


def _found(store: ObjectStore, state: Experiment, trials: Sequence[Trial], *, deletes: bool) -> Iterator[_Found]:
    from prefect_tune.core.journal import load
    from prefect_tune.core.layout import JournalKey, TrialKey
    from prefect_tune.stores.staging import side_by_side

    with side_by_side() as transfers:
        for known in trials:
            key = TrialKey(experiment=state.name, trial=known.trial)
            own = JournalKey(experiment=state.name, trial=known.trial)
            journal = load(store, own, side_by_side=transfers) if known.apart else state
            if known.trial not in journal.trials:
                continue  # it was added, and has not begun
            place = _Place(store, key, journal, transfers)
            try:
                yield _collected(place) if deletes else _collectable(place)
            except CheckpointCorrupt as error:
                yield _Found(known.trial, damage=str(error))


def _collectable(place: _Place) -> _Found:
    doomed, rest = _leftovers(place)
    orphans = _orphans(place)
    return _Found(
        place.key.trial,
        checkpoints=tuple(key.step for key in doomed),
        orphan_count=len(orphans),
        orphan_bytes=sum(each.size_bytes for each in orphans),
        undecided_count=len(rest),
    )


def _leftovers(place: _Place) -> tuple[Sequence[CheckpointKey], Sequence[CheckpointKey]]:
    """Those that can be deleted, and those of which that is not yet known."""
    from prefect_tune.core.collect import is_collectable, leftover

    found = leftover(place.store, place.key, place.trial, place.journal.settled_from)
    doomed = [key for key in found if is_collectable(place.trial, key)]
    return doomed, [key for key in found if key not in doomed]


def _orphans(place: _Place) -> Sequence[Listed]:
    from prefect_tune.core.collect import orphans

    return orphans(place.store, place.key, place.trial, side_by_side=place.side_by_side)


def _collected(place: _Place) -> _Found:
    """Delete, and return what was deleted: retired checkpoints with their blobs first, then what is left of blobs."""
    from prefect_tune.core.clone import clear
    from prefect_tune.tasks.stamp import new_stamp

    found = _collectable(place)
    doomed, _ = _leftovers(place)
    if doomed:
        clear(place.store, place.key, place.trial, doomed, new_stamp(), side_by_side=place.side_by_side)
    if left := _orphans(place):
        place.store.delete([each.path for each in left])
    return found


def _print(found: Sequence[_Found], *, deleted: bool) -> None:
    from prefect_tune.core.values import shown_size

    table = columns("trial", "checkpoints", "blobs", "size", "")
    something = [each for each in found if each.checkpoints or each.orphan_count or each.undecided_count or each.damage]
    for each in something:
        steps = ", ".join(f"step {step}" for step in each.checkpoints)
        later = f"{each.undecided_count} may still be needed" if each.undecided_count else ""
        cells = (each.trial, steps, str(each.orphan_count), shown_size(each.orphan_bytes), each.damage or later)
        table.add_row(*plain(cells), style="red" if each.damage else "")
    if something:
        shown(table, "")
    size = shown_size(sum(each.orphan_bytes for each in found))
    objects = sum(each.orphan_count + len(each.checkpoints) for each in found)
    if not objects:
        shown(f"nothing to collect in {len(found)} trials")
    elif deleted:
        shown(f"deleted: {objects} objects, {size}")
    else:
        shown(f"{objects} objects, {size}; to delete them: --delete")
