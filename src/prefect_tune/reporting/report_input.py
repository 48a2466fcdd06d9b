"""The data of a report: the current trials, their ranking, and the parameters in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import Losses, front, ranked
from prefect_tune.core.experiment.summary import best_first, objective_in
from prefect_tune.core.experiment.trial_transitions import Trial, with_report
from prefect_tune.core.models import flat
from prefect_tune.core.search.domains import Branch, domains_in
from prefect_tune.core.search.numeric_domains import Float, Integer
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.reporting.history import HistoryView

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
    domains: Mapping[str, object] = field(default_factory=dict)
    """The domains of the space, by parameter, those of options after their choice; empty if it is not journaled."""

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

    def is_log(self, parameter: str) -> bool | None:
        """Return whether a parameter is drawn by orders of magnitude; None if the space does not say."""
        domain = self.domains.get(parameter)
        return domain.scale == "log" if isinstance(domain, Float | Integer) else None

    @cached_property
    def constants(self) -> Mapping[str, object]:
        """The parameters of a search that no domain draws and that are the same in every trial."""
        if not self.domains and len(self.trials) < 2:
            return {}
        first = flat(self.trials[0].config) if self.trials else {}
        return {name: value for name, value in first.items() if name not in self.cells and name not in self.domains}


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
    domains = _domains(experiment.settings.get("space"))
    return ReportInput(experiment, uri, now, objective, history, trials, losses, expected, age, _cells(trials), domains)


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


def _domains(space: object) -> Mapping[str, object]:
    """Return the domains of a journaled space, by the names of their parameters; no function of it is imported."""
    if not isinstance(space, Mapping):
        return {}
    try:
        return dict(_domains_in(space_from_json(space, lambda _: _no_value), ""))
    except InvalidInput:  # of another version
        return {}


def _no_value(_: Mapping[str, object]) -> object:
    raise InvalidInput("a report draws no values")


def _domains_in(node: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _domains_in(child, f"{name}/{key}" if name else key)
    elif any(domains_in(node)):
        yield name, node
        for each in node.options if isinstance(node, Branch) else ():
            if isinstance(each, dict):
                yield from _domains_in(each, name)
