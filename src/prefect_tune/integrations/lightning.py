"""A Lightning callback that reports and saves. A resume is exact, even in the middle of an epoch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.renamed import make_module_getattr
from prefect_tune.integrations.common import (
    MetricNames,
    get_checkpoint_directory,
    get_validated_rank,
    make_trial_path,
    missing_extra_error,
    select_metrics,
    try_report_step,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import lightning
    import torch
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "lightning", "lightning", "torch") from error

from prefect_tune.integrations.torch import ResumableLoader, random_state, set_random_state

__getattr__ = make_module_getattr(__name__, {"restored_checkpoint": "get_checkpoint_path"})

__all__ = ["TuneReportCheckpointCallback", "get_checkpoint_path"]

_CHECKPOINT_FILE = "checkpoint.ckpt"
_RANK_FILE = "random-{}.pt"
_USED_INTERNALS = (
    "_combined_loader",
    "_combined_loader_states_to_load",
    "_data_fetcher",
    "_restarting",
    "_resuming_from_checkpoint",
    "trainer._signal_connector._original_handlers",
    "trainer._signal_connector._register_signal",
    "epoch_progress.current.processed",
    "epoch_loop.restarting",
    "epoch_loop.val_loop._combined_loader",
)
"""Internals of Lightning's training loop that this module uses. No public API can save between batches or epochs."""


def get_checkpoint_path() -> str | None:
    """Return the `ckpt_path` of a resumed trial; None on a fresh start."""
    directory = get_checkpoint_directory()
    return str(directory / _CHECKPOINT_FILE) if directory else None


class TuneReportCheckpointCallback(Callback):
    """Report the logged metrics, and save the trainer's state at the flow's `checkpoint` interval and at the end.

    ```python
    trainer = Trainer(callbacks=[TuneReportCheckpointCallback(every_steps=10)], enable_checkpointing=False)
    trainer.fit(model, loader, ckpt_path=get_checkpoint_path(), weights_only=True)
    ```

    The state is Lightning's own state and the random generators, which Lightning does not save. The loader must resume
    at its position: use `prefect_tune.integrations.torch.ResumableLoader`, or another one with `state_dict`. If a
    resume is within an epoch, that epoch's averages (`on_epoch=True`) include only the batches after the resume. With
    `processes_per_trial`, pass `devices=pt.get_trial().world_size, use_distributed_sampler=False` to the trainer.

    `default_root_dir`, the folders of `CSVLogger` and `TensorBoardLogger`, and `dirpath` of `ModelCheckpoint` are moved
    below the trial's directory, so that trials do not overwrite each other's files. A path that contains the trial's ID
    is not moved.

    Args:
        metrics: which of `trainer.callback_metrics` to report; `{"loss": "val_loss"}` renames one. Default: all.
        every_steps: the number of optimizer steps between reports. Default: report at the end of each epoch. Before the
            end of the first validation, reports may lack the search's metric.
    """

    def __init__(self, metrics: MetricNames = None, *, every_steps: int | None = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._every_steps = every_steps
        self._restored_state: Mapping[str, Any] | None = None
        self._reported_step = 0
        self._has_validated = False
        self._due_metrics: Mapping[str, object] | None = None
        self._rank = 0
        self._trainer: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning does not save, including the metrics of the last validation."""
        validation = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return {
            "validation": validation._state_dicts() if validation is not None else [],
            "random": random_state(),
            "reported_step": self._reported_step,
            "has_validated": self._has_validated,
            "metrics": dict(self._trainer.callback_metrics),
            "should_stop": self._trainer.should_stop,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_state, self._reported_step = state_dict, state_dict["reported_step"]
        self._has_validated = state_dict["has_validated"]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the number of processes before the training, and move output paths below the trial's directory.

        A `ModelCheckpoint` uses its moved path, because Lightning sets up such callbacks after all others.
        """
        del pl_module
        self._rank = get_validated_rank("Trainer", trainer.world_size)
        root = trainer.default_root_dir
        option = None if root == os.getcwd() else "Trainer(default_root_dir)"  # noqa: PTH109 - Lightning's default
        trainer._default_root_dir = make_trial_path(root, option)  # there is no public name
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                _move_logger(logger, None if logger.save_dir == root else f"{type(logger).__name__}(save_dir)")
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", None):
                checkpoint.dirpath = make_trial_path(checkpoint.dirpath, "ModelCheckpoint(dirpath)")
        self._trainer = trainer
        if stage == "fit":
            self._patch_loops(trainer.fit_loop)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        self._has_validated |= not trainer.sanity_checking

    def _patch_loops(self, fit_loop: Any) -> None:
        """Patch the loops so that they call this callback when Lightning has completed a batch or an epoch.

        A callback's own hooks run too early, before other hooks, a validation, and schedulers that monitor a metric.

        Raises:
            InvalidInput: this version of Lightning has different loops.
        """
        epoch_loop = fit_loop.epoch_loop
        try:
            attrgetter(*_USED_INTERNALS)(fit_loop)
            for loop, name, method in (
                (fit_loop, "on_run_start", self._start_fit),
                (epoch_loop, "reset", self._reset_epoch),
                (epoch_loop, "on_advance_end", self._end_batch),
                (fit_loop, "on_advance_end", self._end_epoch),
                (fit_loop, "on_run_end", self._end_fit),
            ):
                # Wrap the method of the class, because in a second `fit` the loop's own method is already this patch.
                setattr(loop, name, partial(method, getattr(type(loop), name).__get__(loop)))
        except AttributeError as error:
            version = lightning.__version__
            raise InvalidInput(f"lightning {version}: expected the training loop of version 2.6: {error}") from error

    def _start_fit(self, on_run_start: Callable[[], None]) -> None:
        loaders = self._trainer.fit_loop._combined_loader.flattened  # no public attribute has all loaders
        if stateless := [type(loader).__name__ for loader in loaders if not hasattr(loader, "load_state_dict")]:
            raise InvalidInput(
                f"{stateless}: without a saved position, a resume would train on other batches; use "
                "prefect_tune.integrations.torch.ResumableLoader, or a loader with state_dict and load_state_dict"
            )
        # Restore the trial's SIGTERM handler, since Lightning's would end the training before the next report and save.
        signals = self._trainer._signal_connector
        signals._register_signal(signal.SIGTERM, signals._original_handlers[signal.SIGTERM])
        if get_checkpoint_path() is not None and self._restored_state is None:
            raise InvalidInput("trainer.fit: the trial resumes from a checkpoint: pass ckpt_path=get_checkpoint_path()")
        on_run_start()
        if self._restored_state is None:
            return
        state, self._restored_state = self._restored_state, None
        fit_loop = self._trainer.fit_loop
        validation = fit_loop.epoch_loop.val_loop
        states, fit_loop._combined_loader_states_to_load = fit_loop._combined_loader_states_to_load, []
        if states:  # load them here: Lightning loads them only within an epoch, and only into new loaders
            fit_loop._combined_loader._load_state_dicts(states)
            iter(fit_loop._data_fetcher)
        epochs = fit_loop.epoch_progress.current
        if epochs.ready == epochs.processed:  # no epoch was interrupted, so the next epoch starts normally
            fit_loop.epoch_loop.restarting = fit_loop._resuming_from_checkpoint = False
            _end_epochs(fit_loop._combined_loader)
        if state["validation"]:
            self._trainer.validating = True
            validation.setup_data()
            self._trainer.training = True
            validation._combined_loader._load_state_dicts(state["validation"])
            _end_epochs(validation._combined_loader)
        self._trainer.callback_metrics.update(state["metrics"])
        self._trainer.should_stop |= state["should_stop"]
        rank_file = Path(get_checkpoint_directory() or "", _RANK_FILE.format(self._rank))
        # A rank without a random state in the checkpoint uses the random state of rank 0.
        has_state = self._rank > 0 and rank_file.exists()
        set_random_state(torch.load(rank_file, weights_only=True) if has_state else state["random"])

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        """Reset an epoch, and clear flags that make Lightning repeat or skip parts of a batch after a restore."""
        reset()
        fit_loop = self._trainer.fit_loop
        fit_loop._restarting = fit_loop.epoch_loop.restarting = False

    def _end_batch(self, on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        on_advance_end(data_fetcher)
        step = self._trainer.global_step
        if self._every_steps and step % self._every_steps == 0 and step > self._reported_step:
            self._reported_step = step
            self._due_metrics = dict(self._trainer.callback_metrics)
            if not self._trainer.fit_loop.epoch_loop.done:
                self._report_metrics(self._due_metrics)

    def _end_epoch(self, on_advance_end: Callable[[], None]) -> None:
        on_advance_end()
        if self._every_steps is None:
            self._report_metrics(self._trainer.callback_metrics)
        elif self._due_metrics is not None:
            self._report_metrics(self._due_metrics)

    def _end_fit(self, on_run_end: Callable[[], None]) -> None:
        save_last_step(self._save_trainer)
        on_run_end()

    def _report_metrics(self, metrics: Mapping[str, object]) -> None:
        self._due_metrics = None
        may_lack = self._trainer.enable_validation and not self._has_validated
        # Only the metrics of rank 0 count.
        reported = {} if self._rank else select_metrics(metrics, self._metrics, allow_missing=may_lack)
        if not try_report_step(reported, self._save_trainer, allow_missing=may_lack):
            self._trainer.should_stop = True

    def _save_trainer(self, directory: str) -> None:
        """Save on all ranks. Lightning gathers its state on rank 0, but each rank has its own random generators."""
        self._trainer.save_checkpoint(Path(directory, _CHECKPOINT_FILE))
        if self._rank:
            torch.save(random_state(), Path(directory, _RANK_FILE.format(self._rank)))


def _move_logger(logger: Any, option: str | None) -> None:
    """Move a logger, which Lightning has already opened, below the trial's directory, and restart it there."""
    original = logger.log_dir
    if make_trial_path(original) == original:
        return
    directory = make_trial_path(logger.save_dir, option)
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.close()
    with suppress(OSError):  # the folder is not empty, for example because another trial uses it too
        for path in Path(original).glob(f"events.out.tfevents.*.{os.getpid()}.*"):
            path.unlink()
        Path(original).rmdir()
    logger._root_dir = logger._save_dir = directory  # there is no public way to move a logger
    logger._experiment = None
    if isinstance(logger._version, int):
        logger._version = None


def _end_epochs(combined_loader: Any) -> None:
    """End the restored epoch of each loader, even if `limit_train_batches` left batches of the epoch untrained."""
    for loader in combined_loader.flattened:
        if isinstance(loader, ResumableLoader):
            loader.batch_sampler.set_epoch(0)
