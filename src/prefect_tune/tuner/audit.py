"""Audit an experiment: derive each proposal and decision of its journal again, and report the first difference.

Before the audit applies an event to the state, it derives from this state the event that the search had to write, with
the functions of a running search. Afterwards it records the event in a `SearchPolicy`, as a running search does. So the
audit's policy gets all results in the order in which the search got them, and is in the same state at each event.
At each new owner, the audit creates a new policy and replays the journal to the policy, as that owner did.

    state before ──► derive(event): expected, underivable or None ──► state after ──► record(event)
The audit imports no code that a journal names. When it derives an event, its policy has received only earlier events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.display_text import shorten
from prefect_tune.core.errors import BadMetric, InvalidInput, UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment, apply_entry, apply_event, make_empty_experiment
from prefect_tune.core.experiment.failure_policy import end_reason_after_error
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import iter_entries
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCloned,
    CheckpointsAdopted,
    DecisionMade,
    DeletionStarted,
    Entry,
    Event,
    ExperimentConfigured,
    ExperimentForked,
    FinishKind,
    FormAnswered,
    OwnerChanged,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialEvent,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
    WarmStart,
    Writer,
)
from prefect_tune.core.reasons import AnyReason, get_reason_code
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.core.search.base import Exhausted, Proposed, Search, SearchState, Space, Suggestion
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.values import StepReport, canonical_json
from prefect_tune.parameters.argument_checks import parse_scheduler
from prefect_tune.parameters.plan_checks import with_default_samples
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, StoredForm, list_unstored_options
from prefect_tune.trust import find_code_choices
from prefect_tune.tuner.run_search import deduplicate_prior_trials, make_search_policy
from prefect_tune.tuner.search_policy import SearchPolicy, format_trial_id, make_finish_event, pending_decision

_TIMEOUT = timedelta(minutes=30)
_MAX_EVENT_LENGTH = 400


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first proposal or decision in which the journal and the audit differ."""

    entry: int
    """The number of the entry in the experiment's journal."""
    trial: str | None
    """The trial's id; None for a decision about the whole search."""
    expected: str
    """The decision that the search had to make."""
    found: str
    """The decision that the journal holds."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: numbers of events, and the first difference."""

    experiment: str
    """The experiment's name."""
    entry_count: int
    """The number of entries read: all entries, or the entries up to the difference."""
    derived: Mapping[str, int]
    """The number of proposals and decisions for which the audit derived what the journal holds, by event type."""
    not_derived: Mapping[str, int]
    """The number of decisions that cannot be derived, by reason."""
    observed: Mapping[str, int]
    """The number of other events, such as reports, by event type."""
    difference: AuditDifference | None = None
    """The first difference, at which the audit ended; None if there is none."""

    @property
    def summary(self) -> str:
        """The result in one line: `412 of 412 proposals and decisions derived again`, or the difference."""
        if (difference := self.difference) is not None:
            location = f"entry {difference.entry}" + (f", trial {difference.trial}" if difference.trial else "")
            return f"{location}: expected {difference.expected}; found {difference.found}"
        derived = sum(self.derived.values())
        total = derived + sum(self.not_derived.values())
        return f"{derived:,} of {total:,} proposals and decisions derived again"


def audit(
    experiment: str,
    *,
    target: StorageTarget | str,
    space: object = None,
    search: object = None,
    scheduler: object = None,
    stop: object = None,
) -> AuditReport:
    """Derive each proposal and decision of an experiment again from its journal, and compare them with the journal.

    The audit writes nothing, and reads one object after the other. It does not import the code that the journal names.
    If the journal does not hold a component, such as your own search, pass it, so that its decisions are derived, too.

    ```python
    report = pt.audit("digits", target="runs")
    ```

    Args:
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        space: the space, if the journal does not hold it, or if it contains functions.
        search: the search, if the journal does not hold it, or if it is an `OptunaSearch`.
        scheduler: the scheduler, if the journal does not hold it.
        stop: the stop criterion, if the journal does not hold it, or if it contains functions.

    Returns:
        AuditReport: what was derived, what was not, and the first difference.

    Raises:
        InvalidInput: there is no such experiment, or a parameter is invalid.
        JournalCorrupt: an entry is missing or altered, or its events cannot follow the earlier ones.
        UnknownVersion: a newer prefect-tune wrote an entry.
        StoreUnavailable: the target did not answer.
    """
    storage = resolve_existing(target)
    auditor = _Auditor(storage, {"space": space, "search": search, "scheduler": scheduler, "stop": stop})
    derived, not_derived, observed = Counter[str](), Counter[str](), Counter[str]()

    def compare_and_apply(before: Experiment, event: Event, number: int, writer: Writer) -> Experiment:
        match auditor.derive(before, event):
            case None:
                observed[event.type] += 1
            case _Underivable(reason=reason):
                not_derived[reason] += 1
            case _Expectation(events=events) if any(_are_equivalent(event, candidate) for candidate in events):
                derived[event.type] += 1
            case _Expectation(events=events, instead=instead):
                expected = " or ".join(_format_event(candidate, event) for candidate in events) or instead
                trial, journaled = getattr(event, "trial", None), _format_event(event, *events[:1])
                raise _DifferenceFoundError(AuditDifference(number, trial, expected, journaled))
        after = apply_event(before, event, number, writer)
        auditor.record(before, event, after)
        return after

    difference, number = None, 0
    with storage.open(timeout=_TIMEOUT) as store:
        state = make_empty_experiment(find_current_journal(store, experiment))
        try:
            for entry, digest in iter_entries(store, state.key):
                number = entry.number
                auditor.begin_entry(entry)
                state = apply_entry(state, entry, digest, compare_and_apply)
        except _DifferenceFoundError as error:
            difference = error.difference
        if not number:
            raise InvalidInput(no_experiment_message(store, experiment, storage.uri))
    return AuditReport(state.name, number, dict(derived), dict(not_derived), dict(observed), difference)


class _DifferenceFoundError(Exception):
    """Ends the audit at the first difference."""

    def __init__(self, difference: AuditDifference) -> None:
        super().__init__(difference)
        self.difference = difference


# What the audit derives for an event of the journal.


@dataclass(frozen=True, slots=True)
class _Expectation:
    """The search had to write one of these events."""

    events: Sequence[Event]
    instead: str = ""
    """What the search had to do instead, if it had to write no event."""


@dataclass(frozen=True, slots=True)
class _Underivable:
    """The event is a decision that cannot be derived."""

    reason: str


_Derived: TypeAlias = _Expectation | _Underivable | None
"""None: the event is not a decision, but for example a report, the end of an attempt, or a request of the user."""


# The plan of each owner, made from the settings in the journal and the arguments of `audit`.


class _UnknownSearch(Search):
    """Takes the place of an unknown search; proposes nothing."""

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        del space, objective, seed
        return _UnknownSearchState()


class _UnknownSearchState(SearchState):
    def suggest(self, number: int) -> Suggestion:
        del number
        return Exhausted(reason="unknown")

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        del number, config


@dataclass(frozen=True, slots=True)
class _AuditPlan:
    """The known parameters on which an owner's decisions depend."""

    plan: SearchPlan
    """The plan without the trainable, callbacks and locations, on which no decision depends."""
    unknown: Mapping[str, str]
    """By name (`space`, `search`, `scheduler`, `stop`): why the parameter is unknown, and how to pass it."""

    @property
    def policy_settings(self) -> Sequence[object]:
        """The parameters on which a policy depends."""
        plan = self.plan
        return plan.space, plan.search, plan.num_samples, plan.scheduler, plan.stop, plan.metric, plan.mode, plan.seed


def _make_audit_plan(target: StorageTarget, state: Experiment, passed: Mapping[str, object]) -> _AuditPlan:
    """Return the plan of the owner of `state`; do not import the code that the journal names.

    A value in `passed` is used only if the audit cannot restore that parameter from the journal alone.

    Raises:
        InvalidInput: the settings or the arguments are invalid.
    """
    settings = state.settings
    values = {
        name: value for name, value in settings.items() if name in OPTIONS and OPTIONS[name].stored is StoredForm.DATA
    }
    unknown: dict[str, str] = {}
    for name in PASSABLE_PARAMETERS:
        values.pop(name, None)
        if (reason := _unknown_parameter_reason(name, settings)) is None:
            values |= {name: settings[name]} if name in settings else {}
        elif passed.get(name) is not None:
            values[name] = passed[name]
        else:
            unknown[name] = f"{name}: {reason}; pass it: {name}=..., or --{name} MODULE:NAME"
    if unknown.keys() & {"space", "search"}:
        unknown["search"] = unknown.get("search", unknown.get("space", ""))
        values["search"] = _UnknownSearch()
        values.pop("num_samples", None)
    plan = SearchPlan(trainable=_raise_on_training, target=target, experiment=state.name, **values)
    return _AuditPlan(plan if "search" in unknown else with_default_samples(plan, state), unknown)


PASSABLE_PARAMETERS = ("space", "search", "scheduler", "stop")
"""The parameters that the caller of `audit` can pass."""


def _raise_on_training(config: Mapping[str, object]) -> None:
    raise AssertionError(f"an audit trains nothing, but its trainable was called with {config}")


def _unknown_parameter_reason(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return why the audit cannot restore a parameter from the settings alone; None if it can."""
    if name in list_unstored_options(settings):
        return "it was passed as an object, which the journal does not hold"
    stored = settings.get(name)
    if stored is None:
        return None
    if name == "search":
        is_optuna = "OptunaSearch" in (stored if isinstance(stored, Mapping) else [stored])
        return "Optuna's proposals depend on its version" if is_optuna else None
    if name == "scheduler":
        try:
            parse_scheduler(stored)
        except UnsafePayload:
            return "it names code, which an audit does not import"
        return None
    return "it names code, which an audit does not import" if find_code_choices({name: stored}) else None


# The events.

_NON_DECISION_EVENTS = (
    OwnerChanged | CheckpointsAdopted | ExperimentConfigured | FormAnswered | ExperimentForked | DeletionStarted
)


class _Auditor:
    """Derives each event again, from the policy and the trials' last reports; both are updated with each event."""

    def __init__(self, target: StorageTarget, passed: Mapping[str, object]) -> None:
        self._target = target
        self._passed = passed
        self._plans: dict[int, _AuditPlan] = {}  # by term
        self._policy: SearchPolicy | None = None
        self._warm_starts: list[WarmStart] = []
        self._reports: dict[str, StepReport] = {}  # by trial: the last journaled report of the present attempt
        self._decisions: dict[str, tuple[int, StepReport]] = {}  # by trial: milestone and report of the last decision
        self._is_fork_entry = False
        self._preceding_error: TrialErrored | None = None  # the preceding event, if it is a `TrialErrored`
        self._search_end_reason: AnyReason | None = None  # why the stoppers end the search, as of the last entry

    def begin_entry(self, entry: Entry) -> None:
        """Begin the next entry. The events of an entry that completes a fork are copies, so they are not derived."""
        forks = (event for event in entry.events if isinstance(event, ExperimentForked))
        self._is_fork_entry = any(event.trials is not None for event in forks)
        self._search_end_reason = self._policy.end_reason() if self._policy else None

    def derive(self, before: Experiment, event: Event) -> _Derived:
        """Return what `event` had to be in the state `before`."""
        if self._is_fork_entry or isinstance(event, _NON_DECISION_EVENTS):
            return None
        if self._policy is None and before.term in self._plans:  # a new owner
            self._policy = make_search_policy(self._plans[before.term].plan)
            self._policy.add_prior_trials(deduplicate_prior_trials(self._warm_starts))
            self._policy.replay(before)
            self._search_end_reason = self._policy.end_reason()
        if (policy := self._policy) is None:
            return None  # this is a single training, which decides nothing
        if isinstance(event, TrialAdded):
            return self._expect_added_trial(before, policy, event)
        if isinstance(event, StopRequested):
            return self._expect_search_stop(before, policy, event)
        trial = before.trials.get(str(getattr(event, "trial", "")))  # without a trial, `apply_event` raises
        plan = self._plans[before.term]
        match event:
            case DecisionMade() if trial is not None:
                return self._expect_decision(policy, trial, event, plan)
            case StepReported() if trial is not None:
                return self._expect_report(policy, trial, event, plan)
            case TrialResumed() if trial is not None:
                return self._expect_resume(policy, trial, event, plan)
            case CheckpointCloned() if trial is not None:
                return _expect_clone(trial, event)
            case TrialFinished() if trial is not None and trial.phase is not Phase.RUNNING:
                return self._expect_finish(before, policy, trial, plan)
            case AttemptStarted() | AttemptEnded() | TrialPaused() | TrialFinished() | TrialErrored():
                self._reports.pop(event.trial, None)
                self._decisions.pop(event.trial, None)
            case _:
                pass
        return None

    def record(self, before: Experiment, event: Event, after: Experiment) -> None:
        """Record an applied event, as a running search records the events that it writes."""
        self._preceding_error = event if isinstance(event, TrialErrored) else None
        if isinstance(event, OwnerChanged | ExperimentConfigured) and after.settings:
            plan, old_plan = _make_audit_plan(self._target, after, self._passed), self._plans.get(after.term)
            if old_plan is None or plan.policy_settings != old_plan.policy_settings:
                self._policy = None
            self._plans[after.term] = plan
        if isinstance(event, OwnerChanged) or self._is_fork_entry:
            self._policy = None
        if isinstance(event, ExperimentConfigured):
            self._warm_starts += event.warm_starts
        if self._policy is None:
            return
        if after.policy_event_count > before.policy_event_count and not isinstance(event, ExperimentConfigured):
            trial = after.trial(str(getattr(event, "trial", "")))
            for past_event in trial.policy_events[before.policy_event_count - after.policy_event_count :]:
                self._policy.record(trial, past_event)
        if isinstance(event, TrialRequeued):
            self._search_end_reason = self._policy.end_reason()  # the error of a requeued trial no longer counts
        if isinstance(event, TrialEvent):
            self._policy.record_training_time(event.trial, after.trial(event.trial).trained_seconds)

    def _expect_added_trial(self, before: Experiment, policy: SearchPolicy, event: TrialAdded) -> _Derived:
        if reason := before.stop_reason or self._search_end_reason:
            return _Expectation((), f"no new trial, because the search ends: {reason}")
        if (paused := policy.schedule.next_trial_to_resume()) is not None:
            return _Expectation([TrialResumed(trial=paused)])
        if policy.schedule.is_waiting():
            return _Expectation((), "no new trial yet: the scheduler waits for other trials")
        name = format_trial_id(policy.proposed_count)
        if unknown := self._plans[before.term].unknown.get("search"):
            renamed = event.model_copy(update={"trial": name})
            return _Underivable(unknown) if event.trial == name else _Expectation([renamed])
        match policy.suggest():
            case Proposed(config=config):
                return _Expectation([event.model_copy(update={"trial": name, "config": config})])
            case Exhausted(reason=reason):
                return _Expectation((), f"no further trial: {reason}")
            case _:
                return _Expectation((), "no new trial yet: the search waits for other trials to end")

    def _expect_decision(self, policy: SearchPolicy, trial: Trial, event: DecisionMade, plan: _AuditPlan) -> _Derived:
        milestone = step = event.report.step
        last = self._reports.get(trial.id)
        if self._are_milestones_known(trial, plan):
            due_step = policy.next_milestone(trial)
            if pending_decision(trial) is not None or due_step is None or step < due_step:
                return _Expectation((), f"no decision at step {step}: {_describe_next_decision(trial, due_step)}")
            if last is not None and due_step <= last.step < step:
                return _Expectation((), f"a decision at step {last.step}")
            milestone = due_step
        if last is not None and last.step == step:
            expected = event.model_copy(update={"report": last})
            if not _are_equivalent(event, expected):
                return _Expectation([expected])
        self._decisions[trial.id] = (milestone, event.report)
        try:
            decision = policy.decide(trial, event.report)
        except BadMetric as error:
            return _Expectation((), f"no decision: {error}")
        unknown = plan.unknown.get("scheduler")
        return _Underivable(unknown) if unknown else _Expectation([event.model_copy(update={"decision": decision})])

    def _are_milestones_known(self, trial: Trial, plan: _AuditPlan) -> bool:
        """Return whether this plan's scheduler is known and has set the attempt's milestones."""
        is_ours = trial.outbox is None or self._plans.get(trial.launch_term) is plan
        return is_ours and "scheduler" not in plan.unknown

    def _expect_report(self, policy: SearchPolicy, trial: Trial, event: StepReported, plan: _AuditPlan) -> _Derived:
        """Return what the search had to write instead of this report, such as a decision; None if the report fits."""
        step = event.report.step
        last, self._reports[trial.id] = self._reports.get(trial.id), event.report
        milestone, decided_report = self._decisions.get(trial.id, (step, None))
        if decided_report is not None and decided_report.step == step:
            expected = event.model_copy(update={"report": decided_report})
            return None if _are_equivalent(event, expected) else _Expectation([expected])
        if not self._are_milestones_known(trial, plan):
            return None
        if decided_report is not None and milestone <= step < decided_report.step:
            return _Expectation((), f"a decision at step {step}")
        due_step = policy.next_milestone(trial)
        if due_step is None or last is None or last.step < due_step:
            return None
        return _Expectation((), f"no further step: {_describe_next_decision(trial, due_step)}")

    def _expect_resume(self, policy: SearchPolicy, trial: Trial, event: TrialResumed, plan: _AuditPlan) -> _Derived:
        if unknown_reason := plan.unknown.get("scheduler"):
            return _Underivable(unknown_reason)
        if policy.resumes_without_scheduler(trial) or policy.schedule.next_trial_to_resume() == trial.id:
            return _Expectation([event])
        _signal_if_no_new_trial(policy, plan)
        paused_trial = policy.schedule.next_trial_to_resume()
        return _Expectation([TrialResumed(trial=paused_trial)] if paused_trial else (), "no trial to resume")

    def _expect_finish(self, before: Experiment, policy: SearchPolicy, trial: Trial, plan: _AuditPlan) -> _Derived:
        """Return the end that the search had to write for a trial that is not running, such as a paused trial."""
        decision, stop_reason = pending_decision(trial), before.pending_stops.get(trial.id)
        stop = decision.decision if decision is not None else None
        finishes = [make_finish_event(trial.id, stop)] if isinstance(stop, Stop) else []
        if stop_reason is not None:
            finishes.append(TrialFinished(trial=trial.id, reason=stop_reason, kind=FinishKind.STOPPED))
        if finishes:
            return _Expectation(finishes)
        if unknown_reason := plan.unknown.get("scheduler"):
            return _Underivable(unknown_reason)
        if policy.schedule.next_trial_to_stop() is None:
            _signal_if_no_new_trial(policy, plan)
        if (trial_and_stop := policy.schedule.next_trial_to_stop()) is None:
            return _Expectation((), "this trial does not end here")
        return _Expectation([make_finish_event(*trial_and_stop)])

    def _expect_search_stop(self, before: Experiment, policy: SearchPolicy, event: StopRequested) -> _Derived:
        if event.request is not None or event.trial is not None:
            return None
        plan = self._plans[before.term]
        reason: AnyReason | None = None
        if self._preceding_error is not None:
            errored_trial, trials = before.trial(self._preceding_error.trial), before.trials.values()
            reason = end_reason_after_error(errored_trial, trials, fail_fast=plan.plan.fail_fast)
        reason = reason or policy.end_reason()
        if reason is None or get_reason_code(event.reason) in ("stopped-on-resume", "time-budget"):
            return _Underivable(plan.unknown.get("stop", _NOT_RECORDED))
        return _Expectation([event.model_copy(update={"reason": reason})])


_NOT_RECORDED = "a clock, a missing metric or the user's choice ended the search; the journal does not say which one"


def _are_equivalent(event: Event, other: Event) -> bool:
    """Return whether two events have the same JSON, apart from a reason that is text, which the user's code wrote."""
    return event == other or canonical_json(_comparable_fields(event)) == canonical_json(_comparable_fields(other))


def _comparable_fields(event: Event) -> Mapping[str, object]:
    fields = event.model_dump()
    for holder in (fields, fields.get("decision")):
        if isinstance(holder, dict) and isinstance(holder.get("reason"), str):
            holder["reason"] = ""
    return fields


def _expect_clone(trial: Trial, event: CheckpointCloned) -> _Derived:
    """Return the clone that the exploit requires: of the source's checkpoint or, if `event` says so, the trial's own.

    Return None if a user restarted the trial from one of its own checkpoints, with an unchanged configuration.
    """
    if event.source == trial.id and event.config is None:
        return None
    if (exploit := trial.pending_exploit) is None:
        return _Expectation((), "no clone: the scheduler decided no exploit for this trial")
    source = trial.id if event.source == trial.id else exploit.source
    expected_values = {"source": source, "config": exploit.config, "reason": exploit.reason}
    return _Expectation([event.model_copy(update=expected_values)])


def _signal_if_no_new_trial(policy: SearchPolicy, plan: _AuditPlan) -> None:
    """Tell the schedule that there is no new trial, if the search proposes none, or if the search is unknown."""
    if "search" in plan.unknown or not isinstance(policy.suggest(), Proposed):
        policy.schedule.on_no_new_trial()


def _describe_next_decision(trial: Trial, milestone: int | None) -> str:
    if pending_decision(trial) is not None:
        return f"the decision at step {milestone} has no effect yet"
    return "the scheduler makes no further decision" if milestone is None else f"a decision is due at step {milestone}"


def _format_event(event: Event, *others: Event) -> str:
    """Return the event's type, and the values that differ from the first event of the same type in `others`."""
    reference = next((candidate.model_dump(mode="json") for candidate in others if candidate.type == event.type), {})
    omitted_fields = set() if reference else {"report", "fingerprint", "proposed_by_search"}
    fields = event.model_dump(mode="json", exclude={"type", *omitted_fields})
    shown_fields = {name: value for name, value in fields.items() if not reference or value != reference.get(name)}
    values = ", ".join(f"{name} {json.dumps(value)}" for name, value in shown_fields.items() if reference or value)
    text = f"{event.type}: {values}" if values else event.type
    return shorten(text, _MAX_EVENT_LENGTH)
