"""The cost of an experiment: what each second of its slots was used for, computed from the journal.

    slots * time of the runs  =  useful training + lost + start + restoring + saving + waiting + ending + idle

A run begins when it takes over the experiment. It ends when its last slot is freed or, if killed, at its last live
status. An attempt holds its slot from the search's request for the attempt until the slot is free. The time before
the attempt begins is "start"; the time after its last journal entry is "ending". An attempt whose end was not journaled
ends with its run, or when the trial's next attempt begins; its training after its last commit is lost. All other time
is idle. If an attempt outlives its run, the time that the attempt measures before the next run is added to the sum.

Durations come from monotonic clocks (`run_clock_now`). Only the time at which an attempt began can come from another
clock, if the attempt was lost or ran on another machine. If this time is outside the attempt's slot or run, the nearest
time inside is used instead, and `is_begin_clamped` is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Self

from prefect_tune.core.display_text import format_seconds, pluralize
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, compute_unsaved_seconds
from prefect_tune.core.page_elements import Table, Text, render_notebook_cell
from prefect_tune.core.usage_records import AttemptRecord, AttemptUsage, GroupUsage, PhaseSeconds, RankEnd
from prefect_tune.core.values import parse_time


class CostCategory(StrEnum):
    """What a second of a slot was used for; `meaning` explains the category to users."""

    meaning: str

    def __new__(cls, label: str, meaning: str) -> Self:
        """Return a member whose value is the label."""
        member = str.__new__(cls, label)
        member._value_, member.meaning = label, meaning
        return member

    TRAINING = "training", "Training that was not lost."
    LOST = "lost", "Training after the last commit of a failed or lost attempt. The next attempt repeats these steps."
    START = "start and import", "Before training: launch, queue, journal entry, start of the process, import, `setup`."
    RESTORING = "restoring", "The download of the checkpoint, and `load_checkpoint`."
    SAVING = "saving", "Training waited for `save_checkpoint`, the copy of its files, or an upload."
    WAITING = "waiting for a decision", "Training waited until the search decided."
    ENDING = "ending", "From the trial's last message until its slot is free: uploads, `cleanup`, journal entries."
    IDLE = "idle", "No attempt held the slot."

    @property
    def key(self) -> str:
        """The name of the category in JSON and tables."""
        return self.name.lower()


_MEASURED_CATEGORIES = tuple(category for category in CostCategory if category.key in PhaseSeconds.model_fields)
"""The categories whose seconds an attempt measures itself."""


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """The cost of one attempt."""

    trial: str
    attempt: int
    began_at: datetime
    """When the attempt got its slot; if this is unknown, when the attempt began."""
    seconds: Mapping[CostCategory, float]
    """The seconds of each category except idle."""
    usage: AttemptUsage | None
    """The processor and memory usage of the attempt; None if it is running or was lost."""
    is_begin_clamped: bool = False
    """Whether another clock says that the attempt began outside its slot or run; `began_at` is then moved inside."""

    @property
    def rank_ends(self) -> Sequence[RankEnd]:
        """How the ranks of the attempt ended; empty if nothing is recorded."""
        return self.usage.ends if isinstance(self.usage, GroupUsage) else ()

    @property
    def total_seconds(self) -> float:
        """The number of seconds for which the attempt held its slot."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class RunCost:
    """The slots of one run, and how long the run held them."""

    began_at: datetime
    seconds: float
    slots: int | None
    """The number of slots. None if it is unlimited: then only used slots count, and no slot is idle."""


@dataclass(frozen=True, slots=True, repr=False)
class ExperimentCost:
    """The cost of an experiment so far. Its `repr` is a sentence; a notebook also shows a table of the categories."""

    runs: Sequence[RunCost]
    attempts: Sequence[AttemptCost]
    """The costs of the attempts, grouped by trial, in the order in which the trials were added."""
    seconds: Mapping[CostCategory, float]
    """The seconds of all slots by category; their sum is `slot_seconds`."""

    @property
    def slot_seconds(self) -> float:
        """The number of seconds of all slots in all runs."""
        return sum(self.seconds.values())

    @property
    def run_seconds(self) -> float:
        """The time of all runs, without the time between them."""
        return sum(run.seconds for run in self.runs)

    def __repr__(self) -> str:
        """Return the number of attempts and the text of `format_cost`."""
        attempts = pluralize(len(self.attempts), "attempt", "attempts")
        return f"<ExperimentCost of {attempts}: {format_cost(self) or 'no slot was held yet'}>"

    def _repr_html_(self) -> str:
        total = self.slot_seconds or 1.0
        rows = [
            (str(category), format_seconds(seconds), format_percentage(seconds / total), category.meaning)
            for category, seconds in self.seconds.items()
            if seconds / total >= _MIN_LISTED_SHARE
        ]
        sentence = format_cost(self) or "no slot was held yet"
        return render_notebook_cell(Text([sentence]), Table(("slots", "time", "share", ""), rows))

    def group_attempts_by_trial(self) -> Mapping[str, Sequence[AttemptCost]]:
        """Return the attempts by trial; a trial without attempts is absent."""
        attempts: dict[str, list[AttemptCost]] = {}
        for attempt in self.attempts:
            attempts.setdefault(attempt.trial, []).append(attempt)
        return attempts


_HELD_CATEGORIES = tuple(category for category in CostCategory if category is not CostCategory.IDLE)


def compute_cost(experiment: Experiment, until: datetime) -> ExperimentCost:
    """Return the cost of an experiment.

    Args:
        experiment: the state from its journal; its running trials may already have reports that are not journaled yet.
        until: the time of the newest information about running trials; their attempts count until this time.
    """
    runs = _compute_run_spans(experiment, until)
    attempts = [cost for trial in experiment.trials.values() for cost in _iter_attempt_costs(trial, runs, until)]
    seconds: Counter[CostCategory] = Counter()
    for attempt in attempts:
        seconds.update(attempt.seconds)
    run_costs = [RunCost(run.begin, (run.end - run.begin).total_seconds(), run.slots) for run in runs]
    idle = sum(max(0.0, (run.slots or 0) * run.seconds - _sum_busy_seconds(run, attempts)) for run in run_costs)
    return ExperimentCost(
        run_costs, attempts, {key: seconds[key] for key in _HELD_CATEGORIES} | {CostCategory.IDLE: idle}
    )


@dataclass(frozen=True, slots=True)
class _RunSpan:
    """When a run began and ended, by the run's own clock."""

    term: int
    begin: datetime
    end: datetime
    slots: int | None


def _compute_run_spans(experiment: Experiment, until: datetime) -> Sequence[_RunSpan]:
    """Return the spans of the runs; a run lasts at least until the last journaled event of its attempts."""
    times = ((run, parse_time(run.began_at), parse_time(run.ended_at or run.began_at)) for run in experiment.runs)
    runs = [
        _RunSpan(run.term, begin, end, run.slots) for run, begin, end in times if begin is not None and end is not None
    ]
    for trial in experiment.trials.values():
        for record in trial.attempt_records:
            began = parse_time(record.began_at or "")
            if began is None or record.slot_at is not None or not runs:
                continue  # if `slot_at` is known, the event `SlotFreed` has already extended the run
            index = _find_run_index(runs, record, began)
            last = _add_seconds(_clamp_begin(runs, index, began), record.seconds.total)
            if trial.phase is Phase.RUNNING and record is trial.attempt_records[-1]:
                index, last = len(runs) - 1, max(last, until)
            runs[index] = replace(runs[index], end=max(runs[index].end, last))
    return runs


def _find_run_index(runs: Sequence[_RunSpan], record: AttemptRecord, began: datetime) -> int:
    """Return the index of the attempt's run: by its term, or else the last run that did not begin after `began`."""
    by_time = max((index for index, run in enumerate(runs) if run.begin <= began), default=0)
    return next((index for index, run in enumerate(runs) if run.term == record.term), by_time)


def _clamp_begin(runs: Sequence[_RunSpan], index: int, began: datetime) -> datetime:
    """Return `began`, moved into the attempt's run: not before the run began, and not after the next run began.

    The times may come from different clocks. An attempt of the user's own flow has no slot, so its time is not moved.
    """
    run, following = runs[index], next(iter(runs[index + 1 :]), None)
    if run.slots is None:
        return began
    first = max(began, run.begin)
    return min(first, following.begin) if following is not None and following.begin > run.begin else first


def _add_seconds(time: datetime, seconds: float) -> datetime:
    return time + timedelta(seconds=seconds)


def _iter_attempt_costs(trial: Trial, runs: Sequence[_RunSpan], until: datetime) -> Iterator[AttemptCost]:
    """Yield the cost of each attempt whose times are known."""
    free_at: datetime | None = None
    for index, record in enumerate(trial.attempt_records):
        following = next(iter(trial.attempt_records[index + 1 :]), None)
        is_running = trial.phase is Phase.RUNNING and following is None
        began, slot_at = parse_time(record.began_at or ""), parse_time(record.slot_at or "")
        outlives_run = slot_at is not None and 0 < record.term < record.slot_term
        if slot_at is not None and not outlives_run:
            first = slot_at
        elif slot_at is not None and record.usage is not None:
            # `slot_at` is when the last run took the slot over. The attempt began earlier: count back from its end.
            first = _add_seconds(slot_at, min(0.0, record.slot_seconds - record.seconds.total))
        elif began is not None:
            first = _clamp_begin(runs, _find_run_index(runs, record, began), began) if runs else began
        else:
            continue
        is_bounded = slot_at is None and first != began
        first = max(first, free_at or first)
        if is_running:
            newest = record.seconds.with_added_seconds(
                "training", compute_unsaved_seconds(trial, trial.trained_seconds)
            )
            record = record.model_copy(update={"seconds": newest})  # noqa: PLW2901  includes its newest report
            free_at = max(until, _add_seconds(began or first, record.seconds.total))
        else:
            free_at = _compute_slot_end(record, first, following, runs)
        free_at = max(first, free_at)
        held_seconds, seconds_before = (free_at - first).total_seconds(), 0.0
        if began is not None and slot_at is not None and not outlives_run:
            gap = (began - first).total_seconds()
            seconds_before = min(max(0.0, gap), max(0.0, held_seconds - record.seconds.total))
            is_bounded = gap != seconds_before
        seconds = _categorize_seconds(record, seconds_before, held_seconds, is_running=is_running)
        yield AttemptCost(trial.id, record.attempt, first, seconds, record.usage, is_bounded)


def _compute_slot_end(
    record: AttemptRecord, first: datetime, following: AttemptRecord | None, runs: Sequence[_RunSpan]
) -> datetime:
    """Return when an ended attempt left its slot."""
    slot_at, began = parse_time(record.slot_at or ""), parse_time(record.began_at or "")
    if slot_at is not None:
        return _add_seconds(slot_at, record.slot_seconds)
    measured_end = _add_seconds(first, record.seconds.total)
    if record.usage is not None or not runs:
        return measured_end
    run = runs[_find_run_index(runs, record, began or first)]
    if run.slots is None:
        return measured_end  # an attempt of the user's own flow has no slot
    is_same_run = following is not None and following.term == record.term
    next_began = parse_time(following.began_at or "") if following is not None and is_same_run else None
    return max(measured_end, min(run.end, next_began or run.end))


def _categorize_seconds(
    record: AttemptRecord, seconds_before: float, held_seconds: float, *, is_running: bool
) -> Mapping[CostCategory, float]:
    """Return an attempt's seconds by category: as measured, `seconds_before` as START, and the rest by a guess."""
    measured = {category: float(getattr(record.seconds, category.key)) for category in _MEASURED_CATEGORIES}
    seconds = dict.fromkeys(_HELD_CATEGORIES, 0.0) | measured
    seconds[CostCategory.START] += seconds_before
    rest = held_seconds - sum(seconds.values())
    has_trained = record.seconds.start > 0  # the first commit sets `start`; earlier, the start of training is unknown
    if record.usage is not None:
        rest_category = CostCategory.ENDING
    elif not has_trained:
        rest_category = CostCategory.START
    else:
        rest_category = CostCategory.TRAINING if is_running else CostCategory.LOST
    if record.is_lost:
        seconds[CostCategory.LOST] = max(0.0, record.seconds.training - record.saved_seconds)
        seconds[CostCategory.TRAINING] -= seconds[CostCategory.LOST]
    if rest >= 0:
        return seconds | {rest_category: seconds[rest_category] + rest}
    measured_seconds = sum(seconds.values())  # exceeds `held_seconds` if clocks differ or the slot was freed early
    return {category: value * held_seconds / measured_seconds for category, value in seconds.items()}


def _sum_busy_seconds(run: RunCost, attempts: Sequence[AttemptCost]) -> float:
    """Return the seconds for which attempts held the run's slots, summed over the slots."""
    end = _add_seconds(run.began_at, run.seconds)
    spans = ((attempt.began_at, _add_seconds(attempt.began_at, attempt.total_seconds)) for attempt in attempts)
    return sum(max(0.0, (min(end, last) - max(run.began_at, first)).total_seconds()) for first, last in spans)


# The cost as text.

MAX_LISTED_LOSSES = 3
_MIN_LISTED_SHARE = 0.005
"""Smaller shares are not listed, since they would be printed as 0 %."""


def format_cost(cost: ExperimentCost) -> str:
    """Return `81 % of 4 h 10 min of 2 slots was training; the largest losses: idle 9 %, saving 4 %`.

    If the number of slots was changed or is unlimited, the text gives the time of all slots: `8 h 20 min of all slots`.
    The text is empty if no slot was held yet.
    """
    if not cost.attempts or not cost.slot_seconds:
        return ""
    shares = {category: seconds / cost.slot_seconds for category, seconds in cost.seconds.items()}
    training_share = format_percentage(shares.pop(CostCategory.TRAINING))
    losses = sorted((loss for loss in shares.items() if loss[1] >= _MIN_LISTED_SHARE), key=lambda loss: -loss[1])
    loss_list = ", ".join(f"{category} {format_percentage(share)}" for category, share in losses[:MAX_LISTED_LOSSES])
    label = "the largest losses" if len(losses) > 1 else "the only loss"
    counts = {run.slots for run in cost.runs}
    (count,) = counts if len(counts) == 1 else (None,)
    if count is None or abs(count * cost.run_seconds - cost.slot_seconds) > 0.01 * cost.slot_seconds:
        slots = f"{format_seconds(cost.slot_seconds)} of all slots"
    else:
        slots = f"{format_seconds(cost.run_seconds)} of {pluralize(count, 'slot', 'slots')}"
    return f"{training_share} of {slots} was training" + (f"; {label}: {loss_list}" if loss_list else "")


def format_percentage(share: float) -> str:
    """Return a share as a percentage: `9 %`."""
    return f"{100 * share:.0f} %"
