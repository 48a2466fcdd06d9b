"""JSON of schedulers, searches and stoppers, for forms, deployments and the journal: `{"ASHA": {"max_t": 81}}`.

`prefect_tune.registry` lists the classes that have one. Their options are the fields of the dataclass; its metadata
holds an example of each option for messages. `core/search/named_options.py` writes what is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, replace
from typing import Any, cast

import prefect_tune
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import AnyOf, Stopper
from prefect_tune.core.metrics import shown
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.named_options import option_name
from prefect_tune.core.search.space_json import class_of_fields, space_from_json
from prefect_tune.core.shown_text import did_you_mean
from prefect_tune.core.values import HasJsonForm, canonical_json
from prefect_tune.registry import BUILT_IN
from prefect_tune.runtime.load_named import import_path_of, load_named


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


def to_json(thing: object) -> dict[str, Any] | None:
    """Return a scheduler, search or stopper as JSON; None if JSON cannot represent it, or its class is unknown."""
    try:
        return cast("dict[str, Any]", thing.json_form()) if isinstance(thing, HasJsonForm) else None
    except InvalidInput:
        return None


def _made(given: object, where: str) -> object:
    name, arguments = _parts(given, where)
    options = _options_of(name)
    named = {f"{key}_seconds" if f"{key}_seconds" in options else key: value for key, value in arguments.items()}
    _require_options(name, options, named, where)
    read = {
        option.name: space_from_json(value) if option.metadata.get("json") == "space" else value
        for option, value in ((options[key], value) for key, value in named.items())
    }
    try:
        return getattr(prefect_tune, name)(**read)
    except TypeError as error:
        raise InvalidInput(f"{where}: {name}: {error}") from error


def _parts(given: object, where: str) -> tuple[str, Mapping[str, Any]]:
    known, named = BUILT_IN[where], {given: {}} if isinstance(given, str) else given
    if isinstance(named, Mapping) and len(named) == 1:
        ((name, arguments),) = named.items()
        if name in known and isinstance(arguments, Mapping):
            return name, arguments
        if name in known:
            raise InvalidInput(f"{where}: {name}: expected its options, as in {_example(name)}, found {arguments!r}")
        raise InvalidInput(
            f"{where}: unknown name {name!r}; expected one of {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    example = next(iter(known))
    raise InvalidInput(f"{where}: expected an object, or its JSON such as {{{example!r}: {{...}}}}, found {given!r}")


def _require_options(name: str, options: Mapping[str, Field[Any]], given: Mapping[str, Any], where: str) -> None:
    for unknown in [each for each in given if each not in options]:
        hint = did_you_mean(unknown, options) or f"; its options are {', '.join(options)}" * bool(options)
        raise InvalidInput(f"{where}: {name} has no option {unknown!r}{hint}")
    required = (key for key, each in options.items() if each.default is MISSING)
    if missing := [key for key in required if key not in given]:
        raise InvalidInput(f"{where}: {name} needs {' and '.join(missing)}: {_example(name)}")


def _options_of(name: str) -> Mapping[str, Field[Any]]:
    """Return the fields of a built-in class, by their names in JSON."""
    return {option_name(each): each for each in fields(getattr(prefect_tune, name))}


def _example(name: str) -> str:
    options = _options_of(name).items()
    return json.dumps({name: {key: each.metadata["example"] for key, each in options if "example" in each.metadata}})
