"""Retention policy: which checkpoints are kept.

The entry that journals a new checkpoint also names those that it retires, and their bytes are deleted after it. So a
process that dies between the two leaves garbage, and never a checkpoint without its bytes. Maintenance applies the same
policy to trials that have ended. The newest checkpoint is always kept, since the next attempt starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from prefect_tune.core.search.objective import objective_of
from prefect_tune.core.values import AS_WHOLE, Value

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial import Trial
    from prefect_tune.core.journal_events import CheckpointRef, QuarantinedCheckpoint

_Count = Annotated[int, Field(ge=1), AS_WHOLE]


class Retention(Value):
    """Which checkpoints are kept: those that at least one rule keeps. Without any rule all are kept.

    The newest checkpoint and pinned ones are always kept. A checkpoint whose metric is missing
    is never among the best; of equally good ones the older is kept, so that a new one replaces none.

    Args:
        last: keep this many of the newest.
        best: keep this many of the best by `metric`.
        metric: the reported metric that ranks checkpoints for `best`.
        mode: whether a small metric is good (`min`, the default), or a large one (`max`).
        every: keep each checkpoint whose step is a multiple of this.
    """

    last: _Count | None = Field(default=None, description="Keep this many of the newest.")
    best: _Count | None = Field(default=None, description="Keep this many of the best by `metric`.")
    metric: str | None = Field(default=None, description="The reported metric that ranks checkpoints for `best`.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether a small metric is good, or a large one.")
    every: _Count | None = Field(default=None, description="Keep each checkpoint whose step is a multiple of this.")

    @model_validator(mode="after")
    def _best_needs_a_metric(self) -> Retention:
        if (self.best is None) != (self.metric is None):
            raise ValueError("`best` and `metric` require each other: set both, or neither")
        return self

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is set, so that all checkpoints are kept."""
        return self.last is None and self.best is None and self.every is None


def retired(checkpoints: Sequence[CheckpointRef], policy: Retention) -> tuple[int, ...]:
    """Return the sequences of the checkpoints that `policy` does not keep; `checkpoints` is oldest first."""
    if policy.keeps_all:
        return ()
    from prefect_tune.core.experiment.summary import best_saved  # the flows import this module, and need no journal

    stays = {each.sequence for each in checkpoints[-(policy.last or 1) :]}
    stays |= {each.sequence for each in checkpoints if each.pinned}
    stays |= {each.sequence for each in checkpoints if policy.every and each.step % policy.every == 0}
    if (objective := objective_of(policy.metric, policy.mode)) is not None:
        stays |= {each.sequence for each in best_saved(checkpoints, objective)[: policy.best]}
    return tuple(each.sequence for each in checkpoints if each.sequence not in stays)


def retired_by_commit(trial: Trial, new: CheckpointRef, policy: Retention) -> Sequence[CheckpointRef]:
    """Return the live and then the quarantined checkpoints of `trial` that end with the commit of `new`."""
    live = (*trial.checkpoints, new)
    ending = retired(live, policy)
    quarantined = retired_quarantined(trial.quarantined_checkpoints, live, policy)
    return [*(each for each in live if each.sequence in ending), *quarantined]


def retired_quarantined(
    quarantined: Sequence[QuarantinedCheckpoint], checkpoints: Sequence[CheckpointRef], policy: Retention
) -> Sequence[CheckpointRef]:
    """Return quarantined checkpoints that `policy` would retire if they were live beside `checkpoints`.

    A quarantined checkpoint may be undamaged, and be reinstated. Therefore it is returned only when the trial has as
    many newer live checkpoints as the policy always keeps (`last`, or 1).
    """
    if policy.keeps_all or len(checkpoints) < (policy.last or 1):
        return []
    refs = [each.checkpoint for each in quarantined]
    going = retired(sorted((*checkpoints, *refs), key=lambda each: each.sequence), policy)
    oldest = checkpoints[-(policy.last or 1)].sequence
    return [each for each in refs if each.sequence in going and each.sequence < oldest]
