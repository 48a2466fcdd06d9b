"""The automations of this package, as values: the trigger and the actions of each.

Two restart runs whose process died. Prefect's own *retries* cannot: the process that would carry them out is gone. The
others are alerts on this package's events (`prefect_tune.core.prefect_events`), and on Prefect's of
failed runs; the user gives their actions at installation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Literal

from prefect.automations import (
    AutomationCore,
    ChangeFlowRunState,
    DoNothing,
    EventTrigger,
    Posture,
    RunDeployment,
    SendNotification,
)
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes
from prefect.events.schemas.automations import Automation
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.prefect_events import (
    BestImproved,
    TrialStalled,
)
from prefect_tune.prefect_api.api_client import prefect_server

_PREFIX = "prefect-tune: "
_TAG = "prefect-tune"
_ATTEMPTS = "train-trial"
_FLOWS = ("tune", "durable-trainable", "resume", "maintain")
_ABOUT = "Experiment {{ event.payload.experiment }} at {{ event.payload.target }}: "
_METRICS = (
    "{% for name, value in event.payload.metrics.items() %}{{ '' if loop.first else ', ' }}{{ name }} "
    "{{ '%.6g' | format(value) if value is float else value }}{% endfor %}"
)
_FLOW_RUN = "prefect.flow-run."
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
    action: ActionTypes | None = None
    """None of an alert, whose actions are given at installation; without one it is switched off."""
    says: str = ""
    """The message of an alert, as a Prefect template."""

    @property
    def is_alert(self) -> bool:
        return self.action is None


def shipped(heartbeat_window: timedelta) -> Mapping[str, AutomationSpec]:
    """Return all automations by their names.

    Args:
        heartbeat_window: silence after which a run counts as crashed: at least two heartbeat periods.
    """
    # After a restart between the two reports of a crash, by the runner and by its worker some seconds later, the run
    # would be two processes: so it waits. Attempts of trials are restarted by their search.
    start_again = AutomationSpec(
        f"{_PREFIX}restart a crashed run",
        f"Restarts a crashed run of a deployment tagged {_TAG!r} after {_COOL_DOWN.seconds} s, as the same run: it "
        "resumes from its last commit. If its process is still alive, only one of the two can commit.",
        _silence(
            [_TAGGED, {"prefect.resource.role": "flow", "prefect.resource.name": f"!{_ATTEMPTS}"}],
            after="Crashed",
            expect=(*_GOES_ON, *_IS_OVER),
            within=_COOL_DOWN,
        ),
        ChangeFlowRunState(
            state=StateType.SCHEDULED, name="AwaitingRetry", message="Crashed; rescheduled by prefect-tune."
        ),
    )
    seconds = f"{heartbeat_window.total_seconds():g} s"
    silent = AutomationSpec(  # a lost machine cannot report its crash
        f"{_PREFIX}mark a run without heartbeats as crashed",
        f"Marks a run of a deployment tagged {_TAG!r} as Crashed after {seconds} without a heartbeat: its machine is "
        "lost. PREFECT_FLOWS_HEARTBEAT_FREQUENCY sets the heartbeat period.",
        _silence(
            [_TAGGED],
            after="heartbeat",
            expect=("heartbeat", "Crashed", "AwaitingRetry", "Scheduled", *_IS_OVER),
            within=heartbeat_window,
        ),
        ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {seconds}."),
    )
    return {spec.name: spec for spec in (start_again, silent, *_ALERTS)}


_TAGGED: dict[str, str | list[str]] = {
    "prefect.resource.role": "tag",
    "prefect.resource.id": f"prefect.tag.{_TAG}",
}


def _silence(
    related: list[dict[str, str | list[str]]], *, after: str, expect: Sequence[str], within: timedelta
) -> EventTrigger:
    """Return the trigger for a flow run of which none of the expected events follows `after` in time."""
    return EventTrigger(
        posture=Posture.Proactive,
        match={"prefect.resource.id": f"{_FLOW_RUN}*"},
        match_related=related,
        after={f"{_FLOW_RUN}{after}"},
        expect={f"{_FLOW_RUN}{name}" for name in expect},
        for_each={"prefect.resource.id"},
        threshold=1,
        within=within,
    )


def _alert(name: str, description: str, says: str, events: set[str], **match: Any) -> AutomationSpec:
    trigger = EventTrigger(posture=Posture.Reactive, expect=events, threshold=1, within=timedelta(0), **match)
    return AutomationSpec(
        f"{_PREFIX}{name}", f"{description} An alert without an action is switched off.", trigger, says=says
    )


_OF_OURS = {"prefect.resource.id": f"{_TAG}.*"}
_ALERTS = (
    _alert(
        "alert on a damaged checkpoint",
        "A committed checkpoint is damaged. Training resumes from the one before it; check the target.",
        _ABOUT + "a checkpoint of trial {{ event.payload.trial }} is damaged, and was quarantined: "
        "{{ event.payload.reason }}",
        {"prefect-tune.quarantined"},
        match={**_OF_OURS, f"{_TAG}.kills": "false"},
    ),
    _alert(
        "alert on a new best trial",
        "A trial is the best so far: notify, or run a deployment that evaluates its model.",
        _ABOUT + "trial {{ event.payload.trial }} is the best, at step {{ event.payload.step }}: " + _METRICS,
        {BestImproved.name},
        match=_OF_OURS,
    ),
    _alert(
        "alert on a trial without reports",
        "A trial has not reported for five times its longest gap between reports, and at least 5 minutes.",
        _ABOUT + "trial {{ event.payload.trial }} has not reported for {{ event.payload.silent_seconds }} s",
        {TrialStalled.name},
        match=_OF_OURS,
    ),
    # Also of a run that fails before it has opened an experiment, and has no event of its own. The runs are selected by
    # the flow: by the tag, a flow that calls `pt.tune` would send a second alert, and so would attempts of trials.
    _alert(
        "alert on a failed run",
        "A run ended with an error. It is not restarted: remove the cause first.",
        "Run {{ flow_run.name }} of the flow {{ flow.name }} failed: {{ event.payload.validated_state.message }} "
        "{{ flow_run | ui_url or '' }}",
        {f"{_FLOW_RUN}Failed", f"{_FLOW_RUN}TimedOut"},
        match={"prefect.resource.id": f"{_FLOW_RUN}*"},
        match_related=[{"prefect.resource.role": "flow", "prefect.resource.name": list(_FLOWS)}],
    ),
)


# Install and remove, by name, the Prefect automations that restart runs and send alerts.


@dataclass(frozen=True, slots=True)
class Installed:
    """An automation as it is on the server now."""

    name: str
    is_alert: bool
    enabled: bool
    acts: bool
    """Whether it has an action; an alert may have none."""


_HEARTBEATS = 3
_USUAL_FREQUENCY = 180
_OURS = {"name", "description", "tags", "trigger", "enabled", "actions"}


def automation_names() -> Sequence[str]:
    """Return the names of all automations that this package can install."""
    return list(shipped(_window(None)))


def install_automations(
    *,
    names: Collection[str] | None = None,
    notify: str | None = None,
    run: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    heartbeat_window_seconds: float | None = None,
) -> Sequence[str]:
    """Install automations on the Prefect server, or update existing ones; return their names.

    Automations are matched by name; others are not changed. Installing twice is the same as installing once. An alert
    without an action is switched off. An update keeps whether any other automation is enabled, and keeps an alert's
    actions unless `notify` or `run` is passed.

    Args:
        names: some of `automation_names()`. Default: all.
        notify: the notification block that sends alerts, such as `"slack-webhook/alerts"`.
        run: the deployment that alerts run, such as `"evaluate/nightly"`. Without `run` and `notify`, a new alert
            is switched off: add an action in the UI, and switch it on.
        parameters: parameters of that deployment; texts may be templates, such as
            `"{{ event.payload.experiment }}"`.
        heartbeat_window_seconds: seconds without a heartbeat after which a run is considered crashed. Default: three
            heartbeats (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, 180 s unless it is set; set the same value where the
            runs are).

    Raises:
        InvalidInput: there is no such automation, block or deployment, or no Prefect server is set up. Nothing was
            installed.
        TuneError: the server did not answer, or refused: for example, the role or plan does not allow automations.
    """
    window = _window(heartbeat_window_seconds)
    done = apply_automations(_chosen(names, window), notify=notify, run=run, parameters=parameters)
    return [each.name for each in done]


def apply_automations(
    chosen: Sequence[AutomationSpec] | None = None,
    *,
    notify: str | None = None,
    run: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    without_action: Literal["switch off", "leave out"] = "switch off",
) -> Sequence[Installed]:
    """Install these automations, or all; return each as it is then.

    Args:
        chosen: the automations. Default: all.
        notify: as in `install_automations`, like `run` and `parameters`.
        run: the deployment that alerts run.
        parameters: its parameters.
        without_action: whether a new alert without an action is installed switched off, or not at all.

    Raises what `install_automations` raises.
    """
    chosen = _chosen(None, _window(None)) if chosen is None else chosen
    with prefect_server("automations") as client:
        actions = _actions(client, notify, run, parameters)
        idle = [] if actions or without_action == "switch off" else [each for each in chosen if each.is_alert]
        wanted = [each for each in chosen if each not in idle or _found(client, each)]
        return [_installed(client, each, actions) for each in wanted]


def uninstall_automations(*, names: Collection[str] | None = None) -> Sequence[str]:
    """Remove installed automations, all or those of `names`; return the names of those that were removed.

    Raises:
        InvalidInput: this package has no automation of that name, or no Prefect server is set up.
        TuneError: the server did not answer, or refused: for example, the role or plan does not allow automations.
    """
    removed = []
    with prefect_server("automations") as client:
        for spec in _chosen(names, _window(None)):
            if there := _found(client, spec):
                removed.append(spec.name)
            for automation in there:
                _delete(client, automation)
    return removed


def _delete(client: SyncPrefectClient, automation: Automation) -> None:
    """Delete an automation, unless it is gone: another process, or a request whose answer was lost, has deleted it."""
    try:
        client.delete_automation(automation.id)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.NOT_FOUND:
            raise


def require_block(slug: str) -> None:
    """Require that the notification block `slug` is saved on the server.

    Raises:
        InvalidInput: it is not, or no Prefect server is set up.
        TuneError: the server did not answer, or refused.
    """
    with prefect_server("automations") as client:
        _block(client, slug)


def _window(seconds: float | None) -> timedelta:
    if seconds is None:
        seconds = _HEARTBEATS * (get_current_settings().flows.heartbeat_frequency or _USUAL_FREQUENCY)
    if seconds < 10:
        raise InvalidInput(f"heartbeat_window_seconds: expected at least 10, found {seconds:g}")
    return timedelta(seconds=seconds)


def _chosen(names: Collection[str] | None, window: timedelta) -> Sequence[AutomationSpec]:
    known = shipped(window)
    if isinstance(names, str):
        names = [names]
    if unknown := set(names or ()) - set(known):
        raise InvalidInput(f"automations: expected one of {', '.join(map(repr, known))}, found {min(unknown)!r}")
    return [each for name, each in known.items() if names is None or name in names]


def _actions(
    client: SyncPrefectClient, notify: str | None, run: str | None, parameters: Mapping[str, Any] | None
) -> Sequence[ActionTypes]:
    """Return the actions of alerts; `_automation` adds the texts of notifications."""
    actions: list[ActionTypes] = []
    if notify is not None:
        block = _block(client, notify)
        actions.append(SendNotification(block_document_id=block, subject="{{ automation.name }}", body=""))
    if run is None and parameters is not None:
        raise InvalidInput("parameters: expected run='flow/deployment' with them, the deployment that they are for")
    if run is not None:
        try:
            deployment = client.read_deployment_by_name(run).id
        except (ObjectNotFound, ValueError) as error:
            raise InvalidInput(f"run={run!r}: no such deployment exists; expected 'flow/deployment'") from error
        given = None if parameters is None else dict(parameters)
        actions.append(RunDeployment(source="selected", deployment_id=deployment, parameters=given))
    return actions


def _block(client: SyncPrefectClient, slug: str) -> Any:
    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise InvalidInput(
            f"notify={slug!r}: no such block is saved; expected TYPE/NAME of a notification block. Save one "
            "first, in the UI or with SlackWebhook(url=...).save('alerts'), which is then 'slack-webhook/alerts'"
        ) from error


def _found(client: SyncPrefectClient, wanted: AutomationSpec) -> Sequence[Automation]:
    """Return the automation as it is on the server; of duplicates first one that acts."""
    return sorted(client.read_automations_by_name(wanted.name), key=lambda each: not _act(each.actions))


def _installed(client: SyncPrefectClient, wanted: AutomationSpec, actions: Sequence[ActionTypes]) -> Installed:
    is_active = bool(wanted.action or actions)
    if there := _found(client, wanted):
        first, *others = there
        for twin in others:  # concurrent installs created duplicates
            _delete(client, twin)
        # Prefect Cloud's actions may be of types that this Prefect does not know.
        new = _automation(wanted, actions or first.actions, enabled=first.enabled if _act(first.actions) else is_active)
        if new.model_dump(include=_OURS) != first.model_dump(include=_OURS):  # an update resets the trigger's state
            client.update_automation(first.id, AutomationCore(**new.model_dump(exclude={"owner_resource"})))
    else:
        new = _automation(wanted, actions or [DoNothing()], enabled=is_active)
        client.create_automation(new)
    return Installed(new.name, wanted.is_alert, new.enabled, _act(new.actions))


def _act(actions: Sequence[object]) -> bool:
    return not all(isinstance(action, DoNothing) for action in actions)


def _automation(wanted: AutomationSpec, actions: Sequence[Any], *, enabled: bool) -> AutomationCore:
    if wanted.action is not None:
        actions = [wanted.action]
    return AutomationCore(
        name=wanted.name,
        description=wanted.description,
        tags=[_TAG],
        enabled=enabled,
        trigger=wanted.trigger,
        actions=[
            action.model_copy(update={"body": wanted.says})
            if isinstance(action, SendNotification) and not action.body  # else a person has written another text
            else action
            for action in actions
        ],
        actions_on_trigger=[],
        actions_on_resolve=[],
        owner_resource=None,
    )
