"""What a report is made of: the trials as they stand now, compared, with the values in which they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Protocol

from prefect_tune.core.experiment import Experiment
from prefect_tune.core.objective import Objective
from prefect_tune.core.ranking import Losses, front, ranked
from prefect_tune.core.standing import best_first, objective_in
from prefect_tune.core.trial import Trial, with_report
from prefect_tune.core.values import flat
from prefect_tune.reporting.chronicle import Story
from prefect_tune.reporting.importance import importances

__all__ = ["DRAWN", "Material", "material", "spread"]

DRAWN = 60
"""How many learning curves are drawn."""
_MOST_PARAMETERS = 200


class Tells(Protocol):
    """A chronicle, or what asks one in another thread."""

    def __call__(self, trials: Collection[str], /) -> Story: ...


@dataclass(frozen=True)
class Material:
    """An experiment at one moment."""

    experiment: Experiment
    uri: str
    now: datetime
    objective: Objective | None
    story: Story
    trials: Sequence[Trial]
    """In the order in which they were added, with their newest reports."""
    losses: Mapping[str, Losses]
    """Of the trials that can be compared, the best first."""
    expected: int | None = None
    """How many trials there are to be."""
    cells: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """The parameters in which the trials differ, by the trials' order; None where one has it not."""

    @cached_property
    def ranking(self) -> Sequence[Trial]:
        """Those that can be compared, the best first."""
        known = {each.trial: each for each in self.trials}
        return [known[name] for name in self.losses]

    @cached_property
    def best(self) -> Sequence[Trial]:
        """The best one; with several metrics those of the Pareto front; nobody where nothing can be compared."""
        if self.objective is None or len(self.objective.metrics) == 1:
            return self.ranking[:1]
        known = {each.trial: each for each in self.trials}
        return [known[name] for name in front(self.losses.items())]

    def compared(self, trial: str) -> Mapping[str, float]:
        """Return what a trial is compared by, as it was reported; a bool as a number. Nothing where it cannot be."""
        if self.objective is None or trial not in self.losses:
            return {}
        told = zip(self.objective.metrics, self.objective.modes, self.losses[trial], strict=True)
        return {name: loss if mode == "min" else -loss for name, mode, loss in told}

    @cached_property
    def importances(self) -> Mapping[str, float]:
        """How much each parameter matters to the first metric, the largest first."""
        places = [place for place, each in enumerate(self.trials) if each.trial in self.losses]
        parameters = {name: [values[place] for place in places] for name, values in self.cells.items()}
        return importances(parameters, [self.losses[self.trials[place].trial][0] for place in places])


def material(experiment: Experiment, tells: Tells, *, uri: str, now: datetime, expected: int | None = None) -> Material:
    """Return what a report of the experiment is made of."""
    objective = objective_in(experiment.settings)
    story = tells(_drawn(experiment, objective))
    trials = [with_report(each, story.newest.get(each.trial)) for each in experiment.trials.values()]
    losses = {each.trial: losses for each, losses in ranked(trials, objective)}
    return Material(experiment, uri, now, objective, story, trials, losses, expected, _cells(trials))


def spread(items: Sequence[Trial], most: int) -> Sequence[Trial]:
    """Return at most so many: the first half of them, which is the better one, and a few of all the others."""
    if len(items) <= most:
        return items
    best, others = items[: most // 2], items[most // 2 :]
    room = most - len(best)
    return [*best, *(others[index * len(others) // room] for index in range(room))]


def _drawn(experiment: Experiment, objective: Objective | None) -> Sequence[str]:
    return [each.trial for each in spread(best_first(list(experiment.trials.values()), objective), DRAWN)]


def _cells(trials: Sequence[Trial]) -> Mapping[str, Sequence[object]]:
    configs = [flat(each.config) for each in trials]
    names = list(dict.fromkeys(name for config in configs for name in config))[:_MOST_PARAMETERS]
    columns = {name: [config.get(name) for config in configs] for name in names}
    return {name: column for name, column in columns.items() if len(set(map(str, column))) > 1}
