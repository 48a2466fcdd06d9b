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
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal_events import Quarantined
from prefect_tune.core.messages.process_messages import MetricsFrom
from prefect_tune.core.resources import Processes
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.runtime.load_named import pickled
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
    own_journal: bool = False
    """Whether the trial has a journal of its own, as in a search; a single training writes the experiment's."""

    @property
    def journal(self) -> JournalKey:
        """The journal that an attempt writes."""
        return self.trial.journal if self.own_journal else self.trial.of_experiment


@dataclass(frozen=True)
class AttemptRequest:
    """The request for one attempt of a trial."""

    search_term: int = 0
    """The term in which the requesting run owns the experiment."""
    experiment_id: str = ""
    """The id of the requesting experiment; empty if it is not checked: in a process of the search itself."""
    attempt: int = 0
    """The number of the requested attempt; running the same request again makes a further attempt."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The trial's configuration, if the attempt creates the trial's own journal."""
    reached: int | None = None
    """The last step that the attempt before is known to have trained, if its owner vanished."""
    milestone: int | None = None
    """The step at which the trial asks whether to continue."""
    saves_first: bool = False
    """Whether it commits a checkpoint of that step before it asks."""
    exploit: Exploit | None = None
    """Resume from a clone of another trial's newest checkpoint, with another configuration."""
    last_step: int | None = None
    """The step with which each trial ends at the latest, from which nothing is exploited; None if it is not known."""
    quarantines: tuple[Quarantined, ...] = ()
    """Checkpoints to quarantine first, since the trainable fails on them."""
    answers: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """People's answers to the trial's questions, by the question's key."""
    secret: str = ""
    """With which the nodes of the attempt sign their messages; empty for one node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the trial's process, such as the devices it may use."""


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
        from prefect_tune.runtime.pickle_by_value import find_unpicklable

        name, part = find_unpicklable(thing)
        shown = getattr(thing, "__qualname__", None) or repr(thing)
        what = f"{shown}: it uses {name} of class {type(part).__name__}, which" if name else f"{shown}: it"
        raise InvalidInput(
            f"{what} cannot be sent to the trial's process ({type(error).__name__}: {error}). Create it inside the "
            "trainable, or put the trainable into a module and pass 'package.module:Name'"
        ) from error
