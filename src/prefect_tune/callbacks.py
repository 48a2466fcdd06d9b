"""`pt.Callback`: hear what becomes of the trials of a search, in the process that runs it. No Prefect is needed.

It has no say: whatever a callback does, raises or takes its time for, no trial waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.events import AttemptEnded, CheckpointRef, Finished, GaveUp, Started
from prefect_tune.core.objective import Objective
from prefect_tune.core.trial import Trial
from prefect_tune.core.values import StepReport

__all__ = ["Callback", "SearchInfo"]


@dataclass(frozen=True)
class SearchInfo:
    """What a callback is set up for."""

    experiment: str
    """Its name on the target."""
    target_uri: str
    """Where it lives, without secrets."""
    objective: Objective | None
    """What trials are compared by."""


class Callback:
    """Hears of a search. Override what you need; every hook may be left out.

    **When.** The hooks of one callback are called one after the other, in one thread that is its own, in the
    order in which things happened: for each trial in the order of its history, over all trials in the order in
    which the search heard of them. Reports come as soon as they are made, everything else once it is in the
    journal of its trial or is about to be in the experiment's.

    **How often.** A callback is told of everything in the experiment, from the first trial on, also where it
    joins later, or where things happened while no search was running. How far it was told is kept on the target,
    with its `get_state`, every few seconds and at the end. So after a run that ended in order nothing is told
    twice; after a crash what came since the last such moment is told again, to a callback that has forgotten it
    just as well: its state is the one of that moment. What is counted in the state is therefore counted exactly
    once; what goes elsewhere (a message, a file) at least once, and `trial`, `attempt` and `step` tell a
    repetition. Steps that are trained again after a failure are reported again; `on_trial_start` says from where.

    **Failures.** What a hook raises is logged, with its trace, and counts as told. A hook that hangs is left
    behind when the search ends; what it has missed it is told by the next run.

    `trial` is the trial as the journal has it by then. It may be further than the news.
    """

    @property
    def name(self) -> str:
        """What its state is kept under; of two callbacks with one name in a search the second is `<name>-2`."""
        return type(self).__name__

    def setup(self, search: SearchInfo) -> None:
        """Get ready, before anything is told. Where it raises, nothing is told in this run."""

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        """An attempt begins, after step `started.from_step`: what was reported beyond it does not count any more."""

    def on_trial_restore(self, trial: Trial, started: Started) -> None:
        """As `on_trial_start`, and before it, for an attempt that goes on from a checkpoint."""

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        """A step was reported."""

    def on_trial_save(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        """A checkpoint was committed; called before `on_checkpoint`, which is the same."""

    def on_checkpoint(self, trial: Trial, checkpoint: CheckpointRef) -> None:
        """A checkpoint was committed: `results.checkpoint` and `pt.Checkpoint` can read it."""

    def on_trial_recover(self, trial: Trial, ended: AttemptEnded) -> None:
        """An attempt ended, and the trial has not: it is tried again, unless `on_trial_error` follows."""

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        """The trial is done."""

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        """The trial errored, and is not tried again."""

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        """This run of the search ends; resumed, it may go on."""

    def get_state(self) -> Mapping[str, object] | None:
        """Return what `set_state` needs, as JSON. What was told up to now must survive a crash when this returns."""
        return None

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        """Take up what `get_state` gave in an earlier run, after `setup`.

        Return False if that is of no use here, such as on a machine that has none of its files: then everything is
        told from the beginning.
        """
