"""When a trial saves, and which checkpoints are kept.

The entry that journals a new checkpoint also names the checkpoints that it retires; their bytes are deleted afterwards.
So a process that crashes in between leaves unneeded objects, but never a checkpoint without its bytes. Maintenance
applies the same rules to ended trials. The newest checkpoint is always kept, since the next attempt starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from prefect_tune.core.search.objective import make_objective
from prefect_tune.core.values import INTEGER_VALIDATOR, NUMBER_VALIDATOR, Value

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial
    from prefect_tune.core.journal_events import CheckpointRef, QuarantinedCheckpoint

_Positive = Annotated[int, Field(ge=1), INTEGER_VALIDATOR]


class Cadence(Value):
    """When a class trainable saves: as soon as one of these conditions is met.

    The class also saves when it must stop, or a report contains `should_checkpoint`. A function trainable saves when
    it reports a checkpoint; with `report_step` or the integrations' callbacks, it saves like a class trainable.

    ```python
    checkpoint = pt.Cadence(every_steps=10)
    ```

    Args:
        every_steps: save after this many steps. Default: by time only.
        every_seconds: save after the first step that ends this long after the last save began. Default: 60.
        at_end: save the last step too. Default: yes.
    """

    every_steps: Annotated[int, Field(ge=1), INTEGER_VALIDATOR] | None = Field(
        default=None, description="Save after this many steps."
    )
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER_VALIDATOR] | None = Field(
        default=60.0, description="Save after the first step that ends this long after the last save began."
    )
    at_end: bool = Field(default=True, description="Save the last step too.")

    @property
    def never_saves(self) -> bool:
        """Whether a trial saves only when a stop, its report or its scheduler requests a save."""
        return self.every_steps is None and self.every_seconds is None and not self.at_end

    def is_save_due(self, steps: int, elapsed: timedelta) -> bool:
        """Return whether to save now, `steps` steps and the time `elapsed` after the last save."""
        if self.every_steps is not None and steps >= self.every_steps:
            return True
        return self.every_seconds is not None and elapsed.total_seconds() >= self.every_seconds


class Retention(Value):
    """Which checkpoints are kept: every checkpoint that at least one rule keeps. Without a rule, all are kept.

    The newest checkpoint is always kept. A checkpoint without the metric is never among the best. A new checkpoint does
    not replace an equally good older one.

    ```python
    retention = pt.Retention(last=2, best=1, metric="loss")
    ```

    Args:
        last: keep this many of the newest.
        best: keep this many of the best by `metric`.
        metric: the reported metric that ranks checkpoints for `best`.
        mode: whether a small metric is good (`min`, the default), or a large one (`max`).
        every: keep each checkpoint whose step is a multiple of this.
    """

    last: _Positive | None = Field(default=None, description="Keep this many of the newest.")
    best: _Positive | None = Field(default=None, description="Keep this many of the best by `metric`.")
    metric: str | None = Field(default=None, description="The reported metric that ranks checkpoints for `best`.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether a small metric is good, or a large one.")
    every: _Positive | None = Field(default=None, description="Keep each checkpoint whose step is a multiple of this.")

    @model_validator(mode="after")
    def _require_metric_for_best(self) -> Retention:
        if (self.best is None) != (self.metric is None):
            raise ValueError("`best` and `metric` require each other: set both, or neither")
        return self

    @property
    def keeps_all(self) -> bool:
        """Whether all checkpoints are kept, because no rule is set."""
        return self.last is None and self.best is None and self.every is None


def find_sequences_to_retire(checkpoints: Sequence[CheckpointRef], policy: Retention) -> tuple[int, ...]:
    """Return the sequences of the `checkpoints` that `policy` does not keep. Pass the oldest checkpoint first."""
    if policy.keeps_all:
        return ()
    from prefect_tune.core.experiment.summary import rank_checkpoints  # late, so that flows load no journal modules

    kept = {ref.sequence for ref in checkpoints[-(policy.last or 1) :]}
    kept |= {ref.sequence for ref in checkpoints if policy.every and ref.step % policy.every == 0}
    if (objective := make_objective(policy.metric, policy.mode)) is not None:
        kept |= {ref.sequence for ref in rank_checkpoints(checkpoints, objective)[: policy.best]}
    return tuple(ref.sequence for ref in checkpoints if ref.sequence not in kept)


def find_checkpoints_to_retire(trial: Trial, new: CheckpointRef, policy: Retention) -> Sequence[CheckpointRef]:
    """Return the checkpoints of `trial` that the commit of `new` retires: live ones, then quarantined ones."""
    live = (*trial.checkpoints, new)
    sequences = find_sequences_to_retire(live, policy)
    quarantined = find_quarantined_to_retire(trial.quarantined_checkpoints, live, policy)
    return [*(ref for ref in live if ref.sequence in sequences), *quarantined]


def find_quarantined_to_retire(
    quarantined: Sequence[QuarantinedCheckpoint], checkpoints: Sequence[CheckpointRef], policy: Retention
) -> Sequence[CheckpointRef]:
    """Return the quarantined checkpoints that `policy` would retire if they were among the live `checkpoints`.

    A quarantined checkpoint may be undamaged, and may be reinstated. So it is retired only if `policy.last` newer live
    checkpoints exist; without `last`, one newer live checkpoint is enough.
    """
    if policy.keeps_all or len(checkpoints) < (policy.last or 1):
        return []
    refs = [item.checkpoint for item in quarantined]
    sequences = find_sequences_to_retire(sorted((*checkpoints, *refs), key=lambda ref: ref.sequence), policy)
    limit = checkpoints[-(policy.last or 1)].sequence
    return [ref for ref in refs if ref.sequence in sequences and ref.sequence < limit]
