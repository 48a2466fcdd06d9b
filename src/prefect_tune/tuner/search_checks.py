"""Notice what makes a whole search useless, and say it: no report has its metric, or all trials error.

Also noticed: exploits that change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import StepReported
from prefect_tune.core.errors import SearchFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import same_errors_reason
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Decided,
    Event,
    Finished,
    GaveUp,
    Paused,
    Reported,
    Started,
    TrialAdded,
    events_in,
)
from prefect_tune.core.metrics import kind_unless_number, shown
from prefect_tune.core.reasons import Reason, error_of, make_reason
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import did_you_mean, nearest, plural
from prefect_tune.core.values import StepReport, leaves, metric_in
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.resume_compatibility import (
    KEEPS_CONFIGURATIONS,
)
from prefect_tune.results import Results
from prefect_tune.terminal.formatting import errors_by_cause

_CERTAIN = 2
"""The number of trials without a metric that are no exception any more."""


class MetricCheck(SearchObserver):
    """Warns if the first report lacks a metric of the search, and ends the search when it is certain that all do.

    A trainable may report a metric every n-th step only. So a trial shows that a metric is missing only when it has
    completed, if it began in this run, or when the scheduler could not decide about it, and no report of any trial had
    the metric. It is certain with the first such trial if a metric of a similar name was reported; else with the
    second: one trial alone may be an exception, such as a configuration that cannot be trained. The search then ends as
    soon as each trial that is training at that moment has reported too, or has ended; at once if it is the scheduler
    that cannot decide, since its trial waits for the answer.

    A stop criterion needs its metrics in each report, so the first attempt that fails for lack of one ends the search,
    if no report of any trial had that metric.
    """

    def __init__(self, objective: Objective | None, log: Log, stop_metrics: frozenset[str] = frozenset()) -> None:
        self._stop_metrics = set(stop_metrics)
        """The metrics of the stop criterion that no report of this run had."""
        self.bad_stop = ""
        """The error of the stop criterion for which the search ends; empty while it continues."""
        self._metrics: Sequence[str] = objective.metrics if objective else ()
        self._log = log
        self._missing: Sequence[str] = self._metrics
        """The metrics that no report of this run had."""
        self._reported: set[str] = set()
        """The names in the reports of this run, while one is missing."""
        self._is_first = True
        self._begun: set[str] = set()
        self._reported_by: dict[str, set[str]] = {each: set() for each in self._metrics}
        """The trials that have reported each metric in this run."""
        self._completed_without: dict[str, list[str]] = {each: [] for each in self._metrics}
        """The trials that have completed without each metric, while no report had it."""
        self._lacking: set[str] = set()
        """The trials that have completed without a metric, or about which the scheduler could not decide."""
        self._silent: set[str] = set()
        """The trials that have begun in this run and have reported nothing in it."""
        self._awaited: set[str] | None = None
        """The silent trials when it became certain; None while it is not."""
        self._lack: Sequence[str] = ()
        """The metrics that are missing for certain, unless a silent trial reports them."""
        self.ended_without: Sequence[str] = ()
        """The metrics for whose lack the search ends; empty while it continues."""

    def why_end(self, experiment: Experiment, undecided: str | None = None) -> Reason | None:
        """Return why the search ends; None while it continues.

        Args:
            undecided: the trial about which the scheduler, which compares the first metric, could not decide.
        """
        if self.bad_stop:
            return make_reason("missing-stop-metrics", metrics=sorted(self._stop_metrics))
        if undecided is not None:
            self._conclude(undecided, experiment, self._metrics[:1], awaited=set())
        if self._awaited is not None and not self.ended_without and not self._awaited & self._silent:
            self.ended_without = never_last(experiment, [each for each in self._lack if each in self._missing])
        return make_reason("missing-metrics", metrics=list(self.ended_without)) if self.ended_without else None

    @property
    def came_late(self) -> bool:
        """Whether the search ends for lack of metrics, and a trial has reported all of them since."""
        return bool(self.ended_without) and not set(self.ended_without) & set(self._missing)

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        self._check(step.trial, step.report)

    def applied(self, event: Event, experiment: Experiment) -> None:
        """Check also the reports of a remote trial: they arrive in `Absorbed`, with an entry of its journal."""
        for each in events_in(event):
            match each:
                case TrialAdded(trial=trial):
                    self._silent.add(trial)
                case Started(trial=trial):
                    self._silent.add(trial)
                    if each.attempt == 1:
                        self._begun.add(trial)
                case Reported(trial=trial, report=report):
                    self._check(trial, report)
                case Finished(trial=trial):
                    self._silent.discard(trial)
                    if trial in self._begun and experiment.trial(trial).status is Status.COMPLETED:
                        self._note_lacking(experiment.trial(trial))
                        self._conclude(trial, experiment, self._metrics, awaited=self._silent)
                case AttemptEnded(trial=trial, cause=Cause.BAD_STOP, reason=why) if self._stop_metrics:
                    where = f"trial {trial} errored at step {experiment.trial(trial).step}"
                    self.bad_stop = self.bad_stop or f"{where}: {why}"
                case AttemptEnded(trial=trial) | GaveUp(trial=trial) | Paused(trial=trial):
                    self._silent.discard(trial)
                case _:
                    pass

    def lost(self, trial: Trial, why: str) -> None:
        del why
        self._silent.discard(trial.trial)

    def _check(self, trial: str, report: StepReport) -> None:
        self._silent.discard(trial)
        for name in self._metrics:
            if metric_in(report.metrics, name) is not None:
                self._reported_by[name].add(trial)
        self._stop_metrics = {each for each in self._stop_metrics if metric_in(report.metrics, each) is None}
        if self._missing:
            self._missing = [each for each in self._missing if metric_in(report.metrics, each) is None]
            self._reported.update(name for name, _ in leaves(report.metrics))
            self._warn_of_lacking()
        if self._is_first:
            self._is_first = False
            self._warn(trial, report)

    def _warn(self, trial: str, report: StepReport) -> None:
        found = [name for name, _ in leaves(report.metrics)]
        for name in self._metrics:
            value = metric_in(report.metrics, name)
            if kind := kind_unless_number(value):
                said = (trial, name, kind, shown(value))
                self._log.warning("trial %s reported the metric %r as %s, not as a number: %s", *said)
            elif value is None:
                hint = did_you_mean(name, found)
                self._log.warning(
                    "trial %s reported %s, without the metric %r; the search ends if no report has it by the time %s, "
                    "and all that train then have reported%s",
                    *(trial, sorted(found), name, "a trial completes" if hint else "two trials have completed", hint),
                )

    def _note_lacking(self, trial: Trial) -> None:
        for name in self._metrics:
            if trial.trial not in self._reported_by[name] and metric_in(trial.metrics, name) is None:
                self._completed_without[name].append(trial.trial)
        self._warn_of_lacking()

    def _warn_of_lacking(self) -> None:
        """Warn of each trial that has completed without a metric that others have reported."""
        for name in self._metrics:
            while name not in self._missing and self._completed_without[name]:
                lacking = self._completed_without[name].pop(0)
                self._log.warning(
                    "trial %s completed and never reported the metric %r, which others have reported", lacking, name
                )

    def _conclude(self, by: str, experiment: Experiment, among: Sequence[str], *, awaited: Collection[str]) -> None:
        if not (lacking := never_last(experiment, [each for each in among if each in self._missing])):
            return
        self._lacking.add(by)
        is_certain = len(self._lacking) >= _CERTAIN or all(nearest(each, self._reported) for each in lacking)
        if is_certain:
            self._lack = lacking
            self._awaited = set(awaited) if self._awaited is None else self._awaited & set(awaited)


def never_last(experiment: Experiment, metrics: Sequence[str]) -> Sequence[str]:
    """Return those of the metrics that no trial's last report has."""
    trials = experiment.trials.values()
    return [name for name in metrics if all(metric_in(each.metrics, name) is None for each in trials)]


# Notice that exploits change nothing: trials report what the trials report whose checkpoints they took over.

_CERTAIN_REPORTS = 3
"""The number of equal reports that are no coincidence any more, if they are not all of one value."""
_KEPT = 5
_Values = tuple[object, ...]


@dataclass
class _Pair:
    """A trial and the source of its last exploit: the first reports of each since then that were not compared."""

    source: str
    changed: str
    own: dict[int, _Values] = field(default_factory=dict)
    of_source: dict[int, _Values] = field(default_factory=dict)


class ExplorationCheck(SearchObserver):
    """Warns once if trials that exploit another, with another configuration, report exactly that trial's metrics.

    A trainable whose checkpoint restores the old learning rate too trains on as its source does. Only reports of the
    same steps after the exploit are compared; one that differs shows that configurations matter, and ends the check.
    """

    def __init__(self, objective: Objective | None, log: Log) -> None:
        self._metrics: Sequence[str] = objective.metrics if objective else ()
        self._log = log
        self._pairs: dict[str, _Pair] = {}
        self._equal: list[_Values] = []
        self._is_over = False

    def applied(self, event: Event, experiment: Experiment) -> None:
        if self._is_over or not (isinstance(event, Decided) and isinstance(event.decision, Exploit)):
            return
        source, trial = event.decision.source, event.trial
        self._pairs = {name: each for name, each in self._pairs.items() if trial not in (name, each.source)}
        before, now = (dict(leaves(each)) for each in (experiment.trial(source).config, event.decision.config))
        if changed := [name for name, value in now.items() if before.get(name, ...) != value]:
            self._pairs[trial] = _Pair(source, ", ".join(changed))

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        for name, pair in self._pairs.items():
            if step.trial == name:
                self._compare(name, pair, step.report, pair.own, pair.of_source)
            elif step.trial == pair.source:
                self._compare(name, pair, step.report, pair.of_source, pair.own)
        if self._is_over:
            self._pairs.clear()

    def _compare(
        self, trial: str, pair: _Pair, report: StepReport, side: dict[int, _Values], other: dict[int, _Values]
    ) -> None:
        values = tuple(metric_in(report.metrics, name) for name in self._metrics)
        if (known := other.pop(report.step, None)) is None:
            if len(side) < _KEPT:
                side[report.step] = values
            return
        self._equal.append(values)
        self._is_over |= known != values
        if not self._is_over and len(self._equal) >= _CERTAIN_REPORTS and len(set(self._equal)) > 1:
            self._is_over = True
            self._log.warning(
                "trial %s has exploited trial %s, with another value of %s, and reports the same %s as that trial at "
                "the same steps: its new configuration changes nothing. A checkpoint of a whole model or optimizer "
                "also restores the old learning rate: after restoring, apply the values of the configuration again "
                "(see PBT on the page on schedulers)",
                *(trial, pair.source, pair.changed, " and ".join(self._metrics)),
            )


# The error with which a search fails: every trial errored, or no report had a metric that it needs.

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
    if len(results.errors) == len(results.trials) or same_errors_reason(results.trials.values()):
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
