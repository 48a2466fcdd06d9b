"""Derive the decisions in a search's journal again, event by event, with the functions that a running search calls.

Before each event is applied, the auditor asks these functions what the search had to write in that state, and compares.
After it, the event is recorded by a `SearchPolicy`, as a running search records what it puts into an entry: both are in
the same state at each event, in the order in which the results arrived. A new owner begins a new policy and replays the
journal to it; so does the audit.

    state before ──► findings(event): expected, unknown or observed ──► state after ──► record(event)
Never: a policy that reads more of the journal than the search had written; code that only the journal names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from prefect_tune.attempt.attempt import last_report, meets, next_start
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import BadMetric, BadStop, UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import (
    FailurePolicy,
    GiveUp,
    Quarantine,
    errors_end_reason,
    is_forgiven,
    verdict,
)
from prefect_tune.core.experiment.retention import Retention, retired_by_commit
from prefect_tune.core.experiment.stoppers import of_trials, why_over
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, after, with_adopted
from prefect_tune.core.journal_events import (
    Absorbed,
    Adopted,
    Answered,
    Cause,
    Cloned,
    Committed,
    Configured,
    Decided,
    Deletion,
    Entry,
    Event,
    Finished,
    FinishKind,
    Forked,
    GaveUp,
    OneTrialsEvent,
    Opened,
    Paused,
    Quarantined,
    Reported,
    Requeued,
    Resumed,
    Started,
    StopAsked,
    TrialAdded,
    WarmStart,
)
from prefect_tune.core.reasons import AnyReason, code_of, make_reason
from prefect_tune.core.schedulers.base import Pause, Stop
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Search, Space, Suggestion
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import canonical_json
from prefect_tune.parameters.json_specs import scheduler_from
from prefect_tune.parameters.options import Stored
from prefect_tune.parameters.search_limits import with_default_samples
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, only_in_code
from prefect_tune.trust import code_choices
from prefect_tune.tuner.repeated_values import ReportCopies, clone_of_source, misplacement_reason
from prefect_tune.tuner.run_search import policy_of
from prefect_tune.tuner.search_policy import SearchPolicy, extension_of, finish_of, open_decision, retry_of, trial_id
from prefect_tune.tuner.warm_start import prior_trials_of

# What an event of the journal is to an audit.


@dataclass(frozen=True, slots=True)
class Expected:
    """The search had to write one of these events."""

    events: Sequence[Event]
    otherwise: str = ""
    """What it had to do if there is none."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """It is a decision that cannot be derived."""

    why: str


@dataclass(frozen=True, slots=True)
class Observed:
    """It is no decision: a report, the end of an attempt, a takeover, a person's request."""


Finding: TypeAlias = Expected | Unknown | Observed


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
class AuditPlan:
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


def audit_plan(target: StorageTarget, state: Experiment, given: Mapping[str, object]) -> AuditPlan:
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
    return AuditPlan(plan if "search" in unknown else with_default_samples(plan, state), unknown)


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
        return "Optuna's proposals depend on its version" * ("OptunaSearch" in str(stored))
    if name == "scheduler":
        try:
            scheduler_from(stored)
        except UnsafePayload:
            return "the journal names code in it"
        return ""
    return "the journal names code in it" * bool(code_choices({name: stored}))


# The events.

_OF_AN_OPENING = Opened | Adopted | Configured | Answered | Forked | Deletion


class Derivation:
    """The state of an audit: the search's policy after each event, and what the trials have reported."""

    def __init__(self, target: StorageTarget, given: Mapping[str, object]) -> None:
        self._target = target
        self._given = given
        self._plans: dict[int, AuditPlan] = {}  # by term
        self._policy: SearchPolicy | None = None
        self._warm_starts: list[WarmStart] = []
        self._curves = Curves()
        self._report_copies = ReportCopies()
        self._decided_steps: dict[str, tuple[int, int]] = {}  # by trial: the last milestone, and the step that met it
        self._keeps_reports = False
        self._requested_in: dict[str, int] = {}  # the term in which the search requested a trial's attempt
        self._is_copy = False
        self._gave_up: GaveUp | None = None  # the last event, if it is one
        self._must_end: AnyReason | None = None  # why the stoppers end the search, as of the last entry

    def begin(self, entry: Entry) -> None:
        """Take note of the next entry. The one that completes a fork copies the decisions of its origin."""
        self._is_copy = any(isinstance(event, Forked) and event.trials is not None for event in entry.events)
        self._must_end = self._policy.why_end() if self._policy else None

    def findings(self, before: Experiment, event: Event) -> Iterator[tuple[Event, Finding]]:
        """Yield what `event` had to be, and for an absorbed entry each event in it, by the state before it."""
        if self._is_copy or isinstance(event, _OF_AN_OPENING):
            yield event, Observed()
            return
        self._begin_policy(before)
        if isinstance(event, Absorbed):
            yield from self._absorbed(before, event)
            return
        trial = before.trials.get(str(getattr(event, "trial", "")))
        if (why := misplacement_reason(event, trial, None)) is not None:
            yield event, Expected((), why)
        yield from self._repeated(trial, event)
        yield event, self._finding(before, event)

    def record(self, before: Experiment, event: Event, now: Experiment) -> None:
        """Record an event after it was applied, as a running search records what it writes."""
        self._gave_up = event if isinstance(event, GaveUp) else None
        if isinstance(event, Opened | Configured) and now.settings:
            self._configured(now)
        if isinstance(event, Opened) or self._is_copy:
            self._policy = None
        if isinstance(event, Configured):
            self._warm_starts += event.warm_starts
        if self._is_copy or not isinstance(event, Absorbed):
            self._keep_reports(event)
            for trial in self._trials_of(before, event):
                self._report_copies.record(trial, event)
        if self._policy is None:
            return
        if now.past_count > before.past_count and not isinstance(event, Configured):
            trial = now.trial(str(getattr(event, "trial", "")))
            for past_event in trial.past[before.past_count - now.past_count :]:
                self._policy.record(trial, past_event)
        if isinstance(event, Requeued):
            self._must_end = self._policy.why_end()  # an errored trial that is begun again counts no more
        if isinstance(event, Absorbed):
            self._policy.has_trained(now.trial(event.trial))

    def _trials_of(self, before: Experiment, event: Event) -> Sequence[Trial]:
        names = event.checkpoints if isinstance(event, Adopted) else (str(getattr(event, "trial", "")),)
        return [trial for name in names if (trial := before.trials.get(name)) is not None]

    def _repeated(self, trial: Trial | None, event: Event) -> Iterator[tuple[Event, Finding]]:
        """Yield a difference if the journal of a search contains other values of the event already."""
        expected = self._report_copies.expected_event(trial, event) if trial is not None else None
        if expected is not None and self._policy is not None and not is_same(event, expected):
            yield event, Expected([expected])

    def _keep_reports(self, event: Event) -> None:
        """Keep the reports of trials, if a stopper looks back at them."""
        if self._keeps_reports:
            self._curves.tell_event(event)

    def _configured(self, now: Experiment) -> None:
        plan, earlier = audit_plan(self._target, now, self._given), self._plans.get(now.term)
        if of_trials(plan.plan.stopper).looks_back and not self._keeps_reports:
            self._keeps_reports = not any(trial.step for trial in now.trials.values())
            if not self._keeps_reports:
                why = "stop: it needs reports from before it was chosen, which the audit has not kept"
                plan = AuditPlan(plan.plan, {**plan.unknown, "stop": why})
        if earlier is None or plan.policy_settings != earlier.policy_settings:
            self._policy = None
        self._plans[now.term] = plan

    def _begin_policy(self, before: Experiment) -> None:
        """Begin the policy of a new owner, in the state that the journal implies."""
        if self._policy is None and before.term in self._plans:
            self._policy = policy_of(self._plans[before.term].plan)
            self._policy.warm_start(prior_trials_of(self._warm_starts))
            self._policy.replay(before)
            self._must_end = self._policy.why_end()

    def _finding(self, before: Experiment, event: Event) -> Finding:
        match event:
            case TrialAdded():
                return self._added(before, event)
            case StopAsked():
                return self._stopped(before, event)
            case Decided() | Resumed() | Finished() | GaveUp() | Requeued() if self._policy is not None:
                return self._of_search(before, self._policy, event)
            case Absorbed() | Opened() | Adopted() | Configured() | Answered() | Forked() | Deletion():
                return Observed()
            case _:
                trial = before.trials.get(event.trial)  # without one it cannot be applied, and is damage
                return Observed() if trial is None else self._of_attempt(before, trial, event)

    # ------------------------------------------------------------------------------------------------ the search

    def _added(self, before: Experiment, event: TrialAdded) -> Finding:
        policy = self._policy
        if policy is None:
            return Observed()  # the configuration of a single training is given
        if why := before.ends or self._must_end:
            return Expected((), f"no new trial: the search ends, {why}")
        if (paused := policy.resume_next()) is not None:
            return Expected([Resumed(trial=paused)])
        if policy.is_waiting():
            return Expected((), "no new trial yet: the scheduler waits for others")
        name = trial_id(policy.proposed)
        if unknown := self._plans[before.term].unknown.get("search"):
            return Unknown(unknown) if event.trial == name else Expected([event.model_copy(update={"trial": name})])
        match policy.suggest():
            case Proposed(config=config):
                return Expected([event.model_copy(update={"trial": name, "config": config})])
            case Exhausted(reason=reason):
                return Expected((), f"no further trial: {reason}")
            case _:
                return Expected((), "no new trial yet: the search waits for others to end")

    def _of_search(
        self, before: Experiment, policy: SearchPolicy, event: Decided | Resumed | Finished | GaveUp | Requeued
    ) -> Finding:
        plan, trial = self._plans[before.term], before.trials.get(event.trial)
        if trial is None:
            return Observed()  # it cannot be applied, and is damage
        match event:
            case Decided():
                return self._decided(policy, trial, event, plan)
            case Resumed():
                return self._resumed(policy, trial, event, plan)
            case Finished():
                return self._finished(before, policy, trial, plan)
            case GaveUp():
                return _given_up(trial, event, plan.plan.failure_policy)
            case Requeued():
                return self._requeued(trial, event, plan)

    def _decided(self, policy: SearchPolicy, trial: Trial, event: Decided, plan: AuditPlan) -> Finding:
        if self._follows_milestones(trial, plan):
            milestone, step = policy.milestone(trial), event.report.step
            if open_decision(trial) is not None or milestone is None or step < milestone:
                return Expected((), f"no decision at step {step}: {_next_decision(trial, milestone)}")
            last_step = self._report_copies.last_reported_step(trial.trial)
            if last_step is not None and milestone <= last_step < step:
                return Expected((), f"a decision at step {last_step}")
            self._decided_steps[trial.trial] = (milestone, step)
        try:
            decision = policy.decide(trial, event.report)
        except BadMetric as error:
            return Expected((), f"no decision: {error}")
        unknown = plan.unknown.get("scheduler")
        return Unknown(unknown) if unknown else Expected([event.model_copy(update={"decision": decision})])

    def _follows_milestones(self, trial: Trial, plan: AuditPlan) -> bool:
        """Whether the trial's attempt got its milestones from this owner's scheduler, which is known."""
        requested_in = self._requested_in.get(trial.trial)
        is_ours = requested_in is None or self._plans.get(requested_in) is plan
        return is_ours and "scheduler" not in plan.unknown

    def _reported(self, before: Experiment, trial: Trial, event: Reported) -> Finding:
        """Return the decision that is missing if the attempt has passed a milestone without one."""
        plan, last_step = self._plans.get(before.term), self._report_copies.last_reported_step(trial.trial)
        if plan is None or self._policy is None or not self._follows_milestones(trial, plan):
            return Observed()
        decided = self._decided_steps.get(trial.trial)
        if decided is not None and decided[0] <= event.report.step < decided[1]:
            return Expected((), f"a decision at step {event.report.step}")
        milestone = self._policy.milestone(trial)
        if milestone is None or last_step is None or last_step < milestone:
            return Observed()
        return Expected((), f"no further step: {_next_decision(trial, milestone)}")

    def _resumed(self, policy: SearchPolicy, trial: Trial, event: Resumed, plan: AuditPlan) -> Finding:
        if unknown := plan.unknown.get("scheduler"):
            return Unknown(unknown)
        if policy.is_to_resume(trial) or policy.resume_next() == trial.trial:
            return Expected([event])
        _conclude_proposals(policy, plan)
        paused = policy.resume_next()
        return Expected([Resumed(trial=paused)] if paused else (), "no paused trial to be resumed")

    def _finished(self, before: Experiment, policy: SearchPolicy, trial: Trial, plan: AuditPlan) -> Finding:
        """Return the end of a trial that has no attempt: by a decision, a request, or since it is paused in vain."""
        if ends := _early_ends(before, trial):
            return Expected(ends)
        if unknown := plan.unknown.get("scheduler"):
            return Unknown(unknown)
        if policy.stop_next() is None:
            _conclude_proposals(policy, plan)
        if (stopped := policy.stop_next()) is None:
            return Expected((), "no end of this trial")
        return Expected([finish_of(*stopped)])

    def _requeued(self, trial: Trial, event: Requeued, plan: AuditPlan) -> Finding:
        match trial.phase:
            case Phase.FINISHED:
                if unknown := plan.unknown.get("stop"):
                    return Unknown(unknown)
                is_met = meets(trial, of_trials(plan.plan.stopper), lambda: self._curves.of(trial.trial))
                return Expected(() if is_met else [extension_of(trial)], "no further step: its stop criterion is met")
            case Phase.PENDING:
                is_due = is_forgiven(trial, plan.plan.failure_policy)
                return Expected([retry_of(trial)] if is_due else (), "no fresh retry budgets")
            case _:  # `rerun_errored` is a parameter of the run, which no journal holds
                return Observed() if event == retry_of(trial) else Expected([retry_of(trial)])

    def _stopped(self, before: Experiment, event: StopAsked) -> Finding:
        if event.request is not None or event.trial is not None or self._policy is None:
            return Observed()
        plan = self._plans[before.term]
        why: AnyReason | None = None
        if self._gave_up is not None:
            gave_up, trials = before.trial(self._gave_up.trial), before.trials.values()
            why = errors_end_reason(gave_up, trials, fail_fast=plan.plan.fail_fast)
        why = why or self._policy.why_end()
        if why is None or code_of(event.reason) in ("stopped-on-resume", "time-budget"):
            return Unknown(plan.unknown.get("stop", _NOT_HELD))
        return Expected([event.model_copy(update={"reason": why})])

    # ---------------------------------------------------------------------------------------------- the attempts

    def _absorbed(self, before: Experiment, event: Absorbed) -> Iterator[tuple[Event, Finding]]:
        if event.trial not in before.trials:
            return  # it cannot be applied, and is damage
        trial = before.trial(event.trial)
        for each in event.events:
            if (why := misplacement_reason(each, trial, event)) is not None:
                yield each, Expected((), why)
            yield from self._repeated(trial, each)
            if self._policy is not None and (step := self._report_copies.missing_step(trial, each)) is not None:
                yield each, Expected((), f"a report of step {step}")
            match each:
                case Reported():
                    yield each, self._reported(before, trial, each)
                    self._report_copies.record(trial, each)
                    trial = after(trial, each, event.number, event.writer)
                case Opened(owner=owner):
                    self._requested_in[trial.trial] = owner.search_term
                    yield each, self._retried(trial, each)
                case TrialAdded():
                    proposed = each.model_copy(update={"config": trial.config, "fingerprint": trial.fingerprint})
                    if not is_same(each, proposed):  # a copy of the proposal, which was counted
                        yield each, Expected([proposed])
                case Adopted():
                    yield each, Observed()
                    self._report_copies.record(trial, each)
                    trial = with_adopted(trial, each)
                case Deletion():
                    yield each, Observed()
                case _:
                    yield each, self._of_attempt(before, trial, each)
                    if isinstance(each, Started):
                        self._decided_steps.pop(trial.trial, None)
                    self._report_copies.record(trial, each)
                    trial = after(trial, each, event.number, event.writer)
            self._keep_reports(each)

    def _plan_of_attempt(self, before: Experiment, trial: Trial) -> AuditPlan | None:
        return self._plans.get(self._requested_in.get(trial.trial, before.term))

    def _retried(self, trial: Trial, event: Opened) -> Finding:
        """Return the end of the trial if the search requested an attempt although a retry budget was spent."""
        plan, cause = self._plans.get(event.owner.search_term), trial.cause
        is_requested = event.owner.attempt > trial.attempt > 0 and trial.phase is Phase.PENDING
        if plan is None or not is_requested or cause in (None, Cause.MACHINE, Cause.PREEMPTED):
            return Observed()  # the search counts lost attempts, too, which the journal does not hold
        decided = verdict(trial, cause, plan.plan.failure_policy)
        if not isinstance(decided, GiveUp):
            return Observed()
        return Expected([GaveUp(trial=trial.trial, cause=cause, reason=decided.reason)])

    def _of_attempt(self, before: Experiment, trial: Trial, event: OneTrialsEvent) -> Finding:
        """Return the finding on an event of an attempt, which only some events need the plan for."""
        if isinstance(event, Started):
            return Expected(_starts(trial))
        plan = self._plan_of_attempt(before, trial)
        if plan is None:
            is_decision = isinstance(event, Committed) and event.retires
            return Unknown(_NO_SETTINGS) if is_decision or isinstance(event, Finished) else Observed()
        match event:
            case Committed():
                return _committed(trial, event, plan.plan.retention or Retention())
            case Cloned(inherited=False):
                return _cloned(before, trial, event)
            case Paused():
                return Expected(_pauses(trial), "no pause")
            case Finished():
                return self._ended(before, trial, event, plan)
            case Quarantined(kills=True):
                return _quarantined(trial, event, plan.plan.failure_policy)
            case _:
                return Observed()

    def _ended(self, before: Experiment, trial: Trial, event: Finished, plan: AuditPlan) -> Finding:
        if event.kind is FinishKind.RETURNED:
            return Expected([event.model_copy(update={"reason": make_reason("returned")})])
        if event.kind is not FinishKind.CRITERION:
            ends = _early_ends(before, trial)
            # A stop request may reach an attempt of a deployment that has outlived its search.
            return Observed() if not ends and plan.plan.trials == "deployment" else Expected(ends, "no early end")
        if unknown := plan.unknown.get("stop"):
            return Unknown(unknown)
        stopper = of_trials(plan.plan.stopper)
        curve = self._curves.of(trial.trial) if stopper.looks_back else [last_report(trial)]
        try:
            why = why_over(stopper, curve) if curve else None
        except BadStop as error:
            return Expected((), f"a failure: {error}")
        ends = [Finished(trial=trial.trial, reason=why)] if why else []
        return Expected(ends, "a further step: its stop criterion is not met")


_NO_SETTINGS = "outside a search: its journal does not hold the stop criterion and the retention"
_NOT_HELD = "the search ends by a clock, a missing metric or a choice of a person, which the journal does not hold"


MEASURED: Final = {"at", "seconds", "use"}
"""Fields of events that hold what was measured, and decide nothing."""


def is_same(event: Event, other: Event) -> bool:
    """Return whether two events are the same in the journal, but for what was measured, and for texts of users."""
    return event == other or canonical_json(_comparable_json(event)) == canonical_json(_comparable_json(other))


def _comparable_json(event: Event) -> Mapping[str, object]:
    fields = event.model_dump(exclude=MEASURED)
    for holder in (fields, fields.get("decision")):
        if isinstance(holder, dict) and isinstance(holder.get("reason"), str):
            holder["reason"] = ""
    return fields


def _conclude_proposals(policy: SearchPolicy, plan: AuditPlan) -> None:
    """Tell the scheduler that there are no more trials, if that is so; of an unknown search it may be."""
    if "search" in plan.unknown or not isinstance(policy.suggest(), Proposed):
        policy.no_more()


def _early_ends(before: Experiment, trial: Trial) -> Sequence[Finished]:
    """Return the ends of a trial that its scheduler has decided and a person has requested."""
    decided, requested = open_decision(trial), before.stops.get(trial.trial)
    stop = decided.decision if decided is not None else None
    ends = [finish_of(trial.trial, stop)] if isinstance(stop, Stop) else []
    if requested is not None:
        ends.append(Finished(trial=trial.trial, reason=requested, kind=FinishKind.STOPPED))
    return ends


def _pauses(trial: Trial) -> Sequence[Paused]:
    decided = open_decision(trial)
    reasons = [trial.exploits.reason] if trial.exploits is not None else []
    if decided is not None and isinstance(decided.decision, Pause):
        reasons.append(decided.decision.reason)
    return [Paused(trial=trial.trial, reason=reason) for reason in reasons]


def _starts(trial: Trial) -> Sequence[Started]:
    """Return the start from the newest checkpoint, and from each newer one that a guest may have quarantined since."""
    start = next_start(trial)
    since = [each.checkpoint for each in trial.quarantined_checkpoints if each.since > trial.collected_up_to]
    newer = [each for each in since if each.sequence > (start.from_sequence or 0)]
    others = ({"from_step": each.step, "from_sequence": each.sequence} for each in newer)
    return [start, *(start.model_copy(update=each) for each in others)]


def _committed(trial: Trial, event: Committed, policy: Retention) -> Finding:
    if policy.keeps_all and not event.retires:
        return Observed()
    ending = retired_by_commit(trial, event.checkpoint, policy)
    return Expected([event.model_copy(update={"retires": tuple(each.sequence for each in ending)})])


def _next_decision(trial: Trial, milestone: int | None) -> str:
    """Return when the scheduler decides next, for messages."""
    if open_decision(trial) is not None:
        return f"the decision at step {milestone} is not carried out yet"
    return "the scheduler decides nothing more" if milestone is None else f"a decision is due at step {milestone}"


def _cloned(before: Experiment, trial: Trial, event: Cloned) -> Finding:
    """Return the clone that the last exploit asks for; which checkpoint was the newest, only the target knew."""
    if (exploit := trial.exploits) is None:
        return Expected((), "no clone: the scheduler has decided none") if trial.own_journal else Observed()
    event = clone_of_source(before, event)
    source = event.source
    if source.trial.trial not in (exploit.source, trial.trial):
        source = source.model_copy(update={"trial": source.trial.of_experiment.trial_key(exploit.source)})
    return Expected([event.model_copy(update={"config": exploit.config, "reason": exploit.reason, "source": source})])


def _quarantined(trial: Trial, event: Quarantined, policy: FailurePolicy) -> Finding:
    decided = verdict(trial, trial.cause, policy) if trial.cause is not None else None
    if not isinstance(decided, Quarantine):
        return Expected((), "no quarantine")
    return Expected([event.model_copy(update={"sequence": decided.sequence, "reason": decided.reason})])


def _given_up(trial: Trial, event: GaveUp, policy: FailurePolicy) -> Finding:
    """Return the end by a spent budget; a lost attempt, a failed restore or a missing metric are not in the journal."""
    if trial.phase is Phase.PENDING and trial.cause is event.cause and code_of(event.reason) != "attempts-lost":
        decided = verdict(trial, event.cause, policy)
        if isinstance(decided, GiveUp):
            reasons = [decided.reason, *([trial.end_reason] if event.cause is Cause.BAD_METRIC else [])]
            return Expected([event.model_copy(update={"reason": reason}) for reason in reasons])
    return Unknown("the journal does not hold lost attempts, failed restores and reports without the metric")
