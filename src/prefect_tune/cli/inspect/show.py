"""The command `show`: the status of an experiment, or of one of its trials."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import caught_up, chosen_trials, opened, trials_today, viewed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_first, counted, is_search, objective_in, shown_settings
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.messages.live_status import ExperimentView, RunningTrial
from prefect_tune.core.models import first_line, shown_size
from prefect_tune.core.texts import visible
from prefect_tune.terminal.data_age import format_moment, freshness_of
from prefect_tune.terminal.formatting import (
    borderless_table,
    errors_by_cause,
    facts_table,
    format_counts,
    format_steps,
    names_of,
    plain_cells,
    print_parts,
)
from prefect_tune.terminal.trials_table import trials_table

_TRIALS_SHOWN = 50
_ERRORS_SHOWN = 5
_TIMES = ("attempt_began_at", "reported_at")


@command
def show(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """Show the status of an experiment: its trials, the best one first; or all details of one trial."""
    with opened(target, experiment) as (store, state):
        view = viewed(store, state)
        today = trials_today(store, state, chosen_trials(state, trial)) if trial else []
    if is_search(state) and trial is None:
        show_search(view, as_json=as_json, again=shlex.join(["prefect-tune", "resume", target, experiment]))
        return
    state, now = view.experiment, datetime.now(UTC)
    about: dict[str, object] = {"experiment": state.name, "term": state.epoch, "owner": str(state.owner or "")}
    chosen = next(iter(chosen_trials(state, trial)), None)
    if chosen is not None and today:  # the experiment's journal does not know what maintenance has retired since
        chosen = caught_up(chosen, today[0])
    facts = _facts(view, chosen) if chosen is not None else {}
    fresh = freshness_of(view, now)
    if as_json:
        print(json.dumps({**about, **fresh.fields(), **facts}, indent=2))
    else:
        head = {"experiment": state.name, "owner": _owner_of(state)}
        print_parts(facts_table({**head, "as of": fresh.words(), **_readable(facts, chosen, now)}))
        if chosen is not None and _has_traceback(chosen):
            print(f"\n{visible(chosen.reason.strip())}")  # as it is: a wrapped line of code cannot be read or copied


def show_search(view: ExperimentView, *, as_json: bool, again: str = "") -> None:
    """Print a search: its settings, and its trials, the best one first.

    Args:
        again: the command that resumes it, to print if its process has probably ended.
    """
    state, now = view.experiment, datetime.now(UTC)
    fresh = freshness_of(view, now)
    objective = objective_in(state.settings)
    trials = best_first(list(state.trials.values()), objective)
    about = {
        "experiment": state.name,
        "metric": list(objective.metrics) if objective else None,
        "mode": list(objective.modes) if objective else None,
        "trials_by_status": counted(state),
        "term": state.epoch,
        "owner": str(state.owner or ""),
    }
    if as_json:
        facts = [_facts(view, each) for each in trials]
        shown = {**about, **fresh.fields(), "settings": shown_settings(state.settings), "trials": facts}
        print(json.dumps(shown, indent=2))
        return
    metrics, shown_trials = objective.metrics if objective else (), trials[:_TRIALS_SHOWN]
    styles = {Status.RUNNING: "dim"} if fresh.is_stale else {}
    table = trials_table(shown_trials, metrics, _columns_of_running(view, shown_trials, now), styles=styles)
    resume = {"resume with": again} if again and fresh.is_stale else {}
    print_parts(facts_table({**_head(state), "as of": fresh.words(), **resume}), "", table)
    if len(trials) > _TRIALS_SHOWN:
        print_parts(f"and {len(trials) - _TRIALS_SHOWN} more; --json prints all")
    _show_errors(trials)


def _readable(facts: Mapping[str, object], trial: Trial | None, now: datetime) -> Mapping[str, object]:
    """Return the facts of a trial with ages and ranges of steps, without those that are None or an empty text.

    Of a reason with a traceback it is the first line: the whole follows the table.
    """
    shown = {name: format_moment(str(at), now) for name in _TIMES if (at := facts.get(name))}
    if trial is not None and trial.checkpoints:
        size_bytes = sum(each.size_bytes for each in trial.checkpoints)
        in_all = f", {shown_size(size_bytes)} in all" if size_bytes else ""
        shown["checkpoints"] = format_steps([each.step for each in trial.checkpoints]) + in_all
    if trial is not None and _has_traceback(trial):
        shown["reason"] = first_line(trial.reason)
    if trial is not None:
        shown["wasted_steps"] = trial.wasted_count
    left = {name: value for name, value in facts.items() if value not in (None, "") and name != "wasted_at_least"}
    return {name: shown.get(name, value) for name, value in left.items()}


def _has_traceback(trial: Trial) -> bool:
    return "\n" in trial.reason.strip()


def _columns_of_running(view: ExperimentView, trials: Sequence[Trial], now: datetime) -> Mapping[str, list[str]]:
    """Return the columns that only running trials fill; none if none of them runs."""
    attempts = [view.running(each.trial) for each in trials]
    if not any(attempts):
        return {}
    return {
        "host": [(each.host or "") if each else "" for each in attempts],
        "last report": [_last_report(each, now) if each else "" for each in attempts],
    }


def _last_report(attempt: RunningTrial, now: datetime) -> str:
    if attempt.report is None:
        return f"none yet; began {format_moment(attempt.began_at, now)}" if attempt.began_at else "none yet"
    return format_moment(attempt.reported_at, now)


def _owner_of(state: Experiment) -> str:
    """Return the number of the owner, and its run."""
    return f"{state.epoch}: {state.owner}" if state.owner else ""


def _head(state: Experiment) -> Mapping[str, object]:
    """Return the lines above the table of trials."""
    objective = objective_in(state.settings)
    by = zip(objective.modes, objective.metrics, strict=True) if objective else ()
    return {
        "experiment": state.name,
        **({"by": f"{', '.join(map(' '.join, by))} of the last report, the best first"} if objective else {}),
        "trials": format_counts(counted(state)),
        "owner": _owner_of(state),
    }


def _show_errors(trials: Sequence[Trial]) -> None:
    """Print each different error with its trials."""
    causes = errors_by_cause(
        sorted((each for each in trials if each.status is Status.ERRORED), key=lambda each: each.trial)
    )
    if not causes:
        return
    table = borderless_table("errored", "reason")
    for cause, alike in causes[:_ERRORS_SHOWN]:
        table.add_row(*plain_cells((names_of(alike), cause)))
    print_parts("", table)
    if len(causes) > _ERRORS_SHOWN:
        print_parts(f"and {len(causes) - _ERRORS_SHOWN} more errors; --json prints all")
    first = causes[0][1][0]
    if _has_traceback(first):
        print_parts(f"--trial {first.trial} prints its traceback")


def _facts(view: ExperimentView, trial: Trial) -> dict[str, object]:
    attempt = view.running(trial.trial)
    return {
        "trial": trial.trial,
        "status": str(trial.status),
        "reason": trial.reason,
        "step": trial.step,
        "metrics": dict(trial.metrics),
        "checkpoints": [each.step for each in trial.checkpoints],
        "quarantined": len(trial.quarantined),
        "attempts": trial.attempt,
        "host": attempt.host if attempt else None,
        "attempt_began_at": attempt.began_at if attempt else None,
        "reported_at": attempt.reported_at if attempt else None,
        "wasted_steps": trial.wasted_steps,
        "wasted_at_least": trial.wasted_at_least,
        "trained_seconds": trial.measured_seconds,
        "config": dict(trial.config),
    }
