"""Check the arguments of a call before a flow run begins: their names and types here, their meaning in `SearchPlan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any, get_type_hints

from prefect.client.schemas.objects import State
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.settings import get_current_settings
from prefect.utilities.collections import visit_collection
from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.values import argument_error

_CONSUMED_BY_PREFECT = frozenset({"return_state", "wait_for"})
_OTHER_NAMES: Mapping[str, str] = {
    "checkpoint": "checkpoint_config checkpoint_freq",
    "config": "param_space",
    "experiment": "name study_name",
    "failures": "max_failures",
    "max_concurrent_trials": "n_jobs",
    "mode": "direction directions",
    "num_samples": "n_trials",
    "resume": "load_if_exists",
    "retention": "keep_checkpoints_num",
    "scheduler": "pruner",
    "search": "search_alg sampler",
    "space": "param_space search_space config",
    "target": "storage_path local_dir upload_dir storage",
    "time_budget_seconds": "time_budget_s timeout",
    "trainable": "objective func",
}
"""Parameters of the flows, and their names in Ray Tune and Optuna."""
_EXAMPLES = {
    "callbacks": "callbacks=[pt.FileLogger()]",
    "checkpoint": "checkpoint=pt.Cadence(every_steps=5)",
    "failures": "failures=pt.FailurePolicy(max_failures=2)",
    "retention": "retention=pt.Retention(last=3)",
    "sync": "sync=pt.SyncConfig(...)",
    "warm_start": "warm_start=['earlier-experiment']",
}


def require_valid(flow: Flow[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of a call as Prefect will; arguments that hold futures or block references are left to it.

    Returns:
        the arguments that it has checked, by name.

    Raises:
        InvalidInput: an argument is unknown, missing, or of a wrong type.
    """
    given = {name: value for name, value in options.items() if name not in _CONSUMED_BY_PREFECT}
    called, parameters = f"pt.{flow.fn.__name__}", signature(flow.fn).parameters
    for name in [each for each in given if each not in parameters]:
        ours = [each for each, others in _OTHER_NAMES.items() if name in others.split() and each in parameters]
        hint = f"did you mean {ours[0]!r}?" if ours else did_you_mean_or_has(name, parameters)
        raise InvalidInput(f"{name}: {called} has no such parameter; {hint}")
    try:
        bound = signature(flow.fn).bind(*args, **given).arguments
    except TypeError as error:
        raise InvalidInput(f"{called}: {error}") from None
    checked = {name: value for name, value in bound.items() if not _is_for_later(value)}
    for name, value in checked.items():
        try:
            _adapter(flow.fn, name).validate_python(value)
        except ValidationError as error:
            wrong = argument_error(error, name)
            raise (wrong if name not in _EXAMPLES else InvalidInput(f"{wrong}; write {_EXAMPLES[name]}")) from None
    return checked


def require_storable(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check that Prefect's API takes the arguments: its own error would print all of them.

    Raises:
        InvalidInput: they are too large together, or one holds text that is not Unicode.
    """
    sizes, max_bytes = {}, get_current_settings().server.api.max_parameter_size
    for name, value in arguments.items():
        try:
            stored = flow.serialize_parameters({name: value})
            sizes[name] = len(json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode())
        except UnicodeEncodeError as error:
            text = error.object[max(0, error.start - 20) : error.end + 20]
            raise InvalidInput(
                f"{name}: expected Unicode text, found {text!a}; read the file in the trainable"
            ) from None
        except AssertionError as refused:  # before Prefect 3.9; it carries no message
            raise InvalidInput(
                f"{name}: Prefect cannot store a dataclass type; pass an instance of it, or 'package.module:Name'"
            ) from refused
    if 0 < max_bytes < sum(sizes.values()):
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidInput(
            f"{largest}: {sizes[largest]:,} bytes as JSON, and Prefect takes {max_bytes:,} for all parameters; pass a "
            "path, and read the file in the trainable"
        )


def _is_for_later(value: object) -> bool:
    parts: list[object] = []
    visit_collection(value, parts.append, return_data=False, max_depth=3)
    return any(isinstance(part, PrefectFuture | State) or (isinstance(part, dict) and "$ref" in part) for part in parts)


@cache
def _adapter(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function, include_extras=True)[name])
