"""A callback for Hugging Face's Trainer that saves at an interval and reports the Trainer's checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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

try:
    from transformers import PreTrainedModel, TrainerCallback
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "transformers") from error

__getattr__ = make_module_getattr(__name__, {"restored_checkpoint": "get_checkpoint_path"})

__all__ = ["TuneReportCheckpointCallback", "get_checkpoint_path"]

_DEFAULT_OUTPUT_DIRS = ("trainer_output", "tmp_trainer")


def get_checkpoint_path() -> str | None:
    """Return the directory for `resume_from_checkpoint`; None on a fresh start."""
    directory = get_checkpoint_directory()
    return str(directory) if directory else None


class TuneReportCheckpointCallback(TrainerCallback):
    """Report the metrics that the Trainer logs, and those of its evaluations, each time with the Trainer's checkpoint.

    ```python
    trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), callbacks=[
        TuneReportCheckpointCallback(every_steps=50)], train_dataset=data)
    trainer.train(resume_from_checkpoint=get_checkpoint_path())
    ```

    Each report is saved, even if the flow's `checkpoint` interval is longer, because the Trainer can save only at its
    own save points. On a resume, the Trainer restores the random states and skips the batches already trained. Weights
    and states are read without running code (`training_args.bin` is a pickle, and is not read). For several processes,
    use `processes_per_trial`.

    Trials would overwrite each other's files in a shared `output_dir`, so it is moved below the trial's directory,
    unless its path contains the trial's ID. If `save_strategy` is not `"no"`, the Trainer also saves checkpoints there.
    These are synced as artifacts. At a reported step, only the report's checkpoint is saved, and moved to the target.

    Args:
        metrics: which of these metrics to report; `{"loss": "eval_loss"}` renames one. Default: all.
        every_steps: the number of optimizer steps between reports; the last step is always reported. Default: report at
            the end of each epoch. Before the end of the first evaluation, reports may lack the metric of the search.
    """

    def __init__(self, metrics: MetricNames = None, *, every_steps: int | None = None) -> None:
        self._metric_names = metrics
        self._every_steps = every_steps
        self._metrics: dict[str, object] = {}
        self._requested_step: int | None = None
        self._is_trial_over = False
        self._rank = 0
        self._output_dir = ""

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del state, control
        with suppress(InvalidInput):  # if there is no trial, `on_train_begin` raises this error later
            _move_output_dir(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        del control
        self._rank = get_validated_rank("Trainer", args.world_size)
        _move_output_dir(args)  # if `add_callback` has added this callback, `on_init_end` was not called
        if args.load_best_model_at_end:
            raise InvalidInput(
                "TrainingArguments(load_best_model_at_end=True): expected False, since the Trainer's checkpoints are "
                "moved to the target"
            )
        if args.save_strategy == "best":
            raise InvalidInput(
                'TrainingArguments(save_strategy="best"): expected another strategy, such as "no"; with "best" the '
                "Trainer ignores the save requests of this callback"
            )
        if args.ignore_data_skip or args.save_only_model or args.dataloader_persistent_workers:
            raise InvalidInput(
                "TrainingArguments(ignore_data_skip, save_only_model, dataloader_persistent_workers): expected False "
                "for each, since a resumed training would otherwise differ"
            )
        if getattr(args, "enable_jit_checkpoint", False):
            raise InvalidInput(
                "TrainingArguments(enable_jit_checkpoint): expected False, found True, with which the Trainer ends a "
                "training at SIGTERM as if it were complete; the trial itself saves and ends at SIGTERM"
            )
        if getattr(model, "_hf_peft_config_loaded", False):
            raise InvalidInput(
                "Trainer(model): the Trainer cannot load the checkpoints of a model with `model.add_adapter(config)`; "
                "pass `peft.get_peft_model(model, config)` instead"
            )
        if get_checkpoint_path() is not None and state.global_step == 0:
            raise InvalidInput("trainer.train: the trial resumes, so pass resume_from_checkpoint=get_checkpoint_path()")
        for logs in state.log_history:  # so that reports include metrics of an evaluation before the resume
            self._metrics.update({name: value for name, value in logs.items() if name != "step"})
        if (directory := get_checkpoint_path()) is not None and isinstance(model, PreTrainedModel):
            # The Trainer saves weights under the hub's names, but loads only those under the model's names. Load all.
            model.load_state_dict(type(model).from_pretrained(directory).state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._every_steps and (state.global_step % self._every_steps == 0 or state.global_step >= state.max_steps):
            self._request_save(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._every_steps is None:
            self._request_save(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, object] | None = None, **_: Any) -> None:
        del args, state, control
        self._metrics.update(logs or {})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, object] | None = None, **_: Any
    ) -> None:
        del args, state, control
        self._metrics.update(metrics or {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._requested_step != state.global_step:
            return
        self._requested_step = None
        folder, args.output_dir = args.output_dir, self._output_dir
        has_evaluated = any(name.startswith("eval_") for logs in state.log_history for name in logs)
        may_lack = args.eval_strategy != "no" and not has_evaluated

        def move_files(directory: str) -> None:
            for path in sorted(Path(folder, f"checkpoint-{state.global_step}").iterdir()):
                shutil.move(path, Path(directory, path.name))

        metrics: Mapping[str, object] = {}
        if not self._rank:  # only rank 0 has the metrics
            metrics = select_metrics(self._metrics, self._metric_names, allow_missing=may_lack)
            metrics = {**metrics, "should_checkpoint": True}
        self._is_trial_over = not try_report_step(metrics, move_files, allow_missing=may_lack)
        shutil.rmtree(folder)
        control.should_training_stop = control.should_training_stop or self._is_trial_over

    def _request_save(self, args: Any, state: Any, control: Any) -> None:
        """Make the Trainer log, save to a temporary folder, and then call `on_save`."""
        if not self._is_trial_over:
            control.should_log = control.should_save = True
            self._requested_step = state.global_step
            # The folder is not below `output_dir`, where an artifact sync would upload incomplete files.
            self._output_dir, args.output_dir = args.output_dir, tempfile.mkdtemp()


def _move_output_dir(args: Any) -> None:
    option = None if args.output_dir in _DEFAULT_OUTPUT_DIRS else "TrainingArguments(output_dir)"
    args.output_dir = make_trial_path(args.output_dir, option)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
