"""How the flows' parameters are asked for in a form, where their types alone would ask badly, or ask for secrets.

What a flow accepts is not touched: a script passes objects as ever. But Prefect's API refuses parameters of a
deployment that do not fit its form; so a block is picked there, or named, and never spelled out with its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from prefect_tune.blocks import AzureTarget, FsspecTarget, GcsTarget, LocalTarget, S3Target, StorageTarget, SyncConfig
from prefect_tune.blocks.form import Form
from prefect_tune.core.objective import Mode
from prefect_tune.flows.resuming import RerunErrored

__all__ = [
    "CallbacksField",
    "MetricField",
    "ModeField",
    "OtherTrainableField",
    "RerunField",
    "ResumeField",
    "SchedulerField",
    "SearchField",
    "SpaceField",
    "StopField",
    "SyncField",
    "TargetField",
    "TrainableField",
]

_Schema: TypeAlias = Mapping[str, Any]
_NOTHING: _Schema = {"type": "null"}


class _AskedAs:
    """Ask for a parameter as this schema does, which is made when somebody wants to know."""

    def __init__(self, schema: Callable[[], _Schema]) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(self, _core_schema: object, _handler: object) -> JsonSchemaValue:
        return dict(self._schema())


def _one_of(*kinds: _Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [dict(kind) for kind in kinds]})


def _text(title: str) -> _Schema:
    return {"title": title, "type": "string"}


def _choice(title: str, *words: str) -> _Schema:
    return {"title": title, "type": "string", "enum": list(words)}


def _json(title: str) -> _Schema:
    return {"title": title, "type": "object", "additionalProperties": True}


def _list_of(title: str, each: _Schema) -> _Schema:
    return {"title": title, "type": "array", "items": dict(each)}


def _saved(block: type[Form]) -> _Schema:
    """A saved block, picked from a list: its parameter is a reference, and nothing that stands in it."""
    reference = {"type": "string"}
    ways = {"block_document_id": reference, "block_document_slug": reference}
    there = {"type": "object", "properties": ways, "additionalProperties": False, "minProperties": 1}
    return {
        "title": f"{block.get_block_type_name()} block",
        "block_type_slug": block.get_block_type_slug(),
        "type": "object",
        "properties": {"$ref": there},
        "required": ["$ref"],
        "additionalProperties": False,
    }


def _target() -> _Schema:
    kinds = (S3Target, GcsTarget, AzureTarget, LocalTarget, FsspecTarget)
    return {"anyOf": [_text("URI, or type/name of a saved block"), *(_saved(kind) for kind in kinds)]}


def _sync() -> _Schema:
    fields = dict(SyncConfig.model_json_schema()["properties"])
    fields["upload_dir"] = {**fields["upload_dir"], "anyOf": [_text("URI, or type/name of a saved block"), _NOTHING]}
    options = {"title": "Options", "type": "object", "properties": fields, "additionalProperties": False}
    return {"anyOf": [options, _saved(SyncConfig), _NOTHING]}


_MODE = _choice("One for all", "min", "max")
_STOP = (_json("Limits and stoppers, JSON"), _text("package.module:name"), _list_of("Several", {}), _NOTHING)

TargetField: TypeAlias = Annotated[StorageTarget | str, _AskedAs(_target)]
SyncField: TypeAlias = Annotated[SyncConfig | None, _AskedAs(_sync)]
TrainableField: TypeAlias = Annotated[Any, WithJsonSchema({"type": "string"})]
OtherTrainableField: TypeAlias = Annotated[Any, _one_of(_text("package.module:Name"), _NOTHING)]
SpaceField: TypeAlias = Annotated[dict[str, Any] | None, _one_of(_json("JSON"), _NOTHING)]
MetricField: TypeAlias = Annotated[
    str | list[str] | None, _one_of(_text("One"), _list_of("Several", {"type": "string"}), _NOTHING)
]
ModeField: TypeAlias = Annotated[Mode | list[Mode], _one_of(_MODE, _list_of("One for each", _MODE))]
SchedulerField: TypeAlias = Annotated[Any, _one_of(_json("JSON"), _text("Its name alone"), _NOTHING)]
SearchField: TypeAlias = Annotated[Any, _one_of(_json("JSON"), _text("Its name alone"), _NOTHING)]
StopField: TypeAlias = Annotated[Any, _one_of(*_STOP)]
CallbacksField: TypeAlias = Annotated[
    list[Any] | None, _one_of(_list_of("package.module:Name", {"type": "string"}), _NOTHING)
]
ResumeField: TypeAlias = Annotated[
    bool | str,
    _one_of(_choice("Is it there?", "auto", "must", "never"), _text("Ray Tune's words"), {"type": "boolean"}),
]
RerunField: TypeAlias = Annotated[
    RerunErrored, _one_of({"title": "Go on, and try them again", "type": "boolean"}, _choice("Nothing else", "only"))
]
