"""The command `gc`: list or delete objects of an experiment that are not needed any more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import chosen_trials, opened, trial_key
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import plural, shown_size
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.formatting import borderless_table, plain_cells, print_parts


@command
def gc(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Default: only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the objects of an experiment that are not needed any more; with --delete, delete them.

    Retired checkpoints, blobs of interrupted saves, and answers to attempts that have ended.

    Objects that a checkpoint or a clone refers to are kept, and so are those that a
    running save may use: it is safe beside a running search.
    Quarantined checkpoints are kept until the trial retires them: they can be released.
    """
    with opened(target, experiment) as (store, state):
        found = list(_found(store, state, chosen_trials(state, trial), deletes=delete))
    if as_json:
        print(json.dumps({"deleted": delete, "trials": [asdict(each) for each in found]}, indent=2))
    else:
        _print(found, deleted=delete)
    if any(each.damage for each in found):
        raise typer.Exit(1)


def _found(store: ObjectStore, state: Experiment, trials: Sequence[Trial], *, deletes: bool) -> Iterator[Collected]:
    with transfer_pool() as transfers:
        for known in trials:
            key = trial_key(state, known)
            if deletes:
                from prefect_tune.supervisor.run_identity import new_write_id

                yield collect_from(store, key, new_write_id(), side_by_side=transfers, known=known)
            else:
                yield look_for_garbage(store, key, side_by_side=transfers, known=known)


def _print(found: Sequence[Collected], *, deleted: bool) -> None:
    table = borderless_table("trial", "checkpoints", "blobs", "answers", "size", "")
    something = [each for each in found if each != type(each)(each.trial)]
    for each in something:
        steps = ", ".join(f"step {step}" for step in each.checkpoints)
        later = f"{each.undecided_count} may still be needed" if each.undecided_count else ""
        counts = (str(each.orphan_count), str(each.answer_count), shown_size(each.orphan_bytes))
        cells = (each.trial, steps, *counts, each.damage or each.kept or later)
        table.add_row(*plain_cells(cells), style="red" if each.damage else "")
    if something:
        print_parts(table, "")
    size = shown_size(sum(each.orphan_bytes for each in found))
    count = sum(each.orphan_count + each.answer_count + len(each.checkpoints) for each in found)
    objects = plural(count, "object", "objects")
    if not count:
        print_parts(f"nothing to collect in {plural(len(found), 'trial', 'trials')}")
    elif deleted:
        print_parts(f"deleted: {objects}, {size}")
    else:
        print_parts(f"{objects}, {size}; to delete them: --delete")
