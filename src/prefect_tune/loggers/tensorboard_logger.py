"""A logger that writes TensorBoard event files with `tensorboardX`, which needs neither torch nor TensorFlow."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Finished, GaveUp, Started
from prefect_tune.core.values import StepReport, flat
from prefect_tune.loggers.file_logger import DEFAULT_DIRECTORY, FolderLogger, require_package

_MOST_OPEN = 64


class TensorBoardLogger(FolderLogger):
    """Writes an event file into each trial's folder: `tensorboard --logdir <directory>/<experiment>`.

    Numbers become scalars by step, nested ones as `eval/loss`; other values are left out. When a trial ends, its
    configuration and last metrics are listed under HPARAMS. When steps are trained again, a new event file
    replaces the earlier one from its first step on.

    Args:
        directory: where the folder `<experiment>/<trial>` is.

    Raises:
        InvalidInput: tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        require_package("tensorboardX", "tensorboard", "TensorBoardLogger")
        super().__init__(directory)
        self._files: OrderedDict[str, _EventFile] = OrderedDict()  # least recently used first

    def on_trial_start(self, trial: Trial, started: Started) -> None:
        self._close(trial.trial)
        self._open(trial.trial, started.from_step + 1)

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        file = self._files.get(trial.trial) or self._open(trial.trial, report.step)
        self._files.move_to_end(trial.trial)
        file.write_scalars(report.step, _numbers(flat(report.metrics)))

    def on_trial_complete(self, trial: Trial, finished: Finished) -> None:
        del finished
        self._write_hparams(trial)
        self._close(trial.trial)

    def on_trial_error(self, trial: Trial, gave_up: GaveUp) -> None:
        del gave_up
        self._close(trial.trial)

    def on_experiment_end(self, trials: Mapping[str, Trial]) -> None:
        del trials
        for trial in list(self._files):
            self._close(trial)

    def get_state(self) -> Mapping[str, object] | None:
        for file in self._files.values():
            file.flush()
        return super().get_state()

    def _open(self, trial: str, step: int) -> _EventFile:
        """Open an event file that replaces earlier ones from `step` on."""
        while len(self._files) >= _MOST_OPEN:
            self._close(next(iter(self._files)))
        self._files[trial] = _EventFile(self.folder_of(trial), step)
        return self._files[trial]

    def _close(self, trial: str) -> None:
        if (file := self._files.pop(trial, None)) is not None:
            file.close()

    def _write_hparams(self, trial: Trial) -> None:
        from tensorboardX.summary import hparams

        file = self._files.get(trial.trial) or self._open(trial.trial, trial.step + 1)
        config = flat(trial.config)
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in config.items()}
        for summary in hparams(plain, _numbers(flat(trial.metrics))):
            file.write(summary=summary)


class _EventFile:
    """An event file, written in the calling thread."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        # Files are read in the order of their names, which begin with the time in seconds.
        suffix = f".{sum(1 for _ in folder.glob('events.out.tfevents.*')):06d}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self.write(step=step, session_log=SessionLog(status=SessionLog.START))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        from tensorboardX.proto.summary_pb2 import Summary

        summary_values = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.write(step=step, summary=Summary(value=summary_values))

    def write(self, **fields: object) -> None:
        """Write an event with the current time."""
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), **fields))

    def flush(self) -> None:
        """Pass all events to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
