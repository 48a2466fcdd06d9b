"""The facts and numbers of a report: the same on a page, in an artifact, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from prefect_tune.core.experiment.summary import counted, is_search, shown_settings
from prefect_tune.core.experiment.trial_transitions import ENDED, Status, Trial, newest_key
from prefect_tune.core.journal_events.experiment_events import Owner
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.reporting.history import AttemptEnd, AttemptPeriod, OwnershipPeriod
from prefect_tune.reporting.report_input import ReportInput

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


@dataclass(frozen=True)
class Facts:
    """An experiment."""

    experiment: str
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
        return [_trial_facts(each, state.name, owners.get(each.trial), links) for each in trials[:most]]

    ownerships, domains = _until_now(report_input), report_input.domains
    nested = [f"{each}/" for each in domains]
    ranked = [*report_input.ranking, *(each for each in report_input.trials if each.trial not in report_input.losses)]
    errors = [each for each in report_input.trials if each.status is Status.ERRORED]
    return Facts(
        experiment=state.name,
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
        ended_because=state.ends,
        is_whole=history.is_whole,
    )


def _trial_facts(trial: Trial, experiment: str, owner: Owner | None, links: Links) -> TrialFacts:
    key = newest_key(TrialKey(experiment=experiment, trial=trial.trial), trial)
    return TrialFacts(
        trial=trial.trial,
        status=str(trial.status),
        reason=trial.reason,
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
    wasted = sum(each.wasted_steps for each in trials)
    return Cost(
        trained_seconds=trained,
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
    )


def _at(iso: str) -> str:
    """To the second."""
    return iso[:19] + iso[-6:] if len(iso) > 25 else iso
