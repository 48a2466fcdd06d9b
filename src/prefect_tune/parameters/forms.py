"""The types of the flows' parameters: what checkers accept in a call, and JSON schemas for forms.

A parameter has a schema of its own where that of its type is unclear or asks for secrets.

The flows themselves still accept objects from a script. But Prefect's API refuses deployment parameters that do not
fit the schema; so a form selects or names a saved block, and never takes a block's fields with their credentials.
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
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    create_model,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.blocks.resolve_target import ABSOLUTE, block_slug_pattern, validate_target
from prefect_tune.blocks.storage_target import ObjectTarget, StrictBlock
from prefect_tune.blocks.targets import TARGET_TYPES
from prefect_tune.callbacks import Callback
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import as_dicts
from prefect_tune.core.search.objective import Mode
from prefect_tune.prefect_api.flow_with_server import FlowWithServer
from prefect_tune.runtime.trainable import Trainable

if TYPE_CHECKING:
    from typing import Self


_Schema: TypeAlias = Mapping[str, Any]
_NOTHING: _Schema = {"type": "null"}


def form_of(flow: Flow[Any, Any]) -> dict[str, Any]:
    """Return the schema of a flow's parameters, simplified for forms.

    An optional parameter is a field that may stay empty, not a choice between a type and None; descriptions, which
    a form shows literally, have no Markdown in them. The parameters in the group of a `GroupedFlow` are valid beside it
    too.
    """
    schema = parameter_schema(flow).model_dump_for_openapi()
    definitions = {
        name: {**each, **_described(each), "properties": _fields(each.get("properties", {}))}
        for name, each in schema.get("definitions", {}).items()
    }
    form = {**schema, "properties": _fields(schema["properties"]), "definitions": definitions}
    if isinstance(flow, GroupedFlow):  # no form shows patterns as fields
        group = definitions[OPTIONS]["properties"]
        form["patternProperties"] = {f"^{name}$": {"anyOf": [field, _NOTHING]} for name, field in group.items()}
    return form


def _fields(fields: Mapping[str, _Schema]) -> dict[str, _Schema]:
    return {name: _field({**each, **_described(each)}) for name, each in fields.items()}


def _described(field: _Schema) -> _Schema:
    """Return a field's description without Markdown, capitalized unless it begins with a literal."""
    given = str(field.get("description", "")).partition("\n\nArgs:\n")[0].strip()
    said = " ".join(given.replace("`", "").split())
    return {"description": said if given.startswith("`") else said[:1].upper() + said[1:]} if said else {}


def _field(field: dict[str, Any]) -> _Schema:
    """Return the field without null: an empty one is left out, and the API accepts null for it anyway."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != _NOTHING]
    if field.get("default", ...) is not None or any({"$ref", "properties"} & kind.keys() for kind in kinds):
        return field  # an optional section stays a choice, so that the form shows it collapsed
    del field["default"]
    if len(kinds) == 1:
        del field["anyOf"]
        return {**kinds[0], **field}
    return field


class _AskedAs:
    """A type annotation that replaces the JSON schema of a parameter; the schema is built on demand."""

    def __init__(self, schema: Callable[[], _Schema]) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(self, _core_schema: object, _handler: object) -> JsonSchemaValue:
        return dict(self._schema())


class _ValidatedAs:
    """A type annotation that replaces the type for pydantic: checkers see what is declared."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(self._kind)


def _one_of(*kinds: _Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [dict(kind) for kind in kinds]})


def _text(title: str) -> _Schema:
    return {"title": title, "type": "string"}


def _choice(title: str, *words: str) -> _Schema:
    return {"title": title, "type": "string", "enum": list(words)}


def _list_of(title: str, each: _Schema) -> _Schema:
    return {"title": title, "type": "array", "items": dict(each)}


def _saved(block: type[StrictBlock]) -> _Schema:
    """Return the schema of a saved block, selected from a list: a reference, without the block's fields."""
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


def _target_text() -> _Schema:
    """Return the schema of a target as a text: Prefect's API refuses a relative path before a run begins."""
    return {**_text(_TARGET_TITLE), "pattern": rf"^(?:{ABSOLUTE}|{block_slug_pattern()}$)"}


def _target() -> _Schema:
    kinds = sorted(TARGET_TYPES, key=lambda kind: not issubclass(kind, ObjectTarget))  # a deployment needs a bucket
    return {"anyOf": [_target_text(), *(_saved(kind) for kind in kinds)]}


def _warm_start() -> _Schema:
    pattern = rf"^(?:[^/]+|{ABSOLUTE}.*|{block_slug_pattern()}/[^/]+)$"
    return {"anyOf": [_list_of("Experiments", {**_text("Name, or target/name"), "pattern": pattern}), _NOTHING]}


def _sync() -> _Schema:
    target = {"anyOf": [_target_text(), _NOTHING]}
    known: dict[str, Any] = {
        # the schema of the blocks of targets would import the credential blocks of other packages
        name: (Annotated[Any, WithJsonSchema(target)] if name == "upload_dir" else each.annotation, each)
        for name, each in SyncConfig.model_fields.items()
    }
    model = create_model("Options", __config__=ConfigDict(arbitrary_types_allowed=True), **known)
    drawn: Mapping[str, _Schema] = model.model_json_schema()["properties"]
    options = {
        "title": "Options",
        "type": "object",
        "properties": {name: {**each, "position": place} for place, (name, each) in enumerate(drawn.items())},
        "additionalProperties": False,
        # What Prefect's client adds to a block that it sends; no form shows patterns as fields.
        "patternProperties": {"^(_block_|_is_anonymous|block_type_slug)": {}},
    }
    return {"anyOf": [options, _saved(SyncConfig), _NOTHING]}


def _writable_target(target: Any) -> object:
    validate_target(target)
    return resolve_target(target) if isinstance(target, os.PathLike) else target


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_TARGET_TITLE = "Absolute path or URI, or type/name of a saved block"
_MODE = _choice("One mode for all metrics", "min", "max")
_OPTIONAL_DICT = _ValidatedAs(dict[str, Any] | None)
_UNCHECKED = _ValidatedAs(Any)
"""For what `SearchPlan` validates: its messages say more."""
_Json: TypeAlias = Mapping[str, Mapping[str, Any]]
_Function: TypeAlias = Callable[[Mapping[str, Any]], object]

TargetLike: TypeAlias = StorageTarget | str | os.PathLike[str]
"""A block, the `type/name` of a saved block, a URI, or a path of this machine."""
TrainableLike: TypeAlias = type[Trainable] | Callable[[Any], object] | str
"""A subclass of `pt.Trainable`, a function of the configuration, or the `package.module:Name` of one."""
ConfigLike: TypeAlias = Mapping[str, Any] | _Dataclass
"""A configuration or a space: a dict, or a dataclass whose fields are its parameters."""
StopLike: TypeAlias = (
    Stopper
    | _Function
    | Mapping[str, float | Mapping[str, Any]]
    | Sequence[Stopper | _Function | Mapping[str, float | Mapping[str, Any]]]
    | str
    | None
)
"""A stopper, a function of the metrics, limits of metrics, several of these, or a stopper's JSON or name."""

TargetField: TypeAlias = Annotated[
    TargetLike, _ValidatedAs(StorageTarget | str), BeforeValidator(_writable_target), _AskedAs(_target)
]
OptionalTargetField: TypeAlias = Annotated[
    TargetLike | None,
    _ValidatedAs(Annotated[StorageTarget | str, BeforeValidator(_writable_target)] | None),
    _AskedAs(lambda: {"anyOf": [*_target()["anyOf"], _NOTHING]}),
]
WarmStartField: TypeAlias = Annotated[list[str] | None, _AskedAs(_warm_start)]
ConfigField: TypeAlias = Annotated[ConfigLike | None, _OPTIONAL_DICT, BeforeValidator(as_dicts)]
StopField: TypeAlias = Annotated[StopLike, _UNCHECKED]
SchedulerName: TypeAlias = Literal["FIFO", "MedianStopping"]
"""The schedulers that need no options."""
SearchName: TypeAlias = Literal["RandomSearch", "OptunaSearch"]
SchedulerField: TypeAlias = Annotated[Scheduler | _Json | SchedulerName | None, _UNCHECKED]
SearchField: TypeAlias = Annotated[Search | _Json | SearchName | None, _UNCHECKED]
ResourcesField: TypeAlias = Annotated[Mapping[str, float] | None, _ValidatedAs(dict[str, float] | None)]
SyncField: TypeAlias = Annotated[SyncConfig | None, _AskedAs(_sync)]
TrainableField: TypeAlias = Annotated[TrainableLike, _UNCHECKED, WithJsonSchema({"type": "string"})]
OtherTrainableField: TypeAlias = Annotated[
    TrainableLike | None, _UNCHECKED, _one_of(_text("package.module:Name"), _NOTHING)
]
MetricField: TypeAlias = Annotated[
    str | list[str] | None, _one_of(_text("One metric"), _list_of("Several metrics", {"type": "string"}), _NOTHING)
]
ModeField: TypeAlias = Annotated[
    Mode | list[Mode] | None, _one_of(_MODE, _list_of("One mode for each metric", _MODE), _NOTHING)
]
CallbacksField: TypeAlias = Annotated[
    Sequence[Callback | str] | None,
    _ValidatedAs(list[Any] | None),
    _one_of(_list_of("package.module:Name", {"type": "string"}), _NOTHING),
]
ResumeLike: TypeAlias = Literal[
    "auto",
    "must",
    "never",
    "errored",
    "errored_only",
    "auto+errored",
    "auto+errored_only",
    "local",
    "local+errored",
    "local+errored_only",
    "remote",
    "remote+errored",
    "remote+errored_only",
    "AUTO",
    "AUTO+ERRORED",
    "AUTO+ERRORED_ONLY",
    "ERRORED_ONLY",
    "LOCAL",
    "REMOTE",
]
"""The words of `resume`, and Ray Tune's, as checkers know them; other cases and orders of these words work too."""
ResumeField: TypeAlias = Annotated[
    bool | ResumeLike,
    _ValidatedAs(bool | str),
    _one_of(_choice("Mode", "auto", "must", "never"), _text("Ray Tune's resume modes"), {"type": "boolean"}),
]
RerunErrored: TypeAlias = bool | Literal["only"]
RerunField: TypeAlias = Annotated[
    RerunErrored,
    _one_of({"title": "Retry errored trials too", "type": "boolean"}, _choice("Retry errored trials only", "only")),
]


# Flows for deployments: their forms show the few parameters that everybody needs, and the others in one group.

ADVANCED = "advanced"
"""The parameter that holds the group."""
OPTIONS = "AdvancedOptions"
"""The group's definition in the schema of a form."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class GroupedFlow(FlowWithServer[_P, _R]):
    """A flow to deploy. Its form shows the parameters `first`, in this order, and all others in the group `advanced`.

    A run takes a parameter of the group beside it too, as Python clients pass it; that one replaces the one in the
    group.

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
        descriptions = parameter_docstrings(getdoc(flow.fn))
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
            for place, each in enumerate(others)
        }
        strict = ConfigDict(title="Options", extra="forbid", arbitrary_types_allowed=True)
        options = create_model(OPTIONS, __config__=strict, **fields)
        default = Field(default=None, description=f"{len(fields)} more parameters: choose Options.")
        group = Parameter(ADVANCED, Parameter.KEYWORD_ONLY, default=default, annotation=options | None)
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


def _entry(flow: FlowWithServer[_P, _R], accepted: Signature, module: str) -> Callable[..., _R]:
    """Return the function that a run calls; Prefect's engine refuses parameters that its signature lacks."""
    function: Callable[..., _R] = flow.fn

    def entry(**parameters: Any) -> _R:
        group: BaseModel | None = parameters.pop(ADVANCED)
        if group is not None:
            context = FlowRunContext.get()  # whose parameters are without the defaults that Prefect adds
            beside = context.flow_run.parameters if context is not None and context.flow_run is not None else {}
            for name in sorted(group.model_fields_set):
                if name not in beside:
                    parameters[name] = getattr(group, name)
                elif parameters[name] != getattr(group, name):
                    warning = "%s: the value beside the group replaces the one in %r"
                    get_run_logger().warning(warning, name, ADVANCED)
        return function(**parameters)

    entry.__name__ = entry.__qualname__ = function.__name__
    entry.__module__ = module
    entry.__doc__ = function.__doc__
    vars(entry)["__signature__"] = accepted
    return entry
