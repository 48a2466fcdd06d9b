"""The types of the flows' parameters, for type checkers, and their JSON schemas, for forms.

A parameter gets a handwritten schema if the schema of its type is unclear or asks for secrets. A call from a script can
pass a block. A form can only select or name a saved block: its schema omits the fields of the block, which may be
credentials, and Prefect's API rejects parameters of a deployment that are not in the schema.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, getdoc, signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from prefect.context import FlowRunContext
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.utilities.callables import parameter_docstrings, parameter_schema
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WithJsonSchema, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.blocks.resolve_target import ABSOLUTE_PATTERN, make_block_slug_pattern, validate_target
from prefect_tune.blocks.storage_target import ObjectTarget, StrictBlock
from prefect_tune.blocks.targets import TARGET_TYPES
from prefect_tune.callbacks import Callback
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import convert_to_dicts
from prefect_tune.core.search.objective import Mode
from prefect_tune.prefect_api.flow_with_server import FlowWithServer
from prefect_tune.runtime.trainable import Trainable

if TYPE_CHECKING:
    from typing import Self


_Schema: TypeAlias = Mapping[str, Any]
_NULL: _Schema = {"type": "null"}


def make_form_schema(flow: Flow[Any, Any]) -> dict[str, Any]:
    """Return the schema of a flow's parameters, simplified for forms.

    An optional parameter is a field that can stay empty, not a choice between a type and None. Descriptions have no
    Markdown, since forms do not render it. The grouped parameters of a `GroupedFlow` are also valid outside the group.
    """
    schema = parameter_schema(flow).model_dump_for_openapi()
    definitions = {
        name: {**kind, **_simplify_description(kind), "properties": _simplify_fields(kind.get("properties", {}))}
        for name, kind in schema.get("definitions", {}).items()
    }
    form = {**schema, "properties": _simplify_fields(schema["properties"]), "definitions": definitions}
    if isinstance(flow, GroupedFlow):  # accept these parameters outside the group too; forms ignore `patternProperties`
        group = definitions[OPTIONS_DEFINITION]["properties"]
        form["patternProperties"] = {f"^{name}$": {"anyOf": [field, _NULL]} for name, field in group.items()}
    return form


def _simplify_fields(fields: Mapping[str, _Schema]) -> dict[str, _Schema]:
    return {name: _drop_null({**field, **_simplify_description(field)}) for name, field in fields.items()}


def _simplify_description(field: _Schema) -> _Schema:
    """Return a field's description without Markdown; capitalize it unless it begins with a code literal."""
    description = str(field.get("description", "")).partition("\n\nArgs:\n")[0].strip()
    text = " ".join(description.replace("`", "").split())
    return {"description": text if description.startswith("`") else text[:1].upper() + text[1:]} if text else {}


def _drop_null(field: dict[str, Any]) -> _Schema:
    """Return the field without the type null, since forms omit empty fields, and Prefect's API accepts null anyway."""
    choices = [choice for choice in field.get("anyOf", ()) if choice != _NULL]
    if field.get("default", ...) is not None or any({"$ref", "properties"} & choice.keys() for choice in choices):
        return field  # keep null as a choice, so that the form shows an optional section collapsed
    del field["default"]
    if len(choices) == 1:
        del field["anyOf"]
        return {**choices[0], **field}
    return field


class _WithSchema:
    """An annotation that replaces the JSON schema of a parameter; it builds the schema on demand."""

    def __init__(self, schema: Callable[[], _Schema]) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(self, _core_schema: object, _handler: object) -> JsonSchemaValue:
        return dict(self._schema())


class _WithType:
    """An annotation that replaces the type for pydantic, but not for type checkers."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(self._kind)


def _any_of(*schemas: _Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [dict(schema) for schema in schemas]})


def _text_schema(title: str) -> _Schema:
    return {"title": title, "type": "string"}


def _choice_schema(title: str, *values: str) -> _Schema:
    return {"title": title, "type": "string", "enum": list(values)}


def _list_schema(title: str, items: _Schema) -> _Schema:
    return {"title": title, "type": "array", "items": dict(items)}


def _block_reference_schema(block: type[StrictBlock]) -> _Schema:
    """Return the schema of a field in which the user selects a saved block; it has none of the block's own fields."""
    names = {name: {"type": "string"} for name in ("block_document_id", "block_document_slug")}
    reference = {"type": "object", "properties": names, "additionalProperties": False, "minProperties": 1}
    return {
        "title": f"{block.get_block_type_name()} block",
        "block_type_slug": block.get_block_type_slug(),
        "type": "object",
        "properties": {"$ref": reference},
        "required": ["$ref"],
        "additionalProperties": False,
    }


def _target_text_schema() -> _Schema:
    """Return the schema of a target passed as text; by it, Prefect's API rejects relative paths before a run begins."""
    return {**_text_schema(_TARGET_TITLE), "pattern": rf"^(?:{ABSOLUTE_PATTERN}|{make_block_slug_pattern()}$)"}


def _target_schema() -> _Schema:
    blocks = sorted(TARGET_TYPES, key=lambda block: not issubclass(block, ObjectTarget))  # buckets first
    return {"anyOf": [_target_text_schema(), *(_block_reference_schema(block) for block in blocks)]}


def _warm_start_schema() -> _Schema:
    pattern = rf"^(?:[^/]+|{ABSOLUTE_PATTERN}.*|{make_block_slug_pattern()}/[^/]+)$"
    source = {**_text_schema("Name, or target/name"), "pattern": pattern}
    return {"anyOf": [_list_schema("Experiments", source), _NULL]}


def _sync_schema() -> _Schema:
    target = {"anyOf": [_target_text_schema(), _NULL]}
    fields: dict[str, Any] = {
        # `upload_dir` is only text, since the schema of a target block needs the credential blocks of other packages.
        name: (Annotated[Any, WithJsonSchema(target)] if name == "upload_dir" else field.annotation, field)
        for name, field in SyncConfig.model_fields.items()
    }
    model = create_model("Options", __config__=ConfigDict(arbitrary_types_allowed=True), **fields)
    schemas: Mapping[str, _Schema] = model.model_json_schema()["properties"]
    options = {
        "title": "Options",
        "type": "object",
        "properties": {name: {**field, "position": position} for position, (name, field) in enumerate(schemas.items())},
        "additionalProperties": False,
        # Allow the fields that Prefect's client adds to a block; forms ignore `patternProperties`.
        "patternProperties": {"^(_block_|_is_anonymous|block_type_slug)": {}},
    }
    return {"anyOf": [options, _block_reference_schema(SyncConfig), _NULL]}


def _resolve_path_target(target: Any) -> object:
    validate_target(target)
    return resolve_target(target) if isinstance(target, os.PathLike) else target


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_TARGET_TITLE = "Absolute path or URI, or type/name of a saved block"
_MODE_SCHEMA = _choice_schema("One mode for all metrics", "min", "max")
_OPTIONAL_DICT = _WithType(dict[str, Any] | None)
_ANY_TYPE = _WithType(Any)
"""Makes pydantic accept any value, since `SearchPlan` validates the parameter with better messages."""
_Json: TypeAlias = Mapping[str, Mapping[str, Any]]
_Function: TypeAlias = Callable[[Mapping[str, Any]], object]

TargetLike: TypeAlias = StorageTarget | str | os.PathLike[str]
"""A block, the `type/name` of a saved block, a URI, or a path on this machine."""
TrainableLike: TypeAlias = type[Trainable] | Callable[[Any], object] | str
"""A subclass of `pt.Trainable`, a function of the configuration, or the `package.module:Name` of either."""
ConfigLike: TypeAlias = Mapping[str, Any] | _Dataclass
"""A configuration or a space: a dict, or a dataclass with a field for each parameter."""
StopLike: TypeAlias = (
    Stopper
    | _Function
    | Mapping[str, float | Mapping[str, Any]]
    | Sequence[Stopper | _Function | Mapping[str, float | Mapping[str, Any]]]
    | str
    | None
)
"""A stopper, a function of the metrics, limits of metrics, several of these, or a stopper's JSON or import path."""

TargetField: TypeAlias = Annotated[
    TargetLike, _WithType(StorageTarget | str), BeforeValidator(_resolve_path_target), _WithSchema(_target_schema)
]
OptionalTargetField: TypeAlias = Annotated[
    TargetLike | None,
    _WithType(Annotated[StorageTarget | str, BeforeValidator(_resolve_path_target)] | None),
    _WithSchema(lambda: {"anyOf": [*_target_schema()["anyOf"], _NULL]}),
]
WarmStartField: TypeAlias = Annotated[list[str] | None, _WithSchema(_warm_start_schema)]
ConfigField: TypeAlias = Annotated[ConfigLike | None, _OPTIONAL_DICT, BeforeValidator(convert_to_dicts)]
StopField: TypeAlias = Annotated[StopLike, _ANY_TYPE]
SchedulerName: TypeAlias = Literal["FIFO", "MedianStopping"]
"""The schedulers that need no options."""
SearchName: TypeAlias = Literal["RandomSearch", "OptunaSearch"]
SchedulerField: TypeAlias = Annotated[Scheduler | _Json | SchedulerName | None, _ANY_TYPE]
SearchField: TypeAlias = Annotated[Search | _Json | SearchName | None, _ANY_TYPE]
ResourcesField: TypeAlias = Annotated[Mapping[str, float] | None, _WithType(dict[str, float] | None)]
SyncField: TypeAlias = Annotated[SyncConfig | None, _WithSchema(_sync_schema)]
TrainableField: TypeAlias = Annotated[TrainableLike, _ANY_TYPE, WithJsonSchema({"type": "string"})]
OptionalTrainableField: TypeAlias = Annotated[
    TrainableLike | None, _ANY_TYPE, _any_of(_text_schema("package.module:Name"), _NULL)
]
MetricField: TypeAlias = Annotated[
    str | list[str] | None,
    _any_of(_text_schema("One metric"), _list_schema("Several metrics", {"type": "string"}), _NULL),
]
ModeField: TypeAlias = Annotated[
    Mode | list[Mode] | None, _any_of(_MODE_SCHEMA, _list_schema("One mode for each metric", _MODE_SCHEMA), _NULL)
]
CallbacksField: TypeAlias = Annotated[
    Sequence[Callback | str] | None,
    _WithType(list[Any] | None),
    _any_of(_list_schema("package.module:Name", {"type": "string"}), _NULL),
]
_AutoWord: TypeAlias = Literal["auto", "must", "never", "errored", "errored_only", "auto+errored", "auto+errored_only"]
_LocalWord: TypeAlias = Literal["local", "local+errored", "local+errored_only"]
_RemoteWord: TypeAlias = Literal["remote", "remote+errored", "remote+errored_only"]
_RayWord: TypeAlias = Literal["AUTO", "AUTO+ERRORED", "AUTO+ERRORED_ONLY", "ERRORED_ONLY", "LOCAL", "REMOTE"]
ResumeLike: TypeAlias = Literal[_AutoWord, _LocalWord, _RemoteWord, _RayWord]
"""The values of `resume` for type checkers, with Ray Tune's words; the flow accepts any letter case and word order."""
ResumeField: TypeAlias = Annotated[
    bool | ResumeLike,
    _WithType(bool | str),
    _any_of(_choice_schema("Mode", "auto", "must", "never"), _text_schema("Ray Tune's modes"), {"type": "boolean"}),
]
RerunErrored: TypeAlias = bool | Literal["only"]
RerunField: TypeAlias = Annotated[
    RerunErrored,
    _any_of(
        {"title": "Retry errored trials too", "type": "boolean"}, _choice_schema("Retry errored trials only", "only")
    ),
]


# Flows for deployments. Their forms show the few parameters that all users need, and one group with all others.

ADVANCED_PARAMETER = "advanced"
"""The parameter that holds the group."""
OPTIONS_DEFINITION = "AdvancedOptions"
"""The group's definition in the schema of a form."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class GroupedFlow(FlowWithServer[_P, _R]):
    """A flow to deploy. Its form shows the parameters `first`, in this order, and all others in the group `advanced`.

    Python clients may also pass a grouped parameter outside the group; the outer value replaces the value in the group.

    Args:
        flow: the flow to run, with flat parameters.
        first: the names of the parameters to show first, including all required parameters.
        module: the module that the entrypoint of a deployment names.
    """

    __signature__: Signature
    """The form's parameters, from which Prefect makes a deployment's schema."""

    def __init__(self, flow: FlowWithServer[_P, _R], first: Sequence[str], module: str) -> None:
        parameters = signature(flow.fn, eval_str=True).parameters
        by_keyword = {name: parameter.replace(kind=Parameter.KEYWORD_ONLY) for name, parameter in parameters.items()}
        others = [parameter for name, parameter in by_keyword.items() if name not in first]
        descriptions, fields = parameter_docstrings(getdoc(flow.fn)), dict[str, Any]()
        for position, parameter in enumerate(others):
            name, default = parameter.name, parameter.default
            text = descriptions.get(name)
            field = Field(default=default, title=name, description=text, json_schema_extra={"position": position})
            fields[name] = parameter.annotation, field
        strict = ConfigDict(title="Options", extra="forbid", arbitrary_types_allowed=True)
        options = create_model(OPTIONS_DEFINITION, __config__=strict, **fields)
        default = Field(default=None, description=f"{len(fields)} more parameters: choose Options.")
        group = Parameter(ADVANCED_PARAMETER, Parameter.KEYWORD_ONLY, default=default, annotation=options | None)
        # The default is None, because Prefect before version 3.9 would pass a default `Field` as the argument.
        call_flow = _make_entrypoint(flow, Signature([*by_keyword.values(), group.replace(default=None)]), module)
        super().__init__(call_flow, name=flow.name, version=flow.version, persist_result=flow.persist_result)
        self.flat_flow = flow
        self.__signature__ = Signature([*(by_keyword[name] for name in first), group])

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.flat_flow(*args, **flatten_parameters(options))

    def with_options(self, **options: Any) -> Self:
        """Return a copy with other options, but the same form."""
        other = super().with_options(**options)
        other.flat_flow = self.flat_flow.with_options(**options)
        other.__signature__ = self.__signature__
        return other

    def group_parameters(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat parameters in the form's structure."""
        first_values = {name: value for name, value in parameters.items() if name in self.__signature__.parameters}
        others = {name: value for name, value in parameters.items() if name not in first_values}
        return {**first_values, ADVANCED_PARAMETER: others} if others else first_values


def flatten_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a form's parameters, ungrouped. For a parameter both inside and outside the group, the outer value counts.

    Raises:
        InvalidInput: the group is not a mapping.
    """
    flat = dict(parameters)
    group = flat.pop(ADVANCED_PARAMETER, None)
    if not isinstance(group, Mapping | None):
        raise InvalidInput(f"{ADVANCED_PARAMETER}: expected an object with parameters, found a {type(group).__name__}")
    return {**(group or {}), **flat}


def _make_entrypoint(flow: FlowWithServer[_P, _R], accepted: Signature, module: str) -> Callable[..., _R]:
    """Return the function that a run calls. Its signature is `accepted`; Prefect's engine rejects other parameters."""
    function: Callable[..., _R] = flow.fn

    def call_flow(**parameters: Any) -> _R:
        group: BaseModel | None = parameters.pop(ADVANCED_PARAMETER)
        if group is not None:
            context = FlowRunContext.get()  # `flow_run.parameters` has only what was passed, without defaults
            passed = context.flow_run.parameters if context is not None and context.flow_run is not None else {}
            for name in sorted(group.model_fields_set):
                if name not in passed:
                    parameters[name] = getattr(group, name)
                elif parameters[name] != getattr(group, name):
                    warning = "%s: the value outside the group replaces the value in %r"
                    get_run_logger().warning(warning, name, ADVANCED_PARAMETER)
        return function(**parameters)

    call_flow.__name__ = call_flow.__qualname__ = function.__name__
    call_flow.__module__ = module
    call_flow.__doc__ = function.__doc__
    vars(call_flow)["__signature__"] = accepted
    return call_flow
