"""Validate the arguments of a flow call before the flow run starts, with one error line for each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from inspect import Parameter, signature
from reprlib import repr as shortened
from types import FunctionType
from typing import Any, get_args, get_type_hints

from prefect.client.schemas.objects import State
from prefect.exceptions import ParameterBindError
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.settings import get_current_settings
from prefect.utilities.callables import get_call_parameters
from prefect.utilities.collections import visit_collection
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json

from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.shown_text import did_you_mean, did_you_mean_or_has
from prefect_tune.core.values import HasJsonForm, valid_name

_CALLS = frozenset({"return_state", "wait_for"})
"""Keyword arguments that Prefect consumes itself."""
_MAKES = frozenset({"trainable", "callbacks"})
"""Parameters that accept a class, or report a class with an error of their own."""
_SECRET = frozenset({"target", "sync"})
"""Parameters whose values never appear in an error: they may hold credentials."""
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "storage_path": ("target",),
    "local_dir": ("target",),
    "upload_dir": ("target",),
    "name": ("experiment",),
    "param_space": ("space", "config"),
    "config": ("space",),
    "search_alg": ("search",),
    "max_failures": ("failures",),
    "time_budget_s": ("time_budget_seconds",),
    "checkpoint_config": ("checkpoint", "retention"),
    "checkpoint_freq": ("checkpoint",),
    "keep_checkpoints_num": ("retention",),
    "n_trials": ("num_samples",),
    "direction": ("mode",),
    "directions": ("mode",),
    "sampler": ("search",),
    "pruner": ("scheduler",),
    "study_name": ("experiment",),
    "storage": ("target",),
    "load_if_exists": ("resume",),
    "timeout": ("time_budget_seconds",),
    "n_jobs": ("max_concurrent_trials",),
    "objective": ("trainable",),
    "func": ("trainable",),
    "search_space": ("space",),
}
"""Parameter names of Ray Tune and Optuna, and their equivalents here."""
_CHECKS: Mapping[str, Callable[[Any], object]] = {"target": validate_target, "experiment": valid_name}
"""What the flow checks first, here before there is a flow run. Neither needs the target or the Prefect server."""
_EXPECTED = {
    "bool": "True or False",
    "dict": "a dict",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "string": "text",
    "tuple": "a tuple",
}
_TELLING = {"extra_forbidden": "there is no such field", "missing": "missing", "value_error": "", "unknown_field": ""}
"""Messages for pydantic error types other than a wrong value type; empty: use pydantic's own message."""
_CLEARLY = 4
"""Upper bound of the size of Prefect's JSON, relative to pydantic's JSON of the same value."""
_WRITE = {
    "callbacks": "callbacks=[pt.FileLogger()]",
    "checkpoint": "checkpoint=pt.Cadence(every_steps=5)",
    "failures": "failures=pt.FailurePolicy(max_failures=2)",
    "retention": "retention=pt.Retention(last=3)",
    "sync": "sync=pt.SyncConfig(...)",
    "target": "target='s3://bucket/runs', or a folder, or the type/name of a saved block",
    "warm_start": "warm_start=['earlier-experiment']",
}


def require_valid(flow: Flow[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of a call as Prefect will; arguments that hold futures or block references are left to it.

    Returns:
        the arguments that it has checked, by name.

    Raises:
        InvalidInput: an argument is unknown, missing, or of a wrong type, with a line for each; or all together
            exceed the size that Prefect stores, or one holds text that Prefect cannot send.
    """
    given = {name: value for name, value in options.items() if name not in _CALLS}
    _require_known(flow, given)
    try:
        bound = get_call_parameters(flow.fn, args, given, apply_defaults=False)
    except ParameterBindError as error:
        raise InvalidInput(_unbound(flow, args, given)) from error
    here = {name: value for name, value in bound.items() if not _is_for_later(value)}
    if wrong := [said for name, value in here.items() if (said := _wrong(flow, name, value))]:
        raise InvalidInput("\n".join(wrong))
    _require_storable(flow, bound, get_current_settings().server.api.max_parameter_size)
    return here


def _require_storable(flow: Flow[..., Any], bound: Mapping[str, Any], most_bytes: int) -> None:
    if _are_clearly_small(bound, most_bytes):
        return
    sizes = {name: _byte_count(flow, name, value) for name, value in bound.items()}
    if not 0 < most_bytes < sum(sizes.values()):
        return
    largest = max(sizes, key=sizes.__getitem__)
    parts, hint = bound[largest], ""
    if isinstance(parts, Mapping) and parts:
        within = max(parts, key=lambda key: _byte_count(flow, largest, parts[key]))
        hint = f" {within!r} is the largest:"
    raise InvalidInput(
        f"{largest}: {sizes[largest]:,} bytes as JSON, and Prefect takes {most_bytes:,} for all parameters;{hint} pass "
        "a path, and read the file in the trainable"
    )


def _are_clearly_small(bound: Mapping[str, Any], most_bytes: int) -> bool:
    """Estimate the size by pydantic: Prefect's serializer imports FastAPI, which would delay a server's start."""
    try:
        return len(to_json(bound, fallback=_nothing_much, context=HasJsonForm.ESTIMATE)) < most_bytes / _CLEARLY
    except ValueError:
        return False


def _nothing_much(value: object) -> str:
    """Return "" for a function, which Prefect serializes as `{}`; other objects only Prefect can serialize."""
    if isinstance(value, FunctionType):
        return ""
    raise ValueError(value)


def _byte_count(flow: Flow[..., Any], name: str, value: object) -> int:
    try:
        stored = flow.serialize_parameters({name: value})
    except AssertionError as refused:  # it carries no message
        raise InvalidInput(
            f"{name}: Prefect cannot store a dataclass type; pass an instance of it, or 'package.module:Name'"
        ) from refused
    if surrogate := _WITH_SURROGATE.search(json.dumps(stored, ensure_ascii=False)):
        raise InvalidInput(
            f"{name}: expected Unicode text, found {surrogate[1]!a}; a file name that is not UTF-8 can only be read in "
            "the trainable, or be written as ascii(name)"
        )
    return len(json.dumps(stored, separators=(",", ":")).encode())


_WITH_SURROGATE = re.compile(r'"([^"]*[\ud800-\udfff][^"]*)"')


def _require_known(flow: Flow[..., Any], given: Iterable[str]) -> None:
    known = signature(flow.fn).parameters
    if unknown := [name for name in given if name not in known]:
        raise InvalidInput(
            "\n".join(f"{name}: {_called(flow)} has no such parameter{_hint(name, known)}" for name in unknown)
        )


def _hint(name: str, known: Iterable[str]) -> str:
    there = list(known)
    ours = [each for each in _ELSEWHERE.get(name, ()) if each in there]
    return f"; did you mean {ours[0]!r}?" if ours else f"; {did_you_mean_or_has(name, there)}"


def _unbound(flow: Flow[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> str:
    """Return why the arguments do not bind: too many positional ones, one passed twice, or some missing."""
    parameters = signature(flow.fn).parameters
    by_place = [name for name, each in parameters.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_place):
        return (
            f"{_called(flow)}: expected at most {len(by_place)} positional arguments "
            f"({', '.join(by_place)}), found {len(args)}; pass the others by keyword"
        )
    if twice := [name for name in by_place[: len(args)] if name in given]:
        return f"{twice[0]}: {_called(flow)} got it twice, by position and by keyword; pass it once"
    there = {*by_place[: len(args)], *given}
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in there]
    return "\n".join(f"{name}: missing; {_called(flow)} needs it{_written(name)}" for name in missing)


def _called(flow: Flow[..., Any]) -> str:
    return f"pt.{flow.fn.__name__}"


def _written(name: str) -> str:
    return f"; write {_WRITE[name]}" if name in _WRITE else ""


def _is_for_later(value: object) -> bool:
    later = False

    def look(each: Any) -> Any:
        nonlocal later
        later = later or isinstance(each, PrefectFuture | State) or (isinstance(each, dict) and "$ref" in each)
        return each

    visit_collection(value, look, return_data=False, max_depth=3)
    return later


def _wrong(flow: Flow[..., Any], name: str, value: object) -> str | None:
    if isinstance(value, type) and name not in _MAKES:
        return f"{name}: expected an object, found the class {value.__name__}; write {_made_of(value)}"
    kind = _kinds(flow.fn)[name]
    if kind is Any:
        return None
    kinds = {*get_args(kind), kind}
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:  # pydantic takes True for 1
        return f"{name}: expected {_EXPECTED['int' if int in kinds else 'float']}, found {value}"
    try:
        _adapter(flow.fn, name).validate_python(value)
    except ValidationError as error:
        return _described(name, value, error.errors(include_url=False))
    return _refused(name, value)


def _refused(name: str, value: object) -> str | None:
    if value is None or name not in _CHECKS:
        return None
    try:
        _CHECKS[name](value)
    except InvalidInput as refused:
        return f"{name}: {str(refused).removeprefix(f'{name}: ')}"
    return None


@cache
def _kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    return get_type_hints(function)


@cache
def _adapter(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function, include_extras=True)[name])


def _made_of(kind: type) -> str:
    import prefect_tune

    prefix = "pt." if kind.__name__ in prefect_tune.__all__ else ""
    needed = [name for name, each in signature(kind).parameters.items() if each.default is each.empty]
    return f"{prefix}{kind.__name__}({', '.join(f'{each}=...' for each in needed)})"


def _described(name: str, value: object, errors: Iterable[ErrorDetails]) -> str:
    """Return the first error inside the value if its outer type matches; else all the types that were expected."""
    every = list(errors)
    within = [each for each in every if each["input"] is not value or each["type"] == "missing"]
    errors = within[:1] or every
    first = errors[0]
    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"][-1:] if within)
    if first["type"] in _TELLING:
        return f"{name}{where}: {_TELLING[first['type']] or first['msg'].removeprefix('Value error, ')}"
    expected = " or ".join(dict.fromkeys(map(_expected, errors)))
    hint = "" if within else _written(name)
    return f"{name}{where}: expected {expected}, found {_found(name, first['input'])}{_meant(first)}{hint}"


def _meant(error: ErrorDetails) -> str:
    """Return `; did you mean 'min'?` where one of a few words was expected, and a similar one was found."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    return did_you_mean(error["input"], re.findall(r"'([^']*)'", str(error.get("ctx", {})["expected"])))


def _expected(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    kind = error["type"].partition("_")[0]
    if "class_name" in context:
        return f"a {context['class_name']}"
    if error["type"].endswith(("_type", "_parsing")) and kind in _EXPECTED:
        return _EXPECTED[kind]
    if error["type"] == "literal_error":
        return str(context["expected"])
    message = error["msg"].removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def _found(name: str, found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    is_plain = found is None or isinstance(found, str | int | float)
    return shortened(found) if is_plain and (name not in _SECRET or found is None) else f"a {type(found).__name__}"
