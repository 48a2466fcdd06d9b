"""The interface of searches. A search proposes configurations, and receives the reports and the ends of their trials.

`Repeated` proposes each configuration of another search several times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields, is_integer_at_least, is_number
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import NamedOptions
from prefect_tune.core.values import StepReport, iter_leaves

Space: TypeAlias = Mapping[str, object]
"""A configuration with domains in place of some values: `{"lr": pt.loguniform(1e-4, 1), "model": {"depth": 3}}`."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """The next trial. Its `config` is plain JSON, with a value for each domain of the space."""

    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """No proposal now; call `suggest` again after a running trial has ended."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The search has no more proposals."""

    reason: str
    """Shown in the log."""


Suggestion: TypeAlias = Proposed | Wait | Exhausted


class Search(NamedOptions, ABC):
    """The configuration of a search: a frozen value. Its state is the `SearchState` that `begin` returns."""

    @abstractmethod
    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        """Return the state of the search in an experiment that has no trials yet.

        Raises:
            InvalidInput: the search does not support a domain of the space, or needs an objective, but gets None.
        """

    def trial_count(self, space: Space) -> int | None:
        """Return the number of trials that the search proposes for `space`; None if unknown beforehand."""
        del space
        return None


class SearchState(RenamedMembers, ABC):
    """The state of a search: a deterministic function of the sequence of calls.

    Trials are numbered from 0, in the order of their proposals. When an experiment resumes, a new instance gets the
    same calls, in the order of the journal, but `restore_trial` in place of each `suggest` that proposed a trial.
    Afterwards, the new instance must suggest what the old one would. So draw the values of trial `number` from a
    generator seeded by (seed, number), and keep no generator from one trial to the next.
    """

    _renamed: ClassVar[Mapping[str, str]] = {
        "recall": "restore_trial",
        "learn": "add_prior_trial",
        "reported": "on_report",
        "stopped": "on_trial_stopped",
        "ended": "on_trial_ended",
    }

    @abstractmethod
    def suggest(self, number: int) -> Suggestion:
        """Propose the configuration of the next trial, which is trial `number`."""

    @abstractmethod
    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        """Record that trial `number` exists. Its `config` counts as data, even if the present space excludes it."""

    def on_report(self, number: int, report: StepReport) -> None:
        """Record a running trial's report at a milestone."""
        del number, report

    def on_trial_stopped(self, number: int) -> None:
        """Record that the scheduler prunes trial `number`; a call of `on_trial_ended` follows."""
        del number

    def on_trial_ended(self, number: int, report: StepReport | None, *, failed: bool) -> None:
        """Record a trial's end and its last report, if any. If the same trial ends again, the last call counts."""
        del number, report, failed

    def add_prior_trial(self, config: Mapping[str, object], report: StepReport, *, stopped: bool) -> bool:
        """Record a finished trial of another experiment; return whether the search uses the trial.

        Called before all other methods. The trial has no number, and is no sample. `stopped`: whether it was pruned.
        """
        del config, report, stopped
        return False


@dataclass(frozen=True, slots=True)
class Repeated(Search):
    """Propose each configuration of `search` for `times` consecutive trials, which `search` counts as one trial.

    When all of these trials have ended, `search` receives the mean of each metric that all of them reported; failed
    trials are left out. `search` receives no reports of running trials. For an example, see `RandomSearch`.
    """

    search: Search
    times: int
    index_as: str | None = None
    """The parameter, such as a seed, whose value is the number of the repetition, from 0; None for no parameter."""

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        if not is_integer_at_least(self.times, 1):
            raise InvalidInput(f"Repeated: expected at least 1 for times, found {self.times!r}")

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        """Begin `search`. Raises like `search.begin`, and also if the space has the parameter that `index_as` names."""
        if self.index_as in space:
            raise InvalidInput(f"Repeated: expected no {self.index_as!r} in the space, because index_as adds it")
        return _RepeatedState(self.search.begin(space, objective, seed), self)

    def trial_count(self, space: Space) -> int | None:
        count = self.search.trial_count(space)
        return None if count is None else count * self.times


class _RepeatedState(SearchState):
    """Trial `number` is repetition `number % times` of trial `number // times` of the repeated search."""

    def __init__(self, search: SearchState, repeated: Repeated) -> None:
        self._search = search
        self._times = repeated.times
        self._index_as = repeated.index_as
        self._config: dict[str, object] = {}
        self._reports_by_group: dict[int, dict[int, StepReport | None]] = {}

    def suggest(self, number: int) -> Suggestion:
        group, repetition = divmod(number, self._times)
        if repetition == 0:
            suggestion = self._search.suggest(group)
            if not isinstance(suggestion, Proposed):
                return suggestion
            self._config = dict(suggestion.config)
        index = {} if self._index_as is None else {self._index_as: repetition}
        return Proposed({**self._config, **index})

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        group, repetition = divmod(number, self._times)
        self._config = {key: value for key, value in config.items() if key != self._index_as}
        if repetition == 0:
            self._search.restore_trial(group, self._config)

    def on_trial_ended(self, number: int, report: StepReport | None, *, failed: bool) -> None:
        group = self._reports_by_group.setdefault(number // self._times, {})
        group[number] = None if failed else report
        if len(group) == self._times:
            reports = [report for _, report in sorted(group.items()) if report is not None]
            mean = _average_reports(reports) if reports else None
            self._search.on_trial_ended(number // self._times, mean, failed=not reports)

    def add_prior_trial(self, config: Mapping[str, object], report: StepReport, *, stopped: bool) -> bool:
        inner_config = {key: value for key, value in config.items() if key != self._index_as}
        return self._search.add_prior_trial(inner_config, report, stopped=stopped)


def _average_reports(reports: Sequence[StepReport]) -> StepReport:
    flat_metrics = [dict(iter_leaves(report.metrics)) for report in reports]
    names = set.intersection(*map(set, flat_metrics))
    columns = {name: [value for metrics in flat_metrics if is_number(value := metrics[name])] for name in sorted(names)}
    return StepReport(
        step=max(report.step for report in reports),
        metrics={name: fmean(values) for name, values in columns.items() if len(values) == len(reports)},
        trained_seconds=fmean(report.trained_seconds for report in reports),
    )
