"""The command `show`: the status of an experiment, or of one of its trials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, TrialName, command
from prefect_tune.cli.shared.open_target import chosen_trials, opened
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_first, counted, is_search, objective_in, shown_settings
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import first_line
from prefect_tune.terminal.formatting import borderless_table, facts_table, format_counts, plain_cells, print_parts
from prefect_tune.terminal.trials_table import trials_table

_TRIALS_SHOWN = 50
_ERRORS_SHOWN = 5


@command
def show(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """Show the status of an experiment: its trials, the best one first; or all details of one trial."""
    with opened(target, experiment) as (_, state):
        pass
    if is_search(state) and trial is None:
        show_search(state, as_json=as_json)
        return
    about = {"experiment": state.name, "epoch": state.epoch, "owner": str(state.owner or "")}
    found = [about | _facts(each) for each in chosen_trials(state, trial)] or [about]
    if as_json:
        print(json.dumps(found[0], indent=2))
    else:
        print_parts(facts_table(found[0]))


def show_search(state: Experiment, *, as_json: bool) -> None:
    """Print a search: its settings, and its trials, the best one first."""
    objective = objective_in(state.settings)
    trials = best_first(list(state.trials.values()), objective)
    about = {
        "experiment": state.name,
        "metric": list(objective.metrics) if objective else None,
        "mode": list(objective.modes) if objective else None,
        "trials_by_status": counted(state),
        "epoch": state.epoch,
        "owner": str(state.owner or ""),
    }
    if as_json:
        shown = about | {"settings": shown_settings(state.settings), "trials": [_facts(each) for each in trials]}
        print(json.dumps(shown, indent=2))
        return
    metrics = objective.metrics if objective else ()
    print_parts(facts_table(_head(state, about)), "", trials_table(trials[:_TRIALS_SHOWN], metrics))
    if len(trials) > _TRIALS_SHOWN:
        print_parts(f"and {len(trials) - _TRIALS_SHOWN} more; --json prints all")
    _show_errors(trials)


def _head(state: Experiment, about: Mapping[str, object]) -> Mapping[str, object]:
    """The lines above the table of trials."""
    objective = objective_in(state.settings)
    by = zip(objective.metrics, objective.modes, strict=True) if objective else ()
    return {
        "experiment": state.name,
        **({"by": ", ".join(f"{mode} {name}" for name, mode in by)} if objective else {}),
        "trials": format_counts(counted(state)),
        "owner": about["owner"],
    }


def _show_errors(trials: Sequence[Trial]) -> None:
    errored = [each for each in trials if each.status == "errored"]
    if errored:
        table = borderless_table("errored", "because")
        for each in errored[:_ERRORS_SHOWN]:
            table.add_row(*plain_cells((each.trial, first_line(each.reason))))
        print_parts("", table)
    if len(errored) > _ERRORS_SHOWN:
        print_parts(f"and {len(errored) - _ERRORS_SHOWN} more errored; --json prints all")


def _facts(trial: Trial) -> dict[str, object]:
    return {
        "trial": trial.trial,
        "status": str(trial.status),
        "reason": trial.reason,
        "step": trial.step,
        "metrics": dict(trial.metrics),
        "checkpoints": [each.step for each in trial.checkpoints],
        "quarantined": len(trial.quarantined),
        "attempts": trial.attempt,
        "wasted_steps": trial.wasted_steps,
        "trained_seconds": trial.trained_seconds,
        "config": dict(trial.config),
    }
