"""The data of a report: the current trials, their ranking, and the parameters in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import Losses, front, ranked
from prefect_tune.core.experiment.summary import best_first, objective_in
from prefect_tune.core.experiment.trial_transitions import Trial, with_report
from prefect_tune.core.models import flat
from prefect_tune.core.search.objective import Objective
from prefect_tune.reporting.history import HistoryView
from prefect_tune.reporting.param_importance import importances

DRAWN = 60
"""The most learning curves that are drawn."""
_MOST_PARAMETERS = 200


@dataclass(frozen=True)
class ReportInput:
    """An experiment at one moment."""

    experiment: Experiment
    uri: str
    now: datetime
    objective: Objective | None
    history: HistoryView
    trials: Sequence[Trial]
    """The trials in the order in which they were added, with their newest reports."""
    losses: Mapping[str, Losses]
    """The losses of the trials that can be compared, the best first."""
    expected: int | None = None
    """The expected number of trials."""
    age: str = ""
    """How old the report is, in words; empty if no trial runs."""
    cells: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """The parameters in which the trials differ, with a value per trial; None if a trial does not have it."""

    @cached_property
    def ranking(self) -> Sequence[Trial]:
        """The trials that can be compared, the best first."""
        known = {each.trial: each for each in self.trials}
        return [known[name] for name in self.losses]

    @cached_property
    def best(self) -> Sequence[Trial]:
        """The best one; with several metrics the Pareto front; empty if no trial can be compared."""
        if self.objective is None or len(self.objective.metrics) == 1:
            return self.ranking[:1]
        known = {each.trial: each for each in self.trials}
        return [known[name] for name in front(self.losses.items())]

    def compared(self, trial: str) -> Mapping[str, float]:
        """Return the metrics that compare a trial, as reported, a bool as a number; empty if it has none."""
        if self.objective is None or trial not in self.losses:
            return {}
        compared = zip(self.objective.metrics, self.objective.modes, self.losses[trial], strict=True)
        return {name: loss if mode == "min" else -loss for name, mode, loss in compared}

    @cached_property
    def importances(self) -> Mapping[str, float]:
        """The importance of each parameter for the first metric, the largest first."""
        places = [place for place, each in enumerate(self.trials) if each.trial in self.losses]
        parameters = {name: [values[place] for place in places] for name, values in self.cells.items()}
        return importances(parameters, [self.losses[self.trials[place].trial][0] for place in places])


def report_input_of(  # noqa: PLR0913  the last two are known to some callers only
    experiment: Experiment,
    history: HistoryView,
    *,
    uri: str,
    now: datetime,
    expected: int | None = None,
    age: str = "",
) -> ReportInput:
    """Return the data for a report of the experiment; `history` has the curves of `drawn_trials`."""
    objective = objective_in(experiment.settings)
    trials = [with_report(each, history.newest.get(each.trial)) for each in experiment.trials.values()]
    losses = {each.trial: losses for each, losses in ranked(trials, objective)}
    return ReportInput(experiment, uri, now, objective, history, trials, losses, expected, age, _cells(trials))


def spread(items: Sequence[Trial], most: int) -> Sequence[Trial]:
    """Return at most `most` items: half of them the first (best) ones, the others spread over the rest."""
    if len(items) <= most:
        return items
    best, others = items[: most // 2], items[most // 2 :]
    room = most - len(best)
    return [*best, *(others[index * len(others) // room] for index in range(room))]


def drawn_trials(experiment: Experiment) -> Sequence[str]:
    """Return the trials whose learning curves are drawn: the best, and some of the others."""
    ordered = best_first(list(experiment.trials.values()), objective_in(experiment.settings))
    return [each.trial for each in spread(ordered, DRAWN)]


def _cells(trials: Sequence[Trial]) -> Mapping[str, Sequence[object]]:
    configs = [flat(each.config) for each in trials]
    names = list(dict.fromkeys(name for config in configs for name in config))[:_MOST_PARAMETERS]
    columns = {name: [config.get(name) for config in configs] for name in names}
    return {name: column for name, column in columns.items() if len(set(map(str, column))) > 1}
