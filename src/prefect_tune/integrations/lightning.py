"""A Lightning callback that reports and saves; a resume is exact also in the middle of an epoch."""

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
    import lightning
    import torch
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
except ModuleNotFoundError as error:
    raise missing(error, "lightning", "lightning", "torch") from error

from prefect_tune.integrations.torch import ResumableLoader, random_state, set_random_state

__all__ = ["TuneReportCheckpointCallback", "restored_checkpoint"]

_FILE = "checkpoint.ckpt"
_RANK_FILE = "random-{}.pt"
_INTERNALS = (
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
"""Of Lightning's training loop: it has no public way to save between two batches or epochs."""


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
        every_steps: report each so many steps of the optimizer. Default: at the end of each epoch. Until the first
            validation has ended, reports may lack the metric of the search.
    """

    def __init__(self, metrics: MetricNames = None, *, every_steps: int | None = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._every_steps = every_steps
        self._restored: Mapping[str, Any] | None = None
        self._reported_step = 0
        self._has_validated = False
        self._due: Mapping[str, object] | None = None
        self._rank = 0
        self._trainer: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning does not save: of the metrics, such as those of the last validation, too."""
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
        self._restored, self._reported_step = state_dict, state_dict["reported_step"]
        self._has_validated = state_dict["has_validated"]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse another number of processes than the trial's, before anything is trained, and keep its files apart.

        Lightning sets up a `ModelCheckpoint` after all other callbacks.
        """
        del pl_module
        self._rank = require_ranks("Trainer", trainer.world_size)
        root = trainer.default_root_dir
        option = None if root == os.getcwd() else "Trainer(default_root_dir)"  # noqa: PTH109 - Lightning's default
        trainer._default_root_dir = path_of_trial(root, option)  # its one name
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                _move_logger(logger, None if logger.save_dir == root else f"{type(logger).__name__}(save_dir)")
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", None):
                checkpoint.dirpath = path_of_trial(checkpoint.dirpath, "ModelCheckpoint(dirpath)")
        self._trainer = trainer
        if stage == "fit":
            self._enter_loops(trainer.fit_loop)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        self._has_validated |= not trainer.sanity_checking

    def _enter_loops(self, fit_loop: Any) -> None:
        """Let this callback act between Lightning's batches and epochs, where nothing of them is left to do.

        All hooks of callbacks are too early: other hooks, a validation, and schedulers that monitor a metric follow.

        Raises:
            InvalidInput: this release of Lightning has other loops.
        """
        epoch_loop = fit_loop.epoch_loop
        try:
            attrgetter(*_INTERNALS)(fit_loop)
            for loop, name, method in (
                (fit_loop, "on_run_start", self._start_run),
                (epoch_loop, "reset", self._restore_epoch),
                (epoch_loop, "on_advance_end", self._end_batch),
                (fit_loop, "on_advance_end", self._end_epoch),
                (fit_loop, "on_run_end", self._end_run),
            ):
                # That of the class: this callback has replaced that of the loop if `fit` is called again.
                setattr(loop, name, partial(method, getattr(type(loop), name).__get__(loop)))
        except AttributeError as error:
            raise InvalidInput(
                f"lightning {lightning.__version__}: expected the training loop of version 2.6, found another: {error}"
            ) from error

    def _start_run(self, on_run_start: Callable[[], None]) -> None:
        loaders = self._trainer.fit_loop._combined_loader.flattened  # the only place where all of them are
        if strange := [type(each).__name__ for each in loaders if not hasattr(each, "load_state_dict")]:
            raise InvalidInput(
                f"{strange}: a resumed training would begin with other batches; use "
                "prefect_tune.integrations.torch.ResumableLoader, or a loader with state_dict and load_state_dict"
            )
        # Lightning's own handler of SIGTERM would end the training at the next batch, before it is reported and saved.
        signals = self._trainer._signal_connector
        signals._register_signal(signal.SIGTERM, signals._original_handlers[signal.SIGTERM])
        if restored_checkpoint() is not None and self._restored is None:
            raise InvalidInput("trainer.fit: pass ckpt_path=restored_checkpoint(), the trial resumes from a checkpoint")
        on_run_start()
        if self._restored is None:
            return
        state, self._restored = self._restored, None
        fit_loop = self._trainer.fit_loop
        validation = fit_loop.epoch_loop.val_loop
        states, fit_loop._combined_loader_states_to_load = fit_loop._combined_loader_states_to_load, []
        if states:  # Lightning loads them within an epoch only, and not if the loader was made before they were read
            fit_loop._combined_loader._load_state_dicts(states)
            iter(fit_loop._data_fetcher)
        epochs = fit_loop.epoch_progress.current
        if epochs.ready == epochs.processed:  # the next epoch begins like any other
            fit_loop.epoch_loop.restarting = fit_loop._resuming_from_checkpoint = False
            _leave_epochs(fit_loop._combined_loader)
        if state["validation"]:
            self._trainer.validating = True
            validation.setup_data()
            self._trainer.training = True
            validation._combined_loader._load_state_dicts(state["validation"])
            _leave_epochs(validation._combined_loader)
        self._trainer.callback_metrics.update(state["metrics"])
        self._trainer.should_stop |= state["should_stop"]
        own = Path(restored_directory() or "", _RANK_FILE.format(self._rank))
        # A rank that the checkpoint is without draws the numbers of rank 0.
        has_own = self._rank > 0 and own.exists()
        set_random_state(torch.load(own, weights_only=True) if has_own else state["random"])

    def _restore_epoch(self, reset: Callable[[], None]) -> None:
        """Restore the place in the epoch; then nothing of an earlier batch has to be repeated or left out."""
        reset()
        fit_loop = self._trainer.fit_loop
        fit_loop._restarting = fit_loop.epoch_loop.restarting = False

    def _end_batch(self, on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        on_advance_end(data_fetcher)
        step = self._trainer.global_step
        if self._every_steps and step % self._every_steps == 0 and step > self._reported_step:
            self._reported_step = step
            self._due = dict(self._trainer.callback_metrics)
            if not self._trainer.fit_loop.epoch_loop.done:
                self._report(self._due)

    def _end_epoch(self, on_advance_end: Callable[[], None]) -> None:
        on_advance_end()
        if self._every_steps is None:
            self._report(self._trainer.callback_metrics)
        elif self._due is not None:
            self._report(self._due)

    def _end_run(self, on_run_end: Callable[[], None]) -> None:
        save_last_step(self._save)
        on_run_end()

    def _report(self, metrics: Mapping[str, object]) -> None:
        self._due = None
        may_lack = self._trainer.enable_validation and not self._has_validated
        reported = {} if self._rank else chosen(metrics, self._metrics, may_lack=may_lack)  # those of rank 0 count
        if not goes_on_after(reported, self._save, may_lack=may_lack):
            self._trainer.should_stop = True

    def _save(self, directory: str) -> None:
        """Save on all ranks: Lightning gathers what rank 0 writes, and each rank has its own random generators."""
        self._trainer.save_checkpoint(Path(directory, _FILE))
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
    logger._root_dir = logger._save_dir = directory  # a logger has no other way to be moved
    logger._experiment = None
    if isinstance(logger._version, int):
        logger._version = None


def _leave_epochs(combined_loader: Any) -> None:
    """Say that what was restored is the end of an epoch, although `limit_train_batches` may have left a part of it."""
    for loader in combined_loader.flattened:
        if isinstance(loader, ResumableLoader):
            loader.batch_sampler.set_epoch(0)
