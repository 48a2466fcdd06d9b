"""The plain arguments of the public tasks, checked before any work starts."""

from __future__ import annotations

import os
from typing import TypeAlias

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.models import valid_name
from prefect_tune.core.storage.layout import TrialKey

__all__ = ["Directory", "TargetLike", "trial_key", "valid_step"]

TargetLike: TypeAlias = StorageTarget | str | os.PathLike[str]
"""A block, the `type/name` of a saved block, a URI, or a path of this machine."""
Directory: TypeAlias = str | os.PathLike[str]


def trial_key(experiment: str, trial: str) -> TrialKey:
    """Return the key of a trial. Raises `InvalidInput` if a name cannot be a folder on every target."""
    return TrialKey(experiment=valid_name(experiment), trial=valid_name(trial))


def valid_step(step: object) -> int:
    """Return the step. Raises `InvalidInput` if it is no number from 1 on."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise InvalidInput(f"step: expected a number from 1 on, the count of trained steps, found {step!r}")
    return step
