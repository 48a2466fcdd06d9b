"""Collect the data of a report, as values and as JSON: trials with their newest reports, the ranking, runs, totals."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.cost import CostCategory, ExperimentCost, compute_cost, format_cost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import (
    Losses,
    count_by_status,
    find_pareto_front,
    get_experiment_kind,
    may_have_several_trials,
    objective_from_settings,
    rank_trials,
    settings_for_display,
    sort_trials,
)
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Status,
    Trial,
    apply_report,
    newest_checkpoint_key,
)
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.reasons import format_error
from prefect_tune.core.search.domains import Branch, Float, Integer, find_domains
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.search_view import OwnershipPeriod, SearchSnapshot
from prefect_tune.core.values import flatten
from prefect_tune.terminal.formatting import cost_to_json

MAX_CURVES = 60
"""The maximum number of learning curves in a chart."""
MAX_TRIALS = 50
MAX_ERRORS = 10
MAX_RUNS = 20
"""The maximum number of runs in tables and in JSON; the last runs are kept."""
_MAX_PARAMETERS = 200

RunUrlFunction: TypeAlias = Callable[[Owner], str | None]
"""Returns the URL of an owner's run; None if the URL is unknown."""


@dataclass(frozen=True)
class Totals:
    """What an experiment did and cost."""

    trained_seconds: float | None
    """The training time of all trials; None if the time of any trial was not measured."""
    useful_seconds: float | None
    """The seconds of *training* in `slots`, without lost time; equal to `trained_seconds` if no attempt held a slot."""
    lost_seconds: float
    """The seconds of *lost* in `slots`: the training time of lost attempts after their last commits."""
    attempts: int
    attempts_lost: int
    attempts_failed: int
    recomputed_steps: int
    """The number of steps that were trained, lost, and trained again."""
    recomputed_is_lower_bound: bool
    """Whether more than `recomputed_steps` may have been trained again."""
    recomputed_seconds: float | None
    """The estimated time of `recomputed_steps`, from the average time of a step; None without `trained_seconds`."""
    checkpoints_committed: int
    committed_bytes: int
    measured_bytes: int
    """The bytes of the commits whose uploads were measured; the uploads of adopted commits were not measured."""
    sent_bytes: int
    saved_bytes: int
    """The number of bytes that were not uploaded because the target already had them."""
    upload_seconds: float
    slots: Mapping[str, object] = field(default_factory=dict)
    """The seconds that the slots spent, by category and run, as `cost_to_json` returns them."""
    sentence: str = ""
    """The cost in one sentence; empty if no slot was held."""


@dataclass(frozen=True)
class ReportInput:
    """The state of an experiment at the time `now`."""

    experiment: Experiment
    uri: str
    now: datetime
    objective: Objective | None
    snapshot: SearchSnapshot
    trials: Sequence[Trial]
    """The trials in the order in which they were added, with their newest reports."""
    losses: Mapping[str, Losses]
    """The losses of each trial that can be compared, by trial name, the best first."""
    run_url: RunUrlFunction = lambda _: None
    expected_trial_count: int | None = None
    """The number of trials that the present run expects; None if unknown."""
    age: str = ""
    """A text that says when the data was read or how old it is; empty if no trial is running."""
    differing_parameters: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """For each parameter that differs between trials, its value in each trial; None in a trial that lacks it."""
    domains: Mapping[str, object] = field(default_factory=dict)
    """The domains of the space, by parameter; a choice precedes the domains in its options. Empty without a space."""

    @cached_property
    def ranking(self) -> Sequence[Trial]:
        """The trials that can be compared, the best first."""
        by_name = {trial.id: trial for trial in self.trials}
        return [by_name[name] for name in self.losses]

    @cached_property
    def best_trials(self) -> Sequence[Trial]:
        """The best trial or, with several metrics, the Pareto front; empty if no trial can be compared."""
        if self.objective is None or len(self.objective.metrics) == 1:
            return self.ranking[:1]
        by_name = {trial.id: trial for trial in self.trials}
        return [by_name[name] for name in find_pareto_front(self.losses.items())]

    @cached_property
    def first_trials(self) -> Sequence[Trial]:
        """At most 50 trials: those that can be compared, from the best to the worst, then the others."""
        others = (trial for trial in self.trials if trial.id not in self.losses)
        return [*self.ranking, *others][:MAX_TRIALS]

    @cached_property
    def errored_trials(self) -> Sequence[Trial]:
        """The first 10 errored trials."""
        return [trial for trial in self.trials if trial.status is Status.ERRORED][:MAX_ERRORS]

    @property
    def is_search(self) -> bool:
        return may_have_several_trials(self.experiment)

    @cached_property
    def owner_by_trial(self) -> Mapping[str, Owner | None]:
        """The owner that ran the last attempt of each trial."""
        return {attempt.trial: attempt.owner for attempt in self.snapshot.attempts}

    def get_run_url(self, trial: Trial) -> str | None:
        """Return the URL of the run of a trial's last attempt."""
        owner = self.owner_by_trial.get(trial.id)
        return self.run_url(owner) if owner else None

    def get_host(self, trial: Trial) -> str | None:
        """Return the host that runs a trial; None if the trial is not running."""
        owner = self.owner_by_trial.get(trial.id)
        return owner.host if owner and trial.status is Status.RUNNING else None

    @cached_property
    def runs(self) -> Sequence[tuple[OwnershipPeriod, int]]:
        """The owners' periods, each with its number of attempts. While a trial runs, the last period ends at `now`."""
        periods = list(self.snapshot.ownerships)
        begins = [period.began_at for period in periods]
        counts = Counter(bisect_right(begins, attempt.began_at) - 1 for attempt in self.snapshot.attempts)
        if periods and any(trial.status is Status.RUNNING for trial in self.trials):
            periods[-1] = replace(periods[-1], last_entry_at=max(periods[-1].last_entry_at, self.now))
        return [(period, counts[index]) for index, period in enumerate(periods)]

    @property
    def elapsed_seconds(self) -> float:
        """The seconds during which the experiment had an owner, without the time between runs."""
        return sum(compute_elapsed_seconds(period) for period, _ in self.runs)

    @cached_property
    def cost(self) -> ExperimentCost:
        """The time that the slots spent, by category, run and attempt."""
        return compute_cost(self.experiment, self.now)

    @cached_property
    def totals(self) -> Totals:
        """What the experiment did and cost."""
        costs, seconds = self.snapshot.costs, self.cost.seconds
        measured = [trial.measured_seconds for trial in self.trials]
        trained = None if None in measured else sum(filter(None, measured))
        recomputed = sum(trial.recomputed_steps for trial in self.trials)
        steps = sum(trial.step for trial in self.trials)
        return Totals(
            trained_seconds=trained,
            useful_seconds=seconds[CostCategory.TRAINING] if trained and self.cost.attempts else trained,
            lost_seconds=seconds[CostCategory.LOST],
            attempts=sum(trial.attempt for trial in self.trials),
            attempts_lost=sum(attempt.is_lost for attempt in self.snapshot.attempts),
            attempts_failed=sum(attempt.status is Status.ERRORED for attempt in self.snapshot.attempts),
            recomputed_steps=recomputed,
            recomputed_is_lower_bound=any(trial.recomputed_is_lower_bound for trial in self.trials),
            recomputed_seconds=None if trained is None else trained / max(1, steps) * recomputed,
            checkpoints_committed=costs.commit_count,
            committed_bytes=costs.committed_bytes,
            measured_bytes=costs.measured_bytes,
            sent_bytes=costs.sent_bytes,
            saved_bytes=costs.measured_bytes - costs.sent_bytes + costs.cloned_bytes,
            upload_seconds=costs.upload_seconds,
            slots=cost_to_json(self.cost),
            sentence=format_cost(self.cost),
        )

    def get_objective_values(self, trial: str) -> Mapping[str, float]:
        """Return the reported objective values of a trial as numbers; empty if the trial cannot be compared."""
        if self.objective is None or trial not in self.losses:
            return {}
        rows = zip(self.objective.metrics, self.objective.modes, self.losses[trial], strict=True)
        return {name: loss if mode == "min" else -loss for name, mode, loss in rows}

    def has_log_scale(self, parameter: str) -> bool | None:
        """Return whether a parameter is sampled on a log scale; None if its domain is not a range of numbers."""
        domain = self.domains.get(parameter)
        return domain.scale == "log" if isinstance(domain, Float | Integer) else None

    @cached_property
    def constants(self) -> Mapping[str, object]:
        """The parameters of a search that have no domain and the same value in every trial."""
        if not self.is_search or (not self.domains and len(self.trials) < 2):
            return {}
        first = flatten(self.trials[0].config) if self.trials else {}
        variable = {*self.differing_parameters, *self.domains}
        return {name: value for name, value in first.items() if name not in variable}

    @cached_property
    def space(self) -> Mapping[str, str]:
        """The domains as text, each choice with the domains in its options; empty if no space is journaled."""
        nested = tuple(f"{name}/" for name in self.domains)
        return {name: repr(domain) for name, domain in self.domains.items() if not name.startswith(nested)}


def compute_elapsed_seconds(period: OwnershipPeriod) -> float:
    """Return how long a run owned the experiment, in seconds."""
    return (period.last_entry_at - period.began_at).total_seconds()


def make_report_input(
    snapshot: SearchSnapshot,
    *,
    uri: str,
    now: datetime,
    run_url: RunUrlFunction = lambda _: None,
    objective: Objective | None = None,
    expected_trial_count: int | None = None,
    age: str = "",
) -> ReportInput:
    """Return a report's data. `snapshot` has the curves of `select_curve_trials`. Default `objective`: the search's."""
    experiment = snapshot.experiment
    objective = objective or objective_from_settings(experiment.settings)
    trials = [apply_report(trial, snapshot.get_newest_report(trial.id)) for trial in experiment.trials.values()]
    configs = [flatten(trial.config) for trial in trials]
    names = list(dict.fromkeys(name for config in configs for name in config))[:_MAX_PARAMETERS]
    columns = {name: [config.get(name) for config in configs] for name in names}
    return ReportInput(
        experiment,
        uri,
        now,
        objective,
        snapshot,
        trials,
        losses={trial.id: losses for trial, losses in rank_trials(trials, objective)},
        run_url=run_url,
        expected_trial_count=expected_trial_count,
        age=age,
        differing_parameters={name: column for name, column in columns.items() if len(set(map(str, column))) > 1},
        domains=_read_domains(experiment.settings.get("space")),
    )


def sample_trials(trials: Sequence[Trial], max_count: int) -> Sequence[Trial]:
    """Return at most `max_count` of the sorted `trials`: half of them the best, and half spread over all others."""
    if len(trials) <= max_count:
        return trials
    best, others = trials[: max_count // 2], trials[max_count // 2 :]
    count = max_count - len(best)
    return [*best, *(others[index * len(others) // count] for index in range(count))]


def select_curve_trials(experiment: Experiment) -> Sequence[str]:
    """Return the names of the trials for the charts of learning curves: the best trials and some others."""
    ordered = sort_trials(list(experiment.trials.values()), objective_from_settings(experiment.settings))
    return [trial.id for trial in sample_trials(ordered, MAX_CURVES)]


def _read_domains(space: object) -> Mapping[str, object]:
    """Return the domains of a journaled space, by parameter, without importing the functions that the space names."""

    def reject(_: Mapping[str, object]) -> object:
        raise InvalidInput("a report draws no values")

    try:
        return dict(_iter_domains(space_from_json(space, lambda _: reject), "")) if isinstance(space, Mapping) else {}
    except InvalidInput:  # another version wrote the space
        return {}


def _iter_domains(node: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _iter_domains(child, f"{name}/{key}" if name else key)
    elif any(find_domains(node)):
        yield name, node
        for option in node.options if isinstance(node, Branch) else ():
            if isinstance(option, dict):
                yield from _iter_domains(option, name)


def trial_to_json(trial: Trial) -> dict[str, object]:
    """Return a trial as JSON, for the commands `show` and `report`."""
    return {
        "trial": trial.id,
        "status": str(trial.status),
        "reason": trial.reason,
        "step": trial.step,
        "metrics": dict(trial.metrics),
        "config": dict(trial.config),
        "attempts": trial.attempt,
        "recomputed_steps": trial.recomputed_steps,
        "recomputed_is_lower_bound": trial.recomputed_is_lower_bound,
        "trained_seconds": trial.measured_seconds,
    }


def report_to_json(report: ReportInput) -> dict[str, object]:
    """Return the facts of a report as JSON."""

    def make_trial_rows(trials: Sequence[Trial]) -> Sequence[Mapping[str, object]]:
        rows = []
        for trial in trials:
            key = newest_checkpoint_key(state.key.trial_key(trial.id), trial)
            checkpoint = {"checkpoint": key.folder if key else None, "checkpoint_step": key.step if key else None}
            run = {"run": report.get_run_url(trial), "host": report.get_host(trial)}
            rows.append({**trial_to_json(trial), "error": format_error(trial.end_reason), **checkpoint, **run})
        return rows

    state, objective = report.experiment, report.objective
    runs = [
        {
            "term": period.term,
            "owner": str(period.owner),
            "began_at": period.began_at.isoformat(timespec="seconds"),
            "last_entry_at": period.last_entry_at.isoformat(timespec="seconds"),
            "elapsed_seconds": compute_elapsed_seconds(period),
            "attempts": attempts,
            "trials_added": period.trial_count,
            "sample_count": period.sample_count,
            "link": report.run_url(period.owner),
        }
        for period, attempts in report.runs
    ]
    return {
        "experiment": state.name,
        "folder": state.key.folder,
        "where": report.uri,
        "kind": get_experiment_kind(state),
        "metric": objective.metrics if objective else (),
        "mode": objective.modes if objective else (),
        "began_at": runs[0]["began_at"] if runs else "",
        "as_of": report.now.isoformat(timespec="seconds"),
        "elapsed_seconds": report.elapsed_seconds,
        "age": report.age,
        "trials_by_status": count_by_status(state),
        "trial_count": len(report.trials),
        "ended_count": sum(trial.phase in ENDED_PHASES for trial in report.trials),
        "expected_trial_count": report.expected_trial_count,
        "best": make_trial_rows(report.best_trials[:MAX_TRIALS]),
        "trials": make_trial_rows(report.first_trials),
        "errors": make_trial_rows(report.errored_trials),
        "constants": report.constants,
        "space": report.space,
        "run_count": len(runs),
        "runs": runs[-MAX_RUNS:],
        "cost": asdict(report.totals),
        "settings": settings_for_display(state.settings),
        "stop_reason": str(state.stop_reason),
        "is_complete": report.snapshot.is_complete,
    }
