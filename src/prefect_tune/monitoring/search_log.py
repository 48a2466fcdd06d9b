"""The log of a search: one line for each trial that begins, resumes or ends."""

from __future__ import annotations

import logging

from prefect_tune.core.events.experiment_events import (
    AttemptEnded,
    Cause,
    Cloned,
    Event,
    Finished,
    GaveUp,
    Paused,
    Started,
    events_in,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import OWNER_VANISHED
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_key
from prefect_tune.core.models import first_line, metric_in, plural
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import TrialKey, below
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.process_channel import Log
from prefect_tune.terminal.formatting import format_value, visible
from prefect_tune.terminal.trials_table import config_cells

_METRICS = 3
"""Metrics in a line if the search compares trials by none."""


class SearchLog(SearchObserver):
    """A listener that logs what happens to trials, each with the trial's name. A single training has no names."""

    def __init__(self, experiment: Experiment, objective: Objective | None, uri: str, log: Log) -> None:
        self._objective = objective
        self._uri = uri
        self._log = log
        self._wasted = {each.trial: each.wasted_steps for each in experiment.trials.values()}
        self._last: dict[str, str] = {}  # both the trial and the search that stopped it journal its end
        self._lost: set[str] = set()  # trials whose lost attempt is logged, and not journaled yet

    def happened(self, event: Event, experiment: Experiment) -> None:
        for each in events_in(event):
            match each:
                case Started() | Cloned() | AttemptEnded() | Finished() | Paused() | GaveUp():
                    self._log_event(each, experiment.trial(each.trial), experiment.name)
                case _:
                    pass

    def lost(self, trial: Trial, why: str) -> None:
        if trial.phase is Phase.RUNNING:
            self._lost.add(trial.trial)
            text = f"crashed in attempt {trial.attempt}: {first_line(why)}"
        else:
            text = f"crashed before attempt {trial.attempt + 1} began: {first_line(why)}"
        self._write(trial, text, logging.WARNING)

    def _log_event(
        self, event: Started | Cloned | AttemptEnded | Finished | Paused | GaveUp, trial: Trial, experiment: str
    ) -> None:
        text, level = "", logging.INFO
        match event:
            case Started():
                text = self._started(event, trial)
            case Cloned(source=source):
                text = f"continues from trial {source.trial.trial}, step {source.step}: {_config_of(trial)}"
            case Finished(reason=reason):
                text = self._ended(trial.status, reason, trial, experiment)
            case Paused(reason=reason):
                text = self._ended("paused", reason, trial, experiment)
            case AttemptEnded(cause=Cause.PREEMPTED, message=message):
                text = self._ended("interrupted", message, trial, experiment)
            case AttemptEnded(message=message) if message == OWNER_VANISHED and trial.trial in self._lost:
                self._lost.discard(trial.trial)
            case AttemptEnded(message=message) if message == OWNER_VANISHED:
                text, level = f"crashed in attempt {trial.attempt}: {message}", logging.WARNING
            case GaveUp(message=message):
                text, level = self._ended("errored", message, trial, experiment), logging.ERROR
            case _:
                pass  # a failure that is retried: `FailureHandler` logs it
        if text and text != self._last.get(trial.trial):
            self._last[trial.trial] = text
            self._write(trial, text, level)

    def _write(self, trial: Trial, text: str, level: int) -> None:
        self._log.log(level, "%s", visible(f"trial {trial.trial} {text}" if trial.apart else f"the trial {text}"))

    def _started(self, event: Started, trial: Trial) -> str:
        repeated = trial.wasted_steps - self._wasted.get(trial.trial, 0)
        self._wasted[trial.trial] = trial.wasted_steps
        if event.attempt == 1:
            return f"begins: {_config_of(trial)}"
        again = f"attempt {event.attempt}; {plural(repeated, 'journaled step', 'journaled steps')} repeated"
        if event.from_sequence is None:
            return f"begins again without a checkpoint ({again})"
        return f"resumes from step {event.from_step} ({again})"

    def _ended(self, end: str, reason: str, trial: Trial, experiment: str) -> str:
        key = newest_key(TrialKey(experiment=experiment, trial=trial.trial), trial)
        saved = f"checkpoint of step {key.step}: {below(self._uri, key.folder)}" if key else "no checkpoint"
        metrics = self._metrics_of(trial, reason)
        at = f"at step {trial.step}{f', {metrics}' if metrics else ''}" if trial.step else "before its first step"
        return f"{end} {at}: {first_line(reason)}; {saved}"

    def _metrics_of(self, trial: Trial, reason: str) -> str:
        names = self._objective.metrics if self._objective else list(trial.metrics)[:_METRICS]
        if any(f"{name} = " in reason for name in names):
            return ""  # the reason of a scheduler gives them
        found = {name: metric_in(trial.metrics, name) for name in names}
        return ", ".join(f"{name} {format_value(value)}" for name, value in found.items() if value is not None)


def _config_of(trial: Trial) -> str:
    return ", ".join(f"{name} {value}" for name, value in config_cells(trial)) or "no parameters"
