"""JSON of schedulers, searches and stoppers, for forms, deployments and the journal: `{"ASHA": {"max_t": 81}}`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import timedelta
from importlib import import_module
from inspect import signature
from typing import Any, cast

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_stoppers import AnyOf, Stopper
from prefect_tune.core.models import canonical_json
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.space_json import space_from_json, space_to_json

__all__ = ["scheduler_from", "search_from", "spelled", "spelled_stop", "stop_from"]

_SCHEDULERS = {
    "FIFO": "prefect_tune.core.schedulers.fifo",
    "ASHA": "prefect_tune.core.schedulers.asha",
    "Hyperband": "prefect_tune.core.schedulers.hyperband",
    "MedianStopping": "prefect_tune.core.schedulers.median_stopping",
    "PBT": "prefect_tune.core.schedulers.pbt",
}
_SEARCHES = {
    "RandomSearch": "prefect_tune.core.search.random_search",
    "OptunaSearch": "prefect_tune.integrations.optuna",
}
_STOPPERS = {
    **dict.fromkeys(("MaxSteps", "MaxTime", "Plateau"), "prefect_tune.core.experiment.trial_stoppers"),
    **dict.fromkeys(
        ("MaxFailures", "TrialBudget", "TimeBudget", "ExperimentPlateau"),
        "prefect_tune.core.experiment.experiment_stoppers",
    ),
}
_EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "ASHA": {"max_t": 81},
    "Hyperband": {"max_t": 81},
    "PBT": {"perturbation_interval": 5, "hyperparam_mutations": {"lr": {"loguniform": [1e-4, 0.1]}}},
    "RandomSearch": {"num_samples": 20},
    "OptunaSearch": {"num_samples": 40},
    "MaxSteps": {"steps": 100},
    "MaxTime": {"time_seconds": 3600},
    "Plateau": {"metric": "loss"},
    "MaxFailures": {"failures": 3},
    "TrialBudget": {"trials": 200},
    "TimeBudget": {"time_seconds": 3600},
}
"""The required options of each, as examples in messages."""
_TIMES = frozenset({"time"})
"""Fields that hold a `timedelta`: `time_seconds` in JSON."""
_SPACES = frozenset({"hyperparam_mutations"})
"""Fields that hold a search space."""


def scheduler_from(given: object) -> Scheduler:
    """Return `given`, or the scheduler that its JSON describes.

    Raises:
        InvalidInput: it is neither.
    """
    made = given if isinstance(given, Scheduler) else _made(given, "scheduler", _SCHEDULERS)
    if isinstance(made, Scheduler):
        return made
    raise InvalidInput(f"scheduler: expected a scheduler, such as pt.ASHA(max_t=81), found {given!r}")


def search_from(given: object, num_samples: int | None = None) -> Search:
    """Return `given`, or the search algorithm that its JSON describes; `num_samples`, if given, replaces its own.

    Raises:
        InvalidInput: it is neither, or it takes no number of samples.
    """
    made = given if isinstance(given, Search) else _made(given, "search", _SEARCHES)
    if not isinstance(made, Search):
        raise InvalidInput(f"search: expected a search, such as pt.RandomSearch(num_samples=20), found {given!r}")
    if num_samples is None:
        return made
    counted: Any = made  # mypy takes no Search for a dataclass
    if "num_samples" in getattr(made, "__dataclass_fields__", ()):
        return cast("Search", replace(counted, num_samples=num_samples))
    raise InvalidInput(
        f"num_samples: {type(made).__name__} decides itself how many it proposes; leave num_samples out, and set "
        "the number there"
    )


def stop_from(given: object) -> object:
    """Return `stop` with stopper objects for those in its JSON: `{"step": 100, "MaxFailures": {"failures": 3}}`.

    A name with a number is a metric: a trial stops when its value reaches the number (`>=`). A name with an object is
    a stopper with these options.

    Raises:
        InvalidInput: no stopper has this name, or these options.
    """
    if isinstance(given, Mapping):
        stoppers = {name: arguments for name, arguments in given.items() if isinstance(arguments, Mapping)}
        limits = {name: limit for name, limit in given.items() if name not in stoppers}
        for name in [each for each in limits if each in _STOPPERS]:
            raise InvalidInput(f"stop: {name} is a stopper: expected {_example(name)}, found {limits[name]!r}")
        made = [_made({name: _with_times(arguments)}, "stop", _STOPPERS) for name, arguments in stoppers.items()]
        return [*made, limits] if made and limits else made or limits
    return [stop_from(each) for each in given] if isinstance(given, list | tuple) else given


def spelled_stop(stop: object) -> Sequence[object] | Mapping[str, object] | str | None:
    """Return `stop` as JSON for `stop_from`; None if JSON cannot represent it, as with a function."""
    if isinstance(stop, AnyOf | list | tuple):
        parts = [spelled_stop(each) for each in (stop.stoppers if isinstance(stop, AnyOf) else stop)]
        return None if None in parts else [each for each in parts if each is not None]
    if isinstance(stop, Stopper):
        return spelled(stop)
    if not isinstance(stop, Mapping | str):
        return None
    try:
        canonical_json(stop)
    except (InvalidInput, TypeError, ValueError):
        return None
    return stop


def _with_times(arguments: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: arguments[f"{name}_seconds"] for name in _TIMES if f"{name}_seconds" in arguments}
    rest = {name: value for name, value in arguments.items() if name.removesuffix("_seconds") not in times}
    try:
        return {**rest, **{name: timedelta(seconds=value) for name, value in times.items()}}
    except TypeError as error:
        raise InvalidInput(f"stop: {dict(arguments)}: expected a number of seconds") from error


def spelled(thing: object) -> dict[str, Any] | None:
    """Return a scheduler, search or stopper as JSON; None if JSON cannot represent it, or its class is unknown."""
    name = type(thing).__name__
    home = {**_SCHEDULERS, **_SEARCHES, **_STOPPERS}.get(name)
    if home is None or not is_dataclass(thing) or not type(thing).__module__.startswith(home):
        return None
    changed = {each.name: getattr(thing, each.name) for each in fields(thing) if not _is_default(thing, each)}
    try:
        arguments = dict(_said(key, value) for key, value in changed.items())
        canonical_json(arguments)
    except (InvalidInput, TypeError, ValueError):
        return None
    return {name: arguments}


def _said(name: str, value: Any) -> tuple[str, object]:
    if isinstance(value, timedelta):
        return f"{name}_seconds", value.total_seconds()
    return name, space_to_json(value) if name in _SPACES else value


def _is_default(thing: object, field: Any) -> bool:
    default = field.default if field.default is not MISSING else None
    return bool(getattr(thing, field.name) == default)


def _made(given: object, where: str, known: Mapping[str, str]) -> object:
    name, arguments = _parts(given, where, known)
    kind = getattr(import_module(known[name]), name)
    _require_options(kind, arguments, where)
    read = {key: space_from_json(value) if key in _SPACES else value for key, value in arguments.items()}
    try:
        return kind(**read)
    except TypeError as error:
        raise InvalidInput(f"{where}: {name}: {error}") from error


def _require_options(kind: Callable[..., object], arguments: Mapping[str, Any], where: str) -> None:
    name, options = kind.__name__, signature(kind).parameters
    unknown = [_in_json(each) for each in arguments if each not in options]
    missing = [_in_json(key) for key, each in options.items() if each.default is each.empty and key not in arguments]
    if unknown:
        there = [_in_json(each) for each in options]
        hint = did_you_mean(unknown[0], there) or f"; its options are {', '.join(there)}" * bool(there)
        raise InvalidInput(f"{where}: {name} has no option {unknown[0]!r}{hint}")
    if missing:
        raise InvalidInput(f"{where}: {name} needs {' and '.join(missing)}: {_example(name)}")


def _in_json(option: str) -> str:
    return f"{option}_seconds" if option in _TIMES else option


def _example(name: str) -> str:
    return json.dumps({name: _EXAMPLES.get(name, {})})


def _parts(given: object, where: str, known: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
    spelling = {given: {}} if isinstance(given, str) else given
    if isinstance(spelling, Mapping) and len(spelling) == 1:
        ((name, arguments),) = spelling.items()
        if name in known and isinstance(arguments, Mapping):
            return name, arguments
        if name in known:
            raise InvalidInput(f"{where}: {name}: expected its options, as in {_example(name)}, found {arguments!r}")
        raise InvalidInput(
            f"{where}: unknown name {name!r}; expected one of {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    example = next(iter(known))
    raise InvalidInput(f"{where}: expected an object, or its JSON such as {{{example!r}: {{...}}}}, found {given!r}")
