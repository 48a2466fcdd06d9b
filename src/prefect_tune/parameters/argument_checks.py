"""Parse and check a flow's arguments before any work starts: values, trainables, JSON of schedulers and other objects.

In forms, deployments and the journal, JSON describes a scheduler, search or stopper: `{"ASHA": {"max_t": 81}}`.
`prefect_tune.registry` lists the classes with a JSON form. The options in the JSON are the dataclass fields of the
class; a field's metadata may hold an example for messages. `core/search/space_json.py` writes the JSON.
`prefect-tune --help` imports this module, so this module imports Prefect only inside functions.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import linecache
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, cast

import prefect_tune
from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import AnyOf, StopCriteria, Stopper, as_stopper
from prefect_tune.core.metrics import short_repr
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import convert_to_dicts, find_domains, to_plain_node
from prefect_tune.core.search.space_json import find_distribution, get_json_key, match_option_class, space_from_json
from prefect_tune.core.values import HasJsonForm, canonical_json, hash_bytes, validate_name
from prefect_tune.registry import BUILT_IN_MODULES
from prefect_tune.runtime.load_named import describe_import_error, find_import_name, load_object
from prefect_tune.runtime.trainable import require_trainable


def validate_experiment_name(name: str | None) -> str:
    """Return `name`; if it is None, the flow run's id, which `with_experiment_name` replaces if the run has a caller.

    Raises:
        InvalidInput: the name would be invalid as a folder's name on some targets.
    """
    if name is not None:
        return validate_name(name)
    from prefect.runtime import flow_run

    return validate_name(str(flow_run.id))


def config_to_json(config: object) -> dict[str, object]:
    """Return a configuration (a mapping, a dataclass or None) as plain JSON.

    Raises:
        InvalidInput: the configuration has a value that JSON cannot represent.
    """
    plain = value_to_json({} if config is None else config, "config")
    if distribution := find_distribution(plain):
        text = short_repr(distribution)
        raise InvalidInput(f"config: expected values, found distribution {text}; pt.tune draws values from a space")
    if isinstance(plain, dict):
        return plain
    raise InvalidInput(f"config: expected a dict or a dataclass, found {short_repr(config)}")


def value_to_json(value: object, where: str) -> object:
    """Return a value as plain JSON (see `to_plain_node`).

    Raises:
        InvalidInput: the value contains a distribution, or something that JSON cannot represent.
    """
    plain = to_plain_node(convert_to_dicts(value), where)
    if node := next(find_domains(plain), None):
        raise InvalidInput(f"{where}: expected values, found {node!r}; only the space of pt.tune has distributions")
    return plain


def validate_trainable(trainable: object) -> object:
    """Return `trainable` after the checks that are possible without importing the user's module.

    Raises:
        InvalidInput: it is no function, no `Trainable` with `step`, and no `package.module:Name` of an existing module.
    """
    if not isinstance(trainable, str):
        return require_trainable(trainable, trainable)
    module, _ = split_import_path(trainable, "trainable")
    missing_module: str | None = None
    try:
        if importlib.util.find_spec(module) is None:
            missing_module = module
    except ModuleNotFoundError as error:
        missing_module = error.name
        if not f"{module}.".startswith(f"{missing_module}."):  # the package exists, but imports a missing module
            raise InvalidInput(f"trainable {trainable!r}: {describe_import_error(error)}") from error
    except (Exception, SystemExit) as error:  # `find_spec` imports the package, whose code may raise anything
        raise InvalidInput(f"trainable {trainable!r}: {describe_import_error(error)}") from error
    if missing_module is None:
        return trainable
    from prefect_tune.blocks.resolve_target import is_deployment_run

    hint = "; is its project installed here, or its folder in PYTHONPATH?"
    if is_deployment_run():
        hint = (
            "; install its project where the worker runs, or add its folder to PYTHONPATH: prefect-tune deploy "
            """--job-variable 'env={"PYTHONPATH": "/home/me/project"}'"""
        )
    raise InvalidInput(f"trainable {trainable!r}: there is no module {missing_module!r}{hint}")


def split_import_path(name: str, where: str) -> tuple[str, str]:
    """Split `package.module:Name` into the module and the name, without importing the module.

    Raises:
        InvalidInput: `name` does not have that form.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InvalidInput(f"{where} {name!r}: expected 'package.module:Name', as in 'my_project.train:Model'")
    return module, attribute


def make_trainable_fingerprint(trainable: object) -> Mapping[str, str]:
    """Return the identity of a trainable: its name, but not its module's name, which depends on how the code is run."""
    name = trainable.partition(":")[2] if isinstance(trainable, str) else getattr(trainable, "__qualname__", "")
    return {"trainable": name.rpartition(".")[2]} if name else {}


def compute_source_digest(trainable: object) -> str:
    """Return a digest of the source of a trainable, without importing its module; empty if the source is unavailable.

    The digest covers only the definition of the class or function, not the code that it calls.
    """
    try:
        if isinstance(trainable, str):
            module, _, name = trainable.partition(":")
            spec = importlib.util.find_spec(module)
            file = spec.origin if spec is not None else None
            source = _extract_definition(Path(file).read_text(encoding="utf-8"), name) if file else ""
        else:
            source = _get_source(trainable)
    except Exception:  # noqa: BLE001 - `inspect` and the parser raise many errors, see `trial_process`
        return ""
    return hash_bytes(source.encode())[:16] if source else ""


def _get_source(trainable: Any) -> str:
    try:
        return inspect.getsource(trainable)
    except (TypeError, OSError):
        if not isinstance(trainable, type):
            raise
    # Find a class of a notebook cell by the files of its methods, because its module `__main__` has no file.
    methods = (method for method in vars(trainable).values() if inspect.isfunction(method))
    files = dict.fromkeys(method.__code__.co_filename for method in methods)
    texts = ("".join(linecache.getlines(file)) for file in files)
    return next((definition for text in texts if (definition := _extract_definition(text, trainable.__name__))), "")


def _extract_definition(text: str, name: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "".join(text.splitlines(keepends=True)[first_line - 1 : node.end_lineno])
    return ""


def parse_scheduler(scheduler: object) -> Scheduler:
    """Return `scheduler`, or the scheduler that its JSON describes.

    Raises:
        InvalidInput: `scheduler` is neither a scheduler nor its JSON.
    """
    return scheduler if isinstance(scheduler, Scheduler) else cast(Scheduler, _build_from_json(scheduler, "scheduler"))


def parse_search(search: object) -> Search:
    """Return `search`, or the search algorithm that its JSON describes.

    Raises:
        InvalidInput: `search` is neither a search algorithm nor its JSON.
    """
    return search if isinstance(search, Search) else cast(Search, _build_from_json(search, "search"))


def with_samples(search: Search, num_samples: int | None) -> Search:
    """Return the search with `num_samples` samples; the unchanged search if `num_samples` is None.

    Raises:
        InvalidInput: the search has no field `num_samples`.
    """
    if num_samples is None:
        return search
    untyped_search: Any = search  # mypy accepts only a dataclass in `replace`
    if "num_samples" in getattr(search, "__dataclass_fields__", ()):
        return cast("Search", replace(untyped_search, num_samples=num_samples))
    raise InvalidInput(f"num_samples: {type(search).__name__} has its own number of samples; set the number there")


def parse_stop(stop: object) -> object:
    """Return `stop` with stopper objects in place of their JSON: `{"step": 100, "MaxFailures": {"failures": 3}}`.

    A name with a number is a metric: a trial stops when the metric reaches the number (`>=`). A name with a JSON object
    is a stopper, and the object has its options. A text `package.module:name` is imported.

    Raises:
        InvalidInput: no stopper has this name or these options, or the import fails.
    """
    if isinstance(stop, str) and ":" in stop:
        return parse_stop(load_object(stop, "stop"))
    if isinstance(stop, Mapping):
        if (name := match_option_class(stop)) in BUILT_IN_MODULES["stop"]:
            raise InvalidInput(
                f"stop: found the fields of {name} without its class: {short_repr(dict(stop))}; expected "
                f"{_make_example(name)}. To limit a metric of such a name, pass a function: 'package.module:name'"
            )
        stopper_arguments = {name: arguments for name, arguments in stop.items() if isinstance(arguments, Mapping)}
        limits = {name: limit for name, limit in stop.items() if name not in stopper_arguments}
        for name in [item for item in limits if item in BUILT_IN_MODULES["stop"]]:
            raise InvalidInput(f"stop: {name} is a stopper: expected {_make_example(name)}, found {limits[name]!r}")
        stoppers = [_build_from_json({name: arguments}, "stop") for name, arguments in stopper_arguments.items()]
        return [*stoppers, limits] if stoppers and limits else stoppers or limits
    return [parse_stop(item) for item in stop] if isinstance(stop, list | tuple) else stop


def stop_to_json(stop: object) -> Sequence[object] | Mapping[str, object] | str | None:
    """Return `stop` as JSON for `parse_stop`; None if JSON cannot represent it, for example a lambda."""
    if isinstance(stop, AnyOf | list | tuple):
        parts = [stop_to_json(part) for part in (stop.stoppers if isinstance(stop, AnyOf) else stop)]
        return None if None in parts else [part for part in parts if part is not None]
    if isinstance(stop, Stopper):
        return component_to_json(stop)
    with suppress(TypeError, ValueError):
        if isinstance(stop, Mapping | str) and canonical_json(stop):
            return stop
    return find_import_name(stop)


def make_stopper(stop: StopCriteria | str) -> Stopper:
    """Return the stopper for `stop`: an object, its JSON, or its import path `package.module:name`.

    Raises:
        InvalidInput: `stop` is none of these.
    """
    return as_stopper(cast("StopCriteria", parse_stop(stop)))


def component_to_json(component: object) -> dict[str, Any] | None:
    """Return a scheduler, search or stopper as JSON; None if its class or its values have no JSON form."""
    try:
        return cast("dict[str, Any]", component.to_json_form()) if isinstance(component, HasJsonForm) else None
    except InvalidInput:
        return None


def _build_from_json(value: object, where: str) -> object:
    """Build the object that `value` describes; `value` is the name of a class, or `{name: options}`."""
    built_in, options_by_name = BUILT_IN_MODULES[where], {value: {}} if isinstance(value, str) else value
    if not (isinstance(options_by_name, Mapping) and len(options_by_name) == 1):
        example = f"{{{next(iter(built_in))!r}: {{...}}}}"
        raise InvalidInput(f"{where}: expected an object, or its JSON such as {example}, found {value!r}")
    ((name, arguments),) = options_by_name.items()
    if name not in built_in:
        hint = did_you_mean(str(name), built_in)
        raise InvalidInput(f"{where}: unknown name {name!r}; expected one of {', '.join(built_in)}{hint}")
    if not isinstance(arguments, Mapping):
        raise InvalidInput(f"{where}: {name}: expected its options, as in {_make_example(name)}, found {arguments!r}")
    cls = getattr(prefect_tune, name)
    options = {get_json_key(field): field for field in fields(cls)}
    values: dict[str, Any] = {}
    for key, option_value in arguments.items():
        option = options.get(f"{key}_seconds") or options.get(key)
        if option is None:
            hint = did_you_mean(key, options) or f"; its options are {', '.join(options)}" * bool(options)
            raise InvalidInput(f"{where}: {name} has no option {key!r}{hint}")
        values[option.name] = space_from_json(option_value) if option.metadata.get("json") == "space" else option_value
    if missing := [key for key, field in options.items() if field.default is MISSING and field.name not in values]:
        raise InvalidInput(f"{where}: {name} needs {' and '.join(missing)}: {_make_example(name)}")
    try:
        return cast("object", cls(**values))
    except TypeError as error:
        raise InvalidInput(f"{where}: {name}: {error}") from error


def _make_example(name: str) -> str:
    """Return example JSON of a built-in class, with the options whose fields have an example."""
    options = fields(getattr(prefect_tune, name))
    examples = {get_json_key(field): field.metadata["example"] for field in options if "example" in field.metadata}
    return json.dumps({name: examples})
