"""The objective of a search: one metric or several, each to be minimized or maximized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import model_validator

from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.metrics import is_finite, short_repr
from prefect_tune.core.values import Value, get_metric, iter_leaves

Mode: TypeAlias = Literal["min", "max"]

_MINIMIZED_WORDS = re.compile(
    "bpb|bpc|brier|cer|cost|crossentropy|deviance|divergence|ece|eer|err|errors?|fid|fnr|fpr|kl|latency|logloss|loss|losses"
    "|mae|mape|misclassification|mse|nll|nrmse|perplexity|ppl|regret|residual|rmse|rmsle|smape|ter|wer"
)
_MAXIMIZED_WORDS = re.compile(
    "acc|accuracy|ap|auc|aucpr|auprc|auroc|bleu|chrf|cider|dice|elbo|f1|fbeta|fscore|iou|jaccard|kappa|likelihood|map|mcc"
    "|meteor|miou|mrr|ndcg|pearson|prauc|precision|psnr|r2|recall|returns?|rewards?|rocauc|rouge|scores?|sensitivity"
    "|spearman|specificity|ssim|success"
)
_NEGATION_WORDS = frozenset({"neg", "negative"})  # as in scikit-learn's neg_mean_squared_error


class Objective(Value):
    """The metrics by which trials are compared. Schedulers use only the first metric."""

    metrics: tuple[str, ...]
    """The names of the metrics; a nested metric has a name like `eval/loss`."""
    modes: tuple[Mode, ...]
    """`min` or `max` for each metric: whether small or large values are better."""

    @model_validator(mode="after")
    def _require_mode_per_metric(self) -> Objective:
        if not self.metrics or len(self.metrics) != len(self.modes):
            raise ValueError(f"expected one mode for each metric, found {self.metrics} and {self.modes}")
        return self

    def loss(self, metrics: Mapping[str, object], where: str) -> float:
        """Return the first of the `losses`. Raises like `losses`."""
        return self.losses(metrics, where)[0]

    def losses(self, metrics: Mapping[str, object], where: str) -> tuple[float, ...]:
        """Return the metrics as losses: values for `max` are negated, so that smaller is better.

        Raises:
            BadMetric: a metric was not reported, or is not a finite number; the message begins with `where`.
        """
        return tuple(
            (1 if mode == "min" else -1) * _require_metric(metrics, name, where)
            for name, mode in zip(self.metrics, self.modes, strict=True)
        )


PLACEHOLDER_OBJECTIVE = Objective(metrics=("unnamed",), modes=("min",))
"""The objective for a schedule that compares no trials, so trials need not report a metric of this name."""


def make_objective(metric: str | Sequence[str] | None, mode: Mode | Sequence[Mode]) -> Objective | None:
    """Return the objective; None without a metric. `mode` is one mode for all metrics, or a list with one per metric.

    Raises:
        InvalidInput: a metric is not text, the number of modes is wrong, or a mode is neither `min` nor `max`.
    """
    if metric is None:
        return None
    metrics, modes = _as_tuple(metric), _as_tuple(mode)
    if not all(isinstance(name, str) for name in metrics):
        raise InvalidInput(f"metric: expected a name, or a list of names, found {metric!r}")
    modes = modes * len(metrics) if isinstance(mode, str) else modes
    if not metrics or len(metrics) != len(modes) or not all(mode in ("min", "max") for mode in modes):
        raise InvalidInput(f"mode: expected 'min' or 'max', or one of them per metric, found {mode!r} for {metric!r}")
    return Objective(metrics=metrics, modes=modes)


def infer_mode(metric: str) -> Mode | None:
    """Return the usual mode of a metric by its name: `max` for `val_acc` or `mAP@50`; None if unknown.

    Only whole words match, so `surf1` is not an F1. A word such as `loss` or `error` takes precedence over `score`.
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", metric)
    words = set(re.split(r"[^a-z0-9]+", f"{metric} {spaced}".lower()))
    words |= {word.rstrip("0123456789") for word in words}  # so that acc1 and map50 match
    is_small, is_large = (any(map(pattern.fullmatch, words)) for pattern in (_MINIMIZED_WORDS, _MAXIMIZED_WORDS))
    if not (is_small or is_large):
        return None
    return "min" if is_small != bool(words & _NEGATION_WORDS) else "max"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list as a tuple, and any other value in a tuple of its own, as journaled settings may have any type."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _require_metric(metrics: Mapping[str, object], name: str, where: str) -> float:
    value = get_metric(metrics, name)
    if isinstance(value, int | float) and is_finite(value):
        return float(value)
    raise BadMetric(
        f"{where}: expected a number for metric {name!r}, found {short_repr(value)}; the report has {sorted(metrics)}"
    )


def require_metrics(metrics: Mapping[str, object], names: Iterable[str], where: str) -> None:
    """Raise `BadMetric` if a report lacks one of the metrics; the message names the option that allows such reports."""
    for name in names:
        try:
            _require_metric(metrics, name, where)
        except BadMetric as error:
            suggestion = did_you_mean(name, [leaf for leaf, _ in iter_leaves(metrics)]) or "."
            option = "If reports may lack it, pass allow_missing_metric=True (--allow-missing-metric)"
            raise BadMetric(f"{error}{suggestion} {option}") from None
