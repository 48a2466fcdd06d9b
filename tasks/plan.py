"""Everything that is fixed about training one trial, before its first attempt."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import cloudpickle

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events import Quarantined
from prefect_tune.core.layout import JournalKey, TrialKey
from prefect_tune.core.retention import Retention
from prefect_tune.core.schedulers.scheduler import Exploit

__all__ = ["Orders", "TrialPlan", "import_path", "payload"]


@dataclass(frozen=True)
class TrialPlan:
    """How a trial is trained, and where its bytes go."""

    target: StorageTarget
    trial: TrialKey
    trainable: str
    """As `payload` gives it."""
    stopper: str
    needs_curve: bool
    """Whether the stopper looks back further than the last report."""
    cadence: Cadence = field(default_factory=Cadence)
    retention: Retention = field(default_factory=Retention)
    sync: SyncConfig = field(default_factory=SyncConfig)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """The trainable's name: another one does not go on where this one was."""
    isolation: Literal["process", "thread"] = "process"
    grace: timedelta = timedelta(seconds=25)
    """How long a trial that is asked to stop may take to save."""
    silence: timedelta | None = None
    """How long a trial may train without a report before it is taken for hung."""
    tags: tuple[str, ...] = ()
    """Of the task run of each attempt; Prefect's limits of tags apply to it."""
    concurrency_limits: tuple[str, ...] = ()
    """Prefect's global concurrency limits in each of which an attempt takes a place."""
    apart: bool = False
    """Whether the trial has a journal of its own, beside the experiment's."""

    @property
    def journal(self) -> JournalKey:
        """The journal that an attempt writes."""
        return JournalKey(experiment=self.trial.experiment, trial=self.trial.trial if self.apart else None)


@dataclass(frozen=True)
class Orders:
    """What is said to one attempt of a trial."""

    epoch: int | None = None
    """In which the caller owns the journal; None: the attempt opens the trial's own journal itself."""
    search_epoch: int = 0
    """In which whoever gives them owns the experiment; 0 for a training alone."""
    experiment_id: str = ""
    """Which experiment of its name gives them; empty where that is not asked: in a process of the search itself."""
    attempt: int = 0
    """Which attempt is ordered; one that is run again with the same orders makes another of it."""
    config: Mapping[str, object] = field(default_factory=dict)
    """For a trial that begins a journal of its own."""
    milestone: int | None = None
    """The step at which the trial asks whether to go on."""
    saves_first: bool = False
    """Whether it commits a checkpoint of that step before it asks."""
    exploit: Exploit | None = None
    """Go on from a clone of another trial's newest checkpoint, with another configuration."""
    puts_aside: tuple[Quarantined, ...] = ()
    """Checkpoints that are not to be used, since they kill the trainable."""
    answers: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """What persons have answered the trial, by the keys of its questions."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the trial's process, such as the devices it may use."""


def import_path() -> tuple[str, ...]:
    """Return where this process imports from, for another one that may stand in another directory."""
    return tuple(_absolute(entry) for entry in sys.path)


def _absolute(entry: str) -> str:
    """Return a path made absolute; what is none is the name of an import hook."""
    with suppress(FileNotFoundError):  # the working directory has been removed: nothing is found there
        return os.path.abspath(entry) if not entry or Path(entry).exists() else entry  # noqa: PTH100  "" is the working directory
    return entry


def payload(thing: object) -> str:
    """Return `thing` as the trial's process can load it: its import path as given, or else a pickle.

    Raises:
        InvalidInput: it cannot be taken to another process.
    """
    if isinstance(thing, str):
        return thing
    try:
        return bytes(cloudpickle.dumps(thing)).hex()
    except Exception as error:
        raise InvalidInput(
            f"{thing!r} cannot be sent to the trial's process ({type(error).__name__}: {error}). Put it into a "
            "module and pass 'package.module:Name', or open files and connections inside it"
        ) from error
