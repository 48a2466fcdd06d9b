"""Audit an experiment: derive each proposal and decision of its journal again, and name the first one that differs.

Before each event is applied, the functions that a running search calls are asked what the search had to write in that
state. After it, the event is recorded by a `SearchPolicy`, as a running search records what it puts into an entry: both
are in the same state at each event, in the order in which the results arrived. A new owner begins a new policy and
replays the journal to it; so does the audit.

    state before ──► finding(event): expected, unknown or None ──► state after ──► record(event)
Never: a policy that reads more of the journal than the search had written; code that only the journal names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import BadMetric, InvalidInput, UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment, after_event, apply, nothing_yet
from prefect_tune.core.experiment.failure_policy import errors_end_reason
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import each_entry
from prefect_tune.core.journal_events import (
    Adopted,
    Answered,
    AttemptEnded,
    Cloned,
    Configured,
    Decided,
    Deletion,
    Entry,
    Event,
    Finished,
    FinishKind,
    Forked,
    GaveUp,
    Opened,
    Paused,
    Reported,
    Requeued,
    Resumed,
    Started,
    StopAsked,
    TrialAdded,
    TrialEvent,
    WarmStart,
    Writer,
)
from prefect_tune.core.reasons import AnyReason, code_of
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Search, Space, Suggestion
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import shorten
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.values import StepReport, canonical_json
from prefect_tune.parameters.argument_checks import scheduler_from
from prefect_tune.parameters.plan_checks import with_default_samples
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, Stored, only_in_code
from prefect_tune.trust import code_choices
from prefect_tune.tuner.run_search import policy_of, prior_trials_of
from prefect_tune.tuner.search_policy import SearchPolicy, finish_of, open_decision, trial_id

_TIMEOUT = timedelta(minutes=30)
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first proposal or decision of a journal that differs from the one derived."""

    entry: int
    """The number of its entry in the experiment's journal."""
    trial: str | None
    """Its trial; None if it is of the whole search."""
    expected: str
    """What the search had to decide."""
    found: str
    """What the journal holds."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: how many events of the journal were derived again, by the type of the event."""

    experiment: str
    """Its name."""
    entry_count: int
    """The entries read: all of them, or those up to the difference."""
    derived: Mapping[str, int]
    """Proposals and decisions that were derived again, and are the same."""
    not_derived: Mapping[str, int]
    """Decisions that cannot be derived, by the reason."""
    observed: Mapping[str, int]
    """Events that are no decisions, such as reports: they are the input of the decisions."""
    difference: AuditDifference | None = None
    """The first difference, at which the audit ended; None if there is none."""

    @property
    def summary(self) -> str:
        """The result in one line: `412 of 412 proposals and decisions derived again`, or the difference."""
        if (found := self.difference) is not None:
            where = f"entry {found.entry}" + (f", trial {found.trial}" if found.trial else "")
            return f"{where}: expected {found.expected}; found {found.found}"
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

    It only reads, from one object after the other, and imports nothing that only the journal names. What the journal
    does not hold, such as a search of your own, is not derived unless it is passed here; all else is.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        space: the space, where the journal names functions in it, or does not hold it.
        search: the search, where the journal does not hold it, or it is one of Optuna's.
        scheduler: the scheduler, where the journal does not hold it.
        stop: the stop criterion, where the journal names functions in it, or does not hold it.

    Returns:
        AuditReport: what was derived, what was not, and the first difference.

    Raises:
        InvalidInput: there is no such experiment, or a parameter is invalid.
        JournalCorrupt: an entry is missing or altered, or its events are impossible after the ones before.
        UnknownVersion: a newer prefect-tune wrote an entry.
        StoreUnavailable: the target did not answer.
    """
    place = resolve_existing(target)
    derivation = _Derivation(place, {"space": space, "search": search, "scheduler": scheduler, "stop": stop})
    derived, not_derived, observed = Counter[str](), Counter[str](), Counter[str]()

    def compare(before: Experiment, event: Event, number: int, writer: Writer) -> Experiment:
        match derivation.finding(before, event):
            case None:
                observed[event.type] += 1
            case _Unknown(why=why):
                not_derived[why] += 1
            case _Expected(events=events) if any(is_same(event, each) for each in events):
                derived[event.type] += 1
            case _Expected(events=events, otherwise=otherwise):
                expected = " or ".join(_shown(each, event) for each in events) or otherwise
                trial, found = getattr(event, "trial", None), _shown(event, *events[:1])
                raise _DiffersError(AuditDifference(number, trial, expected, found))
        after = after_event(before, event, number, writer)
        derivation.record(before, event, after)
        return after

    difference, number = None, 0
    with place.open(timeout=_TIMEOUT) as store:
        state = nothing_yet(current_journal(store, experiment))
        try:
            for entry, digest in each_entry(store, state.key):
                number = entry.number
                derivation.begin(entry)
                state = apply(state, entry, digest, compare)
        except _DiffersError as differs:
            difference = differs.difference
        if not number:
            raise InvalidInput(no_experiment(store, experiment, place.uri))
    return AuditReport(state.name, number, dict(derived), dict(not_derived), dict(observed), difference)


class _DiffersError(Exception):
    """The audit ends here."""

    def __init__(self, difference: AuditDifference) -> None:
        super().__init__(difference)
        self.difference = difference


# What an event of the journal is to an audit.


@dataclass(frozen=True, slots=True)
class _Expected:
    """The search had to write one of these events."""

    events: Sequence[Event]
    otherwise: str = ""
    """What it had to do if there is none."""


@dataclass(frozen=True, slots=True)
class _Unknown:
    """It is a decision that cannot be derived."""

    why: str


_Finding: TypeAlias = _Expected | _Unknown | None
"""None: it is no decision, but a report, the end of an attempt, a takeover, a person's request."""


# The plan of each owner, from the settings in the journal and what the auditor passes.


class _NoSearch(Search):
    """Stands for a search that is not known: it proposes nothing."""

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        del space, objective, seed
        return _NoProposals()


class _NoProposals(Proposals):
    def suggest(self, number: int) -> Suggestion:
        del number
        return Exhausted(reason="unknown")

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        del number, config


@dataclass(frozen=True, slots=True)
class _AuditPlan:
    """The parameters that an owner's decisions followed, as far as they are known."""

    plan: SearchPlan
    """Without a trainable, callbacks and places: they decide nothing."""
    unknown: Mapping[str, str]
    """Why a parameter is not known, and how to pass it, by its name: `space`, `search`, `scheduler` or `stop`."""

    @property
    def policy_settings(self) -> Sequence[object]:
        """What a policy depends on."""
        plan = self.plan
        return plan.space, plan.search, plan.num_samples, plan.scheduler, plan.stop, plan.metric, plan.mode, plan.seed


def _audit_plan(target: StorageTarget, state: Experiment, given: Mapping[str, object]) -> _AuditPlan:
    """Return the plan of the owner of `state`; nothing that only the journal names is imported.

    Args:
        target: where the experiment is stored.
        state: the experiment after the event that holds its settings.
        given: what the auditor passes, by its name: a `space`, `search`, `scheduler` or `stop`. Each is used where the
            journal holds none, or names code in it.

    Raises:
        InvalidInput: the settings, or what is given, are invalid.
    """
    settings = state.settings
    values = {
        name: value for name, value in settings.items() if name in OPTIONS and OPTIONS[name].stored is Stored.DATA
    }
    unknown: dict[str, str] = {}
    for name in PASSED:
        values.pop(name, None)
        if not (why := _why_unknown(name, settings)):
            values |= {name: settings[name]} if name in settings else {}
        elif given.get(name) is not None:
            values[name] = given[name]
        else:
            unknown[name] = f"{name}: {why}; pass it: {name}=..., or --{name} MODULE:NAME"
    if unknown.keys() & {"space", "search"}:
        unknown["search"] = unknown.get("search", unknown.get("space", ""))
        values["search"] = _NoSearch()
        values.pop("num_samples", None)
    plan = SearchPlan(trainable=_no_training, target=target, experiment=state.name, **values)
    return _AuditPlan(plan if "search" in unknown else with_default_samples(plan, state), unknown)


PASSED = ("space", "search", "scheduler", "stop")
"""The parameters that an auditor can pass."""


def _no_training(config: Mapping[str, object]) -> None:
    raise AssertionError(f"an audit trains nothing, such as {config}")


def _why_unknown(name: str, settings: Mapping[str, Any]) -> str:
    """Return why a parameter cannot be made from the settings alone; empty if it can."""
    if name in only_in_code(settings):
        return "it was passed as an object, which the journal does not hold"
    stored = settings.get(name)
    if stored is None:
        return ""
    if name == "search":
        is_optuna = "OptunaSearch" in (stored if isinstance(stored, Mapping) else [stored])
        return "Optuna's proposals depend on its version" * is_optuna
    if name == "scheduler":
        try:
            scheduler_from(stored)
        except UnsafePayload:
            return "the journal names code in it"
        return ""
    return "the journal names code in it" * bool(code_choices({name: stored}))


# The events.

_OF_AN_OPENING = Opened | Adopted | Configured | Answered | Forked | Deletion


class _Derivation:
    """The state of an audit: the search's policy after each event, and the last report of each trial."""

    def __init__(self, target: StorageTarget, given: Mapping[str, object]) -> None:
        self._target = target
        self._given = given
        self._plans: dict[int, _AuditPlan] = {}  # by term
        self._policy: SearchPolicy | None = None
        self._warm_starts: list[WarmStart] = []
        self._reports: dict[str, StepReport] = {}  # by trial: the last report that its present attempt has journaled
        self._decisions: dict[str, tuple[int, StepReport]] = {}  # by trial: the last milestone, the report that met it
        self._is_copy = False
        self._gave_up: GaveUp | None = None  # the last event, if it is one
        self._must_end: AnyReason | None = None  # why the stoppers end the search, as of the last entry

    def begin(self, entry: Entry) -> None:
        """Take note of the next entry. The one that completes a fork copies the decisions of its origin."""
        self._is_copy = any(isinstance(event, Forked) and event.trials is not None for event in entry.events)
        self._must_end = self._policy.why_end() if self._policy else None

    def finding(self, before: Experiment, event: Event) -> _Finding:
        """Return what `event` had to be, by the state before it."""
        if self._is_copy or isinstance(event, _OF_AN_OPENING):
            return None
        if self._policy is None and before.term in self._plans:  # a new owner
            self._policy = policy_of(self._plans[before.term].plan)
            self._policy.warm_start(prior_trials_of(self._warm_starts))
            self._policy.replay(before)
            self._must_end = self._policy.why_end()
        return self._finding(before, event)

    def record(self, before: Experiment, event: Event, now: Experiment) -> None:
        """Record an event after it was applied, as a running search records what it writes."""
        self._gave_up = event if isinstance(event, GaveUp) else None
        if isinstance(event, Opened | Configured) and now.settings:
            plan, earlier = _audit_plan(self._target, now, self._given), self._plans.get(now.term)
            if earlier is None or plan.policy_settings != earlier.policy_settings:
                self._policy = None
            self._plans[now.term] = plan
        if isinstance(event, Opened) or self._is_copy:
            self._policy = None
        if isinstance(event, Configured):
            self._warm_starts += event.warm_starts
        if self._policy is None:
            return
        if now.past_count > before.past_count and not isinstance(event, Configured):
            trial = now.trial(str(getattr(event, "trial", "")))
            for past_event in trial.past[before.past_count - now.past_count :]:
                self._policy.record(trial, past_event)
        if isinstance(event, Requeued):
            self._must_end = self._policy.why_end()  # an errored trial that is begun again counts no more
        if isinstance(event, TrialEvent):
            self._policy.note_training(event.trial, now.trial(event.trial).trained_seconds)

    def _finding(self, before: Experiment, event: Event) -> _Finding:
        if (policy := self._policy) is None:
            return None  # a single training decides nothing
        if isinstance(event, TrialAdded):
            return self._added(before, policy, event)
        if isinstance(event, StopAsked):
            return self._stopped(before, policy, event)
        trial = before.trials.get(str(getattr(event, "trial", "")))  # without one it cannot be applied, and is damage
        plan = self._plans[before.term]
        match event:
            case Decided() if trial is not None:
                return self._decided(policy, trial, event, plan)
            case Reported() if trial is not None:
                return self._reported(policy, trial, event, plan)
            case Resumed() if trial is not None:
                return self._resumed(policy, trial, event, plan)
            case Cloned() if trial is not None:
                return _clone_of(trial, event)
            case Finished() if trial is not None and trial.phase is not Phase.RUNNING:
                return self._finished(before, policy, trial, plan)
            case Started() | AttemptEnded() | Paused() | Finished() | GaveUp():
                self._reports.pop(event.trial, None)
                self._decisions.pop(event.trial, None)
            case _:
                pass
        return None

    def _added(self, before: Experiment, policy: SearchPolicy, event: TrialAdded) -> _Finding:
        if why := before.ends or self._must_end:
            return _Expected((), f"no new trial: the search ends, {why}")
        if (paused := policy.schedule.resume_next()) is not None:
            return _Expected([Resumed(trial=paused)])
        if policy.schedule.is_waiting():
            return _Expected((), "no new trial yet: the scheduler waits for others")
        name = trial_id(policy.proposed)
        if unknown := self._plans[before.term].unknown.get("search"):
            return _Unknown(unknown) if event.trial == name else _Expected([event.model_copy(update={"trial": name})])
        match policy.suggest():
            case Proposed(config=config):
                return _Expected([event.model_copy(update={"trial": name, "config": config})])
            case Exhausted(reason=reason):
                return _Expected((), f"no further trial: {reason}")
            case _:
                return _Expected((), "no new trial yet: the search waits for others to end")

    def _decided(self, policy: SearchPolicy, trial: Trial, event: Decided, plan: _AuditPlan) -> _Finding:
        milestone = step = event.report.step
        last = self._reports.get(trial.trial)
        if self._follows_milestones(trial, plan):
            due_at = policy.milestone(trial)
            if open_decision(trial) is not None or due_at is None or step < due_at:
                return _Expected((), f"no decision at step {step}: {_next_decision(trial, due_at)}")
            if last is not None and due_at <= last.step < step:
                return _Expected((), f"a decision at step {last.step}")
            milestone = due_at
        if last is not None and last.step == step:
            expected = event.model_copy(update={"report": last})
            if not is_same(event, expected):
                return _Expected([expected])
        self._decisions[trial.trial] = (milestone, event.report)
        try:
            decision = policy.decide(trial, event.report)
        except BadMetric as error:
            return _Expected((), f"no decision: {error}")
        unknown = plan.unknown.get("scheduler")
        return _Unknown(unknown) if unknown else _Expected([event.model_copy(update={"decision": decision})])

    def _follows_milestones(self, trial: Trial, plan: _AuditPlan) -> bool:
        """Whether the trial's attempt got its milestones from this owner's scheduler, which is known."""
        is_ours = trial.outbox is None or self._plans.get(trial.search_term) is plan
        return is_ours and "scheduler" not in plan.unknown

    def _reported(self, policy: SearchPolicy, trial: Trial, event: Reported, plan: _AuditPlan) -> _Finding:
        """Return the decision that is missing if the attempt has passed a milestone without one."""
        step = event.report.step
        last, self._reports[trial.trial] = self._reports.get(trial.trial), event.report
        milestone, decided = self._decisions.get(trial.trial, (step, None))
        if decided is not None and decided.step == step:
            expected = event.model_copy(update={"report": decided})
            return None if is_same(event, expected) else _Expected([expected])
        if not self._follows_milestones(trial, plan):
            return None
        if decided is not None and milestone <= step < decided.step:
            return _Expected((), f"a decision at step {step}")
        due_at = policy.milestone(trial)
        if due_at is None or last is None or last.step < due_at:
            return None
        return _Expected((), f"no further step: {_next_decision(trial, due_at)}")

    def _resumed(self, policy: SearchPolicy, trial: Trial, event: Resumed, plan: _AuditPlan) -> _Finding:
        if unknown := plan.unknown.get("scheduler"):
            return _Unknown(unknown)
        if policy.is_to_resume(trial) or policy.schedule.resume_next() == trial.trial:
            return _Expected([event])
        _conclude_proposals(policy, plan)
        paused = policy.schedule.resume_next()
        return _Expected([Resumed(trial=paused)] if paused else (), "no paused trial to be resumed")

    def _finished(self, before: Experiment, policy: SearchPolicy, trial: Trial, plan: _AuditPlan) -> _Finding:
        """Return the end of a trial that has no attempt: by a decision, a request, or since it is paused in vain."""
        if ends := _early_ends(before, trial):
            return _Expected(ends)
        if unknown := plan.unknown.get("scheduler"):
            return _Unknown(unknown)
        if policy.schedule.stop_next() is None:
            _conclude_proposals(policy, plan)
        if (stopped := policy.schedule.stop_next()) is None:
            return _Expected((), "no end of this trial")
        return _Expected([finish_of(*stopped)])

    def _stopped(self, before: Experiment, policy: SearchPolicy, event: StopAsked) -> _Finding:
        if event.request is not None or event.trial is not None:
            return None
        plan = self._plans[before.term]
        why: AnyReason | None = None
        if self._gave_up is not None:
            gave_up, trials = before.trial(self._gave_up.trial), before.trials.values()
            why = errors_end_reason(gave_up, trials, fail_fast=plan.plan.fail_fast)
        why = why or policy.why_end()
        if why is None or code_of(event.reason) in ("stopped-on-resume", "time-budget"):
            return _Unknown(plan.unknown.get("stop", _NOT_HELD))
        return _Expected([event.model_copy(update={"reason": why})])


_NOT_HELD = "the search ends by a clock, a missing metric or a choice of a person, which the journal does not hold"


def is_same(event: Event, other: Event) -> bool:
    """Return whether two events are the same in the journal, except for texts of users."""
    return event == other or canonical_json(_comparable_json(event)) == canonical_json(_comparable_json(other))


def _comparable_json(event: Event) -> Mapping[str, object]:
    fields = event.model_dump()
    for holder in (fields, fields.get("decision")):
        if isinstance(holder, dict) and isinstance(holder.get("reason"), str):
            holder["reason"] = ""
    return fields


def _clone_of(trial: Trial, event: Cloned) -> _Finding:
    """Return the clone that carries out the exploit of a trial: of the decided source, or of itself if that has none.

    A person may have a trial go back to a checkpoint of its own, with its own configuration.
    """
    if event.source == trial.trial and event.config is None:
        return None
    if (exploit := trial.exploits) is None:
        return _Expected((), "no clone: the trial is to exploit no other")
    source = trial.trial if event.source == trial.trial else exploit.source
    changes = {"source": source, "config": exploit.config, "reason": exploit.reason}
    return _Expected([event.model_copy(update=changes)])


def _conclude_proposals(policy: SearchPolicy, plan: _AuditPlan) -> None:
    """Tell the scheduler that there are no more trials, if that is so; of an unknown search it may be."""
    if "search" in plan.unknown or not isinstance(policy.suggest(), Proposed):
        policy.schedule.exhausted()


def _early_ends(before: Experiment, trial: Trial) -> Sequence[Finished]:
    """Return the ends of a trial that its scheduler has decided and a person has requested."""
    decided, requested = open_decision(trial), before.stops.get(trial.trial)
    stop = decided.decision if decided is not None else None
    ends = [finish_of(trial.trial, stop)] if isinstance(stop, Stop) else []
    if requested is not None:
        ends.append(Finished(trial=trial.trial, reason=requested, kind=FinishKind.STOPPED))
    return ends


def _next_decision(trial: Trial, milestone: int | None) -> str:
    """Return when the scheduler decides next, for messages."""
    if open_decision(trial) is not None:
        return f"the decision at step {milestone} is not carried out yet"
    return "the scheduler decides nothing more" if milestone is None else f"a decision is due at step {milestone}"


def _shown(event: Event, *others: Event) -> str:
    """Return the type of an event, and its values that differ from those of the first of `others` of this type."""
    other = next((each.model_dump(mode="json") for each in others if each.type == event.type), {})
    long = set() if other else {"report", "fingerprint", "of_search"}
    fields = event.model_dump(mode="json", exclude={"type", *long})
    differing = {name: value for name, value in fields.items() if not other or value != other.get(name)}
    words = ", ".join(f"{name} {json.dumps(value)}" for name, value in differing.items() if other or value)
    text = f"{event.type}: {words}" if words else event.type
    return shorten(text, _LONGEST)
