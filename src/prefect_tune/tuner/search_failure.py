"""The error with which a search fails: every trial errored, or no report had its metric."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.did_you_mean import nearest
from prefect_tune.core.errors import SearchFailed
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.models import first_line, leaves
from prefect_tune.results.results import Results
from prefect_tune.tuner.metric_check import never_last

__all__ = ["failure_of"]


def failure_of(results: Results, *, lacks_metric: bool) -> SearchFailed | None:
    """Return the error of a search whose trials all errored, or of which no report had a metric; None for any other.

    Args:
        lacks_metric: whether it is certain already that a metric is missing. It is read from the reports otherwise, if
            a trial has completed and no last report has the metric.
    """
    if not results.trials:
        return None
    if len(results.errors) == len(results.trials):
        return SearchFailed(_all_errored(results), results)
    missing = never_last(results.experiment, results.objective.metrics if results.objective else ())
    if missing and not lacks_metric:
        missing = _in_no_report(results, missing)
    return SearchFailed(_without_metric(results, missing), results) if missing else None


def _in_no_report(results: Results, metrics: Sequence[str]) -> Sequence[str]:
    if all(each.status is not Status.COMPLETED for each in results.trials.values()):
        return ()
    reported = results.to_arrow("reports").column_names
    return [name for name in metrics if name not in reported]


def _all_errored(results: Results) -> str:
    (first, why), name = next(iter(results.errors.items())), results.experiment.name
    count = len(results.errors)
    errored = "its only trial errored" if count == 1 else f"all {count} trials errored; the first, {first}"
    return (
        f"experiment {name!r}: {errored}: {first_line(why)}. All errors: "
        f"prefect-tune show {results.target.uri} {name}. Remove the cause, then run the search again with "
        "rerun_errored=True; with another metric, under another name"
    )


def _without_metric(results: Results, missing: Sequence[str]) -> str:
    found = sorted({name for each in results.trials.values() for name, _ in leaves(each.metrics)})
    meant = nearest(missing[0], found)
    question = f"; did you mean {meant!r}?" if meant else "."
    is_one = results.objective is not None and len(results.objective.metrics) == 1
    metric = f"metric={meant!r}" if meant and is_one else "a metric that the trainable reports"
    return (
        f"experiment {results.experiment.name!r}: expected the metric {', '.join(map(repr, missing))}, "
        f"found {', '.join(map(repr, found)) or 'no metric'} in the reports{question} Run the search again under the "
        f"same experiment name with {metric}: completed trials are kept, the others continue from their checkpoints"
    )
