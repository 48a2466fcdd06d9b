"""The Prefect automations of this package: their triggers and actions, and their installation.

Two automations restart runs whose process was killed. Prefect's own *retries* cannot do this, because the process that
would retry no longer exists. The other automations are alerts on failed runs and on events of this package
(`prefect_tune.core.prefect_events`); the user chooses the actions of alerts at installation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

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
from prefect_tune.core.prefect_events import BestImproved, TrialStalled
from prefect_tune.prefect_api.api_client import open_server_client

_PREFIX = "prefect-tune: "
_TAG = "prefect-tune"
_TRIAL_FLOW = "train-trial"
_FLOWS = ("tune", "durable-trainable", "resume", "maintain")
_INTRO = "Experiment {{ event.payload.experiment }} at {{ event.payload.target }}: "
_METRICS = (
    "{% for name, value in event.payload.metrics.items() %}{{ '' if loop.first else ', ' }}{{ name }} "
    "{{ '%.6g' | format(value) if value is float else value }}{% endfor %}"
)
_FLOW_RUN = "prefect.flow-run."
_RESTART_DELAY = timedelta(seconds=30)
# If one of these events follows a crash, the run continues (a heartbeat shows this), so do not restart it.
_CONTINUING_EVENTS = (
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
_END_EVENTS = ("Completed", "Failed", "Cancelled", "Cancelling", "Suspended", "Paused", "Skipped")


@dataclass(frozen=True, slots=True)
class AutomationSpec:
    """An automation that this package can install."""

    name: str
    description: str
    trigger: EventTrigger
    action: ActionTypes | None = None
    """None for an alert, whose actions the user chooses at installation. An alert without an action is switched off."""
    message: str = ""
    """The text of an alert's notification, a template that Prefect renders; empty for other automations."""

    @property
    def is_alert(self) -> bool:
        return self.action is None


def make_automation_specs(heartbeat_window: timedelta) -> Mapping[str, AutomationSpec]:
    """Return all automations by their names.

    Args:
        heartbeat_window: time without a heartbeat (at least two intervals) after which a run is marked as crashed.
    """
    # A crash is reported by the runner and, some seconds later, by its worker. A restart between the two reports would
    # start two processes of the run, so the automation waits. It excludes trials, which the search itself restarts.
    restart = AutomationSpec(
        f"{_PREFIX}restart a crashed run",
        f"Restarts a crashed run of a deployment tagged {_TAG!r} after {_RESTART_DELAY.seconds} s, as the same run, "
        "which resumes from its last commit. If the old process is still running, only one of the two can commit.",
        _make_silence_trigger(
            [_TAGGED_RUNS, {"prefect.resource.role": "flow", "prefect.resource.name": f"!{_TRIAL_FLOW}"}],
            after="Crashed",
            expect=(*_CONTINUING_EVENTS, *_END_EVENTS),
            within=_RESTART_DELAY,
        ),
        ChangeFlowRunState(
            state=StateType.SCHEDULED, name="AwaitingRetry", message="Crashed; rescheduled by prefect-tune."
        ),
    )
    seconds = f"{heartbeat_window.total_seconds():g} s"
    mark_crashed = AutomationSpec(  # a lost machine cannot report a crash
        f"{_PREFIX}mark a run without heartbeats as crashed",
        f"Marks a run of a deployment tagged {_TAG!r} as Crashed after {seconds} without a heartbeat, since its "
        "machine is lost. PREFECT_FLOWS_HEARTBEAT_FREQUENCY sets the heartbeat interval.",
        _make_silence_trigger(
            [_TAGGED_RUNS],
            after="heartbeat",
            expect=("heartbeat", "Crashed", "AwaitingRetry", "Scheduled", *_END_EVENTS),
            within=heartbeat_window,
        ),
        ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {seconds}."),
    )
    return {spec.name: spec for spec in (restart, mark_crashed, *_ALERTS)}


_Labels: TypeAlias = dict[str, str | list[str]]
_TAGGED_RUNS: _Labels = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{_TAG}"}


def _make_silence_trigger(
    related: list[_Labels], *, after: str, expect: Sequence[str], within: timedelta
) -> EventTrigger:
    """Return a trigger that fires if, for the time `within`, no event in `expect` follows a run's event `after`."""
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


def _make_alert_spec(name: str, description: str, message: str, events: set[str], **match: Any) -> AutomationSpec:
    trigger = EventTrigger(posture=Posture.Reactive, expect=events, threshold=1, within=timedelta(0), **match)
    description = f"{description} An alert without an action is switched off."
    return AutomationSpec(f"{_PREFIX}{name}", description, trigger, message=message)


_PACKAGE_EVENTS = {"prefect.resource.id": f"{_TAG}.*"}
_ALERTS = (
    _make_alert_spec(
        "alert on a damaged checkpoint",
        "A committed checkpoint is damaged. Training resumes from the previous checkpoint; check the target.",
        _INTRO + "a checkpoint of trial {{ event.payload.trial }} is damaged, and was quarantined: "
        "{{ event.payload.reason }}",
        {"prefect-tune.checkpoint-quarantined"},
        match={**_PACKAGE_EVENTS, f"{_TAG}.crashes_trainable": "false"},
    ),
    _make_alert_spec(
        "alert on a new best trial",
        "A trial is the best so far: notify, or run a deployment that evaluates its model.",
        _INTRO + "trial {{ event.payload.trial }} is the best, at step {{ event.payload.step }}: " + _METRICS,
        {BestImproved.name},
        match=_PACKAGE_EVENTS,
    ),
    _make_alert_spec(
        "alert on a trial without reports",
        "A trial has not reported for five times its longest gap between reports, and for at least 5 minutes.",
        _INTRO + "trial {{ event.payload.trial }} has not reported for {{ event.payload.silent_seconds }} s",
        {TrialStalled.name},
        match=_PACKAGE_EVENTS,
    ),
    # Prefect's event is the trigger, since a run that fails before it has an experiment emits no event of this package.
    # Runs are matched by flow, not by tag, so that neither trials nor users' flows that call `pt.tune` send alerts.
    _make_alert_spec(
        "alert on a failed run",
        "A run ended with an error. No automation restarts it: fix the cause first.",
        "Run {{ flow_run.name }} of the flow {{ flow.name }} failed: {{ event.payload.validated_state.message }} "
        "{{ flow_run | ui_url or '' }}",
        {f"{_FLOW_RUN}Failed", f"{_FLOW_RUN}TimedOut"},
        match={"prefect.resource.id": f"{_FLOW_RUN}*"},
        match_related=[{"prefect.resource.role": "flow", "prefect.resource.name": list(_FLOWS)}],
    ),
)


# Install and remove automations by name.


@dataclass(frozen=True, slots=True)
class InstalledAutomation:
    """An automation on the server."""

    name: str
    is_alert: bool
    enabled: bool
    has_action: bool


_WINDOW_HEARTBEATS = 3
_DEFAULT_HEARTBEAT_SECONDS = 180
_FIELDS = {"name", "description", "tags", "trigger", "enabled", "actions"}


def automation_names() -> Sequence[str]:
    """Return the names of all automations that this package can install."""
    return list(make_automation_specs(_make_heartbeat_window(None)))


def install_automations(
    *,
    names: Collection[str] | None = None,
    notify: str | None = None,
    run: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    heartbeat_window_seconds: float | None = None,
) -> Sequence[str]:
    """Install automations on the Prefect server, or update existing ones; return their names.

    Automations are matched by name; other automations are not changed. Installing twice is the same as installing once.
    An alert without an action is switched off. If an automation has an action, an update does not switch it on or off.
    An update replaces an alert's actions only if `notify` or `run` is passed.

    Args:
        names: some of `automation_names()`. Default: all.
        notify: the notification block that sends alerts, such as `"slack-webhook/alerts"`.
        run: the deployment that alerts run, such as `"evaluate/nightly"`. Without `run` and `notify`, a new alert
            is switched off: add an action in the UI, and switch the alert on.
        parameters: parameters of deployment `run`; texts may be templates, such as `"{{ event.payload.experiment }}"`.
        heartbeat_window_seconds: seconds without a heartbeat after which a run is marked as crashed. Default: three
            heartbeat intervals (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, 180 s if unset; the runs need the same value).

    Raises:
        InvalidInput: an automation, block or deployment does not exist, or no Prefect server is configured. Nothing
            was installed.
        TuneError: the server did not answer, or refused the request, for example because your role or plan forbids it.
    """
    window = _make_heartbeat_window(heartbeat_window_seconds)
    installed = install_specs(_select_specs(names, window), notify=notify, run=run, parameters=parameters)
    return [automation.name for automation in installed]


def install_specs(
    specs: Sequence[AutomationSpec] | None = None,
    *,
    notify: str | None = None,
    run: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    without_action: Literal["switch off", "leave out"] = "switch off",
) -> Sequence[InstalledAutomation]:
    """Install `specs`, and return what is installed. For the other arguments and errors, see `install_automations`.

    Args:
        specs: the automations to install. Default: all.
        without_action: whether a new alert without an action is installed but switched off, or not installed at all.
    """
    specs = _select_specs(None, _make_heartbeat_window(None)) if specs is None else specs
    with open_server_client("automations") as client:
        actions = _make_alert_actions(client, notify, run, parameters)
        skipped = [] if actions or without_action == "switch off" else [spec for spec in specs if spec.is_alert]
        wanted = [spec for spec in specs if spec not in skipped or _find_installed_automations(client, spec)]
        return [_install_automation(client, spec, actions) for spec in wanted]


def uninstall_automations(*, names: Collection[str] | None = None) -> Sequence[str]:
    """Remove this package's automations, or only those in `names`; return the names of the removed automations.

    Raises:
        InvalidInput: `names` contains an unknown name, or no Prefect server is configured.
        TuneError: the server did not answer, or refused the request, for example because your role or plan forbids it.
    """
    removed = []
    with open_server_client("automations") as client:
        for spec in _select_specs(names, _make_heartbeat_window(None)):
            if installed := _find_installed_automations(client, spec):
                removed.append(spec.name)
            for automation in installed:
                _delete_automation(client, automation)
    return removed


def _delete_automation(client: SyncPrefectClient, automation: Automation) -> None:
    """Delete an automation; do nothing if another process, or a request with a lost response, has deleted it."""
    try:
        client.delete_automation(automation.id)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.NOT_FOUND:
            raise


def require_notification_block(slug: str) -> None:
    """Require that the notification block `slug` is saved on the server.

    Raises:
        InvalidInput: the block is not saved, or no Prefect server is configured.
        TuneError: the server did not answer, or refused the request.
    """
    with open_server_client("automations") as client:
        _read_block_id(client, slug)


def _make_heartbeat_window(seconds: float | None) -> timedelta:
    if seconds is None:
        seconds = _WINDOW_HEARTBEATS * (get_current_settings().flows.heartbeat_frequency or _DEFAULT_HEARTBEAT_SECONDS)
    if seconds < 10:
        raise InvalidInput(f"heartbeat_window_seconds: expected at least 10, found {seconds:g}")
    return timedelta(seconds=seconds)


def _select_specs(names: Collection[str] | None, window: timedelta) -> Sequence[AutomationSpec]:
    specs = make_automation_specs(window)
    if isinstance(names, str):
        names = [names]
    if unknown := set(names or ()) - set(specs):
        raise InvalidInput(f"automations: expected one of {', '.join(map(repr, specs))}, found {min(unknown)!r}")
    return [spec for name, spec in specs.items() if names is None or name in names]


def _make_alert_actions(
    client: SyncPrefectClient, notify: str | None, run: str | None, parameters: Mapping[str, Any] | None
) -> Sequence[ActionTypes]:
    """Return the actions of all alerts; `_make_automation` adds the messages of notifications."""
    actions: list[ActionTypes] = []
    if notify is not None:
        block = _read_block_id(client, notify)
        actions.append(SendNotification(block_document_id=block, subject="{{ automation.name }}", body=""))
    if run is None and parameters is not None:
        raise InvalidInput("parameters: requires run='flow/deployment', the deployment that receives them")
    if run is not None:
        try:
            deployment = client.read_deployment_by_name(run).id
        except (ObjectNotFound, ValueError) as error:
            raise InvalidInput(f"run={run!r}: no such deployment exists; expected 'flow/deployment'") from error
        run_parameters = None if parameters is None else dict(parameters)
        actions.append(RunDeployment(source="selected", deployment_id=deployment, parameters=run_parameters))
    return actions


def _read_block_id(client: SyncPrefectClient, slug: str) -> Any:
    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise InvalidInput(
            f"notify={slug!r}: no such block is saved; expected the TYPE/NAME of a notification block. Save the block "
            "first, in the UI or in Python: SlackWebhook(url=...).save('alerts') saves 'slack-webhook/alerts'"
        ) from error


def _find_installed_automations(client: SyncPrefectClient, spec: AutomationSpec) -> Sequence[Automation]:
    """Return the automations of this name on the server; automations with an action are first."""
    return sorted(client.read_automations_by_name(spec.name), key=lambda installed: not _has_action(installed.actions))


def _install_automation(
    client: SyncPrefectClient, spec: AutomationSpec, actions: Sequence[ActionTypes]
) -> InstalledAutomation:
    is_active = bool(spec.action or actions)
    if installed := _find_installed_automations(client, spec):
        first, *duplicates = installed
        for duplicate in duplicates:  # created by concurrent installations
            _delete_automation(client, duplicate)
        # Everything but DoNothing counts as an action: Prefect Cloud may have types that the installed Prefect lacks.
        is_active = first.enabled if _has_action(first.actions) else is_active
        automation = _make_automation(spec, actions or first.actions, enabled=is_active)
        if automation.model_dump(include=_FIELDS) != first.model_dump(include=_FIELDS):  # an update resets the trigger
            client.update_automation(first.id, AutomationCore(**automation.model_dump(exclude={"owner_resource"})))
    else:
        automation = _make_automation(spec, actions or [DoNothing()], enabled=is_active)
        client.create_automation(automation)
    return InstalledAutomation(automation.name, spec.is_alert, automation.enabled, _has_action(automation.actions))


def _has_action(actions: Sequence[object]) -> bool:
    return not all(isinstance(action, DoNothing) for action in actions)


def _make_automation(spec: AutomationSpec, actions: Sequence[Any], *, enabled: bool) -> AutomationCore:
    if spec.action is not None:
        actions = [spec.action]
    return AutomationCore(
        name=spec.name,
        description=spec.description,
        tags=[_TAG],
        enabled=enabled,
        trigger=spec.trigger,
        actions=[
            action.model_copy(update={"body": spec.message})
            if isinstance(action, SendNotification) and not action.body  # keep the user's text
            else action
            for action in actions
        ],
        actions_on_trigger=[],
        actions_on_resolve=[],
        owner_resource=None,
    )
