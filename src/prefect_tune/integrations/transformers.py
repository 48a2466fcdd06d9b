"""A callback for Hugging Face's Trainer that saves at an interval, and reports the trainer's checkpoints."""

from __future__ import annotations

import shutil
import tempfile
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

try:
    from transformers import PreTrainedModel, TrainerCallback
except ModuleNotFoundError as error:
    raise missing(error, "transformers") from error

__all__ = ["TuneReportCheckpointCallback", "restored_checkpoint"]

_DEFAULT_OUTPUT_DIRS = ("trainer_output", "tmp_trainer")


def restored_checkpoint() -> str | None:
    """Return the directory for `resume_from_checkpoint`; None on a fresh start."""
    directory = restored_directory()
    return str(directory) if directory else None


class TuneReportCheckpointCallback(TrainerCallback):
    """Report what was logged and evaluated, each time with a checkpoint of the trainer's own.

    ```python
    trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), callbacks=[
        TuneReportCheckpointCallback(every_steps=50)], train_dataset=data)
    trainer.train(resume_from_checkpoint=restored_checkpoint())
    ```

    Each report is saved, whatever the flow's `checkpoint` says: the Trainer can save only where it saves. It restores
    the random states and skips the batches that were trained. Its weights and states are read without running code
    (the file `training_args.bin` is a pickle that nothing here reads). Several processes are those of
    `processes_per_trial`.

    `output_dir` becomes a path below the trial's directory, unless it contains the trial's ID: trials would overwrite
    each other's files. With another `save_strategy` than `"no"` the Trainer also saves for itself, into `output_dir`,
    which is synced as an artifact; a checkpoint that both want is moved to the target.

    Args:
        metrics: which to report, of those that are logged and evaluated; `{"loss": "eval_loss"}` renames. Default: all.
        every_steps: report each so many steps of the optimizer, and at the last. Default: at the end of each epoch.
            Until the first evaluation has ended, reports may lack the metric of the search.
    """

    def __init__(self, metrics: MetricNames = None, *, every_steps: int | None = None) -> None:
        self._wanted = metrics
        self._every_steps = every_steps
        self._metrics: dict[str, object] = {}
        self._asked_at: int | None = None
        self._over = False
        self._rank = 0
        self._output_dir = ""

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del state, control
        with suppress(InvalidInput):  # no trial runs here: `train` would raise
            _move_output_dir(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        del control
        self._rank = require_ranks("Trainer", args.world_size)
        _move_output_dir(args)  # `add_callback` came after `on_init_end`
        if args.load_best_model_at_end:
            raise InvalidInput(
                "TrainingArguments(load_best_model_at_end=True): set it to False, since the Trainer's checkpoints are "
                "moved to the target"
            )
        if args.save_strategy == "best":
            raise InvalidInput(
                'TrainingArguments(save_strategy="best"): expected another, such as "no"; with "best" the Trainer does '
                "not save when this callback asks it to"
            )
        if args.ignore_data_skip or args.save_only_model or args.dataloader_persistent_workers:
            raise InvalidInput(
                "TrainingArguments(ignore_data_skip, save_only_model, dataloader_persistent_workers): expected False "
                "for each, or a resumed training would differ"
            )
        if getattr(args, "enable_jit_checkpoint", False):
            raise InvalidInput(
                "TrainingArguments(enable_jit_checkpoint): expected False, found True: the Trainer would end the "
                "training at SIGTERM, as if it were complete; the trial saves and ends without it"
            )
        if getattr(model, "_hf_peft_config_loaded", False):
            raise InvalidInput(
                "Trainer(model): found a model with `model.add_adapter(config)`, whose checkpoints the Trainer cannot "
                "load; pass `peft.get_peft_model(model, config)`"
            )
        if restored_checkpoint() is not None and state.global_step == 0:
            raise InvalidInput("trainer.train: pass resume_from_checkpoint=restored_checkpoint(), the trial resumes")
        for logs in state.log_history:  # of a resumed trial: a report also has the metrics of an earlier evaluation
            self._metrics.update({name: value for name, value in logs.items() if name != "step"})
        if (directory := restored_checkpoint()) is not None and isinstance(model, PreTrainedModel):
            # The Trainer writes weights under the names of the hub, looks for the model's own, and takes what it finds.
            model.load_state_dict(type(model).from_pretrained(directory).state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._every_steps and (state.global_step % self._every_steps == 0 or state.global_step >= state.max_steps):
            self._ask(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._every_steps is None:
            self._ask(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, object] | None = None, **_: Any) -> None:
        del args, state, control
        self._metrics.update(logs or {})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, object] | None = None, **_: Any
    ) -> None:
        del args, state, control
        self._metrics.update(metrics or {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._asked_at != state.global_step:
            return
        self._asked_at = None
        folder, args.output_dir = args.output_dir, self._output_dir
        has_evaluated = any(name.startswith("eval_") for logs in state.log_history for name in logs)
        may_lack = args.eval_strategy != "no" and not has_evaluated

        def move(directory: str) -> None:
            for path in sorted(Path(folder, f"checkpoint-{state.global_step}").iterdir()):
                shutil.move(path, Path(directory, path.name))

        metrics: dict[str, object] = {}
        if not self._rank:  # the metrics of rank 0 count, and only it has them
            metrics = {**chosen(self._metrics, self._wanted, may_lack=may_lack), "should_checkpoint": True}
        self._over = not goes_on_after(metrics, move, may_lack=may_lack)
        shutil.rmtree(folder)
        control.should_training_stop = control.should_training_stop or self._over

    def _ask(self, args: Any, state: Any, control: Any) -> None:
        """Request that the Trainer logs and saves next, into a folder of its own; it calls `on_save` last."""
        if not self._over:
            control.should_log = control.should_save = True
            self._asked_at = state.global_step
            # Not below `output_dir`: a sync of artifacts would send what is half written.
            self._output_dir, args.output_dir = args.output_dir, tempfile.mkdtemp()


def _move_output_dir(args: Any) -> None:
    option = None if args.output_dir in _DEFAULT_OUTPUT_DIRS else "TrainingArguments(output_dir)"
    args.output_dir = path_of_trial(args.output_dir, option)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
