"""The specification of one trial (`TrialSpec`) and of one attempt of it (`AttemptRequest`)."""

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
from prefect_tune.core.messages.process_messages import MetricsFrom
from prefect_tune.core.resources import Processes
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.load_named import find_unpicklable, pickled
from prefect_tune.runtime.trainable import Reuse


@dataclass(frozen=True)
class TrialSpec:
    """How a trial is trained and where its checkpoints are stored: the same for all its attempts.

    As a parameter of the flow `train_trial`, made by `spec_as_parameters`, its target is the text that names it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: Annotated[StorageTarget, PlainValidator(resolve_target), WithJsonSchema({"type": "string"})]
    trial: TrialKey
    trainable: str
    """As `pickled_or_path` returns it."""
    stopper: str
    needs_curve: bool
    """Whether the stopper looks back further than the last report."""
    cadence: Cadence = field(default_factory=Cadence)
    retention: Retention = field(default_factory=Retention)
    sync: Annotated[SyncConfig, WithJsonSchema({"type": "object"})] = field(default_factory=SyncConfig)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """The trainable's name: another trainable may not resume this trial."""
    isolation: Literal["process", "thread"] = "process"
    reuse: Reuse = "auto"
    processes_per_trial: Processes = 1
    """How many processes train it together, each a rank; on several nodes, on each node, and then no range."""
    nodes_per_trial: int = 1
    """How many nodes train it together, each a flow run."""
    min_nodes: int | None = None
    """With how many nodes an attempt may begin, if not all arrive; None: with all."""
    metrics_from: MetricsFrom = "rank 0"
    grace: timedelta = timedelta(seconds=25)
    """How long a trial that is asked to stop may take to save."""
    silence: timedelta | None = None
    """How long a trial may train without a report before it is presumed hung."""
    tags: tuple[str, ...] = ()
    """Tags of the task run of each attempt; Prefect's tag-based concurrency limits apply to it."""
    concurrency_limits: tuple[str, ...] = ()
    """Prefect's global concurrency limits; an attempt holds a slot in each of them."""
    required_metrics: tuple[str, ...] = ()
    """The metrics of the search that each report has to have."""
    of_search: bool = False
    """Whether a search proposed the trial."""


@dataclass(frozen=True)
class AttemptRequest:
    """The request for one attempt of a trial."""

    search_term: int
    """The term in which the requesting run owns the experiment."""
    trial: Trial
    """The trial, which waits for the attempt; without its past."""
    experiment_id: str = ""
    """The id of the requesting experiment; empty if it is not checked: in a process of the search itself."""
    curve: tuple[StepReport, ...] = ()
    """The reports up to its newest checkpoint, if the stopper needs them."""
    milestone: int | None = None
    """The step at which the trial asks whether to continue."""
    saves_first: bool = False
    """Whether it commits a checkpoint of that step before it asks."""
    secret: str = field(default="", repr=False)
    """With which the nodes of the attempt authenticate their connections; empty for one node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the trial's process, such as the devices it may use."""

    @property
    def attempt(self) -> int:
        """The number of the requested attempt."""
        return self.trial.attempt + 1


def import_path() -> tuple[str, ...]:
    """Return this process's `sys.path` as absolute paths, for a process with another working directory."""
    return tuple(_absolute(entry) for entry in sys.path)


def _absolute(entry: str) -> str:
    """Return an existing path as an absolute one; other entries, such as names of import hooks, unchanged."""
    with suppress(FileNotFoundError):  # the working directory was removed: nothing can be imported from it
        return os.path.abspath(entry) if not entry or Path(entry).exists() else entry  # noqa: PTH100  "" is the working directory
    return entry


def pickled_or_path(thing: object) -> str:
    """Return `thing` as text that the trial's process can load: an import path unchanged, else a pickle in hex.

    Raises:
        InvalidInput: it cannot be pickled.
    """
    if isinstance(thing, str):
        return thing
    try:
        return pickled(thing)
    except Exception as error:
        name, part = find_unpicklable(thing)
        shown = getattr(thing, "__qualname__", None) or repr(thing)
        what = f"{shown}: it uses {name} of class {type(part).__name__}, which" if name else f"{shown}: it"
        raise InvalidInput(
            f"{what} cannot be sent to the trial's process ({type(error).__name__}: {error}). Create it inside the "
            "trainable, or put the trainable into a module and pass 'package.module:Name'"
        ) from error
