"""The specification of a trial (`TrialSpec`), and the request for one of its attempts (`AttemptRequest`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, PlainValidator, WithJsonSchema

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.messages.process_messages import MetricsSource
from prefect_tune.core.resources import Processes
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.load_named import find_unpicklable, pickle_to_hex
from prefect_tune.runtime.trainable import Reuse


@dataclass(frozen=True)
class TrialSpec:
    """How a trial is trained, and where its checkpoints are stored. All attempts of the trial have the same spec.

    `make_spec_parameter` turns a spec into a parameter of the flow `train_trial`; in it, a reference names the target.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: Annotated[StorageTarget, PlainValidator(resolve_target), WithJsonSchema({"type": "string"})]
    trial: TrialKey
    trainable: str
    """The result of `serialize_for_trial`: `module:name`, or a pickle in hex."""
    stopper: str
    needs_history: bool
    """Whether the stopper needs more than the last report."""
    cadence: Cadence = field(default_factory=Cadence)
    retention: Retention = field(default_factory=Retention)
    sync: Annotated[SyncConfig, WithJsonSchema({"type": "object"})] = field(default_factory=SyncConfig)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """The trainable's name without its module; the trial cannot be resumed with a trainable of another name."""
    isolation: Literal["process", "thread"] = "process"
    reuse: Reuse = "auto"
    processes_per_trial: Processes = 1
    """How many processes, each a rank, train the trial on each node; with several nodes, a number and never a range."""
    nodes_per_trial: int = 1
    """The number of nodes, each a flow run, that train the trial together."""
    min_nodes: int | None = None
    """The smallest number of nodes with which an attempt may start; None: all nodes."""
    metrics_from: MetricsSource = "rank 0"
    grace_period: timedelta = timedelta(seconds=25)
    """How long a trial may take to save after a stop request."""
    silence_timeout: timedelta | None = None
    """How long a trial may train without a report before it is considered hung; None: no limit."""
    tags: tuple[str, ...] = ()
    """Tags of each attempt's task run, for example for Prefect's tag-based concurrency limits."""
    concurrency_limits: tuple[str, ...] = ()
    """The names of Prefect's global concurrency limits; an attempt holds a slot of each limit."""
    required_metrics: tuple[str, ...] = ()
    """The metrics that the search needs in each report."""
    proposed_by_search: bool = False
    """Whether a search proposed the trial."""


@dataclass(frozen=True)
class AttemptRequest:
    """The request for one attempt of a trial. Unlike the `TrialSpec`, it can differ between attempts."""

    owner_term: int
    """The term of the owner that requests the attempt."""
    trial: Trial
    """The trial that waits for the attempt, without its `policy_events` and `attempt_records`."""
    experiment_id: str = ""
    """The id of the requesting experiment; empty, and not checked, if the search runs in the same process."""
    reports: tuple[StepReport, ...] = ()
    """The reports up to the newest checkpoint, if the stopper needs them (`needs_history`)."""
    milestone: int | None = None
    """The next step at which the trial waits for a decision; None if there is no such step."""
    saves_first: bool = False
    """Whether the trial commits a checkpoint of the step `milestone` before it waits for the decision."""
    secret: str = field(default="", repr=False)
    """The secret that authenticates the connections between the nodes of the attempt; empty for a single node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the trial's process; for example, they name the devices that it may use."""

    @property
    def attempt(self) -> int:
        """The number of the requested attempt."""
        return self.trial.attempt + 1


def get_absolute_sys_path() -> tuple[str, ...]:
    """Return this process's `sys.path` as absolute paths, for processes with other working directories."""
    return tuple(_make_absolute(entry) for entry in sys.path)


def _make_absolute(entry: str) -> str:
    """Make an existing path absolute; return other entries, such as names of import hooks, unchanged."""
    with suppress(FileNotFoundError):  # the working directory was removed: nothing can be imported from there
        return os.path.abspath(entry) if not entry or Path(entry).exists() else entry  # noqa: PTH100  "" is the working directory
    return entry


def serialize_for_trial(value: object) -> str:
    """Return text (`module:name`) unchanged, other values as a pickle in hex. Raises InvalidInput if pickling fails."""
    if isinstance(value, str):
        return value
    try:
        return pickle_to_hex(value)
    except Exception as error:
        name, part = find_unpicklable(value)
        label = getattr(value, "__qualname__", None) or repr(value)
        subject = f"{label}: it uses {name} of class {type(part).__name__}, which" if name else f"{label}: it"
        raise InvalidInput(
            f"{subject} cannot be sent to the trial's process ({type(error).__name__}: {error}). Create it inside the "
            "trainable, or put the trainable into a module and pass 'package.module:Name'"
        ) from error
