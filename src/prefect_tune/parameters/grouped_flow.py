"""Flows for deployments: their forms show the few parameters that everybody needs, and the others in one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, Signature, getdoc, signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.utilities.callables import parameter_docstrings
from pydantic import BaseModel, ConfigDict, Field, create_model

from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import InvalidInput
from prefect_tune.prefect_api.flow_with_server import FlowWithServer

if TYPE_CHECKING:
    from typing import Self

ADVANCED = "advanced"
"""The parameter that holds the group."""
OPTIONS = "AdvancedOptions"
"""The group's definition in the schema of a form."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class GroupedFlow(FlowWithServer[_P, _R]):
    """A flow to deploy. Its form shows the parameters `first`, in this order, and all others in the group `advanced`.

    A run takes a parameter of the group beside it too, as Python clients pass it; that one replaces the one in the
    group, unless only the deployment stores it and the run sets the one in the group.

    Args:
        flow: the flow that is run, whose parameters are flat.
        first: names of parameters, at least of the required ones.
        module: the module that the entrypoint of a deployment names.
    """

    __signature__: Signature
    """The form's parameters: Prefect makes a deployment's schema of them."""

    def __init__(self, flow: FlowWithServer[_P, _R], first: Sequence[str], module: str) -> None:
        known = signature(flow.fn, eval_str=True).parameters
        by_keyword = {name: each.replace(kind=Parameter.KEYWORD_ONLY) for name, each in known.items()}
        others = [each for name, each in by_keyword.items() if name not in first]
        group = _group(others, parameter_docstrings(getdoc(flow.fn)))
        # Before 3.9, Prefect passes a default that is a `Field` as the argument itself.
        entry = _entry(flow, Signature([*by_keyword.values(), group.replace(default=None)]), module)
        super().__init__(entry, name=flow.name, version=flow.version, persist_result=flow.persist_result)
        self.flat = flow
        self.__signature__ = Signature([*(by_keyword[name] for name in first), group])

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the flow with flat parameters."""
        return self.flat(*args, **flattened(options))

    def with_options(self, **options: Any) -> Self:
        """Return a copy with other options and the same form."""
        other = super().with_options(**options)
        other.flat = self.flat.with_options(**options)
        other.__signature__ = self.__signature__
        return other

    def grouped(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat parameters as the form shows them."""
        first = {name: value for name, value in parameters.items() if name in self.__signature__.parameters}
        others = {name: value for name, value in parameters.items() if name not in first}
        return {**first, ADVANCED: others} if others else first


def flattened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a form without the group; one beside the group replaces the one in it.

    Raises:
        InvalidInput: the group is no mapping.
    """
    beside = dict(parameters)
    group = beside.pop(ADVANCED, None)
    if not isinstance(group, Mapping | None):
        raise InvalidInput(f"{ADVANCED}: expected an object with parameters, found a {type(group).__name__}")
    return {**(group or {}), **beside}


def _group(parameters: Sequence[Parameter], descriptions: Mapping[str, str]) -> Parameter:
    fields: dict[str, Any] = {
        each.name: (
            each.annotation,
            Field(
                default=each.default,
                title=each.name,
                description=descriptions.get(each.name),
                json_schema_extra={"position": place},
            ),
        )
        for place, each in enumerate(parameters)
    }
    strict = ConfigDict(title="Options", extra="forbid", arbitrary_types_allowed=True)
    options = create_model(OPTIONS, __config__=strict, **fields)
    said = Field(default=None, description=f"{len(fields)} more parameters: choose Options.")
    return Parameter(ADVANCED, Parameter.KEYWORD_ONLY, default=said, annotation=options | None)


def _entry(flow: FlowWithServer[_P, _R], accepted: Signature, module: str) -> Callable[..., _R]:
    """Return the function that a run calls; Prefect's engine refuses parameters that its signature lacks."""
    function: Callable[..., _R] = flow.fn

    def entry(**given: Any) -> _R:
        return function(**_joined(given))

    entry.__name__ = entry.__qualname__ = function.__name__
    entry.__module__ = module
    entry.__doc__ = function.__doc__
    vars(entry)["__signature__"] = accepted
    return entry


def _joined(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat parameters; those of the group replace defaults, but not what the run was given beside it.

    A form does not show what its deployment stores beside the group: a value that a person sets in the group counts.
    """
    flat = dict(given)
    group: BaseModel | None = flat.pop(ADVANCED)
    if group is None:
        return flat
    beside = _given_to_the_run()
    differ = [name for name in sorted(group.model_fields_set & beside.keys()) if flat[name] != getattr(group, name)]
    flat |= {name: getattr(group, name) for name in group.model_fields_set - beside.keys()}
    stored = _stored_by_the_deployment() if differ else {}
    for name in differ:
        is_set = getattr(group, name) != type(group).model_fields[name].default
        if is_set and _is_only_stored(name, beside, stored):
            flat[name] = getattr(group, name)
            get_run_logger().warning(
                "%s: the value in %r replaces the one that the deployment stores beside the group", name, ADVANCED
            )
        else:
            get_run_logger().warning("%s: the value beside the group replaces the one in %r", name, ADVANCED)
    return flat


def _is_only_stored(name: str, beside: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether the deployment stores the value beside the group, and the run was given its own one in the group."""
    in_group, in_stored_group = ((each.get(ADVANCED) or {}).get(name) for each in (beside, stored))
    return name in stored and stored[name] == beside[name] and in_group != in_stored_group


def _stored_by_the_deployment() -> Mapping[str, Any]:
    """Return the parameters that the deployment of this flow run stores; none if the server does not say."""
    if (deployment := deployment_of_run()) is None:
        return {}
    with suppress(PrefectException, httpx.HTTPError), get_client(sync_client=True) as client:
        return client.read_deployment(deployment).parameters
    return {}


def _given_to_the_run() -> Mapping[str, Any]:
    """Return the parameters of the flow run as they were given, without the defaults that Prefect adds for a call."""
    context = FlowRunContext.get()
    return {} if context is None or context.flow_run is None else context.flow_run.parameters
