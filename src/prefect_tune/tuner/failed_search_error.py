"""The error with which a search fails: every trial errored, or no report had a metric that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.did_you_mean import nearest
from prefect_tune.core.errors import SearchFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.models import leaves, plural
from prefect_tune.parameters.checks.resume_compatibility import KEEPS_CONFIGURATIONS
from prefect_tune.results.results import Results
from prefect_tune.terminal.formatting import errors_by_cause
from prefect_tune.tuner.metric_check import MetricCheck, never_last

_CAUSES = 3
"""Different errors in the message."""


def failure_of(results: Results, found: Experiment | None, metric_check: MetricCheck) -> SearchFailed | None:
    """Return the error of a search whose trials all errored, or that lacked a metric; None for any other.

    Args:
        found: the experiment as this run found it; None if it did not read it.
        metric_check: whether the search ended since a metric is missing. That is read from the reports otherwise, if a
            trial has completed and no last report has the metric.
    """
    if not results.trials:
        return None
    if metric_check.bad_stop:
        return SearchFailed(_with_bad_stop(results, metric_check.bad_stop), results)
    if len(results.errors) == len(results.trials):
        earlier = {} if found is None else found.trials
        skipped = sum(each.attempt == earlier[name].attempt for name, each in results.trials.items() if name in earlier)
        return SearchFailed(_all_errored(results, skipped), results)
    if metric_check.came_late:
        return SearchFailed(_reported_late(results, metric_check.ended_without), results)
    missing = never_last(results.experiment, results.objective.metrics if results.objective else ())
    if missing and not metric_check.ended_without:
        missing = _in_no_report(results, missing)
    return SearchFailed(_without_metric(results, missing), results) if missing else None


def _in_no_report(results: Results, metrics: Sequence[str]) -> Sequence[str]:
    if all(each.status is not Status.COMPLETED for each in results.trials.values()):
        return ()
    reported = results.to_arrow("reports").column_names
    return [name for name in metrics if name not in reported]


def _all_errored(results: Results, skipped: int) -> str:
    name, count, causes = results.experiment.name, len(results.trials), errors_by_cause(results.trials.values())
    (cause, (first, *_)), *others = causes
    if count == 1:
        errored = f"its only trial errored: {cause}"
    elif not others:
        errored = f"{count} of {count} trials errored, all with: {cause}"
    else:
        errored = f"{count} of {count} trials errored: {_counted(causes)}"
    again = f"prefect-tune resume {results.target.uri} {name} --rerun-errored"
    rerun = f"pass rerun_errored=True ({again}); {KEEPS_CONFIGURATIONS}"
    if not skipped:
        failed = f"{errored}. Remove the cause, then run the search again: {rerun}"
    else:
        old = f"{plural(skipped, 'errored trial was', 'errored trials were')} not retried"
        asked = f"{old}: to retry with the code as it is now, {rerun}"
        failed = f"{asked}. In the earlier run {errored}" if skipped == count else f"{errored}. {asked}"
    failed = f"experiment {name!r}: {failed}"
    if "Traceback (most recent call last)" not in first.reason:  # its process has died
        return failed
    return f"{failed}. Traceback: prefect-tune show {results.target.uri} {name} --trial {first.trial}"


def _counted(causes: Sequence[tuple[str, Sequence[Trial]]]) -> str:
    said = [f"{len(trials)} with: {cause} (such as {trials[0].trial})" for cause, trials in causes[:_CAUSES]]
    more = len(causes) - _CAUSES
    return "; ".join([*said, *([plural(more, "other error", "other errors")] if more > 0 else [])])


def _with_bad_stop(results: Results, error: str) -> str:
    said = error if error.endswith("?") else f"{error}."
    return (
        f"experiment {results.experiment.name!r}: {said} Run the search again under the same experiment name with "
        "another stop: completed trials are kept, the others continue from their checkpoints"
    )


def _reported_late(results: Results, metrics: Sequence[str]) -> str:
    names = ", ".join(map(repr, metrics))
    return (
        f"experiment {results.experiment.name!r}: the search ended since no report had the metric {names}, and another "
        "trial reported it after that. Run the search again under the same experiment name to continue it: trials that "
        "have ended are kept, the others continue from their checkpoints"
    )


def _without_metric(results: Results, missing: Sequence[str]) -> str:
    found = sorted({name for each in results.trials.values() for name, _ in leaves(each.metrics)})
    meant = nearest(missing[0], found)
    question = f"; did you mean {meant!r}?" if meant else "."
    is_one = results.objective is not None and len(results.objective.metrics) == 1
    metric = f"metric={meant!r}" if meant and is_one else "a metric that the trainable reports"
    errored = ", errored ones with rerun_errored=True" if results.errors else ""
    return (
        f"experiment {results.experiment.name!r}: expected the metric {', '.join(map(repr, missing))}, "
        f"found {', '.join(map(repr, found)) or 'no metric'} in the reports{question} Run the search again under the "
        f"same experiment name with {metric}: completed trials are kept, the others continue from their checkpoints"
        f"{errored}"
    )
