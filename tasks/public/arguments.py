"""The plain arguments of the public tasks, parsed and validated at once: before anything is owned or written."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.core.checkpoints.metadata import plain_metadata
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.metrics import storable
from prefect_tune.core.models import ExperimentName, StepReport, TrialId
from prefect_tune.core.storage.generations import experiment_names
from prefect_tune.core.texts import did_you_mean
from prefect_tune.parameters.argument_checks import storable_config
from prefect_tune.parameters.options import ValidatedParameters

__all__ = [
    "DeleteArguments",
    "Directory",
    "End",
    "ExperimentArguments",
    "RestoreArguments",
    "SaveArguments",
    "SyncArguments",
    "TrialArguments",
    "similar_experiment",
    "similar_name",
]


Directory: TypeAlias = str | os.PathLike[str]
End: TypeAlias = Literal["completed", "paused", "errored"]
"""How a trial of a flow of one's own ends."""


def _step(given: object) -> int:
    """Return a step. Raises `InvalidInput` if it is no whole number from 1 on."""
    try:
        step = 0 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]  # TypeError is caught
    except TypeError:
        step = 0
    if step < 1:
        raise InvalidInput(f"step: expected a number from 1 on, the count of trained steps, found {given!r}")
    return step


def _path(given: object) -> object:
    """Return a path-like object as text, for pydantic, which knows paths and text."""
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _metrics(given: Any) -> dict[str, object]:
    return storable({} if given is None else given, "metrics")


def _metadata(given: Any) -> dict[str, object]:
    return plain_metadata({} if given is None else given)


def _reports(given: Any) -> tuple[StepReport, ...]:
    """Return reports in the order of their steps, which JSON parameters have as text."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"reports: expected metrics by step, such as {{1: {{'loss': 0.5}}}}, found {given!r}")
    numbered = {_reported_step(step): metrics for step, metrics in (given or {}).items()}
    return tuple(
        StepReport(step=step, metrics=storable(numbered[step], f"reports, step {step}")) for step in sorted(numbered)
    )


def _reported_step(given: object) -> int:
    try:
        return _step(int(given) if isinstance(given, str) and given.isdecimal() else given)
    except InvalidInput as invalid:
        raise InvalidInput(f"reports: {invalid}") from invalid


_Step: TypeAlias = Annotated[int, BeforeValidator(_step)]
_Path: TypeAlias = Annotated[Path, BeforeValidator(_path)]
_Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ExperimentArguments(ValidatedParameters):
    """The experiment that a task reads or writes."""

    target: Annotated[InstanceOf[StorageTarget], BeforeValidator(resolve_target)]
    experiment: ExperimentName


class TrialArguments(ExperimentArguments):
    """The trial that a task reads or writes."""

    trial: TrialId


class SaveArguments(TrialArguments):
    """The arguments of `save_checkpoint`."""

    directory: Annotated[_Path, AfterValidator(Path.absolute)]
    step: _Step
    metrics: Annotated[dict[str, Any], BeforeValidator(_metrics)]
    trained_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metadata: Annotated[dict[str, Any], BeforeValidator(_metadata)]
    retention: Retention | None
    timeout_seconds: _Seconds

    @property
    def report(self) -> StepReport:
        """The report of the step."""
        return StepReport(step=self.step, metrics=self.metrics, trained_seconds=self.trained_seconds)


class RestoreArguments(TrialArguments):
    """The arguments of `restore_checkpoint`."""

    directory: _Path | None
    step: _Step | None
    timeout_seconds: _Seconds

    @property
    def timeout(self) -> timedelta:
        """The limit of one download."""
        return timedelta(seconds=self.timeout_seconds)


class DeleteArguments(TrialArguments):
    """The arguments of `delete_checkpoint`."""

    step: _Step
    timeout_seconds: _Seconds


class SyncArguments(TrialArguments):
    """The arguments of `sync_experiment_state`."""

    reports: Annotated[tuple[StepReport, ...], BeforeValidator(_reports)]
    config: Annotated[dict[str, Any], BeforeValidator(storable_config)] | None
    status: End | None
    reason: str


# Warn of a name that is new on a target and similar to one that exists there: it may be misspelt.

_SIMILAR = 0.75
"""The least similarity of two spellings of one name: that of `slow` and `slwo`."""
_LOOK = timedelta(seconds=5)
_COUNTED = re.compile(r"[^a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
"""What differs within a series of names, such as `fold-a` and `fold-b` or `rate-0.1` and `rate-0.2`."""


def similar_experiment(target: StorageTarget, experiment: str) -> str:
    """Return as `similar_name`, of the experiments on `target`; empty too if they cannot be listed within 5 s."""
    with suppress(TuneError), target.open(timeout=_LOOK) as store:
        return similar_name(experiment, experiment_names(store))
    return ""


def similar_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'slow'?` if a known name may be what was meant; names of one series are not similar."""
    return did_you_mean(name, (each for each in known if _letters(each) != _letters(name)), _SIMILAR)


def _letters(name: str) -> str:
    return _COUNTED.sub("", name)
