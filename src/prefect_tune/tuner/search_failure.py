"""The error with which a search fails: every trial errored."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_tune.core.errors import SearchFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import same_errors_reason
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.reasons import Reason, error_of
from prefect_tune.core.shown_text import plural
from prefect_tune.parameters.plan_checks import KEEPS_CONFIGURATIONS
from prefect_tune.results import Results
from prefect_tune.terminal.formatting import errors_by_cause

_CAUSES = 3
"""Different errors in the message."""


def failure_of(results: Results, found: Experiment | None) -> SearchFailed | None:
    """Return the error of a search whose trials all errored; None for any other.

    Args:
        found: the experiment as this run found it; None if it did not read it.
    """
    trials = results.trials
    if not trials or (len(results.errors) < len(trials) and not same_errors_reason(trials.values())):
        return None
    earlier = {} if found is None else found.trials
    skipped = sum(trial.attempt == earlier[name].attempt for name, trial in trials.items() if name in earlier)
    return SearchFailed(_all_errored(results, skipped), results)


def _all_errored(results: Results, skipped: int) -> str:
    name, count = results.experiment.name, len(results.trials)
    causes = errors_by_cause([trial for trial in results.trials.values() if trial.trial in results.errors])
    (cause, (first, *_)), *others = causes
    if count == 1:
        errored = f"its only trial errored: {cause}"
    elif not others:
        errored = f"{len(results.errors)} of {count} trials errored, all with: {cause}"
    else:
        errored = f"{count} of {count} trials errored: {_counted(causes)}"
    if isinstance(results.experiment.settings.get("trainable"), str):
        again = f"pass rerun_errored=True (prefect-tune resume {results.target.uri} {name} --rerun-errored)"
    else:  # a script's function, which no other program finds
        again = f"pass experiment={name!r} and rerun_errored=True"
    rerun = f"{again}; {KEEPS_CONFIGURATIONS}"
    if not skipped:
        failed = f"{errored}. Remove the cause, then run the search again: {rerun}"
    else:
        old = f"{plural(skipped, 'errored trial was', 'errored trials were')} not retried"
        asked = f"{old}: to retry with the code as it is now, {rerun}"
        failed = f"{asked}. In the earlier run {errored}" if skipped == count else f"{errored}. {asked}"
    failed = f"experiment {name!r}: {failed}"
    error = error_of(first.end_reason)
    if not isinstance(error, Reason) or "traceback" not in error.arguments:  # its process has died
        return failed
    return f"{failed}. Traceback: prefect-tune show {results.target.uri} {name} --trial {first.trial}"


def _counted(causes: Sequence[tuple[str, Sequence[Trial]]]) -> str:
    said = [f"{len(trials)} with: {cause} (such as {trials[0].trial})" for cause, trials in causes[:_CAUSES]]
    more = len(causes) - _CAUSES
    return "; ".join([*said, *([plural(more, "other error", "other errors")] if more > 0 else [])])
