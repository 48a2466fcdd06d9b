"""Class trainables as function trainables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import prefect_tune as pt


def make_function(kind: type[pt.Trainable]) -> Callable[[dict[str, Any]], None]:
    """Return a function that trains as `kind` does, and saves in each step; its local `trainable` is the object."""

    def train(config: dict[str, Any]) -> None:
        trainable = kind()
        trainable.setup(config)
        if (checkpoint := pt.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                trainable.load_checkpoint(directory)
        while True:
            metrics: Mapping[str, Any] = trainable.step()
            folder = pt.get_trial().new_checkpoint_dir()
            trainable.save_checkpoint(str(folder))
            pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(folder))

    return train
