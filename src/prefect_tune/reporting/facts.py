"""The data of a report: trials with their newest reports, their ranking, runs and totals; as values and as JSON."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.cost import Category, ExperimentCost, cost_of, cost_sentence
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import (
    Losses,
    best_first,
    counted,
    front,
    is_search,
    objective_in,
    ranked,
    shown_settings,
)
from prefect_tune.core.experiment.trial_transitions import ENDED, Status, Trial, newest_key, with_report
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.reasons import format_error
from prefect_tune.core.search.domains import Branch, Float, Integer, domains_in
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.search_view import OwnershipPeriod, SearchSnapshot
from prefect_tune.core.values import flat
from prefect_tune.terminal.formatting import cost_fields

DRAWN = 60
"""The most learning curves that are drawn."""
MAX_TRIALS = 50
MAX_ERRORS = 10
MAX_RUNS = 20
"""In the tables and in the JSON; the last runs."""
_MAX_PARAMETERS = 200

Links: TypeAlias = Callable[[Owner], str | None]
"""Returns the URL of a run; None if it has none."""


@dataclass(frozen=True)
class Totals:
    """What an experiment did and cost."""

    trained_seconds: float | None
    """None if that of a trial was not measured."""
    useful_seconds: float | None
    """Of training that counts, as in `slots`; `trained_seconds` if no slot was held."""
    lost_seconds: float
    """Of training after the last commits of attempts that were lost, as in `slots`."""
    attempts: int
    attempts_lost: int
    attempts_failed: int
    wasted_steps: int
    """Steps that were trained, lost, and trained again."""
    wasted_at_least: bool
    """Whether they may be more."""
    wasted_seconds: float | None
    """An estimate, from the average time of a step; None without `trained_seconds`."""
    checkpoints_committed: int
    committed_bytes: int
    measured_bytes: int
    """The part of `committed_bytes` with known uploads; those of adopted commits are not."""
    sent_bytes: int
    saved_bytes: int
    """Not uploaded, because the bytes were on the target already."""
    upload_seconds: float
    slots: Mapping[str, object] = field(default_factory=dict)
    """Where the seconds of the slots went; see `cost_fields`."""
    sentence: str = ""
    """The same in a sentence; empty if no slot was held."""


@dataclass(frozen=True)
class ReportInput:
    """An experiment at one moment."""

    experiment: Experiment
    uri: str
    now: datetime
    objective: Objective | None
    history: SearchSnapshot
    trials: Sequence[Trial]
    """The trials in the order in which they were added, with their newest reports."""
    losses: Mapping[str, Losses]
    """The losses of the trials that can be compared, the best first."""
    links: Links = lambda _: None
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
        by_name = {trial.trial: trial for trial in self.trials}
        return [by_name[name] for name in self.losses]

    @cached_property
    def best(self) -> Sequence[Trial]:
        """The best one; with several metrics the Pareto front; empty if no trial can be compared."""
        if self.objective is None or len(self.objective.metrics) == 1:
            return self.ranking[:1]
        by_name = {trial.trial: trial for trial in self.trials}
        return [by_name[name] for name in front(self.losses.items())]

    @cached_property
    def first_trials(self) -> Sequence[Trial]:
        """The first 50, the best before those that cannot be compared."""
        others = (trial for trial in self.trials if trial.trial not in self.losses)
        return [*self.ranking, *others][:MAX_TRIALS]

    @cached_property
    def errors(self) -> Sequence[Trial]:
        """The first 10 trials that errored."""
        return [trial for trial in self.trials if trial.status is Status.ERRORED][:MAX_ERRORS]

    @property
    def is_search(self) -> bool:
        """Whether it is not a single training."""
        return is_search(self.experiment)

    @cached_property
    def owners(self) -> Mapping[str, Owner | None]:
        """Who runs or ran the last attempt of each trial."""
        return {attempt.trial: attempt.owner for attempt in self.history.attempts}

    def link_of(self, trial: Trial) -> str | None:
        """Return the URL of the run of a trial's last attempt."""
        owner = self.owners.get(trial.trial)
        return self.links(owner) if owner else None

    def host_of(self, trial: Trial) -> str | None:
        """Return the machine that runs a trial; None if it does not run."""
        owner = self.owners.get(trial.trial)
        return owner.host if owner and trial.status is Status.RUNNING else None

    @cached_property
    def runs(self) -> Sequence[tuple[OwnershipPeriod, int]]:
        """The time of each owner, and how many attempts began in it; that of the last lasts while a trial runs."""
        periods = list(self.history.ownerships)
        begins = [period.began for period in periods]
        counts = Counter(bisect_right(begins, attempt.began) - 1 for attempt in self.history.attempts)
        if periods and any(trial.status is Status.RUNNING for trial in self.trials):
            periods[-1] = replace(periods[-1], last=max(periods[-1].last, self.now))
        return [(period, counts[index]) for index, period in enumerate(periods)]

    @property
    def elapsed_seconds(self) -> float:
        """The time in which a run owned the experiment, without the time between runs."""
        return sum(elapsed_seconds(period) for period, _ in self.runs)

    @cached_property
    def cost(self) -> ExperimentCost:
        """Where the time of the slots went."""
        return cost_of(self.experiment, self.now)

    @cached_property
    def totals(self) -> Totals:
        """What it did and cost."""
        costs, seconds = self.history.costs, self.cost.seconds
        measured = [trial.measured_seconds for trial in self.trials]
        trained = None if None in measured else sum(filter(None, measured))
        wasted, steps = sum(trial.wasted_steps for trial in self.trials), sum(trial.step for trial in self.trials)
        return Totals(
            trained_seconds=trained,
            useful_seconds=seconds[Category.TRAINING] if trained and self.cost.attempts else trained,
            lost_seconds=seconds[Category.LOST],
            attempts=sum(trial.attempt for trial in self.trials),
            attempts_lost=sum(attempt.is_lost for attempt in self.history.attempts),
            attempts_failed=sum(attempt.status is Status.ERRORED for attempt in self.history.attempts),
            wasted_steps=wasted,
            wasted_at_least=any(trial.wasted_at_least for trial in self.trials),
            wasted_seconds=None if trained is None else trained / max(1, steps) * wasted,
            checkpoints_committed=costs.commits,
            committed_bytes=costs.committed_bytes,
            measured_bytes=costs.measured_bytes,
            sent_bytes=costs.sent_bytes,
            saved_bytes=costs.measured_bytes - costs.sent_bytes + costs.cloned_bytes,
            upload_seconds=costs.upload_seconds,
            slots=cost_fields(self.cost),
            sentence=cost_sentence(self.cost),
        )

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
        if not self.is_search or (not self.domains and len(self.trials) < 2):
            return {}
        first = flat(self.trials[0].config) if self.trials else {}
        return {name: value for name, value in first.items() if name not in self.cells and name not in self.domains}

    @cached_property
    def space(self) -> Mapping[str, str]:
        """What each other parameter is drawn from; empty if the journal does not say."""
        nested = tuple(f"{name}/" for name in self.domains)
        return {name: repr(domain) for name, domain in self.domains.items() if not name.startswith(nested)}


def elapsed_seconds(period: OwnershipPeriod) -> float:
    """Return how long a run owned the experiment."""
    return (period.last - period.began).total_seconds()


def report_input_of(
    snapshot: SearchSnapshot,
    *,
    uri: str,
    now: datetime,
    links: Links = lambda _: None,
    objective: Objective | None = None,
    expected: int | None = None,
    age: str = "",
) -> ReportInput:
    """Return the data for a report of the experiment; the snapshot has the curves of `drawn_trials`.

    Trials are compared by `objective`, or by that of the search.
    """
    experiment = snapshot.experiment
    objective = objective or objective_in(experiment.settings)
    trials = [with_report(trial, snapshot.newest(trial.trial)) for trial in experiment.trials.values()]
    configs = [flat(trial.config) for trial in trials]
    names = list(dict.fromkeys(name for config in configs for name in config))[:_MAX_PARAMETERS]
    columns = {name: [config.get(name) for config in configs] for name in names}
    return ReportInput(
        experiment,
        uri,
        now,
        objective,
        snapshot,
        trials,
        losses={trial.trial: losses for trial, losses in ranked(trials, objective)},
        links=links,
        expected=expected,
        age=age,
        cells={name: column for name, column in columns.items() if len(set(map(str, column))) > 1},
        domains=_domains_of(experiment.settings.get("space")),
    )


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
    return [trial.trial for trial in spread(ordered, DRAWN)]


def _domains_of(space: object) -> Mapping[str, object]:
    """Return the domains of a journaled space, by the names of their parameters; no function of it is imported."""

    def refuse(_: Mapping[str, object]) -> object:
        raise InvalidInput("a report draws no values")

    try:
        return dict(_domains_in(space_from_json(space, lambda _: refuse), "")) if isinstance(space, Mapping) else {}
    except InvalidInput:  # of another version
        return {}


def _domains_in(node: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _domains_in(child, f"{name}/{key}" if name else key)
    elif any(domains_in(node)):
        yield name, node
        for option in node.options if isinstance(node, Branch) else ():
            if isinstance(option, dict):
                yield from _domains_in(option, name)


def trial_fields(trial: Trial) -> dict[str, object]:
    """Return a trial as JSON, for `show` and `report`."""
    return {
        "trial": trial.trial,
        "status": str(trial.status),
        "reason": trial.reason,
        "step": trial.step,
        "metrics": dict(trial.metrics),
        "config": dict(trial.config),
        "attempts": trial.attempt,
        "wasted_steps": trial.wasted_steps,
        "wasted_at_least": trial.wasted_at_least,
        "trained_seconds": trial.measured_seconds,
    }


def report_fields(report: ReportInput) -> dict[str, object]:
    """Return the facts of a report as JSON."""

    def fields_of(trials: Sequence[Trial]) -> Sequence[Mapping[str, object]]:
        rows = []
        for trial in trials:
            key = newest_key(state.key.trial_key(trial.trial), trial)
            saved = {"checkpoint": key.folder if key else None, "checkpoint_step": key.step if key else None}
            run = {"run": report.link_of(trial), "host": report.host_of(trial)}
            rows.append({**trial_fields(trial), "error": format_error(trial.end_reason), **saved, **run})
        return rows

    state, objective = report.experiment, report.objective
    runs = [
        {
            "term": period.term,
            "owner": str(period.owner),
            "began_at": period.began.isoformat(timespec="seconds"),
            "last_entry_at": period.last.isoformat(timespec="seconds"),
            "elapsed_seconds": elapsed_seconds(period),
            "attempts": attempts,
            "trials_added": period.trials,
            "samples_asked": period.samples,
            "link": report.links(period.owner),
        }
        for period, attempts in report.runs
    ]
    return {
        "experiment": state.name,
        "folder": state.key.folder,
        "where": report.uri,
        "kind": "search" if report.is_search else "training",
        "metric": objective.metrics if objective else (),
        "mode": objective.modes if objective else (),
        "began_at": runs[0]["began_at"] if runs else "",
        "as_of": report.now.isoformat(timespec="seconds"),
        "elapsed_seconds": report.elapsed_seconds,
        "age": report.age,
        "trials_by_status": counted(state),
        "trial_count": len(report.trials),
        "ended_count": sum(trial.phase in ENDED for trial in report.trials),
        "expected_trial_count": report.expected,
        "best": fields_of(report.best[:MAX_TRIALS]),
        "trials": fields_of(report.first_trials),
        "errors": fields_of(report.errors),
        "constants": report.constants,
        "space": report.space,
        "run_count": len(runs),
        "runs": runs[-MAX_RUNS:],
        "cost": asdict(report.totals),
        "settings": shown_settings(state.settings),
        "ended_because": str(state.ends),
        "is_whole": report.history.is_whole,
    }
