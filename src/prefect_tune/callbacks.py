"""`pt.Callback`: hooks that run in the process of a search and observe its trials. They do not depend on Prefect.

A callback cannot influence the search. No trial waits for a callback, and an error in a hook is only logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.journal_events import (
        AttemptEnded,
        AttemptStarted,
        CheckpointRef,
        TrialErrored,
        TrialFinished,
    )

__all__ = [
    "AttemptEnded",
    "AttemptStarted",
    "Callback",
    "CheckpointRef",
    "SearchInfo",
    "StepReport",
    "Trial",
    "TrialErrored",
    "TrialFinished",
]


def __getattr__(name: str) -> object:
    """Import a journal type only on first use, because flows import this module without needing the journal types."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "prefect_tune.core.experiment.trial_transitions" if name == "Trial" else "prefect_tune.core.journal_events"
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class SearchInfo:
    """The search that a callback observes."""

    experiment: str
    """The experiment's name on the target."""
    target_uri: str
    """The target's URI, without secrets."""
    objective: Objective | None
    """The metrics by which trials are compared; None if the search has no metric."""
    generation: int = 1
    """The number of experiments that have had this name, including this one; a deletion makes the name free again."""


class Callback:
    """Observes a search. Override the hooks that you need.

    **When.** Each callback has its own thread, which calls one hook at a time. Events of one trial arrive in the order
    in which they happened, and events of different trials in the order in which the search received them.
    `on_trial_result` is called when a report arrives. All other trial hooks are called before their event is journaled.

    **How often.** A callback receives each event of the experiment at least once, in order, even events that happened
    before the callback was added, or while no search was running. The result of `get_state` is stored on the target
    every few seconds and at the end, with the number of the last journal entry that the callback has received. After a
    regular end, no event is repeated. After a crash, the events of later entries may be repeated; recognize a repeated
    event by `trial`, `attempt`, `step` and a checkpoint's sequence. A step that is trained again after a failure is
    also reported again: see `started.from_step`.

    **Failures.** An exception in a hook is logged, and the event counts as delivered. A hook that hangs is abandoned
    when the search ends; the next run delivers the events that the callback has missed.

    The argument `trial` is the trial's current state in the journal, and may be newer than the event.
    """

    @property
    def name(self) -> str:
        """The key of the stored state; a second callback with this name in a search gets the key `<name>-2`."""
        return type(self).__name__

    def setup(self, search: SearchInfo) -> None:
        """Called before all other hooks. If `setup` raises, this run calls no other hook of the callback."""

    def on_trial_start(self, trial: Trial, started: AttemptStarted) -> None:
        """An attempt continues from step `started.from_step`; earlier reports of later steps no longer count."""

    def on_trial_restore(self, trial: Trial, started: AttemptStarted) -> None:
        """An attempt begins from a checkpoint; called before `on_trial_start`."""

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        """A step was reported."""

    def on_trial_save(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        """A checkpoint was committed; called before `on_checkpoint`, with the same arguments."""

    def on_checkpoint(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        """A checkpoint was committed: `results.checkpoint` and `pt.Checkpoint` can read it."""

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        """An attempt ended, but not its trial. The trial is retried unless `on_trial_error` follows."""

    def on_trial_complete(self, trial: Trial, finished: TrialFinished) -> None:
        """The trial has finished; `finished.kind` says why, for example because a stop criterion was met."""

    def on_trial_error(self, trial: Trial, gave_up: TrialErrored) -> None:
        """The trial errored and is not retried."""

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        """This run of the search ends; a resume may continue the search."""

    def get_state(self) -> Mapping[str, object] | None:
        """Make the effects of all earlier hooks durable; then return the state for `set_state`, as a JSON object."""
        return None

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        """Restore the state that `get_state` returned in an earlier run; called after `setup`.

        Return False if the state is unusable here, for example on a machine without the callback's files. All
        events are then delivered from the beginning.
        """
