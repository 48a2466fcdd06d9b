"""Adopt saves that the last owner did not finish: the manifest exists, the journal entry was never written.

A save ends with two writes: the manifest, which is the commit, and the journal entry, which makes it known. An owner
that dies between them leaves a whole checkpoint that no entry names. The next owner looks for it before it starts the
trial again, and journals it as adopted.

A save's sequence is the number of the journal's last entry when it began. So the saves of the last owner are those
with a sequence from `settled_from` (the entry up to which an earlier owner has looked) to below `opened_at` (the
entry by which the present owner opened the journal): no save of the present owner, now or later, can be taken for one
of them. Of these, saves of earlier attempts and manifests of clones are not adopted: their owner had decided against
the former, and a clone counts only once its own entry is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, Trial, is_acceptable
from prefect_tune.core.journal_events import Adopted, AttemptEnded, Cause, Event, OneTrialsEvent, Quarantined, Reported
from prefect_tune.core.messages.live_status import NOTHING_KNOWN, LastKnown
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest, ref_of
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore, ParallelMap


@dataclass(frozen=True, slots=True)
class _OrphanedSaves:
    """The newest unjournaled save of a trial, and the damaged saves newer than it."""

    trial: Trial
    manifest: Manifest | None
    damaged: tuple[Quarantined, ...]


def adopt(
    store: ObjectStore,
    experiment: Experiment,
    *,
    reached: Mapping[str, int] | None = None,
    last: LastKnown = NOTHING_KNOWN,
    side_by_side: ParallelMap = map,
) -> Sequence[Event]:
    """Return the events that the owner which has just opened `experiment` journals before any others.

    For each trial that is still running, and has no journal of its own: the newest save of its present attempt
    that has a manifest and no entry becomes a checkpoint, the reports in its manifest count, and the attempt ends as a
    failure of the machine. A save with a damaged manifest is quarantined, and the one before it tried. A save that
    is not adopted here never becomes one. Writes nothing: a crash before the entry changes nothing.

    `reached` has the last steps that running trials are known to have trained, also those with journals of their own;
    `last` is what the live status of the last owner says.
    """
    running = [each for each in experiment.trials.values() if each.status is Status.RUNNING and not each.own_journal]
    found = list(side_by_side(lambda trial: _find(store, experiment, trial), running))
    adopted = {each.trial.trial: (ref_of(each.manifest),) for each in found if each.manifest}
    known = {each.trial: 0 for each in running} | dict(reached or {})
    known |= {name: max(each.step, known.get(name, 0)) for name, each in last.reports.items()}
    trained = {name: each.trained_seconds for name, each in last.reports.items()}
    first = Adopted(checkpoints=adopted, reached=known, trained_seconds=trained, seen_at=last.at)
    return [first, *(event for each in found for event in _events_of(each))]


def _find(store: ObjectStore, experiment: Experiment, trial: Trial) -> _OrphanedSaves:
    damaged: list[Quarantined] = []
    for key in _candidates(store, experiment, trial):
        if damaged and damaged[-1].sequence == key.sequence:
            continue  # the journal names checkpoints by sequence, and this one is quarantined already
        try:
            manifest = read_manifest(store, key)
        except CheckpointNotFound:
            continue  # listed, and deleted since by a process that was believed dead
        except CheckpointCorrupt as corrupt:
            damaged.append(Quarantined(trial=trial.trial, sequence=key.sequence, reason=str(corrupt)))
            continue
        if manifest.origin is not None:
            continue  # a clone is a checkpoint only once its owner has journaled it
        if manifest.about.attempt == trial.attempt:  # what earlier attempts left was abandoned by the owner
            return _OrphanedSaves(trial, manifest, tuple(damaged))
    return _OrphanedSaves(trial, None, tuple(damaged))


def _candidates(store: ObjectStore, experiment: Experiment, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of saves that may be adopted, newest first."""
    folder = experiment.trial_key(trial.trial)
    keys = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    unsettled = [
        key
        for key in keys
        if key and experiment.settled_from <= key.sequence < experiment.opened_at and is_acceptable(trial, key.sequence)
    ]
    return sorted(unsettled, key=lambda key: (key.sequence, key.step), reverse=True)


def _events_of(found: _OrphanedSaves) -> Iterator[OneTrialsEvent]:
    trial = found.trial
    yield from found.damaged
    for report in found.manifest.about.reports if found.manifest else ():
        if report.step > trial.step:
            yield Reported(trial=trial.trial, report=report)
    yield AttemptEnded(trial=trial.trial, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
