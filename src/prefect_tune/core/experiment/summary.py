"""Summarize an experiment for users: trials by status and as HTML, the best trial, learning curves, settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, cast, get_args

from prefect_tune.core.display_text import first_line, format_size, pluralize, shorten
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ReplayEvent, Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events import AttemptStarted, CheckpointCloned, Entry, Event, StepReported, TrialAdded
from prefect_tune.core.page_elements import Cell, Code, Table, Text, Verbatim, make_values_table, render_notebook_cell
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.search.objective import Mode, Objective, make_objective
from prefect_tune.core.values import StepReport, flatten

if TYPE_CHECKING:
    from prefect_tune.core.journal_events import CheckpointRef

# Rank trials by their last report, or by other reports if the caller passes a scope.
#
# The last report belongs to the newest checkpoint, which `Results.checkpoint` and `export` return. A comparison by the
# best of all reports would favour noisy and long trials, would need the learning curves, and could choose a report that
# has no checkpoint. Retention uses `rank_checkpoints`, which compares the reports saved with the checkpoints.

Scope: TypeAlias = Literal["last", "all", "avg", "last-5-avg", "last-10-avg"]
"""In Ray Tune's words, the reports by which trials are compared: the last one, the best of all, or a mean."""

Losses: TypeAlias = tuple[float, ...]
"""One number for each metric; smaller is better."""
_Item = TypeVar("_Item")


def format_best_label(objective: Objective) -> str:
    """Return the label of the best trial: `best`, followed by the first metric if the objective has several."""
    return "best" if len(objective.metrics) == 1 else f"best {objective.metrics[0]}"


def validate_scope(scope: Scope) -> Scope:
    """Return `scope`. Raises `InvalidInput` if `scope` is none of the values of `Scope`."""
    if scope in get_args(Scope):
        return scope
    raise InvalidInput(f"scope {scope!r}: expected one of {', '.join(map(repr, get_args(Scope)))}")


def score_reports(reports: Sequence[Mapping[str, object]], objective: Objective, scope: Scope) -> Losses | None:
    """Return a trial's score from the metrics of its reports; None if no report has all metrics of the objective.

    A report without a number for each metric is skipped. If the last report is skipped, scope `last` gives None.
    """
    scores = [losses for metrics in reports if (losses := compute_losses(metrics, objective)) is not None]
    if not scores or scope == "last":
        return compute_losses(reports[-1], objective) if scores else None
    if scope == "all":
        return min(scores)
    averaged = {"avg": scores, "last-5-avg": scores[-5:], "last-10-avg": scores[-10:]}[scope]
    return tuple(sum(column) / len(averaged) for column in zip(*averaged, strict=True))


def compute_losses(metrics: Mapping[str, object], objective: Objective) -> Losses | None:
    """Return the objective's metrics as losses (smaller is better); None if a metric is missing or not a number."""
    try:
        return objective.losses(metrics, "the report")
    except BadMetric:
        return None


def rank_trials(trials: Iterable[Trial], objective: Objective | None) -> list[tuple[Trial, Losses]]:
    """Return each trial whose last report has all metrics, with its losses, best first; equal trials keep their order.

    A trial whose last report belongs to a clone comes after equal trials. Without an objective, the list is empty.
    """
    if objective is None:
        return []
    by_origin = sorted(trials, key=lambda trial: trial.has_inherited_report)
    return sort_by_losses((trial, compute_losses(trial.metrics, objective)) for trial in by_origin)


def sort_by_losses(scores: Iterable[tuple[_Item, Losses | None]]) -> list[tuple[_Item, Losses]]:
    """Return the pairs whose losses are not None, best first; pairs with equal losses keep their order."""
    return sorted([(item, losses) for item, losses in scores if losses is not None], key=lambda pair: pair[1])


def rank_checkpoints(checkpoints: Iterable[CheckpointRef], objective: Objective) -> list[CheckpointRef]:
    """Return the checkpoints whose reports have all metrics, best first; equally good checkpoints keep their order."""
    return [ref for ref, _ in sort_by_losses((ref, compute_losses(ref.metrics, objective)) for ref in checkpoints)]


def find_pareto_front(scores: Iterable[tuple[_Item, Losses]]) -> list[_Item]:
    """Return the Pareto front (the items that no other item dominates), sorted by the first metric, best first.

    One item dominates another if it is at least as good in every metric, and better in one. Equal items do not.
    """
    optimal: list[tuple[_Item, Losses]] = []
    for item, losses in sort_by_losses(scores):  # all items that dominate this one come earlier
        if not any(
            other != losses and all(mine <= theirs for mine, theirs in zip(other, losses, strict=True))
            for _, other in optimal
        ):
            optimal.append((item, losses))
    return [item for item, _ in optimal]


@dataclass(frozen=True, slots=True)
class ExploitRecord:
    """An exploit: a trial continued from another trial's checkpoint, with another configuration."""

    step: int
    source: str
    """The other trial."""
    changed: Mapping[str, tuple[object, object]]
    """The old and the new value of each changed parameter."""


def list_exploits(entries: Iterable[Entry], trial: str) -> Sequence[ExploitRecord]:
    """Return the exploits of a trial, in order, from the entries of its experiment's journal."""
    config: Mapping[str, object] = {}
    exploits: list[ExploitRecord] = []
    for event in _iter_config_events(entries, trial):
        following = event.config or {}
        if isinstance(event, CheckpointCloned):
            names = [*following, *(name for name in config if name not in following)]
            values = {name: (config.get(name), following.get(name)) for name in names}
            changed = {name: (old, new) for name, (old, new) in values.items() if old != new}
            exploits.append(ExploitRecord(event.checkpoint.step, event.source, changed))
        config = following
    return exploits


def find_checkpoint_config(entries: Iterable[Entry], trial: str, sequence: int) -> Mapping[str, object]:
    """Return a trial's configuration at its checkpoint `sequence`; later exploits may have changed the configuration.

    If the checkpoint is a clone, return the configuration with which the trial continues from it.
    """
    config: Mapping[str, object] = {}
    for event in _iter_config_events(entries, trial):
        if isinstance(event, TrialAdded) or event.checkpoint.sequence <= sequence:
            config = event.config or {}
    return config


def _iter_config_events(entries: Iterable[Entry], trial: str) -> Iterator[TrialAdded | CheckpointCloned]:
    """Yield the events that set the configuration of a trial."""
    for event in (event for entry in entries for event in entry.events):
        if isinstance(event, TrialAdded | CheckpointCloned) and event.trial == trial and event.config is not None:
            yield event


class LearningCurves:
    """The reports of every trial, one for each step; for a step that was trained again, the later report.

    If a trial has exploited another trial, its curve begins with the step of the clone.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """Args: entries: the first entries of the experiment's journal."""
        self._reports: dict[str, dict[int, StepReport]] = {}
        self.report_count = 0
        """The number of reports added so far, including repeated steps."""
        self.attempts: dict[str, int] = {}  # by trial: the number of the last attempt that began
        self.clones: dict[str, int] = {}  # by trial: the sequence of its last clone
        for entry in entries:
            self.add_entry(entry)

    def add_entry(self, entry: Entry) -> None:
        """Add the reports of the next entry."""
        for event in entry.events:
            self.add_event(event)

    def add_event(self, event: Event) -> None:
        """Add the reports of the next event."""
        match event:
            case AttemptStarted(trial=trial, attempt=attempt, from_step=start):
                self.attempts[trial], reports = attempt, self._reports.get(trial, {})
                self._reports[trial] = {step: report for step, report in reports.items() if step <= start}
            case CheckpointCloned(trial=trial, checkpoint=clone):
                self.clones[trial], self._reports[trial] = clone.sequence, {clone.step: clone.report}
            case StepReported(trial=trial, report=report):
                self._reports.setdefault(trial, {})[report.step] = report
                self.report_count += 1
            case _:
                pass

    def get_curve(self, trial: str) -> Sequence[StepReport]:
        """Return the reports of a trial in the order of the steps."""
        reports = self._reports.get(trial, {})
        return [reports[step] for step in sorted(reports)]


_MASKED_SETTING = "trial_job_variables"
_DISPLAY_NAMES = {"code": "code_fingerprint", "only_in_code": "not_stored"}
_MASK = "********"
_BLOCK_REFERENCE = re.compile(r"\{\{\s*prefect\.(blocks|variables)\.[^{}]+\}\}")


def may_have_several_trials(state: Experiment) -> bool:
    """Return whether the experiment can have several trials; `durable_trainable` stores one trial, and no settings."""
    return bool(state.settings) or len(state.trials) > 1


def get_experiment_kind(state: Experiment) -> str:
    """Return "search" or "training"; an experiment whose trials run in a user's own flow is a training."""
    was_proposed = any(trial.proposed_by_search for trial in state.trials.values())
    return "search" if state.settings or was_proposed else "training"


def count_by_status(state: Experiment) -> Mapping[str, int]:
    """Return the number of trials by status, in the order of `Status`."""
    counts = Counter(trial.status for trial in state.trials.values())
    return {str(status): counts[status] for status in Status if counts[status]}


def require_trial(state: Experiment, name: str) -> Trial:
    """Return the trial with this name, or with this number: `8` for `00008`.

    Raises:
        InvalidInput: there is no such trial.
    """
    if trial := find_trial(state.trials, name):
        return trial
    names = list(state.trials)
    name_range = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
    raise InvalidInput(f"experiment {state.name!r}: there is no trial {name!r} among its {len(names)}{name_range}")


def find_trial(trials: Mapping[str, Trial], name: str) -> Trial | None:
    """Return the trial with this name, or with this number: `8` for `00008`; None if there is none."""
    if name in trials or not name.isdecimal():
        return trials.get(name)
    return next((trial for other, trial in trials.items() if other.isdecimal() and int(other) == int(name)), None)


def objective_from_settings(settings: Mapping[str, object]) -> Objective | None:
    """Return the objective of these settings; None if they name no metric."""
    metric = cast("str | list[str] | None", settings.get("metric"))
    return make_objective(metric, cast("Mode | list[Mode]", settings.get("mode", "min")))


def settings_for_display(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` for display. The texts in job variables are masked, because they may be secrets.

    Numbers, and references to saved blocks such as `{{ prefect.blocks.secret.wandb }}`, are not masked.
    """
    return {
        _DISPLAY_NAMES.get(name, name): _mask_text(value) if name == _MASKED_SETTING else value
        for name, value in settings.items()
    }


def _mask_text(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _mask_text(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_text(item) for item in value]
    return _MASK if isinstance(value, str) and not _BLOCK_REFERENCE.fullmatch(value) else value


def sort_trials(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the trials, sorted by their last reports, best first; trials that cannot be compared come last."""
    comparable = {trial.id: trial for trial, _ in rank_trials(trials, objective)}
    return [*comparable.values(), *(trial for trial in trials if trial.id not in comparable)]


def find_best_trial(state: Experiment) -> Trial | None:
    """Return the trial whose last report is the best; None if no trial can be compared.

    The best trial may have errored, as in `Results.best`; `format_best_trial_name` marks it.
    """
    ranked = rank_trials(state.trials.values(), objective_from_settings(state.settings))
    return ranked[0][0] if ranked else None


def format_best_trial_name(trial: str, status: str) -> str:
    """Return the name of the best trial, followed by `, errored` if it errored."""
    return f"{trial}, errored" if status == Status.ERRORED else trial


# A trial as text and as HTML.

_MAX_HISTORY_ROWS = 8
_MAX_TRACEBACK_CHARACTERS = 4_000
_INCOMPLETE_STATUSES = frozenset({Status.PRUNED, Status.INTERRUPTED, Status.PAUSED})


def format_status(status: str, step: int) -> str:
    """Return the status for users, with the last step of an incomplete trial: `pruned @3`, `completed`."""
    return f"{status} @{step}" if status in _INCOMPLETE_STATUSES and step else str(status)


def format_recomputed_steps(steps: int, *, at_least: bool) -> str:
    """Return the number of recomputed steps, such as `at least 3 steps`; an empty text for 0."""
    return f"{'at least ' * at_least}{pluralize(steps, 'step', 'steps')}" if steps else ""


def format_trial_html(trial: Trial) -> str:
    """Return a trial as HTML for a notebook, with its history, its newest checkpoint and its whole error."""
    seconds = "" if trial.measured_seconds is None else f" in {trial.measured_seconds:,.1f} s"
    attempts = f", {pluralize(trial.attempt, 'attempt', 'attempts')}" if trial.attempt > 1 else ""
    steps = format_recomputed_steps(trial.recomputed_steps, at_least=trial.recomputed_is_lower_bound)
    recomputed = f", {steps} trained again" if steps else ""
    trained = f"{pluralize(trial.step, 'step', 'steps')}{seconds}{attempts}{recomputed}"
    rows: list[tuple[str, Cell]] = [("trained", trained)]
    history = [text for event in trial.policy_events if (text := _describe_replay_event(event))]
    earlier_count = max(0, len(history) - _MAX_HISTORY_ROWS)
    earlier = [pluralize(earlier_count, "earlier event", "earlier events")] if earlier_count else []
    rows += [("" if index else "history", text) for index, text in enumerate([*earlier, *history[earlier_count:]])]
    if (newest := newest_checkpoint(trial)) is None:
        rows.append(("checkpoint", "none"))
    else:
        others = f"; {len(trial.checkpoints)} are kept" if len(trial.checkpoints) > 1 else ""
        size = f", {format_size(newest.size_bytes)}" if newest.size_bytes else ""
        rows.append(("checkpoint", f"step {newest.step}{size}{others}"))
        rows.append(("", Verbatim(f"results.checkpoint({trial.id!r})")))
    is_errored = trial.status is Status.ERRORED
    if trial.reason and not is_errored:
        rows.append(("reason", first_line(trial.reason)))
    return render_notebook_cell(
        Text([f"Trial {trial.id} · {format_status(trial.status, trial.step)}"], kind="strong"),
        make_values_table("metric", flatten(trial.metrics)),
        make_values_table("parameter", flatten(trial.config)),
        Table((), [(name, cell if isinstance(cell, Verbatim) else shorten(str(cell), 300)) for name, cell in rows]),
        *([Code(trial.reason[-_MAX_TRACEBACK_CHARACTERS:], "text")] if is_errored else []),
    )


def _describe_replay_event(event: ReplayEvent) -> str:
    prefix = f"step {event.report.step}: " if event.report else ""
    if event.kind == "decided" and event.decision is not None:
        decision = event.decision
        reason = "" if isinstance(decision, Continue) else f", {first_line(decision.reason)}"
        return f"{prefix}{decision.type}{reason}"
    if event.kind == "resumed":
        return f"{prefix}resumed"
    return f"{prefix}failed" if event.failed else ""
