"""Read and check a flow's arguments, before any work starts: values, trainables, and JSON of schedulers and the like.

The JSON of a scheduler, a search or a stopper, for forms, deployments and the journal, is `{"ASHA": {"max_t": 81}}`.
`prefect_tune.registry` lists the classes that have one. Their options are the fields of the dataclass; its metadata
holds an example of each option for messages. `core/search/space_json.py` writes what is read here.
Imported by the command line's help: no Prefect at the top.
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
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import AnyOf, StopCriteria, Stopper, as_stopper
from prefect_tune.core.metrics import shown
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import as_dicts, domains_in, frozen
from prefect_tune.core.search.space_json import class_of_fields, distribution_in, option_name, space_from_json
from prefect_tune.core.shown_text import did_you_mean
from prefect_tune.core.values import HasJsonForm, canonical_json, digest_of, valid_name
from prefect_tune.registry import BUILT_IN
from prefect_tune.runtime.load_named import import_advice, import_path_of, load_named
from prefect_tune.runtime.trainable import require_trainable


def experiment_name(given: str | None) -> str:
    """Return the experiment's name: as given, or the id of the flow run; a call by a flow or task has its own default.

    Raises:
        InvalidInput: the name cannot be a folder on every target.
    """
    if given is not None:
        return valid_name(given)
    from prefect.runtime import flow_run

    return valid_name(str(flow_run.id))


def storable_config(config: object) -> dict[str, object]:
    """Return the configuration, a mapping, a dataclass or None, as plain JSON.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent.
    """
    plain = plain_json({} if config is None else config, "config")
    if found := distribution_in(plain):
        raise InvalidInput(
            f"config: expected values, found the distribution {shown(found)}: only pt.tune draws, for its `space`"
        )
    if isinstance(plain, dict):
        return plain
    raise InvalidInput(f"config: expected a dict or a dataclass, found {shown(config)}")


def plain_json(value: object, where: str) -> object:
    """Return a value as plain JSON, by the rule of `frozen`.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent, or a distribution.
    """
    plain = frozen(as_dicts(value), where)
    if node := next(domains_in(plain), None):
        raise InvalidInput(
            f"{where}: expected values, found {node!r}: a distribution is drawn for the `space` of pt.tune only"
        )
    return plain


def valid_trainable(trainable: object) -> object:
    """Return the trainable, checked as far as possible without importing the user's module.

    Raises:
        InvalidInput: it is neither a subclass of `Trainable` with `step`, nor a function, nor `package.module:Name`.
    """
    if not isinstance(trainable, str):
        return require_trainable(trainable, trainable)
    module, _ = import_string(trainable, "trainable")
    missing: str | None = None
    try:
        if importlib.util.find_spec(module) is None:
            missing = module
    except ModuleNotFoundError as error:
        missing = error.name
        if not f"{module}.".startswith(f"{missing}."):  # its package is there, and imports another module
            raise InvalidInput(f"trainable {trainable!r}: {import_advice(error)}") from error
    except (Exception, SystemExit) as error:  # its package is imported, which may raise anything
        raise InvalidInput(f"trainable {trainable!r}: {import_advice(error)}") from error
    if missing is None:
        return trainable
    from prefect_tune.blocks.resolve_target import is_in_run_of_deployment

    where = "; is its project installed here, or its folder in PYTHONPATH?"
    if is_in_run_of_deployment():
        where = (
            "; install its project where the worker runs, or name its folder there: prefect-tune deploy "
            """--job-variable 'env={"PYTHONPATH": "/home/me/project"}'"""
        )
    raise InvalidInput(f"trainable {trainable!r}: there is no module {missing!r}{where}")


def import_string(name: str, where: str) -> tuple[str, str]:
    """Split `package.module:Name` into the module and the name in it; import nothing.

    Raises:
        InvalidInput: `name` does not have that form.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InvalidInput(f"{where} {name!r}: expected 'package.module:Name', as in 'my_project.train:Model'")
    return module, attribute


def name_of(trainable: object) -> Mapping[str, str]:
    """Return what identifies a trainable: its name without its module, which depends on how the code is run."""
    name = trainable.partition(":")[2] if isinstance(trainable, str) else getattr(trainable, "__qualname__", "")
    return {"trainable": name.rpartition(".")[2]} if name else {}


def code_of(trainable: object) -> str:
    """Return a digest of the source of a class or function, or of `package.module:Name`, whose file is not imported.

    Empty if the source is not available. It covers this one definition: a change in code that it calls is not
    detected.
    """
    try:
        if isinstance(trainable, str):
            module, _, name = trainable.partition(":")
            spec = importlib.util.find_spec(module)
            file = spec.origin if spec is not None else None
            source = _definition_in(Path(file).read_text(encoding="utf-8"), name) if file else ""
        else:
            source = _source_of(trainable)
    except Exception:  # noqa: BLE001  `inspect` and the parser have many errors, see `trial_process`
        return ""
    return digest_of(source.encode())[:16] if source else ""


def _source_of(trainable: Any) -> str:
    try:
        return inspect.getsource(trainable)
    except (TypeError, OSError):
        if not isinstance(trainable, type):
            raise
    # A notebook's cell may define the class: `__main__` has no file, but the methods have one.
    methods = (each for each in vars(trainable).values() if inspect.isfunction(each))
    files = dict.fromkeys(each.__code__.co_filename for each in methods)
    texts = ("".join(linecache.getlines(file)) for file in files)
    return next((found for text in texts if (found := _definition_in(text, trainable.__name__))), "")


def _definition_in(text: str, name: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return ""


def scheduler_from(given: object) -> Scheduler:
    """Return `given`, or the scheduler that its JSON describes.

    Raises:
        InvalidInput: it is neither.
    """
    return given if isinstance(given, Scheduler) else cast("Scheduler", _made(given, "scheduler"))


def search_from(given: object) -> Search:
    """Return `given`, or the search algorithm that its JSON describes.

    Raises:
        InvalidInput: it is neither.
    """
    return given if isinstance(given, Search) else cast("Search", _made(given, "search"))


def with_samples(search: Search, num_samples: int | None) -> Search:
    """Return the search with this number of samples in place of its own; unchanged for None.

    Raises:
        InvalidInput: it takes no number of samples.
    """
    if num_samples is None:
        return search
    counted: Any = search  # mypy takes no Search for a dataclass
    if "num_samples" in getattr(search, "__dataclass_fields__", ()):
        return cast("Search", replace(counted, num_samples=num_samples))
    raise InvalidInput(
        f"num_samples: {type(search).__name__} decides itself how many it proposes; leave num_samples out, and set "
        "the number there"
    )


def stop_from(given: object) -> object:
    """Return `stop` with stopper objects for those in its JSON: `{"step": 100, "MaxFailures": {"failures": 3}}`.

    A name with a number is a metric: a trial stops when its value reaches the number (`>=`). A name with an object is
    a stopper with these options. `package.module:name` is the object of that name.

    Raises:
        InvalidInput: no stopper has this name, or these options; or the name cannot be imported.
    """
    if isinstance(given, str) and ":" in given:
        return stop_from(load_named(given, "stop"))
    if isinstance(given, Mapping):
        if (name := class_of_fields(given)) in BUILT_IN["stop"]:
            raise InvalidInput(
                f"stop: found the fields of {name} without its class: {shown(dict(given))}; expected "
                f"{_example(name)}. To limit a metric of this name, pass a function: 'package.module:name'"
            )
        stoppers = {name: arguments for name, arguments in given.items() if isinstance(arguments, Mapping)}
        limits = {name: limit for name, limit in given.items() if name not in stoppers}
        for name in [each for each in limits if each in BUILT_IN["stop"]]:
            raise InvalidInput(f"stop: {name} is a stopper: expected {_example(name)}, found {limits[name]!r}")
        made = [_made({name: arguments}, "stop") for name, arguments in stoppers.items()]
        return [*made, limits] if made and limits else made or limits
    return [stop_from(each) for each in given] if isinstance(given, list | tuple) else given


def stop_to_json(stop: object) -> Sequence[object] | Mapping[str, object] | str | None:
    """Return `stop` as JSON for `stop_from`; None if JSON cannot represent it, as with a lambda."""
    if isinstance(stop, AnyOf | list | tuple):
        parts = [stop_to_json(each) for each in (stop.stoppers if isinstance(stop, AnyOf) else stop)]
        return None if None in parts else [each for each in parts if each is not None]
    if isinstance(stop, Stopper):
        return to_json(stop)
    with suppress(TypeError, ValueError):
        if isinstance(stop, Mapping | str) and canonical_json(stop):
            return stop
    return import_path_of(stop)


def stopper_for(stop: StopCriteria | str) -> Stopper:
    """Return the stopper for `stop`: an object, its JSON, or its name as `package.module:name`.

    Raises:
        InvalidInput: `stop` is none of these.
    """
    return as_stopper(cast("StopCriteria", stop_from(stop)))


def to_json(thing: object) -> dict[str, Any] | None:
    """Return a scheduler, search or stopper as JSON; None if JSON cannot represent it, or its class is unknown."""
    try:
        return cast("dict[str, Any]", thing.json_form()) if isinstance(thing, HasJsonForm) else None
    except InvalidInput:
        return None


def _made(given: object, where: str) -> object:
    """Return the object that `{name: options}`, or a name alone, describes."""
    known, named = BUILT_IN[where], {given: {}} if isinstance(given, str) else given
    if not (isinstance(named, Mapping) and len(named) == 1):
        example = next(iter(known))
        raise InvalidInput(
            f"{where}: expected an object, or its JSON such as {{{example!r}: {{...}}}}, found {given!r}"
        )
    ((name, arguments),) = named.items()
    if name not in known:
        raise InvalidInput(
            f"{where}: unknown name {name!r}; expected one of {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    if not isinstance(arguments, Mapping):
        raise InvalidInput(f"{where}: {name}: expected its options, as in {_example(name)}, found {arguments!r}")
    kind = getattr(prefect_tune, name)
    options = {option_name(each): each for each in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        option = options.get(f"{key}_seconds") or options.get(key)
        if option is None:
            hint = did_you_mean(key, options) or f"; its options are {', '.join(options)}" * bool(options)
            raise InvalidInput(f"{where}: {name} has no option {key!r}{hint}")
        values[option.name] = space_from_json(value) if option.metadata.get("json") == "space" else value
    if missing := [key for key, each in options.items() if each.default is MISSING and each.name not in values]:
        raise InvalidInput(f"{where}: {name} needs {' and '.join(missing)}: {_example(name)}")
    try:
        return cast("object", kind(**values))
    except TypeError as error:
        raise InvalidInput(f"{where}: {name}: {error}") from error


def _example(name: str) -> str:
    """Return the JSON of a built-in class with an example of each option that has one."""
    options = fields(getattr(prefect_tune, name))
    examples = {option_name(each): each.metadata["example"] for each in options if "example" in each.metadata}
    return json.dumps({name: examples})
