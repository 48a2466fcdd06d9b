"""When a trial saves."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field

from prefect_tune.core.values import AS_NUMBER, AS_WHOLE, Value


class Cadence(Value):
    """When a class trainable saves: whichever comes first.

    A function trainable saves whenever it reports a checkpoint, or, with `report_step` and the integrations' callbacks,
    as a class trainable does. That also saves when it is asked to stop, and when a report holds `should_checkpoint`.

    Args:
        every_steps: save after this many steps. Default: by time only.
        every_seconds: save after the first step that ends this long after the last save began. Default: 60.
        at_end: save the last step too. Default: yes.
    """

    every_steps: Annotated[int, Field(ge=1), AS_WHOLE] | None = Field(
        default=None, description="Save after this many steps."
    )
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), AS_NUMBER] | None = Field(
        default=60.0, description="Save after the first step that ends this long after the last save began."
    )
    at_end: bool = Field(default=True, description="Save the last step too.")

    @property
    def never_saves(self) -> bool:
        """Whether a trial is saved only if that is requested: by a stop, its report or its scheduler."""
        return self.every_steps is None and self.every_seconds is None and not self.at_end

    def due(self, steps: int, elapsed: timedelta) -> bool:
        """Say whether to save now, `steps` steps and `elapsed` after the last save."""
        if self.every_steps is not None and steps >= self.every_steps:
            return True
        return self.every_seconds is not None and elapsed.total_seconds() >= self.every_seconds
