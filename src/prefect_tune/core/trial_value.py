"""What is known of a trial: the value, and what can be asked of it. `trial` says how it changes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from prefect_tune.core.events import Aside, Cause, CheckpointRef, Claim
from prefect_tune.core.layout import CheckpointKey, TrialKey
from prefect_tune.core.schedulers.scheduler import Decision, Exploit
from prefect_tune.core.values import StepReport, TrialId, Value

__all__ = [
    "ENDED",
    "Happening",
    "Status",
    "Trial",
    "is_acceptable",
    "is_aside",
    "is_collectable",
    "is_held",
    "is_live",
    "is_overtaken",
    "live_keys",
    "newest_checkpoint",
    "newest_key",
    "parent_of_next",
    "reused_from",
    "with_report",
]


class Status(StrEnum):
    """Where a trial is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ERRORED = "errored"


ENDED = frozenset({Status.FINISHED, Status.ERRORED})


class Happening(Value):
    """What search and scheduler heard of a trial, or said; `order` counts over all trials of the experiment."""

    order: int
    what: Literal["added", "decided", "resumed", "ended"]
    report: StepReport | None = None
    """With "decided": what was decided about; with "ended": the last one."""
    decision: Decision | None = None
    failed: bool = False
    """With "ended": whether the trial errored."""
    stopped: bool = False
    """With "ended": whether the scheduler ended it before its time."""


class Trial(Value):
    """One configuration being trained, as the journal tells it."""

    trial: TrialId
    config: Mapping[str, object]
    fingerprint: Mapping[str, str] = Field(default_factory=dict)
    apart: bool = False
    """Whether it has a journal of its own, which the experiment's takes in."""
    status: Status = Status.PENDING
    attempt: int = 0
    step: int = 0
    """The newest step reported in the history that counts."""
    metrics: Mapping[str, object] = Field(default_factory=dict)
    """The metrics of that step."""
    trained_seconds: float = 0.0
    """The training time up to that step."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """The live ones, oldest first."""
    quarantined: tuple[int, ...] = ()
    """Sequences of checkpoints that are not to be used."""
    aside: tuple[Aside, ...] = ()
    """Those of them that had been committed and are not retired: their bytes stay, and they can be reinstated."""
    lost_checkpoints: int = 0
    """How many of them had been committed: where these were all there were, a start from nothing is no resume."""
    collected_up_to: int = 0
    """The entry of the last retirement: blobs begun before it are reused only while a checkpoint has them."""
    claims: tuple[Claim, ...] = ()
    """By whom its checkpoints, live ones and retired ones, were cloned: their bytes stay until that is over."""
    user_failures: int = 0
    """Failures of the user's code since the trial was added or requeued."""
    machine_failures: int = 0
    """Failures of the machine since the last commit."""
    same_start: int = 0
    """How many attempts in a row died before their first step from one and the same start."""
    blamed_checkpoints: int = 0
    """How many checkpoints were put aside for killing the trainable, since the last commit."""
    started_from: int | None = None
    """The sequence that the last attempt restored; None for a start from nothing."""
    wasted_steps: int = 0
    """Steps that were journaled and had to be done again."""
    reason: str = ""
    """Why it ended, or what the last attempt died of."""
    cause: Cause | None = None
    """What kind of death that was."""
    returned: bool = False
    """Whether the trainable ended by itself."""
    left: bool = False
    """Whether somebody ended it who is not its stopper."""
    absorbed: int = 0
    """The last entry of its own journal that the experiment's journal has taken in."""
    proposed: Mapping[str, object] | None = None
    """The configuration it was added with, where it has exploited another trial since."""
    exploits: Exploit | None = None
    """What the scheduler has decided and the trial has not done yet."""
    past: tuple[Happening, ...] = ()
    """What search and scheduler have to be told again when the experiment is resumed, oldest first."""


def with_report(trial: Trial, report: StepReport | None) -> Trial:
    """Return the trial as of a report that its journal may not know yet; as it is where there is no newer one."""
    if report is None or report.step <= trial.step:
        return trial
    newest = {"step": report.step, "metrics": report.metrics, "trained_seconds": report.trained_seconds}
    return trial.model_copy(update=newest)


def newest_checkpoint(trial: Trial) -> CheckpointRef | None:
    """Return the checkpoint to go on from: the last one committed that is not quarantined."""
    return trial.checkpoints[-1] if trial.checkpoints else None


def newest_key(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the key of that checkpoint."""
    newest = newest_checkpoint(trial)
    return folder.checkpoint_key(newest) if newest else None


def live_keys(folder: TrialKey, trial: Trial) -> list[CheckpointKey]:
    """Return the keys of all checkpoints that it has, oldest first."""
    return [folder.checkpoint_key(each) for each in trial.checkpoints]


def is_live(trial: Trial, checkpoint: CheckpointKey | Claim) -> bool:
    """Return whether it is a checkpoint of `trial` now."""
    return any((each.step, each.sequence) == (checkpoint.step, checkpoint.sequence) for each in trial.checkpoints)


def is_aside(trial: Trial, checkpoint: CheckpointKey | Claim) -> bool:
    """Return whether it is not to be used, and may be a checkpoint again one day."""
    refs = (each.checkpoint for each in trial.aside)
    return any((each.step, each.sequence) == (checkpoint.step, checkpoint.sequence) for each in refs)


def parent_of_next(folder: TrialKey, trial: Trial) -> CheckpointKey | None:
    """Return the checkpoint whose bytes the next save may reuse: the newest one, or none.

    What is older than a damaged one may share what is damaged, found so or not.
    """
    newest = newest_key(folder, trial)
    return None if newest is None or is_overtaken(trial, newest.sequence) else newest


def is_overtaken(trial: Trial, sequence: int) -> bool:
    """Return whether a checkpoint was put aside after a save began (after entry `sequence`), and so unknown to it."""
    return any(sequence < each.since for each in trial.aside)


def reused_from(trial: Trial) -> int:
    """Return the entry since which blobs that no live checkpoint has may be reused by the next save.

    Those of the last retirement and before may be deleted; one that was there when a checkpoint was put aside
    may be what is damaged.
    """
    return max((trial.collected_up_to, *(each.since for each in trial.aside)))


def is_held(trial: Trial, checkpoint: CheckpointKey | Claim) -> bool:
    """Return whether a clone needs its bytes, though it is no checkpoint of `trial` any more."""
    claimed = any((each.step, each.sequence) == (checkpoint.step, checkpoint.sequence) for each in trial.claims)
    return claimed and not is_live(trial, checkpoint)


def is_acceptable(trial: Trial, sequence: int) -> bool:
    """Return whether a save that began after entry `sequence` may still become a checkpoint of `trial`.

    Not one that began before the last retirement: what it reused may have been deleted since. Not one
    that is older than a checkpoint the journal names, or as old: its owner has gone on without it.
    """
    known = max((*(each.sequence for each in trial.checkpoints), *trial.quarantined), default=0)
    return sequence > known and sequence >= trial.collected_up_to


def is_collectable(state: Trial, key: CheckpointKey) -> bool:
    """Return whether the bytes of `key` may be deleted: now, and at any later time.

    It was begun before the last retirement that `state` knows of: no save reuses it any more, here or
    in a process that takes over while the deletion is on its way. It is no checkpoint, and no clone needs
    it: of what is neither, no clone is begun any more.
    """
    if is_aside(state, key):
        return False
    return not is_live(state, key) and not is_held(state, key) and key.sequence < state.collected_up_to
