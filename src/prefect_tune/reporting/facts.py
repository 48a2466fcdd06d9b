"""The facts and numbers of a report: the same on a page, in an artifact, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from prefect_tune.core.search_view import AttemptEnd, AttemptPeriod, OwnershipPeriod, SearchSnapshot
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import flat
from prefect_tune.terminal.cost_view import cost_fields

# The data of a report: the current trials, their ranking, and the parameters in which they differ.

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
    history: SearchSnapshot
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

    @cached_property
    def cost(self) -> ExperimentCost:
        """Where the time of the slots went."""
        return cost_of(self.experiment, self.now)

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


def report_input_of(
    snapshot: SearchSnapshot,
    *,
    uri: str,
    now: datetime,
    expected: int | None = None,
    age: str = "",
) -> ReportInput:
    """Return the data for a report of the experiment.

    Args:
        snapshot: with the curves of `drawn_trials`.
        uri: of the target.
        now: the time of the report.
        expected: the expected number of trials.
        age: how old the report is, in words.
    """
    experiment = snapshot.experiment
    objective = objective_in(experiment.settings)
    trials = [with_report(each, snapshot.newest(each.trial)) for each in experiment.trials.values()]
    losses = {each.trial: losses for each, losses in ranked(trials, objective)}
    domains = _domains(experiment.settings.get("space"))
    return ReportInput(
        experiment, uri, now, objective, snapshot, trials, losses, expected, age, _cells(trials), domains
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


Links: TypeAlias = Callable[[Owner], str | None]
"""Returns the URL of a run; None if it has none."""
_TRIALS = 50
_ERRORS = 10
_RUNS = 20


@dataclass(frozen=True)
class TrialFacts:
    """A trial."""

    trial: str
    status: str
    """A word of `Status`."""
    reason: str
    error: str
    """The error of an errored trial in one line."""
    step: int
    metrics: Mapping[str, object]
    config: Mapping[str, object]
    attempts: int
    wasted_steps: int
    wasted_at_least: bool
    trained_seconds: float | None
    """None if it was not measured."""
    checkpoint: str | None
    """The newest one, as a path below the target."""
    checkpoint_step: int | None
    run: str | None
    """The URL of its last attempt's run."""
    host: str | None
    """The machine that runs it; None if it does not run."""


@dataclass(frozen=True)
class Run:
    """One run's time as the owner of the experiment."""

    term: int
    """The number of the owner."""
    owner: str
    began_at: str
    last_entry_at: str
    elapsed_seconds: float
    attempts: int
    """The number of attempts that began in this time."""
    trials_added: int
    samples_asked: int
    """The number of samples to add to those of earlier runs; 0 if none was given."""
    link: str | None


@dataclass(frozen=True)
class Cost:
    """The cost of the experiment."""

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
    """Where the seconds of the slots went; see `terminal.cost_view.cost_fields`."""
    sentence: str = ""
    """The same in a sentence; empty if no slot was held."""


@dataclass(frozen=True)
class Facts:
    """An experiment."""

    experiment: str
    folder: str
    """Of the experiment on the target."""
    where: str
    kind: str
    metric: Sequence[str]
    mode: Sequence[str]
    began_at: str
    as_of: str
    """The time of what is reported."""
    elapsed_seconds: float
    """The time in which a run owned the experiment, without the time between runs."""
    age: str
    """How old the facts are, in words; empty if no trial runs."""
    trials_by_status: Mapping[str, int]
    trial_count: int
    ended_count: int
    expected_trial_count: int | None
    best: Sequence[TrialFacts]
    """One trial; with several metrics the Pareto front; empty if no trial can be compared."""
    trials: Sequence[TrialFacts]
    """The best first, and no more than 50."""
    errors: Sequence[TrialFacts]
    """No more than 10."""
    constants: Mapping[str, object]
    """The parameters of a search that are the same in every trial."""
    space: Mapping[str, str]
    """What each other parameter is drawn from; empty if the journal does not say."""
    run_count: int
    runs: Sequence[Run]
    """The last 20."""
    cost: Cost
    settings: Mapping[str, object] = field(default_factory=dict)
    ended_because: str = ""
    """Why the last run ended early; empty if the journal does not say."""
    is_whole: bool = True
    """Whether curves, times and costs cover the whole history."""


def facts_of(report_input: ReportInput, links: Links) -> Facts:
    """Return the facts of an experiment."""
    state, history, objective = report_input.experiment, report_input.history, report_input.objective
    owners = {each.trial: each.owner for each in history.attempts}

    def found(trials: Sequence[Trial], most: int) -> Sequence[TrialFacts]:
        return [_trial_facts(each, state.key, owners.get(each.trial), links) for each in trials[:most]]

    ownerships, domains = _until_now(report_input), report_input.domains
    nested = [f"{each}/" for each in domains]
    ranked = [*report_input.ranking, *(each for each in report_input.trials if each.trial not in report_input.losses)]
    errors = [each for each in report_input.trials if each.status is Status.ERRORED]
    return Facts(
        experiment=state.name,
        folder=state.key.folder,
        where=report_input.uri,
        kind="search" if is_search(state) else "training",
        metric=objective.metrics if objective else (),
        mode=objective.modes if objective else (),
        began_at=_at(ownerships[0].began.isoformat()) if ownerships else "",
        as_of=_at(report_input.now.isoformat()),
        elapsed_seconds=sum(map(_elapsed_seconds, ownerships)),
        age=report_input.age,
        trials_by_status=counted(state),
        trial_count=len(report_input.trials),
        ended_count=sum(each.phase in ENDED for each in report_input.trials),
        expected_trial_count=report_input.expected,
        best=found(report_input.best, _TRIALS),
        trials=found(ranked, _TRIALS),
        errors=found(errors, _ERRORS),
        constants=report_input.constants if is_search(state) else {},
        space={name: repr(each) for name, each in domains.items() if not any(map(name.startswith, nested))},
        run_count=len(ownerships),
        runs=_runs(ownerships[-_RUNS:], history.attempts, links),
        cost=_cost(report_input),
        settings=shown_settings(state.settings),
        ended_because=str(state.ends),
        is_whole=history.is_whole,
    )


def _trial_facts(trial: Trial, experiment: JournalKey, owner: Owner | None, links: Links) -> TrialFacts:
    key = newest_key(experiment.trial_key(trial.trial), trial)
    return TrialFacts(
        trial=trial.trial,
        status=str(trial.status),
        reason=trial.reason,
        error=format_error(trial.end_reason),
        step=trial.step,
        metrics=dict(trial.metrics),
        config=dict(trial.config),
        attempts=trial.attempt,
        wasted_steps=trial.wasted_steps,
        wasted_at_least=trial.wasted_at_least,
        trained_seconds=trial.measured_seconds,
        checkpoint=key.folder if key else None,
        checkpoint_step=key.step if key else None,
        run=links(owner) if owner else None,
        host=owner.host if owner and trial.status is Status.RUNNING else None,
    )


def _until_now(report_input: ReportInput) -> Sequence[OwnershipPeriod]:
    """Return the times of the owners; that of the last one lasts while a trial runs."""
    ownerships = list(report_input.history.ownerships)
    if ownerships and any(each.status is Status.RUNNING for each in report_input.trials):
        ownerships[-1] = replace(ownerships[-1], last=max(ownerships[-1].last, report_input.now))
    return ownerships


def _elapsed_seconds(ownership: OwnershipPeriod) -> float:
    return (ownership.last - ownership.began).total_seconds()


def _runs(ownerships: Sequence[OwnershipPeriod], attempts: Sequence[AttemptPeriod], links: Links) -> Sequence[Run]:
    runs = []
    for index, ownership in enumerate(ownerships):
        until = ownerships[index + 1].began if index + 1 < len(ownerships) else None
        begun = sum(1 for each in attempts if ownership.began <= each.began and (until is None or each.began < until))
        times = _at(ownership.began.isoformat()), _at(ownership.last.isoformat())
        added = ownership.trials, ownership.samples
        elapsed = _elapsed_seconds(ownership)
        runs.append(Run(ownership.term, str(ownership.owner), *times, elapsed, begun, *added, links(ownership.owner)))
    return runs


def _cost(report_input: ReportInput) -> Cost:
    trials, costs, attempts = report_input.trials, report_input.history.costs, report_input.history.attempts
    measured = [each.measured_seconds for each in trials]
    trained, steps = None if None in measured else sum(filter(None, measured)), sum(each.step for each in trials)
    wasted, seconds = sum(each.wasted_steps for each in trials), report_input.cost.seconds
    return Cost(
        trained_seconds=trained,
        useful_seconds=seconds[Category.TRAINING] if trained and report_input.cost.attempts else trained,
        lost_seconds=seconds[Category.LOST],
        attempts=sum(each.attempt for each in trials),
        attempts_lost=sum(each.end is AttemptEnd.LOST for each in attempts),
        attempts_failed=sum(each.end is AttemptEnd.FAILED for each in attempts),
        wasted_steps=wasted,
        wasted_at_least=any(each.wasted_at_least for each in trials),
        wasted_seconds=None if trained is None else trained / max(1, steps) * wasted,
        checkpoints_committed=costs.commits,
        committed_bytes=costs.committed_bytes,
        measured_bytes=costs.measured_bytes,
        sent_bytes=costs.sent_bytes,
        saved_bytes=costs.measured_bytes - costs.sent_bytes + costs.cloned_bytes,
        upload_seconds=costs.upload_seconds,
        slots=cost_fields(report_input.cost),
        sentence=cost_sentence(report_input.cost),
    )


def _at(iso: str) -> str:
    """To the second."""
    return iso[:19] + iso[-6:] if len(iso) > 25 else iso
