"""The request of a search: the parameters of `tune`, and the settings among them that the journal stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.models import Value, canonical_json
from prefect_tune.core.search.objective import Mode
from prefect_tune.core.search.space_json import space_from_json, space_to_json
from prefect_tune.parameters.json_specs import scheduler_from, search_from, stop_to_json, to_json
from prefect_tune.parameters.resume_mode import RerunErrored
from prefect_tune.runtime.trial_process import load_trainable

__all__ = ["OF_THE_RUN", "SearchRequest", "from_settings", "only_in_code", "settings_of", "space_of"]

Function: TypeAlias = Callable[[Mapping[str, Any]], object]
OF_THE_RUN = frozenset(
    {
        "target",
        "experiment",
        "resume",
        "rerun_errored",
        "samples_per_run",
        "time_budget_seconds",
        "on_code_change",
        "resources_total",
    }
)
"""Parameters of one run, which the experiment's journal does not store."""
_VALUES: Mapping[str, type[Value]] = {"checkpoint": Cadence, "retention": Retention, "failures": FailurePolicy}


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The parameters of `prefect_tune.flows.tune.tune`, which documents them, with the same defaults.

    The journal omits values that equal their default: changing a default changes every search that is resumed.
    """

    trainable: Any
    target: StorageTarget | str
    space: Mapping[str, Any] | None = None
    experiment: str | None = None
    metric: str | list[str] | None = None
    mode: Mode | list[Mode] = "min"
    num_samples: int | None = None
    samples_per_run: int | None = None
    search: Any = None
    scheduler: Any = None
    seed: int | None = None
    stop: Any = None
    max_concurrent_trials: int | None = None
    resources_per_trial: Mapping[str, float] | None = None
    resources_total: Mapping[str, float] | None = None
    time_budget_seconds: float | None = None
    checkpoint: Cadence | None = None
    retention: Retention | None = None
    failures: FailurePolicy | None = None
    fail_fast: bool = False
    sync: SyncConfig | None = None
    callbacks: list[Any] | None = None
    trials: Literal["tasks", "deployment"] = "tasks"
    trial_deployment: str = "train-trial/train-trial"
    trial_job_variables: Mapping[str, Any] | None = None
    trial_tags: list[str] | None = None
    concurrency_limits: list[str] | None = None
    isolation: Literal["process", "thread"] = "process"
    grace_period_seconds: float = 25
    silence_timeout_seconds: float | None = None
    resume: bool | str | None = "auto"
    rerun_errored: RerunErrored = False
    warm_start: list[str] | None = None
    on_code_change: Literal["warn", "refuse"] = "warn"


def space_of(space: Mapping[str, Any]) -> dict[str, object]:
    """Return a space with its JSON specifications replaced by domain objects; existing objects stay."""
    return space_from_json(space, load=lambda name: cast("Function", load_trainable(name)))


def settings_of(asked: SearchRequest) -> dict[str, object]:
    """Return the settings that the journal stores: all values that differ from the default and have a JSON form.

    `only_in_code` names the others: a resume by experiment name alone cannot restore them.
    """
    settings: dict[str, object] = {}
    only_in_code: list[str] = []
    for each in fields(asked):
        value = getattr(asked, each.name)
        if each.name in OF_THE_RUN or value is None or value == each.default:
            continue
        said = _said(each.name, value)
        if said is None:
            only_in_code.append(each.name)
        else:
            settings[each.name] = said
    return {**settings, **({"only_in_code": only_in_code} if only_in_code else {})}


def _said(name: str, value: Any) -> object | None:
    match value:
        case SyncConfig():
            return _or_none(value.parameters)
        case Value():
            return value.model_dump(mode="json")
        case Mapping() if name == "space":
            return _or_none(lambda: space_to_json(space_of(value)))
        case _ if name in ("scheduler", "search"):
            make = scheduler_from if name == "scheduler" else search_from
            return to_json(make(value))
        case _ if name == "stop":
            return stop_to_json(value)
        case _:
            return _or_none(lambda: canonical_json(value) and value)


def _or_none(say: Any) -> object | None:
    try:
        said: object = say()
    except (InvalidInput, TypeError, ValueError):
        return None
    return said


def only_in_code(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the parameters that were passed and that the journal could not store."""
    names: Any = settings.get("only_in_code", ())
    return list(names)


def from_settings(settings: Mapping[str, object], run: Mapping[str, Any], changed: Mapping[str, Any]) -> SearchRequest:
    """Return the request of an experiment from its settings, with the parameters of this `run` and those `changed`.

    Raises:
        InvalidInput: the settings lack a parameter that only the code held, and `changed` does not pass it.
            Missing callbacks are no error: they decide nothing.
    """
    missing = [name for name in only_in_code(settings) if name not in changed and name != "callbacks"]
    if "trainable" not in settings and "trainable" not in changed and "trainable" not in missing:
        missing.insert(0, "trainable")
    if missing:
        raise InvalidInput(
            f"resume: the journal of this experiment does not store {', '.join(map(repr, missing))}; pass "
            "it here, or call pt.tune(...) as before, with the same experiment name"
        )
    known = {each.name for each in fields(SearchRequest)}
    kept = {name: _read(name, value) for name, value in settings.items() if name in known}
    if "search" in changed:
        kept.pop("num_samples", None)  # it belonged to the earlier search
    return SearchRequest(**{**kept, **run, **changed})


def _read(name: str, value: Any) -> object:
    if name in _VALUES:
        return _VALUES[name].model_validate(value)
    return SyncConfig.model_validate(value) if name == "sync" else value
