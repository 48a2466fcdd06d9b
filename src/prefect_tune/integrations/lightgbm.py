"""LightGBM: report each round, save the booster, and resume with exactly the trees of an uninterrupted training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.renamed import make_module_getattr
from prefect_tune.integrations.common import (
    MetricNames,
    get_checkpoint_directory,
    missing_extra_error,
    select_metrics,
    try_report_step,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import lightgbm as lgb
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "lightgbm") from error

__getattr__ = make_module_getattr(__name__, {"continuing": "remaining_rounds"})

__all__ = ["TuneReportCheckpointCallback", "load_booster", "remaining_rounds", "train"]

_MODEL_FILE = "model.txt"


def load_booster(directory: str | Path) -> lgb.Booster:
    """Return the booster of a checkpoint.

    ```python
    booster = load_booster(checkpoint.to_directory())
    ```
    """
    return lgb.Booster(model_file=Path(directory, _MODEL_FILE))


def remaining_rounds(num_boost_round: int) -> dict[str, Any]:
    """Return `num_boost_round` and `init_model` for the next `lgb.train`; see `TuneReportCheckpointCallback`."""
    directory = get_checkpoint_directory()
    booster = load_booster(directory) if directory else None
    done = booster.current_iteration() if booster else 0
    return {"num_boost_round": num_boost_round - done, "init_model": booster}


class TuneReportCheckpointCallback:
    """Report each round, and save the booster at the flow's `checkpoint` interval and at the end.

    ```python
    lgb.train(params, data, **remaining_rounds(200), valid_sets=[test], callbacks=[TuneReportCheckpointCallback()])
    ```

    A resume is exact if no round draws random numbers. Bagging, `feature_fraction`, GOSS, DART and extra trees use
    generators that LightGBM neither saves nor reseeds. With these options, use `train`, whose resume is exact.
    Put this callback last, because LightGBM skips the callbacks after this one when the trial ends.

    Args:
        metrics: the metrics to report; `{"loss": "test-multi_logloss"}` renames one. Default: all.
    """

    order = 90  # LightGBM calls callbacks with lower numbers first; its early stopping has 30

    def __init__(self, metrics: MetricNames = None) -> None:
        self._metrics = metrics

    def __call__(self, env: lgb.callback.CallbackEnv) -> None:
        self._report_round(env)
        if env.iteration + 1 == env.end_iteration:
            save_last_step(partial(_save_booster, env.model))

    def _report_round(self, env: lgb.callback.CallbackEnv) -> None:
        evaluated = env.evaluation_result_list or []
        last = {f"{data}-{name}": value for data, name, value, *_ in evaluated}
        if not try_report_step(select_metrics(last, self._metrics), partial(_save_booster, env.model)):
            raise lgb.callback.EarlyStopException(env.iteration, evaluated)


class _LightgbmReplayCallback(TuneReportCheckpointCallback):
    """Reports all rounds except the first `reported_rounds` rounds, because an earlier attempt has reported these."""

    def __init__(self, metrics: MetricNames, reported_rounds: int) -> None:
        super().__init__(metrics)
        self._reported_rounds = reported_rounds

    def __call__(self, env: lgb.callback.CallbackEnv) -> None:
        if env.iteration >= self._reported_rounds:
            self._report_round(env)


def train(
    params: Mapping[str, Any],
    train_set: lgb.Dataset,
    num_boost_round: int = 100,
    *,
    segment_rounds: int = 10,
    metrics: MetricNames = None,
    **options: Any,
) -> lgb.Booster:
    """Train like `lgb.train`, but in segments, each of which starts with new generators that are seeded by `seed`.

    A resumed trial repeats its unfinished segment from the segment's first round. So with the same number of threads,
    it ends with the trees of an uninterrupted trial, even if rounds draw random numbers. Each round is reported once.

    ```python
    booster = train(params, data, 100, metrics={"loss": "test-l2"}, valid_sets=[test], valid_names=["test"])
    ```

    Args:
        params: LightGBM's parameters; `seed` is the only seed with an effect.
        train_set: the training data. All data sets need `free_raw_data=False`, since each segment reads their raw data.
        num_boost_round: the number of rounds in all segments together.
        segment_rounds: the number of rounds in a segment. A resume repeats fewer rounds than a segment has.
        metrics: see `TuneReportCheckpointCallback`.
        options: options of `lgb.train`. The state of `callbacks` starts anew in each segment.
    """
    directory = get_checkpoint_directory()
    booster = load_booster(directory) if directory else None
    reported_rounds = booster.current_iteration() if booster else 0
    callbacks = [*options.pop("callbacks", ()), _LightgbmReplayCallback(metrics, reported_rounds)]
    first = reported_rounds // segment_rounds * segment_rounds
    if booster and first < num_boost_round:
        booster = lgb.Booster(model_str=booster.model_to_string(num_iteration=first)) if first else None
    for begin in range(first, num_boost_round, segment_rounds):
        end = min(begin + segment_rounds, num_boost_round)
        seeded = {**params, "seed": int(params.get("seed", 0)) + begin}
        booster = lgb.train(seeded, train_set, end - begin, init_model=booster, callbacks=callbacks, **options)
        if 0 < booster.best_iteration < end or booster.current_iteration() < end:
            break  # stopped early
    if booster is None:
        raise InvalidInput(f"num_boost_round: expected 1 or more, found {num_boost_round}")
    save_last_step(partial(_save_booster, booster))
    return booster


def _save_booster(model: lgb.Booster, directory: str) -> None:
    model.save_model(Path(directory, _MODEL_FILE), num_iteration=-1)
