"""Warm start: results of earlier experiments, read once, stored in the new experiment's journal for its search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from prefect_tune.attempt.attempt import last_report
from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.core.errors import InvalidInput, JournalCorrupt
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal.journal import next_entry
from prefect_tune.core.journal_events import Configured, PriorTrial, WarmStart
from prefect_tune.core.values import canonical_json, valid_name
from prefect_tune.journal_access import JournalWriter, no_experiment_at, read_known
from prefect_tune.monitoring.event_emitter import ExperimentAddress
from prefect_tune.storage_retries import on_target

_TIMEOUT = timedelta(minutes=5)


def source_names(warm_start: Sequence[object]) -> Sequence[str]:
    """Return the experiments to warm-start from, each once: a name on the same target, or `target/name`.

    Raises:
        InvalidInput: one of them is neither.
    """
    for each in warm_start:
        if not isinstance(each, str):
            kind = type(each).__name__
            raise InvalidInput(f"warm_start: expected names of experiments, such as 'first', found a {kind}")
        if "://" in each:
            validate_target(each)  # as a whole: a password in it must not end up in an error about the name
        place, _, name = each.rpartition("/")
        valid_name(name)
        if place:
            validate_target(place)
    return list(dict.fromkeys(str(each) for each in warm_start))


def new_warm_starts(
    names: Sequence[str], target: StorageTarget, own: str, known: Experiment | None = None
) -> Sequence[WarmStart]:
    """Read the finished trials of the experiments that are new to `own`; those may still be running.

    Args:
        names: as `source_names` returns them.
        target: the target of `own`.
        own: the experiment that warm-starts.
        known: its state as of the check of what its journal may choose; None to read it here. Experiments that
            `known` names are not opened, even if the journal has changed since.

    Raises:
        InvalidInput: a source does not exist, or is `own` itself.
        ResumeFailed: a source cannot be read.
    """
    found: list[WarmStart] = []
    if not names:
        return found
    there = (known or read_known(target, own)).warm_starts
    for name in names:
        if name not in there:
            place, _, experiment = name.rpartition("/")
            where = resolve_target(place) if place else target
            at = ExperimentAddress(where.uri, experiment).uri
            if at == ExperimentAddress(target.uri, own).uri:
                raise InvalidInput(
                    f"warm_start: {own!r} is the search itself, which has its own trials: name other experiments"
                )
            state = read_known(where, experiment)
            if not state.number:
                raise InvalidInput(f"warm_start: {no_experiment_at(where, experiment)}")
            found.append(WarmStart(source=name, place=at, trials=tuple(_prior_trials(state))))
    return found


def known_prior_trials(journal_writer: JournalWriter) -> Sequence[PriorTrial]:
    """Return the trials of other experiments that the journal holds, each once, in the order in which it got them."""
    entries = sorted(set(journal_writer.experiment.warm_starts.values()))
    return prior_trials_of([each for number in entries for each in _warm_starts_in(journal_writer, number)])


def prior_trials_of(warm_starts: Sequence[WarmStart]) -> Sequence[PriorTrial]:
    """Return the trials of `warm_starts`, each once, in their order."""
    unique = {_identity(trial): trial for each in reversed(warm_starts) for trial in reversed(each.trials)}
    return list(reversed(unique.values()))


def _warm_starts_in(journal_writer: JournalWriter, number: int) -> Iterator[WarmStart]:
    key = journal_writer.experiment.key
    entry = on_target(journal_writer.target, lambda store: next_entry(store, key, number - 1), _TIMEOUT)
    if entry is None:
        raise JournalCorrupt(f"{key}: entry {number} is missing")
    return (each for event in entry.events if isinstance(event, Configured) for each in event.warm_starts)


def _prior_trials(state: Experiment) -> Iterator[PriorTrial]:
    for each in state.trials.values():
        if each.phase is Phase.FINISHED and each.step:
            stopped = each.past[-1].stopped
            yield PriorTrial(trial=each.trial, config=each.config, report=last_report(each), stopped=stopped)


def _identity(trial: PriorTrial) -> bytes:
    """Return what identifies a trial across forks, which share trials: its configuration and its last report."""
    return canonical_json([trial.config, trial.report.step, trial.report.metrics])
