"""The arguments and results of the public tasks, as plain values.

A task parses and validates its arguments before it takes ownership or writes. Results are frozen, and can be printed,
pickled and stored as JSON.
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
from prefect_tune.core.checkpoints.manifest import normalize_metadata
from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events import CheckpointRef
from prefect_tune.core.metrics import is_integer_at_least, to_plain_metrics, to_plain_scalar
from prefect_tune.core.storage.generations import list_experiment_names
from prefect_tune.core.storage.layout import JournalKey, TrialKey, join_uri
from prefect_tune.core.values import ExperimentName, Number, StepReport, TrialId, Value
from prefect_tune.parameters.argument_checks import config_to_json
from prefect_tune.parameters.search_plan import ValidatedParameters

Directory: TypeAlias = str | os.PathLike[str]
TrialEndStatus: TypeAlias = Literal["completed", "paused", "errored"]
"""How a trial of a user's own flow ends."""


def _validate_step(value: object) -> int:
    """Return `value` as a step: an integer of at least 1. Raises `InvalidInput` for other values."""
    step = to_plain_scalar(value)
    if isinstance(step, int) and is_integer_at_least(step, 1):
        return step
    raise InvalidInput(f"step: expected an integer of at least 1, the number of trained steps, found {value!r}")


def _validate_metrics(value: Any) -> dict[str, object]:
    return to_plain_metrics({} if value is None else value, "metrics")


def _validate_metadata(value: Any) -> dict[str, object]:
    return normalize_metadata({} if value is None else value)


def _parse_reports(value: Any) -> tuple[StepReport, ...]:
    """Return reports in the order of their steps. A step may be text, since the keys of JSON objects are text."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidInput(f"reports: expected metrics by step, such as {{1: {{'loss': 0.5}}}}, found {value!r}")
    numbered = {_parse_report_step(step): metrics for step, metrics in (value or {}).items()}
    plain = {step: to_plain_metrics(numbered[step], f"reports, step {step}") for step in sorted(numbered)}
    return tuple(StepReport(step=step, metrics=metrics) for step, metrics in plain.items())


def _parse_report_step(value: object) -> int:
    try:
        return _validate_step(int(value) if isinstance(value, str) and value.isdecimal() else value)
    except InvalidInput as invalid:
        raise InvalidInput(f"reports: {invalid}") from invalid


_Step: TypeAlias = Annotated[int, BeforeValidator(_validate_step)]
_Path: TypeAlias = Annotated[
    Path, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
]
"""A path; any `os.PathLike` is accepted, while pydantic itself accepts only `Path` and text."""
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
    metrics: Annotated[dict[str, Any], BeforeValidator(_validate_metrics)]
    trained_seconds: Annotated[Number, Field(ge=0)]
    metadata: Annotated[dict[str, Any], BeforeValidator(_validate_metadata)]
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


class SyncStateArguments(TrialArguments):
    """The arguments of `sync_experiment_state`."""

    reports: Annotated[tuple[StepReport, ...], BeforeValidator(_parse_reports)]
    config: Annotated[dict[str, Any], BeforeValidator(config_to_json)] | None
    status: TrialEndStatus | None
    reason: str


# Warn if a name is new on a target and similar to an existing name, since the new name may be misspelled.

_MIN_SIMILARITY = 0.75
"""Two names that are at least as similar as `slow` and `slwo` may be spellings of one name."""
_LIST_TIMEOUT = timedelta(seconds=5)
_SERIES_PART = re.compile(r"[^a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
"""The parts that differ within a series of names, such as `fold-a` and `fold-b` or `rate-0.1` and `rate-0.2`."""


def make_similar_experiment_hint(target: StorageTarget, experiment: str) -> str:
    """Return `; did you mean 'slow'?` if `target` has a similar experiment name; "" if none is found within 5 s."""
    with suppress(TuneError), target.open(timeout=_LIST_TIMEOUT) as store:
        return _format_similar_name_hint(experiment, list_experiment_names(store))
    return ""


def format_misspelling_warning(target: StorageTarget, state: Experiment, trial: str) -> str:
    """Return a warning if the experiment or trial does not exist and its name may be misspelled; "" otherwise."""
    if not state.entry_count:
        hint = make_similar_experiment_hint(target, state.name)
        return f"There is no experiment {state.name!r} at {target.uri}{hint}" if hint else ""
    hint = _format_similar_name_hint(trial, state.trials) if trial not in state.trials else ""
    return f"Experiment {state.name!r} at {target.uri} has no trial {trial!r}{hint}" if hint else ""


def _format_similar_name_hint(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'slow'?` for a similar name in `names` that is not of the same series (`_SERIES_PART`)."""
    series = _SERIES_PART.sub("", name)
    return did_you_mean(name, (other for other in names if _SERIES_PART.sub("", other) != series), _MIN_SIMILARITY)


# The results.


class CommittedCheckpoint(Value):
    """A committed checkpoint of a trial: complete, durable and listed in the experiment's journal."""

    experiment: str
    trial: str
    step: int
    metrics: Mapping[str, Any]
    """The metrics of its step."""
    uri: str
    """The location, without secrets. `pt.Checkpoint(uri)` reads the checkpoint, with the environment's credentials."""
    size_bytes: int
    """The size of the directory."""
    sent_bytes: int | None = None
    """The number of uploaded bytes; the target had the other bytes. None if an earlier call saved the checkpoint."""


class RestoredCheckpoint(Value):
    """A checkpoint with its verified files in a local directory. It can be used as a path: `Path(restored, "x")`."""

    directory: Path
    """The directory with the files. It belongs to the caller; prefect-tune does not delete it."""
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
    """The reason for this status, or for the end of the last attempt; empty during an attempt, and before the first."""
    step: int
    """The newest step. It does not grow when steps are trained again."""
    metrics: Mapping[str, Any]
    """The metrics of the newest step."""
    checkpoint: CommittedCheckpoint | None
    """The newest committed checkpoint, from which the trial continues; None before the first commit."""
    checkpoint_steps: tuple[int, ...]
    """The steps of all live checkpoints of the trial, oldest first."""
    attempts: int
    """The number of attempts that have begun, in all flow runs."""
    recomputed_steps: int
    """The number of steps that were trained again, as far as the journal shows them."""
    recomputed_is_lower_bound: bool
    """Whether more steps may have been trained again, because a run ended without journaling its last reports."""
    config: Mapping[str, Any]
    """The trial's configuration; empty if none was passed."""


class ExperimentState(Value):
    """The state of an experiment after an entry of its journal."""

    experiment: str
    uri: str
    """The location of the experiment, without secrets."""
    entry: int
    """The number of the entry."""
    owner: str
    """The run that owns the experiment, named as in messages; empty if the experiment has no owner."""
    trials: Mapping[str, TrialState] = Field(default_factory=dict)
    """The trials by name, in the order in which they were added."""


def make_committed_checkpoint(
    target: StorageTarget, folder: TrialKey, checkpoint: CheckpointRef, sent_bytes: int | None = None
) -> CommittedCheckpoint:
    """Return a checkpoint of the trial `folder` as the value that tasks return to users."""
    return CommittedCheckpoint(
        experiment=folder.experiment,
        trial=folder.trial,
        step=checkpoint.step,
        metrics=checkpoint.metrics,
        uri=join_uri(target.uri, folder.checkpoint_key(checkpoint).folder),
        size_bytes=checkpoint.size_bytes,
        sent_bytes=sent_bytes,
    )


def make_trial_state(target: StorageTarget, experiment: JournalKey, trial: Trial) -> TrialState:
    """Return the public state of a trial."""
    folder, newest = experiment.trial_key(trial.id), newest_checkpoint(trial)
    return TrialState(
        experiment=experiment.experiment,
        trial=trial.id,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=make_committed_checkpoint(target, folder, newest) if newest else None,
        checkpoint_steps=tuple(kept.step for kept in trial.checkpoints),
        attempts=trial.attempt,
        recomputed_steps=trial.recomputed_steps,
        recomputed_is_lower_bound=trial.recomputed_is_lower_bound,
        config=trial.config,
    )


def make_experiment_state(target: StorageTarget, experiment: Experiment) -> ExperimentState:
    """Return the public state of an experiment."""
    return ExperimentState(
        experiment=experiment.name,
        uri=join_uri(target.uri, experiment.name),
        entry=experiment.entry_count,
        owner=str(experiment.owner or ""),
        trials={name: make_trial_state(target, experiment.key, trial) for name, trial in experiment.trials.items()},
    )
