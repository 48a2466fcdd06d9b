"""Summarize an experiment for people: trials by status and as HTML, the best trial, learning curves, settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, cast, get_args

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import PastEvent, Status, Trial, newest_checkpoint
from prefect_tune.core.journal_events import Cloned, Entry, Event, Reported, Started, TrialAdded
from prefect_tune.core.page_elements import Cell, Code, Table, Text, Verbatim, cell_html, values_table
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.search.objective import Mode, Objective, objective_of
from prefect_tune.core.shown_text import first_line, plural, shorten, shown_size
from prefect_tune.core.values import StepReport, flat

if TYPE_CHECKING:
    from prefect_tune.core.journal_events import CheckpointRef

# Rank trials: by their last report wherever one is called the best, by other reports only where a scope is given.
#
# The last report is that of the newest checkpoint, which `Results.checkpoint` and `export` return; the best of all
# reports favours noisy and long trials, may not be saved, and is known only from the learning curves. Checkpoints are
# ranked by the report that they were saved with: `best_saved`, for retention too.

Scope: TypeAlias = Literal["last", "all", "avg", "last-5-avg", "last-10-avg"]
"""The reports by which trials are compared, in Ray Tune's words: the last one, the best of all, or a mean."""

Losses: TypeAlias = tuple[float, ...]
"""One number for each metric, smaller is better."""
_Key = TypeVar("_Key")


def best_label(objective: Objective) -> str:
    """Return what the best trial, by the last report, is called; of several metrics it names the one that decides."""
    return "best" if len(objective.metrics) == 1 else f"best {objective.metrics[0]}"


def valid_scope(scope: Scope) -> Scope:
    """Return `scope`. Raises `InvalidInput` if it is none."""
    if scope in get_args(Scope):
        return scope
    raise InvalidInput(f"scope {scope!r}: expected one of {', '.join(map(repr, get_args(Scope)))}")


def scored(curve: Sequence[Mapping[str, object]], objective: Objective, scope: Scope) -> Losses | None:
    """Return a trial's score from the metrics of its reports; None where no report has all metrics.

    A report that lacks a metric, or has a text in its place, is skipped; with scope `last` the result is None
    if the last report is such a one.
    """
    found = [losses for metrics in curve if (losses := losses_in(metrics, objective)) is not None]
    if not found or scope == "last":
        return losses_in(curve[-1], objective) if found else None
    if scope == "all":
        return min(found)
    averaged = {"avg": found, "last-5-avg": found[-5:], "last-10-avg": found[-10:]}[scope]
    return tuple(sum(column) / len(averaged) for column in zip(*averaged, strict=True))


def losses_in(metrics: Mapping[str, object], objective: Objective) -> Losses | None:
    """Return the objective's metrics, so that smaller is better; None where one is missing or no number."""
    try:
        return objective.losses(metrics, "the report")
    except BadMetric:
        return None


def ranked(trials: Iterable[Trial], objective: Objective | None) -> list[tuple[Trial, Losses]]:
    """Return the trials that can be compared by their last reports, best first; of equals, the one proposed first.

    But a trial that inherits its last report comes after equal ones that made theirs. `trials` are in the order in
    which they were proposed. Without an objective the result is empty.
    """
    if objective is None:
        return []
    in_order = sorted(trials, key=lambda each: each.inherits)
    return smallest_first((each, losses_in(each.metrics, objective)) for each in in_order)


def smallest_first(scores: Iterable[tuple[_Key, Losses | None]]) -> list[tuple[_Key, Losses]]:
    """Return the pairs that have losses, best first; of equals, the one that comes first in `scores`."""
    compared = [(key, losses) for key, losses in scores if losses is not None]
    return sorted(compared, key=lambda pair: pair[1])


def best_saved(checkpoints: Iterable[CheckpointRef], objective: Objective) -> list[CheckpointRef]:
    """Return the checkpoints whose report has the metrics, best first; of equals, the one that comes first."""
    return [each for each, _ in smallest_first((each, losses_in(each.metrics, objective)) for each in checkpoints)]


def front(scores: Iterable[tuple[_Key, Losses]]) -> list[_Key]:
    """Return the keys of the Pareto front: no other is at least as good in every metric and better in one.

    Equal ones are all on it. Sorted by the first metric, best first.
    """
    kept: list[tuple[_Key, Losses]] = []
    for key, losses in smallest_first(scores):  # one that dominates it comes before it
        if not any(
            other != losses and all(mine <= theirs for mine, theirs in zip(other, losses, strict=True))
            for _, other in kept
        ):
            kept.append((key, losses))
    return [key for key, _ in kept]


@dataclass(frozen=True, slots=True)
class Exploited:
    """A trial went on from a checkpoint of another one, with another configuration."""

    step: int
    source: str
    """The other trial."""
    changed: Mapping[str, tuple[object, object]]
    """By parameter, its value before, and from here on."""


def exploited_by(entries: Iterable[Entry], trial: str) -> Sequence[Exploited]:
    """Return what a trial exploited, in order, from the entries of its experiment's journal."""
    config: Mapping[str, object] = {}
    found: list[Exploited] = []
    for event in _configured_by(entries, trial):
        following = event.config or {}
        if isinstance(event, Cloned):
            names = [*following, *(each for each in config if each not in following)]
            values = {each: (config.get(each), following.get(each)) for each in names}
            changed = {each: (old, new) for each, (old, new) in values.items() if old != new}
            found.append(Exploited(event.checkpoint.step, event.source, changed))
        config = following
    return found


def config_at(entries: Iterable[Entry], trial: str, sequence: int) -> Mapping[str, object]:
    """Return the configuration with which a trial saved its checkpoint of this sequence, before or after exploits.

    Args:
        entries: of the experiment's journal.
        trial: its name.
        sequence: of the checkpoint; a clone has the configuration with which the trial continues from it.
    """
    config: Mapping[str, object] = {}
    for event in _configured_by(entries, trial):
        if isinstance(event, TrialAdded) or event.checkpoint.sequence <= sequence:
            config = event.config or {}
    return config


def _configured_by(entries: Iterable[Entry], trial: str) -> Iterator[TrialAdded | Cloned]:
    """Yield the events that have set the configuration of a trial."""
    for event in (event for entry in entries for event in entry.events):
        if isinstance(event, TrialAdded | Cloned) and event.trial == trial and event.config is not None:
            yield event


class Curves:
    """The reports of every trial, one for each step; for a step that was trained again, the later report.

    The curve of a trial that was cloned into begins with the clone's step.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """Args: entries: the first entries of the experiment's journal."""
        self._reports: dict[str, dict[int, StepReport]] = {}
        self.report_count = 0
        """How many reports were added so far, repeated steps included."""
        for entry in entries:
            self.tell(entry)

    def tell(self, entry: Entry) -> None:
        """Add the reports of the next entry."""
        for event in entry.events:
            self.tell_event(event)

    def tell_event(self, event: Event) -> None:
        """Add the reports of the next event."""
        match event:
            case Started(trial=trial, from_step=start) if trial in self._reports:
                reports = self._reports[trial]
                self._reports[trial] = {step: each for step, each in reports.items() if step <= start}
            case Cloned(trial=trial, checkpoint=copy):
                self._reports[trial] = {copy.step: copy.report}
            case Reported(trial=trial, report=report):
                self._reports.setdefault(trial, {})[report.step] = report
                self.report_count += 1
            case _:
                pass

    def of(self, trial: str) -> Sequence[StepReport]:
        """Return the curve of a trial, by step; empty where it has no report."""
        reports = self._reports.get(trial, {})
        return [reports[step] for step in sorted(reports)]


_HAS_SECRETS = "trial_job_variables"
_SHOWN_NAMES = {"code": "code_fingerprint", "only_in_code": "not_stored"}
_MASK = "********"
_REFERENCE = re.compile(r"\{\{\s*prefect\.(blocks|variables)\.[^{}]+\}\}")


def is_search(state: Experiment) -> bool:
    """Return whether `state` is a search; an experiment of `durable_trainable` has one trial and no settings."""
    return bool(state.settings) or len(state.trials) > 1


def kind_of(state: Experiment) -> str:
    """Return "search" or "training": trials of a flow of one's own, however many, are trainings."""
    return "search" if state.settings or any(trial.of_search for trial in state.trials.values()) else "training"


def counted(state: Experiment) -> Mapping[str, int]:
    """Return the number of trials by status, in the order of `Status`."""
    found = Counter(each.status for each in state.trials.values())
    return {str(status): found[status] for status in Status if found[status]}


def trial_named(state: Experiment, given: str) -> Trial:
    """Return the trial that a person names: by its name, or by its number alone, `8` for `00008`.

    Raises:
        InvalidInput: there is no such trial.
    """
    if found := trial_in(state.trials, given):
        return found
    names = list(state.trials)
    there = f" ({names[0]} to {names[-1]})" if len(names) > 1 else ""
    raise InvalidInput(f"experiment {state.name!r}: there is no trial {given!r} among its {len(names)}{there}")


def trial_in(trials: Mapping[str, Trial], given: str) -> Trial | None:
    """Return the trial of this name, or of this number: `8` for `00008`; None if there is none."""
    if given in trials or not given.isdecimal():
        return trials.get(given)
    return next((each for name, each in trials.items() if name.isdecimal() and int(name) == int(given)), None)


def objective_in(settings: Mapping[str, object]) -> Objective | None:
    """Return the objective in these settings; None where they name no metric."""
    metric = cast("str | list[str] | None", settings.get("metric"))
    return objective_of(metric, cast("Mode | list[Mode]", settings.get("mode", "min")))


def shown_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` for display, with the text values of job variables masked: they may be secrets.

    Numbers are shown, and so are references to saved blocks, such as `{{ prefect.blocks.secret.wandb }}`.
    """
    return {
        _SHOWN_NAMES.get(name, name): _masked(value) if name == _HAS_SECRETS else value
        for name, value in settings.items()
    }


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return _MASK if isinstance(value, str) and not _REFERENCE.fullmatch(value) else value


def best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the trials by their last reports, best first; trials that cannot be compared come last."""
    compared = {each.trial: each for each, _ in ranked(trials, objective)}
    return [*compared.values(), *(each for each in trials if each.trial not in compared)]


def best_of(state: Experiment) -> Trial | None:
    """Return the trial whose last report is the best; None where no trial can be compared.

    The last report counts even if the trial errored, as for `Results.best`; `named` marks that.
    """
    return next((each for each, _ in ranked(state.trials.values(), objective_in(state.settings))), None)


def named(trial: str, status: str) -> str:
    """Return the name of the best trial, followed by `, errored` where it has errored."""
    return f"{trial}, errored" if status == Status.ERRORED else trial


# A trial in words, and as HTML.

_MAX_PAST = 8
_MAX_TRACEBACK = 4_000
_ENDED_SHORT = frozenset({Status.PRUNED, Status.INTERRUPTED, Status.PAUSED})


def status_label(status: str, step: int) -> str:
    """Return the status for people, with the step where it says how far the trial came: `pruned @3`, `completed`."""
    return f"{status} @{step}" if status in _ENDED_SHORT and step else str(status)


def wasted_words(steps: int, *, at_least: bool) -> str:
    """Return a number of wasted steps in words; empty if none is known."""
    return f"{'at least ' * at_least}{plural(steps, 'step', 'steps')}" if steps else ""


def trial_html(trial: Trial) -> str:
    """Return a trial for a notebook, with its history, its newest checkpoint and its whole error."""
    seconds = "" if trial.measured_seconds is None else f" in {trial.measured_seconds:,.1f} s"
    attempts = f", {plural(trial.attempt, 'attempt', 'attempts')}" if trial.attempt > 1 else ""
    wasted = wasted_words(trial.wasted_steps, at_least=trial.wasted_at_least)
    again = f", {wasted} trained again" if wasted else ""
    rows: list[tuple[str, Cell]] = [("trained", f"{plural(trial.step, 'step', 'steps')}{seconds}{attempts}{again}")]
    past = [words for event in trial.past if (words := _words_of(event))]
    earlier_count = max(0, len(past) - _MAX_PAST)
    earlier = [plural(earlier_count, "earlier event", "earlier events")] if earlier_count else []
    rows += [("" if index else "history", words) for index, words in enumerate([*earlier, *past[earlier_count:]])]
    if (newest := newest_checkpoint(trial)) is None:
        rows.append(("checkpoint", "none"))
    else:
        others = f"; {len(trial.checkpoints)} are kept" if len(trial.checkpoints) > 1 else ""
        size = f", {shown_size(newest.size_bytes)}" if newest.size_bytes else ""
        rows.append(("checkpoint", f"step {newest.step}{size}{others}"))
        rows.append(("", Verbatim(f"results.checkpoint({trial.trial!r})")))
    is_errored = trial.status is Status.ERRORED
    if trial.reason and not is_errored:
        rows.append(("reason", first_line(trial.reason)))
    return cell_html(
        Text([f"Trial {trial.trial} · {status_label(trial.status, trial.step)}"], kind="strong"),
        values_table("metric", flat(trial.metrics)),
        values_table("parameter", flat(trial.config)),
        Table((), [(name, cell if isinstance(cell, Verbatim) else shorten(str(cell), 300)) for name, cell in rows]),
        *([Code(trial.reason[-_MAX_TRACEBACK:], "text")] if is_errored else []),
    )


def _words_of(past_event: PastEvent) -> str:
    at = f"step {past_event.report.step}: " if past_event.report else ""
    if past_event.what == "decided" and past_event.decision is not None:
        decision = past_event.decision
        reason = "" if isinstance(decision, Continue) else f", {first_line(decision.reason)}"
        return f"{at}{decision.type}{reason}"
    if past_event.what == "resumed":
        return f"{at}resumed"
    return f"{at}failed" if past_event.failed else ""
