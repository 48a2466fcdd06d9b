"""The automations of this package, as values: the trigger and the actions of each.

Two restart runs whose process died. Prefect's own *retries* cannot: the process that would carry them out is gone. The
others are alerts on this package's events (`prefect_tune.core.notifications.prefect_events`), and on Prefect's of
failed runs; the user gives their actions at installation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from prefect.automations import ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes

from prefect_tune.core.journal_events.experiment_events import Quarantined
from prefect_tune.core.notifications.prefect_events import (
    BestImproved,
    BudgetNearlySpent,
    SyncLagged,
    TrialStalled,
    event_name,
)

_PREFIX = "prefect-tune: "
_TAG = "prefect-tune"
_ATTEMPTS = "train-trial"
_FLOWS = ("tune", "durable-trainable", "resume", "maintain")
_ABOUT = "Experiment {{ event.payload.experiment }} at {{ event.payload.target }}: "
_METRICS = (
    "{% for name, value in event.payload.metrics.items() %}{{ '' if loop.first else ', ' }}{{ name }} "
    "{{ '%.6g' | format(value) if value is float else value }}{% endfor %}"
)
_SPENT = (
    "{{ '%g' | format(event.payload.spent) }} of {{ '%g' | format(event.payload.budget) }}"
    "{{ '' if event.payload.what == 'trials' else ' s' }} are spent ({{ event.payload.what }})"
)
_FLOW_RUN = "prefect.flow-run."
_UNTIL = "An alert without an action is switched off."
_COOL_DOWN = timedelta(seconds=30)
# Each of these events means that the run was restarted already, or must not be; a heartbeat, that it still runs.
_GOES_ON = (
    "Pending",
    "Submitting",
    "Running",
    "Retrying",
    "AwaitingRetry",
    "Scheduled",
    "Late",
    "Resuming",
    "heartbeat",
)
_IS_OVER = ("Completed", "Failed", "Cancelled", "Cancelling", "Suspended", "Paused", "Skipped")


@dataclass(frozen=True, slots=True)
class AutomationSpec:
    """One automation."""

    name: str
    description: str
    trigger: EventTrigger
    acts: Sequence[ActionTypes] = ()
    """Its actions; empty for an alert, whose actions are given at installation."""
    says: str = ""
    """The message of an alert, as a Prefect template."""

    @property
    def is_alert(self) -> bool:
        """Whether the user chooses its actions; without one it is switched off."""
        return not self.acts


def shipped(heartbeat_window: timedelta) -> Mapping[str, AutomationSpec]:
    """Return all automations by their names.

    Args:
        heartbeat_window: silence after which a run counts as crashed: at least two heartbeat periods.
    """
    every = [_start_again(), _silent(heartbeat_window), *_ALERTS]
    return {each.name: each for each in every}


def _start_again() -> AutomationSpec:
    """Restart a crashed run after a delay: its runner reports the crash, and its worker again some seconds later.

    After a restart in between, the run would be two processes. Attempts of trials are restarted by their search.
    """
    return AutomationSpec(
        f"{_PREFIX}restart a crashed run",
        f"Restarts a crashed run of a deployment tagged {_TAG!r} after {_COOL_DOWN.seconds} s, as the same run: it "
        "resumes from its last commit. If its process is still alive, only one of the two can commit.",
        EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{_FLOW_RUN}*"},
            match_related=[_tagged(), {"prefect.resource.role": "flow", "prefect.resource.name": f"!{_ATTEMPTS}"}],
            after={f"{_FLOW_RUN}Crashed"},
            expect={f"{_FLOW_RUN}{each}" for each in (*_GOES_ON, *_IS_OVER)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=_COOL_DOWN,
        ),
        [
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="Crashed; rescheduled by prefect-tune."
            )
        ],
    )


def _silent(window: timedelta) -> AutomationSpec:
    """Mark a run without heartbeats as crashed: a lost machine cannot report its crash."""
    return AutomationSpec(
        f"{_PREFIX}mark a run without heartbeats as crashed",
        f"Marks a run of a deployment tagged {_TAG!r} as Crashed after {window.total_seconds():g} s without a "
        "heartbeat: its machine is lost. PREFECT_FLOWS_HEARTBEAT_FREQUENCY sets the heartbeat period.",
        EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{_FLOW_RUN}*"},
            match_related=[_tagged()],
            after={f"{_FLOW_RUN}heartbeat"},
            expect={f"{_FLOW_RUN}{each}" for each in ("heartbeat", "Crashed", "AwaitingRetry", "Scheduled", *_IS_OVER)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=window,
        ),
        [
            ChangeFlowRunState(
                state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {window.total_seconds():g} s."
            )
        ],
    )


def _tagged() -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{_TAG}"}


def _alert(name: str, event: str, description: str, says: str, **labels: str) -> AutomationSpec:
    trigger = EventTrigger(
        posture=Posture.Reactive,
        match={"prefect.resource.id": f"{_TAG}.*", **{f"{_TAG}.{label}": value for label, value in labels.items()}},
        expect={event},
        threshold=1,
        within=timedelta(0),
    )
    return AutomationSpec(f"{_PREFIX}{name}", f"{description} {_UNTIL}", trigger, says=_ABOUT + says)


def _failed() -> AutomationSpec:
    """Alert on each run that ends Failed, also before it has opened an experiment: it emits no event of its own then.

    The flow's name selects the runs, of scripts and of deployments. By the tag, a flow that calls `pt.tune` would send
    a second alert, and so would attempts of trials.
    """
    trigger = EventTrigger(
        posture=Posture.Reactive,
        match={"prefect.resource.id": f"{_FLOW_RUN}*"},
        match_related=[{"prefect.resource.role": "flow", "prefect.resource.name": list(_FLOWS)}],
        expect={f"{_FLOW_RUN}Failed", f"{_FLOW_RUN}TimedOut"},
        threshold=1,
        within=timedelta(0),
    )
    return AutomationSpec(
        f"{_PREFIX}alert on a failed run",
        f"A run ended with an error. It is not restarted: remove the cause first. {_UNTIL}",
        trigger,
        says="Run {{ flow_run.name }} of the flow {{ flow.name }} failed: {{ event.payload.validated_state.message }} "
        "{{ flow_run | ui_url or '' }}",
    )


_ALERTS = (
    _alert(
        "alert on a damaged checkpoint",
        event_name(Quarantined),
        "A committed checkpoint is damaged. Training resumes from the one before it; check the target.",
        "a checkpoint of trial {{ event.payload.trial }} is damaged, and was quarantined: {{ event.payload.reason }}",
        kills="false",
    ),
    _alert(
        "alert on a new best trial",
        BestImproved.name,
        "A trial is the best so far: notify, or run a deployment that evaluates its model.",
        "trial {{ event.payload.trial }} is the best, at step {{ event.payload.step }}: " + _METRICS,
    ),
    _alert(
        "alert on a trial without reports",
        TrialStalled.name,
        "A trial has not reported for five times its longest gap between reports, and at least 5 minutes.",
        "trial {{ event.payload.trial }} has not reported for {{ event.payload.silent_seconds }} s",
    ),
    _alert(
        "alert on late saves",
        SyncLagged.name,
        "Recent progress is not stored: writes to the journal, or saves of a trial, are behind.",
        "the {{ event.payload.what }} is {{ event.payload.seconds }} s behind; trial: {{ event.payload.trial }}",
    ),
    _alert(
        "alert on 80 % of a budget",
        BudgetNearlySpent.name,
        "80 % of a budget is spent: time, training time or trials.",
        _SPENT,
    ),
    _failed(),
)
