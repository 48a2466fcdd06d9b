"""XGBoost: report each round, save the booster, and resume with exactly the trees of an uninterrupted training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.renamed import make_module_getattr
from prefect_tune.integrations.common import (
    MetricNames,
    find_sibling_callbacks,
    get_checkpoint_directory,
    make_trial_path,
    missing_extra_error,
    select_metrics,
    try_report_step,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import xgboost as xgb
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "xgboost") from error

__getattr__ = make_module_getattr(__name__, {"continuing": "remaining_rounds"})

__all__ = ["TuneReportCheckpointCallback", "load_booster", "remaining_rounds", "train"]

_MODEL_FILE = "model.ubj"


def load_booster(directory: str | Path) -> xgb.Booster:
    """Return the booster of a checkpoint.

    ```python
    booster = load_booster(checkpoint.to_directory())
    ```
    """
    return xgb.Booster(model_file=str(Path(directory, _MODEL_FILE)))


def remaining_rounds(num_boost_round: int) -> dict[str, Any]:
    """Return `num_boost_round` and `xgb_model` for the next call of `xgb.train`; see `TuneReportCheckpointCallback`."""
    directory = get_checkpoint_directory()
    booster = load_booster(directory) if directory else None
    done = booster.num_boosted_rounds() if booster else 0
    return {"num_boost_round": num_boost_round - done, "xgb_model": booster}


class TuneReportCheckpointCallback(xgb.callback.TrainingCallback):
    """Report each round, and save the booster at the flow's `checkpoint` interval and at the end.

    ```python
    xgb.train(params, data, **remaining_rounds(200), evals=[(test, "test")], callbacks=[TuneReportCheckpointCallback()])
    ```

    A resume is exact if no round draws random numbers. If rounds sample rows or columns (`subsample`, `colsample_*`,
    DART), the trees after a resume differ, because XGBoost does not expose its generators' state. In that case, use
    `train`, whose resume is exact. `early_stopping_rounds` restarts its count on a resume; use `pt.Plateau` instead.
    The folder of XGBoost's own `TrainingCheckPoint` is moved below the trial's directory, so that trials do not
    overwrite each other's files. A path that contains the trial's ID is not moved.

    Args:
        metrics: the metrics to report, like `"test-mlogloss"`; `{"loss": "test-mlogloss"}` renames one. Default: all.
    """

    def __init__(self, metrics: MetricNames = None) -> None:
        super().__init__()
        self._metrics = metrics

    def before_training(self, model: Any) -> Any:
        for callback in find_sibling_callbacks(self):
            if isinstance(callback, xgb.callback.TrainingCheckPoint):
                path = make_trial_path(os.fspath(callback._path), "TrainingCheckPoint(directory)")  # noqa: SLF001 - no public name
                Path(path).mkdir(parents=True, exist_ok=True)
                callback._path = path  # noqa: SLF001 - as above
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        del epoch
        last = {f"{data}-{name}": log[-1] for data, logs in evals_log.items() for name, log in logs.items()}
        # In a cross-validation, a score is a pair of the mean and the deviation: report the mean.
        last = {name: float(score[0] if isinstance(score, tuple) else score) for name, score in last.items()}
        return not try_report_step(select_metrics(last, self._metrics), partial(_save_booster, model))

    def after_training(self, model: Any) -> Any:
        save_last_step(partial(_save_booster, model))
        return model


class _ReportNewRoundsCallback(TuneReportCheckpointCallback):
    """Skips the first `reported_rounds` rounds, because an earlier attempt has reported them; reports later rounds."""

    def __init__(self, metrics: MetricNames, reported_rounds: int) -> None:
        super().__init__(metrics)
        self.reported_rounds = reported_rounds
        self.is_trial_over = False

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if model.num_boosted_rounds() > self.reported_rounds:
            self.is_trial_over = super().after_iteration(model, epoch, evals_log)
        return self.is_trial_over

    def after_training(self, model: Any) -> Any:
        return model  # `train` saves the last step of the last segment


def train(
    params: Mapping[str, Any],
    dtrain: xgb.DMatrix,
    num_boost_round: int = 10,
    *,
    segment_rounds: int = 10,
    metrics: MetricNames = None,
    **options: Any,
) -> xgb.Booster:
    """Train like `xgb.train`, in segments that each start with new random generators, seeded by `seed` in `params`.

    A resumed trial repeats its unfinished segment from the segment's first round. So with the same number of threads,
    it ends with the trees of an uninterrupted trial, even if rounds draw random numbers. Each round is reported once.

    ```python
    booster = train(params, data, 100, metrics={"loss": "test-rmse"}, evals=[(test, "test")])
    ```

    Args:
        dtrain: the training data; the predictions for it are recomputed at the start of each segment.
        num_boost_round: the number of rounds in all segments together.
        segment_rounds: the number of rounds in a segment. A resume repeats fewer rounds than this number.
        metrics: see `TuneReportCheckpointCallback`.
        options: options of `xgb.train`, except `xgb_model`; `callbacks` restart in each segment.
    """
    directory = get_checkpoint_directory()
    booster = load_booster(directory) if directory else None
    callback = _ReportNewRoundsCallback(metrics, booster.num_boosted_rounds() if booster else 0)
    callbacks = [*options.pop("callbacks", ()), callback]
    first = callback.reported_rounds // segment_rounds * segment_rounds
    if booster and first < num_boost_round:
        booster = booster[:first] if first else None
    for begin in range(first, num_boost_round, segment_rounds):
        end = min(begin + segment_rounds, num_boost_round)
        seeded = {**params, "seed": int(params.get("seed", 0)) + begin}
        # Pass only the trees, because a booster in memory would keep its random generators, which no resume restores.
        trees = None if booster is None else booster.save_raw("ubj")
        booster = xgb.train(seeded, dtrain, end - begin, xgb_model=trees, callbacks=callbacks, **options)
        if booster.num_boosted_rounds() < end or callback.is_trial_over:
            break
    if booster is None:
        raise InvalidInput(f"num_boost_round: expected 1 or more, found {num_boost_round}")
    save_last_step(partial(_save_booster, booster))
    return booster


def _save_booster(model: xgb.Booster, directory: str) -> None:
    model.save_model(Path(directory, _MODEL_FILE))
