"""Install the automations that start runs again and raise alerts, and take them away: as code, by their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from prefect.automations import AutomationCore, DoNothing, RunDeployment, SendNotification
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import ActionTypes
from prefect.events.schemas.automations import Automation
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from prefect_tune.core.errors import InvalidInput
from prefect_tune.flows.server import prefect_server
from prefect_tune.flows.shipped import Shipped, shipped

__all__ = ["automation_names", "install_automations", "uninstall_automations"]

_TAGS = ["prefect-tune"]
_HEARTBEATS = 3
_USUAL_FREQUENCY = 180
_SUBJECT = "{{ automation.name }}"
_OURS = ("name", "description", "tags", "trigger", "enabled", "actions")


def automation_names() -> Sequence[str]:
    """Return the names of all automations that there are to install."""
    return list(shipped(_window(None)))


def install_automations(
    *,
    names: Collection[str] | None = None,
    notify: str | None = None,
    run: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    heartbeat_window_seconds: float | None = None,
) -> Sequence[str]:
    """Install automations on the Prefect server, or bring those that are there up to date; return their names.

    They are known by their names: nobody else's are touched, and installing twice is installing once. Whether one
    is switched on stays as it is found, and so does what an alert does, unless it is said here.

    Args:
        names: some of `automation_names()`. Default: all.
        notify: the block by which alerts are sent, as `"slack-webhook/alerts"`.
        run: the deployment that alerts run, as `"evaluate/nightly"`. Without this and `notify`, a new alert does
            nothing that is not seen in the event feed, until somebody gives it an action in the UI.
        parameters: those of that deployment; texts may be templates, such as `"{{ event.payload.experiment }}"`.
        heartbeat_window_seconds: after how long a silent run is taken for crashed. Default: three heartbeats
            (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, 180 s unless it is set; set it alike where the runs are).

    Raises:
        InvalidInput: there is no such automation, block or deployment, or no Prefect server is set up. Nothing was
            installed.
        TuneError: the server did not answer, or it refused, for a role or a plan that does not allow automations, say.
    """
    chosen = _chosen(names, _window(heartbeat_window_seconds))
    with prefect_server("automations") as client:
        actions = _actions(client, notify, run, parameters)
        for each in chosen:
            _install(client, each, actions)
    return [each.name for each in chosen]


def uninstall_automations(*, names: Collection[str] | None = None) -> Sequence[str]:
    """Remove automations that were installed, all or some; return the names of those that were there.

    Raises:
        InvalidInput: there is no automation of that name to install, or no Prefect server is set up.
        TuneError: the server did not answer, or it refused, for a role or a plan that does not allow automations, say.
    """
    removed = []
    with prefect_server("automations") as client:
        for each in _chosen(names, _window(None)):
            found = client.read_automations_by_name(each.name)
            for automation in found:
                client.delete_automation(automation.id)
            removed += [each.name] if found else []
    return removed


def _window(seconds: float | None) -> timedelta:
    if seconds is None:
        seconds = _HEARTBEATS * (get_current_settings().flows.heartbeat_frequency or _USUAL_FREQUENCY)
    if seconds < 10:
        raise InvalidInput(f"heartbeat_window_seconds: expected at least 10, found {seconds:g}")
    return timedelta(seconds=seconds)


def _chosen(names: Collection[str] | None, window: timedelta) -> Sequence[Shipped]:
    known = shipped(window)
    if isinstance(names, str):
        names = [names]
    if unknown := set(names or ()) - set(known):
        raise InvalidInput(f"automations: there is no {min(unknown)!r}; there are {', '.join(map(repr, known))}")
    return [each for name, each in known.items() if names is None or name in names]


def _actions(
    client: SyncPrefectClient, notify: str | None, run: str | None, parameters: Mapping[str, Any] | None
) -> Sequence[ActionTypes]:
    """What alerts are to do; their texts come later."""
    actions: list[ActionTypes] = []
    if notify is not None:
        actions.append(SendNotification(block_document_id=_block(client, notify), subject=_SUBJECT, body=""))
    if run is not None:
        given = None if parameters is None else dict(parameters)
        actions.append(RunDeployment(source="selected", deployment_id=_deployment(client, run), parameters=given))
    elif parameters is not None:
        raise InvalidInput("parameters: they are for the deployment that alerts run: run='flow/deployment'")
    return actions


def _block(client: SyncPrefectClient, slug: str) -> Any:
    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise InvalidInput(f"notify={slug!r}: no such block is saved; expected 'slack-webhook/name'") from error


def _deployment(client: SyncPrefectClient, name: str) -> Any:
    try:
        return client.read_deployment_by_name(name).id
    except (ObjectNotFound, ValueError) as error:
        raise InvalidInput(f"run={name!r}: there is no such deployment; expected 'flow/deployment'") from error


def _install(client: SyncPrefectClient, wanted: Shipped, actions: Sequence[ActionTypes]) -> None:
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(_automation(wanted, actions or [DoNothing()]))
        return
    first, *others = found
    for each in others:  # two installed at the same time
        client.delete_automation(each.id)
    new = _automation(wanted, actions or first.actions, enabled=first.enabled)
    if _said(new) != _said(first):  # an update forgets what a trigger was waiting for
        client.update_automation(first.id, AutomationCore(**new.model_dump(exclude={"owner_resource"})))


def _automation(wanted: Shipped, actions: Sequence[ActionTypes], *, enabled: bool = True) -> AutomationCore:
    does = [_worded(each, wanted.says) for each in actions] if wanted.is_alert else list(wanted.acts)
    return AutomationCore(
        name=wanted.name,
        description=wanted.description,
        tags=_TAGS,
        enabled=enabled,
        trigger=wanted.trigger,
        actions=does,
        actions_on_trigger=[],
        actions_on_resolve=[],
        owner_resource=None,
    )


def _worded(action: ActionTypes, says: str) -> ActionTypes:
    if isinstance(action, SendNotification) and not action.body:
        return action.model_copy(update={"body": says})
    return action


def _said(automation: AutomationCore | Automation) -> dict[str, Any]:
    return automation.model_dump(include=set(_OURS))
