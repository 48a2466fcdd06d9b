"""Notice that exploits change nothing: trials report what the trials report whose checkpoints they took over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events.experiment_events import Decided, Event
from prefect_tune.core.models import StepReport, leaves, metric_in
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.search.objective import Objective
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.search_link import StepReported

_CERTAIN = 3
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

    def happened(self, event: Event, experiment: Experiment) -> None:
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
        if not self._is_over and len(self._equal) >= _CERTAIN and len(set(self._equal)) > 1:
            self._is_over = True
            self._log.warning(
                "trial %s has exploited trial %s, with another value of %s, and reports the same %s as that trial at "
                "the same steps: its new configuration changes nothing. A checkpoint of a whole model or optimizer "
                "also restores the old learning rate: after restoring, apply the values of the configuration again "
                "(see PBT on the page on schedulers)",
                *(trial, pair.source, pair.changed, " and ".join(self._metrics)),
            )
