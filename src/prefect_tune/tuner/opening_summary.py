"""The summary that a search logs when it opens its experiment, and its last line if there was nothing to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import best_label
from prefect_tune.core.experiment.summary import best_of, counted, named
from prefect_tune.core.experiment.trial_transitions import Phase, Status
from prefect_tune.core.models import leaves, metric_in, plural
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.texts import visible
from prefect_tune.executors.trial_slots import Slots
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.terminal.formatting import format_counts, format_value

_LONGEST = 400


def log_opening(plan: SearchPlan, found: Experiment, slots: Slots, where: str, log: Log) -> None:
    """Log what the experiment holds, its target, space, scheduler and slots: one line each.

    Args:
        found: the experiment as it was opened, before this run changes it.
        where: where the trials run, such as `on this machine`.
    """
    for line in _lines(plan, found, slots, where):
        log.info("%s", visible(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"))


def warn_of_takeover(found: Experiment, log: Log) -> None:
    """Warn that the run that owned the experiment has not ended it: it may be alive, and ends then.

    Args:
        found: the experiment before this run took it over.
    """
    running = sum(each.phase is Phase.RUNNING for each in found.trials.values())
    if running:
        log.warning(
            "takes over from %s, which left %s running: if that run is alive, its next write fails with Superseded, "
            "and it ends",
            visible(str(found.owner)),
            plural(running, "trial", "trials"),
        )


def log_finished(plan: SearchPlan, found: Experiment, ended: Experiment, log: Log) -> None:
    """Log how to train more, if the experiment was finished when this run opened it, and nothing was trained.

    If trials had errored, `say_errored` or the error of the search says what can be done.
    """
    if (
        found.trials
        and all(each.phase is Phase.FINISHED for each in found.trials.values())
        and _attempts(found) == _attempts(ended)
        and not ended.ends
        and plan.reruns_errored != "only"
    ):
        log.info(
            "experiment %r was finished already, and this run trained nothing: to train more, raise num_samples or "
            "stop, or choose another experiment name",
            found.name,
        )


def _attempts(experiment: Experiment) -> Mapping[str, int]:
    return {name: each.attempt for name, each in experiment.trials.items()}


def _lines(plan: SearchPlan, found: Experiment, slots: Slots, where: str) -> Iterator[str]:
    yield f"experiment {plan.experiment!r} at {plan.target.uri}: {_found(found, plan.objective)}"
    count = plan.trial_count
    trials = "trials" if count is None else plural(count, "trial", "trials")
    yield f"space: {_space(plan.space or {})}; {trials} by {type(plan.proposer).__name__}, seed {plan.seed_of_draws}"
    scheduler = "none, every trial trains to its end" if plan.scheduler is None else repr(plan.scheduler)
    yield f"scheduler: {scheduler}; {_objective(plan.objective)}"
    needed = plan.resources_per_trial
    each = f", each with {format_value(needed)}" if needed else ""
    yield f"slots: {plural(slots.count, 'trial', 'trials')} at once {where}{each}"


def _found(found: Experiment, objective: Objective | None) -> str:
    if not found.trials:
        return "new"
    counts = {"left running" if status == Status.RUNNING else status: count for status, count in counted(found).items()}
    said = f"{plural(len(found.trials), 'trial', 'trials')} found: {format_counts(counts)}"
    best = best_of(found)
    if best is None or objective is None:
        return said
    values = ", ".join(f"{name} {format_value(metric_in(best.metrics, name))}" for name in objective.metrics)
    return f"{said}; {best_label(objective)}: trial {named(best.trial, best.status)}, {values}"


def _space(space: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in leaves(space)) or "empty"


def _objective(objective: Objective | None) -> str:
    if objective is None:
        return "no metric"
    return ", ".join(f"{name} ({mode})" for name, mode in zip(objective.metrics, objective.modes, strict=True))
