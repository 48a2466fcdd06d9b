"""What the public tasks take and return: plain values.

Arguments are parsed and validated at once, before anything is owned or written. Results are frozen, and can be
printed, pickled and stored as JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.core.checkpoints.manifest import plain_metadata
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.metrics import is_count, plain_scalar, storable
from prefect_tune.core.shown_text import did_you_mean
from prefect_tune.core.storage.generations import experiment_names
from prefect_tune.core.storage.layout import JournalKey, TrialKey, below
from prefect_tune.core.values import ExperimentName, Number, StepReport, TrialId, Value
from prefect_tune.parameters.argument_checks import storable_config
from prefect_tune.parameters.search_plan import ValidatedParameters

Directory: TypeAlias = str | os.PathLike[str]
End: TypeAlias = Literal["completed", "paused", "errored"]
"""How a trial of a flow of one's own ends."""


def _step(given: object) -> int:
    """Return a step. Raises `InvalidInput` if it is no whole number from 1 on."""
    step = plain_scalar(given)
    if isinstance(step, int) and is_count(step, 1):
        return step
    raise InvalidInput(f"step: expected a number from 1 on, the count of trained steps, found {given!r}")


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
_Seconds: TypeAlias = Annotated[Number, Field(gt=0)]


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
    trained_seconds: Annotated[Number, Field(ge=0)]
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
    """Return as `_similar_name`, of the experiments on `target`; empty too if they cannot be listed within 5 s."""
    with suppress(TuneError), target.open(timeout=_LOOK) as store:
        return _similar_name(experiment, experiment_names(store))
    return ""


def misspelt(target: StorageTarget, state: Experiment, trial: str) -> str:
    """Return that the experiment or its trial is not on `target`, if its name may be misspelt; else an empty text."""
    if not state.number:
        hint = similar_experiment(target, state.name)
        return f"There is no experiment {state.name!r} at {target.uri}{hint}" if hint else ""
    hint = _similar_name(trial, state.trials) if trial not in state.trials else ""
    return f"Experiment {state.name!r} at {target.uri} has no trial {trial!r}{hint}" if hint else ""


def _similar_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'slow'?` if a known name may be what was meant; names of one series are not similar."""
    return did_you_mean(name, (each for each in known if _letters(each) != _letters(name)), _SIMILAR)


def _letters(name: str) -> str:
    return _COUNTED.sub("", name)


# The results.


class CommittedCheckpoint(Value):
    """A committed checkpoint of a trial: complete, durable and listed in the experiment's journal."""

    experiment: str
    trial: str
    step: int
    metrics: Mapping[str, Any]
    """The metrics that it was saved with."""
    uri: str
    """Its location, without secrets: `pt.Checkpoint(uri)` reads it, with the credentials of the environment."""
    size_bytes: int
    """The size of the directory."""
    sent_bytes: int | None = None
    """The bytes that were uploaded: the others were on the target already; None where the save was an earlier one."""


class RestoredCheckpoint(Value):
    """A checkpoint whose verified files are in a local directory. It can be used as a path: `Path(restored, "x")`."""

    directory: Path
    """The directory with the files. It belongs to the caller, and nothing removes it."""
    experiment: str
    """The name of its experiment."""
    trial: str
    """The name of its trial."""
    step: int
    """The step after which training continues."""
    metrics: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.directory)


class TrialState(Value):
    """The state of a trial in the experiment's journal."""

    experiment: str
    trial: str
    status: Status
    """`completed`, `pruned`, `interrupted`, `errored`, `running`, `paused` or `pending`."""
    reason: str
    """Why it has this status, or why its last attempt ended; empty where nothing ended yet."""
    step: int
    """The newest step, each counted once."""
    metrics: Mapping[str, Any]
    """The metrics of that step."""
    checkpoint: CommittedCheckpoint | None
    """The newest committed checkpoint, from which the trial continues; None before the first."""
    checkpoint_steps: tuple[int, ...]
    """The steps of all its checkpoints, oldest first."""
    attempts: int
    """How many attempts have begun, over all flow runs."""
    wasted_steps: int
    """Steps that are known to have been trained again."""
    wasted_at_least: bool
    """Whether they may be more: a run vanished, and its last reports with it."""
    config: Mapping[str, Any]
    """Its configuration; empty if none was passed."""


class ExperimentState(Value):
    """The state of an experiment after one entry of its journal."""

    experiment: str
    uri: str
    """Its location, without secrets."""
    entry: int
    """The number of that entry."""
    owner: str
    """The run that owns the experiment, as messages name it."""
    trials: Mapping[str, TrialState] = Field(default_factory=dict)
    """The trials by name, in the order in which they were added."""


def committed_checkpoint(
    target: StorageTarget, folder: TrialKey, checkpoint: CheckpointRef, sent_bytes: int | None = None
) -> CommittedCheckpoint:
    """Return the public value of a checkpoint of the trial `folder`."""
    return CommittedCheckpoint(
        experiment=folder.experiment,
        trial=folder.trial,
        step=checkpoint.step,
        metrics=checkpoint.metrics,
        uri=below(target.uri, folder.checkpoint_key(checkpoint).folder),
        size_bytes=checkpoint.size_bytes,
        sent_bytes=sent_bytes,
    )


def trial_state(target: StorageTarget, experiment: JournalKey, trial: Trial) -> TrialState:
    """Return the public state of a trial."""
    folder, newest = experiment.trial_key(trial.trial), newest_checkpoint(trial)
    return TrialState(
        experiment=experiment.experiment,
        trial=trial.trial,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=committed_checkpoint(target, folder, newest) if newest else None,
        checkpoint_steps=tuple(each.step for each in trial.checkpoints),
        attempts=trial.attempt,
        wasted_steps=trial.wasted_steps,
        wasted_at_least=trial.wasted_at_least,
        config=trial.config,
    )


def experiment_state(target: StorageTarget, experiment: Experiment) -> ExperimentState:
    """Return the public state of an experiment."""
    return ExperimentState(
        experiment=experiment.name,
        uri=below(target.uri, experiment.name),
        entry=experiment.number,
        owner=str(experiment.owner or ""),
        trials={name: trial_state(target, experiment.key, each) for name, each in experiment.trials.items()},
    )
