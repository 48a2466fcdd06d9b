"""Convert search spaces to and from JSON, and option objects to JSON, for forms, files and the journal.

    {"lr": {"loguniform": [0.0001, 0.1]}, "layers": {"choice": [1, 2, 3]}, "model": {"depth": {"randint": [1, 5]}}}

An object is a domain if its only key is the name of a domain; every other object is a nested space. Wrap an object that
only looks like a domain: `{"constant": value}` keeps a value unchanged, `{"space": {...}}` reads the keys of an object
as parameters. The keys of the outermost object are always parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

from prefect_tune.core.errors import InvalidInput, UnsafePayload
from prefect_tune.core.metrics import is_number, short_repr
from prefect_tune.core.search import domains
from prefect_tune.core.search.domains import (
    Branch,
    Choice,
    Domain,
    Float,
    Grid,
    Integer,
    Normal,
    SampleFrom,
    to_plain_node,
)
from prefect_tune.core.search.space import child_path, option_path, validate_space
from prefect_tune.core.values import HasJsonForm, Json, canonical_json
from prefect_tune.registry import BUILT_IN_MODULES, OPTION_FIELDS

Function: TypeAlias = Callable[[Mapping[str, Any]], object]
FunctionLoader: TypeAlias = Callable[[str], Function]
"""Loads the function that `sample_from` names (`package.module:name`). This runs code, so documents must be trusted."""

_RANGES: Mapping[str, Callable[..., Domain]] = {
    function.__name__: function
    for function in (
        domains.uniform,
        domains.quniform,
        domains.loguniform,
        domains.qloguniform,
        domains.randint,
        domains.qrandint,
        domains.lograndint,
        domains.qlograndint,
        domains.randn,
        domains.qrandn,
    )
}
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
JSON_FORMS = {
    "choice": '{"choice": [option, ...]} or {"choice": {"options": [...], "weights": [...]}}',
    "grid_search": '{"grid_search": [value, ...]}',
    "sample_from": '{"sample_from": "package.module:name"}',
    "constant": '{"constant": value}',
    "space": '{"space": {...}}',
    **{name: f'{{"{name}": [{", ".join(inspect.signature(call).parameters)}]}}' for name, call in _RANGES.items()},
}
"""The JSON form of each domain, for messages."""
_DISTRIBUTION_BY_FIELDS = {
    frozenset(field.name for field in fields(domain)): name
    for domain, name in (
        (Float, "uniform or randint"),
        (Normal, "randn"),
        (Choice, "choice"),
        (Grid, "grid_search"),
        (SampleFrom, "sample_from"),
    )
}
_OPTION_CLASS_BY_FIELDS = {frozenset(names.split()): name for name, names in OPTION_FIELDS.items()}
_CONSTANT_HINT = 'If this object is a value of your configuration, write {"constant": ...}'
_MIN_SIMILARITY = 0.8
_NO_ARGUMENTS: Mapping[str, object] = {}


def space_from_json(document: Mapping[str, object], load: FunctionLoader | None = None) -> dict[str, object]:
    """Return the space that `document` describes; the document may also have domains such as `pt.uniform(0, 1)`.

    `load` loads the functions of `sample_from`. Without `load`, a function is an error, because loading it runs code.

    ```python
    space = pt.space_from_json({"lr": {"loguniform": [1e-4, 0.1]}})
    ```

    Raises:
        InvalidInput: the document does not describe a valid space; the message says where.
        UnsafePayload: the document names a function, and `load` is None.
    """
    if not isinstance(document, Mapping):
        raise InvalidInput(f'space: expected an object such as {{"lr": {{"uniform": [0, 1]}}}}, found {document!r}')
    return validate_space(_SpaceReader(load).read_parameters(document, ""))


def space_to_json(space: Mapping[str, object]) -> dict[str, Json]:
    """Return the document from which `space_from_json` creates the same space.

    ```python
    document = pt.space_to_json({"lr": pt.loguniform(1e-4, 0.1)})
    ```

    Raises:
        InvalidInput: the space is invalid, or a function of `sample_from` cannot be imported by name.
    """
    return {key: space_node_to_json(node, child_path("", key)) for key, node in validate_space(space).items()}


class _SpaceReader:
    """Reads one document. In all methods, `where` is the name of the parameter, for error messages."""

    def __init__(self, load: FunctionLoader | None) -> None:
        self._load = load

    def read_parameters(self, node: Mapping[str, object], where: str) -> dict[str, object]:
        return {key: self.read_node(child, child_path(where, str(key))) for key, child in node.items()}

    def read_node(self, node: object, where: str) -> object:
        match node:
            case Mapping():
                if keyword := _find_domain_keyword(node):
                    return self._read_domain(keyword, node[keyword], where)
                _reject_option_object(node, where)
                return self.read_parameters(node, where)
            case list() | tuple():
                return [self.read_node(child, child_path(where, index)) for index, child in enumerate(node)]
            case _:
                return to_plain_node(node, where)

    def _read_domain(self, keyword: str, argument: object, where: str) -> object:
        match keyword, argument:
            case "constant", _:
                return to_plain_node(argument, where)
            case "space", Mapping():
                return self.read_parameters(argument, where)
            case "sample_from", str():
                return SampleFrom(self._load_function(argument, where), argument)
            case "grid_search", list() | tuple():
                return _make_domain(where, domains.grid_search, [self._read_options(argument, where)])
            case "choice", list() | tuple():
                return _make_domain(where, domains.choice, [self._read_options(argument, where)])
            case "choice", {"options": list() | tuple() as options, "weights": list() | tuple() as weights}:
                return _make_domain(where, domains.choice, [self._read_options(options, where), weights])
            case _, list() | tuple() if keyword in _RANGES:
                return _make_domain(where, _RANGES[keyword], argument)
            case _, Mapping() if keyword in _RANGES:
                return _make_domain(where, _RANGES[keyword], (), argument)
            case _:
                raise _domain_error(keyword, argument, where)

    def _read_options(self, options: Sequence[object], where: str) -> list[object]:
        return [self.read_node(child, option_path(where, index)) for index, child in enumerate(options)]

    def _load_function(self, path: str, where: str) -> Function:
        if not _FUNCTION_PATH.fullmatch(path):
            raise InvalidInput(f"{where}: sample_from: expected 'package.module:name', found {path!r}")
        if self._load is None:
            raise UnsafePayload(
                f"{where}: sample_from {path!r}: importing a function by its name runs code, which is not allowed "
                "here; pass `load` if you trust the document"
            )
        return self._load(path)


def _find_domain_keyword(node: Mapping[Any, object]) -> str | None:
    """Return the only key of an object if the key is, or resembles, the name of a domain; otherwise None."""
    if len(node) != 1:
        return None
    key, argument = next(iter(node.items()))
    if key in JSON_FORMS:
        return str(key)
    is_call = isinstance(key, str) and isinstance(argument, list)
    return key if is_call and get_close_matches(key, JSON_FORMS, 1, _MIN_SIMILARITY) else None


def _reject_option_object(node: Mapping[str, object], where: str) -> None:
    """Raise if `node` is an option object (for example, a scheduler), in JSON form or as a dict of its fields."""
    if len(node) == 1 and (name := next(iter(node))) in OPTION_FIELDS and isinstance(node[name], Mapping):
        raise InvalidInput(f"{where}: expected a value or a distribution, found a {name}. {_CONSTANT_HINT}")
    if (name := match_option_class(node)) in _DISTRIBUTION_BY_FIELDS.values() or (name and len(node) > 1):
        form = JSON_FORMS.get(name.partition(" ")[0], "")
        raise InvalidInput(
            f"{where}: found the fields of a {name} without its class: {short_repr(dict(node))}. A client "
            f"without this release sent them; pass the JSON form{form and f', such as {form}'}. {_CONSTANT_HINT}"
        )


def match_option_class(node: Mapping[str, object]) -> str:
    """Return the name of the option class whose fields are exactly the keys of `node`; empty if there is none."""
    has_numbers = all(is_number(node[name]) for name in ("low", "high", "mean", "sd") if name in node)
    if not has_numbers or not isinstance(node.get("options", []), list | tuple):
        return ""
    return (_DISTRIBUTION_BY_FIELDS | _OPTION_CLASS_BY_FIELDS).get(frozenset(node), "")


def find_distribution(node: object) -> Mapping[str, object] | None:
    """Return the first distribution in a plain value, in JSON form or as a dict of fields; None if there is none."""
    if isinstance(node, Mapping):
        return node if is_distribution(node) else find_distribution(list(node.values()))
    return next(filter(None, map(find_distribution, node)), None) if isinstance(node, list) else None


def is_distribution(node: Mapping[str, object]) -> bool:
    """Return whether `node` is a distribution in a space; `{"choice": "adam"}` only resembles one."""
    if match_option_class(node) in _DISTRIBUTION_BY_FIELDS.values():
        return True
    if _find_domain_keyword(node) in (None, "constant", "space"):
        return False
    try:
        _SpaceReader(None).read_node(node, "")
    except UnsafePayload:
        return True
    except InvalidInput:
        return False
    return True


def _domain_error(keyword: str, argument: object, where: str) -> InvalidInput:
    name = get_close_matches(keyword, JSON_FORMS, 1, _MIN_SIMILARITY)[0]
    start = "expected" if name == keyword else f"unknown distribution {keyword!r}; did you mean {name!r}? Expected"
    return InvalidInput(
        f"{where}: {start} {JSON_FORMS[name]}, found {{{keyword!r}: {argument!r}}}; if {keyword!r} "
        f'is a name in your configuration, write {{"space": {{"{keyword}": ...}}}}'
    )


def _make_domain(
    where: str,
    function: Callable[..., Domain],
    arguments: Sequence[object],
    options: Mapping[str, object] = _NO_ARGUMENTS,
) -> Domain:
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise _domain_error(function.__name__, options or list(arguments), where) from error
    try:
        return function(*arguments, **options)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def space_node_to_json(node: object, where: str) -> Json:
    """Return the JSON of a part of a valid space. Raises like `space_to_json`."""
    match node:
        case Float() | Integer() | Normal():
            keyword, arguments = domains.get_constructor_call(node)
            return {keyword: list(arguments)}
        case Grid():
            return {"grid_search": _options_to_json(node, where)}
        case Choice(weights=None):
            return {"choice": _options_to_json(node, where)}
        case Choice():
            return {"choice": {"options": _options_to_json(node, where), "weights": list(node.weights or ())}}
        case SampleFrom():
            return {"sample_from": _require_function_path(node, where)}
        case dict():
            document = {key: space_node_to_json(child, child_path(where, key)) for key, child in node.items()}
            is_ambiguous = _find_domain_keyword(node) or match_option_class(node) or node.keys() & OPTION_FIELDS.keys()
            return {"space": document} if is_ambiguous else document
        case list():
            return [space_node_to_json(child, child_path(where, index)) for index, child in enumerate(node)]
        case _:
            return cast("Json", node)


def _options_to_json(node: Branch, where: str) -> list[Json]:
    return [space_node_to_json(child, option_path(where, index)) for index, child in enumerate(node.options)]


def _require_function_path(node: SampleFrom, where: str) -> str:
    path = node.path or f"{getattr(node.function, '__module__', '')}:{getattr(node.function, '__qualname__', '')}"
    if _FUNCTION_PATH.fullmatch(path) and not path.startswith("__main__:"):
        return path
    raise InvalidInput(
        f"{where}: {node!r} cannot be imported by name: move the function to the top level of a module that is "
        "importable where the experiment runs"
    )


# In JSON, an option object has its class as the only key, and its fields as the value: `{"ASHA": {"max_t": 81}}`.

_MODULE_BY_CLASS = {name: module for kind in BUILT_IN_MODULES.values() for name, module in kind.items()}


class NamedOptions(HasJsonForm):
    """The options of a scheduler, search or stopper. Only the built-in classes have a JSON form."""

    __slots__ = ()

    def to_json_form(self) -> object:
        """Return the name of the class, and the options that differ from their defaults."""
        name, options = type(self).__name__, cast("Any", self)
        if not is_dataclass(options) or not type(self).__module__.startswith(_MODULE_BY_CLASS.get(name, "no module")):
            return super().to_json_form()
        form: dict[str, dict[str, object]] = {name: {}}
        for field in fields(options):
            value = getattr(options, field.name)
            if value == (None if field.default is MISSING else field.default):
                continue
            kind = field.metadata.get("json")
            item = value.total_seconds() if kind == "seconds" else space_to_json(value) if kind == "space" else value
            form[name][get_json_key(field)] = item
        try:
            canonical_json(form)
        except (TypeError, ValueError):
            return super().to_json_form()
        return form


def get_json_key(field: Field[Any]) -> str:
    """Return the name of a field in JSON; for a duration, the name ends in `_seconds`."""
    return f"{field.name}_seconds" if field.metadata.get("json") == "seconds" else field.name
