"""Adopt saves that the last owner did not finish: the manifest exists, the journal entry was never written.

A save ends with two writes: the manifest, which is the commit, and the journal entry, which makes it known. An owner
that dies between them leaves a whole checkpoint that no entry names. The next owner looks for it before it starts the
trial again, and journals it as adopted.

Each save of a trial has a higher sequence than the one before it, and each attempt begins with a higher one than the
attempt before it. So the unjournaled save of the last attempt is one from the trial's `settled_from` on, and after the
entry that adopts it, or none, no such save becomes a checkpoint any more. Saves of earlier attempts are not adopted:
their owner had decided against them. An attempt with an open outbox hands its saves over itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    trials: Collection[str] | None = None,
    last: LastKnown = NOTHING_KNOWN,
    side_by_side: ParallelMap = map,
) -> Sequence[Event]:
    """Return the events that end attempts which have ended without journaling that, and adopt what they had saved.

    They are the attempts of `trials`, or all that run without an outbox, for an owner that has just opened the
    experiment. For each of them: the newest save of the attempt that has a manifest and no entry becomes a checkpoint,
    the reports in its manifest count, and the attempt ends as a failure of the machine. A save with a damaged manifest
    is quarantined, and the one before it tried. A save that is not adopted here never becomes a checkpoint. Writes
    nothing: a crash before the entry changes nothing. `last` is what the live status of the last owner says.
    """
    chosen = experiment.trials.values() if trials is None else [experiment.trial(name) for name in trials]
    running = [trial for trial in chosen if trial.status is Status.RUNNING and trial.outbox is None]
    found = list(side_by_side(lambda trial: _find(store, experiment, trial), running))
    adopted = {each.trial.trial: (ref_of(each.manifest),) for each in found if each.manifest}
    known = {trial.trial: 0 for trial in running}
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
            if key.sequence > trial.next_sequence:
                continue  # no save of this trial: quarantined, its sequence would end all commits
            damaged.append(Quarantined(trial=trial.trial, sequence=key.sequence, reason=str(corrupt)))
            continue
        if manifest.about.attempt == trial.attempt:  # what earlier attempts left was abandoned by the owner
            return _OrphanedSaves(trial, manifest, tuple(damaged))
    return _OrphanedSaves(trial, None, tuple(damaged))


def _candidates(store: ObjectStore, experiment: Experiment, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of saves that may be adopted, newest first."""
    folder = experiment.trial_key(trial.trial)
    keys = (CheckpointKey.from_manifest_path(folder, each.path) for each in store.list(folder.checkpoints))
    unsettled = [
        key for key in keys if key and key.sequence >= trial.settled_from and is_acceptable(trial, key.sequence)
    ]
    return sorted(unsettled, key=lambda key: (key.sequence, key.step), reverse=True)


def _events_of(found: _OrphanedSaves) -> Iterator[OneTrialsEvent]:
    trial = found.trial
    yield from found.damaged
    for report in found.manifest.about.reports if found.manifest else ():
        if report.step > trial.step:
            yield Reported(trial=trial.trial, report=report)
    yield AttemptEnded(trial=trial.trial, cause=Cause.MACHINE, reason=make_reason("owner-vanished"))
