"""A Lightning callback that reports and saves; a resume is exact also in the middle of an epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import (
    MetricNames,
    chosen,
    goes_on_after,
    missing,
    path_of_trial,
    require_ranks,
    restored_directory,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import torch
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
except ModuleNotFoundError as error:
    raise missing(error, "lightning", "lightning", "torch") from error

from prefect_tune.integrations.torch import random_state, set_random_state

__all__ = ["TuneReportCheckpointCallback", "restored_checkpoint"]

_FILE = "checkpoint.ckpt"
_RANK_FILE = "random-{}.pt"


def restored_checkpoint() -> str | None:
    """Return the `ckpt_path` of a resumed trial; None on a fresh start."""
    directory = restored_directory()
    return str(directory / _FILE) if directory else None


class TuneReportCheckpointCallback(Callback):
    """Report what was logged, and save the trainer's state when the flow's `checkpoint` says so, and at the end.

    ```python
    trainer = Trainer(callbacks=[TuneReportCheckpointCallback(every_steps=10)], enable_checkpointing=False)
    trainer.fit(model, loader, ckpt_path=restored_checkpoint(), weights_only=True)
    ```

    The state is Lightning's own, and the random generators, which Lightning does not keep. The data has to continue
    where it was: use `prefect_tune.integrations.torch.ResumableLoader`, or another loader with `state_dict`. Averages
    over an epoch of what was logged with `on_epoch=True` count the batches since a resume. With `processes_per_trial`,
    pass `devices=pt.get_trial().world_size, use_distributed_sampler=False` to the trainer.

    `default_root_dir`, the folders of `CSVLogger` and `TensorBoardLogger`, and `dirpath` of `ModelCheckpoint` become
    paths below the trial's directory, unless they contain the trial's ID: trials would overwrite each other's files.

    Args:
        metrics: which of `trainer.callback_metrics` to report; `{"loss": "val_loss"}` renames. Default: all.
        every_steps: report each so many steps of the optimizer. Default: at the end of each epoch.
    """

    def __init__(self, metrics: MetricNames = None, *, every_steps: int | None = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._every_steps = every_steps
        self._restored: Mapping[str, Any] | None = None
        self._reported_step = 0
        self._rank = 0

    def state_dict(self) -> dict[str, Any]:
        return {"random": random_state(), "reported_step": self._reported_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored, self._reported_step = state_dict["random"], state_dict["reported_step"]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse another number of processes than the trial's, before anything is trained, and keep its files apart.

        Lightning sets up a `ModelCheckpoint` after all other callbacks.
        """
        del pl_module, stage
        self._rank = require_ranks("Trainer", trainer.world_size)
        root = trainer.default_root_dir
        option = None if root == os.getcwd() else "Trainer(default_root_dir)"  # noqa: PTH109 - Lightning's default
        trainer._default_root_dir = path_of_trial(root, option)  # noqa: SLF001 - its one name
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                _move_logger(logger, None if logger.save_dir == root else f"{type(logger).__name__}(save_dir)")
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", None):
                checkpoint.dirpath = path_of_trial(checkpoint.dirpath, "ModelCheckpoint(dirpath)")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        _require_exact(trainer)
        if restored_checkpoint() is not None and self._restored is None:
            raise InvalidInput("trainer.fit: pass ckpt_path=restored_checkpoint(), the trial resumes from a checkpoint")
        if self._restored is not None:  # the iterator of the data is made, and its first batch not yet drawn
            set_random_state(self._restored if self._rank == 0 else _random_state_of(self._rank, self._restored))
            self._restored = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, outputs, batch, batch_idx
        step = trainer.global_step
        if self._every_steps and step % self._every_steps == 0 and step > self._reported_step:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        if self._every_steps is None:
            self._report(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        save_last_step(lambda directory: self._save(trainer, directory))

    def _report(self, trainer: Any) -> None:
        self._reported_step = trainer.global_step
        metrics = {} if self._rank else chosen(trainer.callback_metrics, self._metrics)  # those of rank 0 count
        if not goes_on_after(metrics, lambda directory: self._save(trainer, directory)):
            trainer.should_stop = True

    def _save(self, trainer: Any, directory: str) -> None:
        """Save on all ranks: Lightning gathers what rank 0 writes, and each rank has its own random generators."""
        trainer.save_checkpoint(Path(directory, _FILE))
        if self._rank:
            torch.save(random_state(), Path(directory, _RANK_FILE.format(self._rank)))


def _move_logger(logger: Any, option: str | None) -> None:
    """Let a logger, which Lightning has opened by now, begin again below the trial's directory."""
    before = logger.log_dir
    if path_of_trial(before) == before:
        return
    directory = path_of_trial(logger.save_dir, option)
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.close()
    with suppress(OSError):  # another trial may have the folder too
        for path in Path(before).glob(f"events.out.tfevents.*.{os.getpid()}.*"):
            path.unlink()
        Path(before).rmdir()
    logger._root_dir = logger._save_dir = directory  # noqa: SLF001 - a logger has no other way to be moved
    logger._experiment = None  # noqa: SLF001 - as above
    if isinstance(logger._version, int):  # noqa: SLF001 - as above
        logger._version = None  # noqa: SLF001 - as above


def _random_state_of(rank: int, of_first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what this rank saved; that of rank 0 if the checkpoint is one of fewer ranks."""
    path = Path(restored_directory() or "", _RANK_FILE.format(rank))
    return dict(torch.load(path, weights_only=True)) if path.exists() else of_first


def _require_exact(trainer: Any) -> None:
    loaders = trainer.fit_loop._combined_loader.flattened  # noqa: SLF001  the only place where all of them are
    if strange := [type(each).__name__ for each in loaders if not hasattr(each, "load_state_dict")]:
        raise InvalidInput(
            f"{strange}: a resumed training would begin with other batches; use "
            "prefect_tune.integrations.torch.ResumableLoader, or a loader with state_dict and load_state_dict"
        )
