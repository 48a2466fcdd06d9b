"""XGBoost: report each round, save the booster, and resume with exactly the trees of an undisturbed training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import (
    MetricNames,
    callbacks_beside,
    chosen,
    goes_on_after,
    missing,
    path_of_trial,
    restored_directory,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import xgboost as xgb
except ModuleNotFoundError as error:
    raise missing(error, "xgboost") from error

__all__ = ["TuneReportCheckpointCallback", "continuing", "load_booster", "train"]

_FILE = "model.ubj"


def load_booster(directory: str | Path) -> xgb.Booster:
    """Return the booster of a checkpoint."""
    return xgb.Booster(model_file=str(Path(directory, _FILE)))


def continuing(num_boost_round: int) -> dict[str, Any]:
    """Return `num_boost_round` and `xgb_model` for `xgb.train`: all rounds, or those that a resumed trial has left."""
    directory = restored_directory()
    booster = load_booster(directory) if directory else None
    done = booster.num_boosted_rounds() if booster else 0
    return {"num_boost_round": num_boost_round - done, "xgb_model": booster}


class TuneReportCheckpointCallback(xgb.callback.TrainingCallback):
    """Report each round, and save the booster when the flow's `checkpoint` says so, and at the end.

    ```python
    xgb.train(params, data, **continuing(200), evals=[(test, "test")], callbacks=[TuneReportCheckpointCallback()])
    ```

    A resume is exact as long as no round draws random numbers. If rounds sample rows or columns (`subsample`,
    `colsample_*`, DART), the trees after a resume differ, because XGBoost does not expose its generators' state. With
    these use `train`, which is exact. `early_stopping_rounds` restarts its count on a resume: use `pt.Plateau`.
    The folder of XGBoost's own `TrainingCheckPoint` becomes one below the trial's directory, unless its path contains
    the trial's ID: trials would overwrite each other's files.

    Args:
        metrics: which to report, as `"test-mlogloss"`; `{"loss": "test-mlogloss"}` renames. Default: all.
    """

    def __init__(self, metrics: MetricNames = None) -> None:
        super().__init__()
        self._metrics = metrics

    def before_training(self, model: Any) -> Any:
        for callback in callbacks_beside(self):
            if isinstance(callback, xgb.callback.TrainingCheckPoint):
                path = path_of_trial(os.fspath(callback._path), "TrainingCheckPoint(directory)")  # noqa: SLF001 - its one name
                Path(path).mkdir(parents=True, exist_ok=True)
                callback._path = path  # noqa: SLF001 - as above
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        del epoch
        last = {f"{data}-{name}": log[-1] for data, logs in evals_log.items() for name, log in logs.items()}
        # Cross-validation gives the mean and the deviation.
        last = {name: float(score[0] if isinstance(score, tuple) else score) for name, score in last.items()}
        return not goes_on_after(chosen(last, self._metrics), partial(_save, model))

    def after_training(self, model: Any) -> Any:
        save_last_step(partial(_save, model))
        return model


class _XgboostReplayCallback(TuneReportCheckpointCallback):
    """Reports the rounds after the first `reported`, which are trained again, and remembers the end."""

    def __init__(self, metrics: MetricNames, reported: int) -> None:
        super().__init__(metrics)
        self.reported = reported
        self.over = False

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if model.num_boosted_rounds() > self.reported:
            self.over = super().after_iteration(model, epoch, evals_log)
        return self.over

    def after_training(self, model: Any) -> Any:
        return model  # `train` saves the last step of all segments


def train(
    params: Mapping[str, Any],
    dtrain: xgb.DMatrix,
    num_boost_round: int = 10,
    *,
    segment_rounds: int = 10,
    metrics: MetricNames = None,
    **options: Any,
) -> xgb.Booster:
    """Train as `xgb.train` does, in segments that each begin with generators of their own, seeded by `seed`.

    A resumed trial trains its last segment again from the segment's start. So its trees equal those of an
    undisturbed trial, also if rounds draw random numbers, with the same number of threads. Each round is reported once.

    Args:
        params: XGBoost's.
        dtrain: what to train on; its scores are computed anew at the beginning of each segment.
        num_boost_round: of all segments together.
        segment_rounds: a resume trains less than so many rounds more than those since the checkpoint.
        metrics: as in `TuneReportCheckpointCallback`.
        options: of `xgb.train`, but no `xgb_model`; `callbacks` begin anew in each segment.
    """
    directory = restored_directory()
    booster = load_booster(directory) if directory else None
    reporting = _XgboostReplayCallback(metrics, booster.num_boosted_rounds() if booster else 0)
    callbacks = [*options.pop("callbacks", ()), reporting]
    begun = reporting.reported // segment_rounds * segment_rounds
    if booster and begun < num_boost_round:
        booster = booster[:begun] if begun else None
    for begin in range(begun, num_boost_round, segment_rounds):
        end = min(begin + segment_rounds, num_boost_round)
        seeded = {**params, "seed": int(params.get("seed", 0)) + begin}
        # The trees alone, as a checkpoint has them: a booster in memory would bring its generators.
        trees = None if booster is None else booster.save_raw("ubj")
        booster = xgb.train(seeded, dtrain, end - begin, xgb_model=trees, callbacks=callbacks, **options)
        if booster.num_boosted_rounds() < end or reporting.over:
            break
    if booster is None:
        raise InvalidInput(f"num_boost_round: expected 1 or more, found {num_boost_round}")
    save_last_step(partial(_save, booster))
    return booster


def _save(model: xgb.Booster, directory: str) -> None:
    model.save_model(Path(directory, _FILE))
