"""The log of a search: one line for each trial that begins, pauses, resumes or ends, with its result and the best."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import OWNER_VANISHED
from prefect_tune.core.experiment.ranking import Losses, losses_in
from prefect_tune.core.experiment.trial import wasted_words
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial, newest_key
from prefect_tune.core.journal_events.experiment_events import (
    AttemptEnded,
    Cause,
    Cloned,
    Event,
    Finished,
    GaveUp,
    Paused,
    Reported,
    Started,
    events_in,
)
from prefect_tune.core.models import first_line, metric_in
from prefect_tune.core.schedulers.common import shown
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import TrialKey, below
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.search_link import StepReported
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
        self._best: tuple[Losses, str] | None = None  # of all reports, if trials are compared by one metric
        for trial in experiment.trials.values():
            decided = (each.report.metrics for each in trial.past if each.report is not None)
            for metrics in (*decided, *(each.metrics for each in trial.checkpoints), trial.metrics):
                self._compare(trial.trial, metrics)

    def happened(self, event: Event, experiment: Experiment) -> None:
        for each in events_in(event):
            match each:
                case Started() | Cloned() | AttemptEnded() | Finished() | Paused() | GaveUp():
                    self._log_event(each, experiment.trial(each.trial), experiment.name)
                case Reported(trial=trial, report=report):
                    self._compare(trial, report.metrics)
                case _:
                    pass

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        self._compare(step.trial, step.report.metrics)

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
                text = self._ended(Status.PAUSED, reason, trial, experiment)
            case AttemptEnded(cause=Cause.PREEMPTED, message=message):
                text = self._ended(Status.INTERRUPTED, message, trial, experiment)
            case AttemptEnded(message=message) if message == OWNER_VANISHED and trial.trial in self._lost:
                self._lost.discard(trial.trial)
            case AttemptEnded(message=message) if message == OWNER_VANISHED:
                text, level = f"crashed in attempt {trial.attempt}: {message}", logging.WARNING
            case GaveUp(message=message):
                text, level = self._ended(Status.ERRORED, message, trial, experiment), logging.ERROR
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
        lost = f"; {wasted_words(repeated, at_least=trial.wasted_at_least)} repeated" if repeated else ""
        again = f"attempt {event.attempt}{lost}"
        if event.from_sequence is None:
            return f"begins again without a checkpoint ({again})"
        return f"resumes from step {event.from_step} ({again})"

    def _ended(self, end: str, reason: str, trial: Trial, experiment: str) -> str:
        why, saved = first_line(reason), self._saved(end, trial, experiment)
        if not trial.step:
            return f"{end} before its first step: {why}{saved}"
        losses = losses_in(trial.metrics, self._objective) if self._objective else None
        metrics = self._metrics_of(trial, why)
        if losses and self._objective and why.startswith(f"{shown(losses[0], self._objective)} at step {trial.step}: "):
            metrics, why = self._metrics_of(trial, ""), why.partition(": ")[2]  # a scheduler begins with the result
        return f"{end} at step {trial.step}{metrics}{self._compared(trial, losses)}: {why}{saved}"

    def _saved(self, end: str, trial: Trial, experiment: str) -> str:
        """Return the newest checkpoint; of a trial that the scheduler takes off its slot only what differs."""
        key = newest_key(TrialKey(experiment=experiment, trial=trial.trial), trial)
        if key is None:
            return "; no checkpoint"
        if end not in {Status.PAUSED, Status.PRUNED}:
            return f"; checkpoint of step {key.step}: {below(self._uri, key.folder)}"
        return "" if key.step == trial.step else f"; checkpoint of step {key.step}"

    def _metrics_of(self, trial: Trial, why: str) -> str:
        names = self._objective.metrics if self._objective else list(trial.metrics)[:_METRICS]
        if any(f"{name} = " in why for name in names):
            return ""  # a criterion that is met gives them
        found = {name: metric_in(trial.metrics, name) for name in names}
        return "".join(f", {name} {format_value(value)}" for name, value in found.items() if value is not None)

    def _compare(self, trial: str, metrics: Mapping[str, object]) -> None:
        losses = losses_in(metrics, self._objective) if self._objective else None
        if losses is not None and len(losses) == 1 and (self._best is None or losses < self._best[0]):
            self._best = losses, trial

    def _compared(self, trial: Trial, losses: Losses | None) -> str:
        """Return how a trial's last report compares with the best of all reports; empty unless by one metric."""
        if self._objective is None or self._best is None or losses is None or len(losses) != 1 or not trial.apart:
            return ""
        (best,), its_trial = self._best
        if losses == (best,) and its_trial == trial.trial:
            return " (the best so far)"
        value = format_value(best if self._objective.modes[0] == "min" else -best)
        return f" (its best: {value})" if its_trial == trial.trial else f" (best: {value}, trial {its_trial})"


def _config_of(trial: Trial) -> str:
    return ", ".join(f"{name} {value}" for name, value in config_cells(trial)) or "no parameters"
