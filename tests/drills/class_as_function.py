"""A class trainable as a function trainable: the same training by `pt.report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import prefect_tune as pt


def as_function(kind: type[pt.Trainable]) -> Callable[[dict[str, Any]], None]:
    """Return a function that trains as `kind` does, and saves in each step; its local variable `made` is the object."""

    def train(config: dict[str, Any]) -> None:
        made = kind()
        made.setup(config)
        if (checkpoint := pt.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                made.load_checkpoint(directory)
        while True:
            metrics: Mapping[str, Any] = made.step()
            folder = pt.get_trial().new_checkpoint_dir()
            made.save_checkpoint(str(folder))
            pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(folder))

    return train
