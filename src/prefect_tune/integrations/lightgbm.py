"""LightGBM: report each round, save the booster, and resume with exactly the trees of an undisturbed training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import MetricNames, chosen, goes_on_after, missing, restored_directory
from prefect_tune.runtime.trainable import save_last_step

try:
    import lightgbm as lgb
except ModuleNotFoundError as error:
    raise missing(error, "lightgbm") from error

__all__ = ["TuneReportCheckpointCallback", "continuing", "load_booster", "train"]

_FILE = "model.txt"


def load_booster(directory: str | Path) -> lgb.Booster:
    """Return the booster of a checkpoint."""
    return lgb.Booster(model_file=Path(directory, _FILE))


def continuing(num_boost_round: int) -> dict[str, Any]:
    """Return `num_boost_round` and `init_model` for `lgb.train`: all rounds, or those that a resumed trial has left."""
    directory = restored_directory()
    booster = load_booster(directory) if directory else None
    done = booster.current_iteration() if booster else 0
    return {"num_boost_round": num_boost_round - done, "init_model": booster}


class TuneReportCheckpointCallback:
    """Report each round, and save the booster when the flow's `checkpoint` says so, and at the end.

    ```python
    lgb.train(params, data, **continuing(200), valid_sets=[test], callbacks=[TuneReportCheckpointCallback()])
    ```

    A resume is exact as long as no round draws random numbers. Bagging, `feature_fraction`, GOSS, DART and extra
    trees use generators that LightGBM neither saves nor reseeds: with these use `train`, which is exact.
    Put it last: a callback behind it does not see the round at which the trial ends.

    Args:
        metrics: which to report, as `"test-multi_logloss"`; `{"loss": "test-multi_logloss"}` renames. Default: all.
    """

    order = 90  # LightGBM calls them in this order; its early stopping has 30

    def __init__(self, metrics: MetricNames = None) -> None:
        self._metrics = metrics

    def __call__(self, env: lgb.callback.CallbackEnv) -> None:
        self._report(env)
        if env.iteration + 1 == env.end_iteration:
            save_last_step(partial(_save, env.model))

    def _report(self, env: lgb.callback.CallbackEnv) -> None:
        evaluated = env.evaluation_result_list or []
        last = {f"{data}-{name}": value for data, name, value, *_ in evaluated}
        if not goes_on_after(chosen(last, self._metrics), partial(_save, env.model)):
            raise lgb.callback.EarlyStopException(env.iteration, evaluated)


class _ReplayCallback(TuneReportCheckpointCallback):
    """Reports the rounds after the first `reported`, which are trained again."""

    def __init__(self, metrics: MetricNames, reported: int) -> None:
        super().__init__(metrics)
        self._reported = reported

    def __call__(self, env: lgb.callback.CallbackEnv) -> None:
        if env.iteration >= self._reported:
            self._report(env)


def train(
    params: Mapping[str, Any],
    train_set: lgb.Dataset,
    num_boost_round: int = 100,
    *,
    segment_rounds: int = 10,
    metrics: MetricNames = None,
    **options: Any,
) -> lgb.Booster:
    """Train as `lgb.train` does, in segments that each begin with generators of their own, seeded by `seed`.

    A resumed trial trains its last segment again from the segment's start. So its trees equal those of an
    undisturbed trial, also if rounds draw random numbers, with the same number of threads. Each round is reported once.

    Args:
        params: LightGBM's. Of seeds, `seed` alone counts.
        train_set: with `free_raw_data=False`, as each validation set: each segment begins with their scores so far.
        num_boost_round: of all segments together.
        segment_rounds: a resume trains less than so many rounds more than those since the checkpoint.
        metrics: as in `TuneReportCheckpointCallback`.
        options: of `lgb.train`; `callbacks` begin anew in each segment.
    """
    directory = restored_directory()
    booster = load_booster(directory) if directory else None
    reported = booster.current_iteration() if booster else 0
    callbacks = [*options.pop("callbacks", ()), _ReplayCallback(metrics, reported)]
    begun = reported // segment_rounds * segment_rounds
    if booster and begun < num_boost_round:
        booster = lgb.Booster(model_str=booster.model_to_string(num_iteration=begun)) if begun else None
    for begin in range(begun, num_boost_round, segment_rounds):
        end = min(begin + segment_rounds, num_boost_round)
        seeded = {**params, "seed": int(params.get("seed", 0)) + begin}
        booster = lgb.train(seeded, train_set, end - begin, init_model=booster, callbacks=callbacks, **options)
        if 0 < booster.best_iteration < end or booster.current_iteration() < end:
            break  # stopped early
    if booster is None:
        raise InvalidInput(f"num_boost_round: expected 1 or more, found {num_boost_round}")
    save_last_step(partial(_save, booster))
    return booster


def _save(model: lgb.Booster, directory: str) -> None:
    model.save_model(Path(directory, _FILE), num_iteration=-1)
