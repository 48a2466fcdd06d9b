"""The cost of an experiment: where each second of its slots went, from the fold of its journal.

    slots * time of the runs  =  useful training + lost + start + restoring + saving + waiting + ending + idle

A run's time is from its takeover to the last sign of life of it: a freed slot, or its live status if it was killed.
An attempt is in its slot from the start that the search requested until the search has freed the slot; before it
begins it starts, and after its last entry it ends. An attempt without an end of its own lasts until its run's last
sign of life, or until the trial's next attempt: what it did after its last commit is lost. Idle is what is
left of the slots. An attempt that outlives its search adds the time between the runs.

Durations come from monotonic clocks: an attempt's phases, the seconds of a slot, and the times of one run, which are
those of `run_now`. Only the begin of an attempt on another machine, or of one that was lost, may be a time of day of
another clock: it is kept within the slot or the run, and `is_bounded` tells whether that has changed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Self

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, unsaved_seconds
from prefect_tune.core.page_elements import Table, Text, cell_html
from prefect_tune.core.shown_text import format_seconds, plural
from prefect_tune.core.usage_records import AttemptRecord, AttemptUse, GroupUse, PhaseSeconds, RankEnd
from prefect_tune.core.values import parse_time


class Category(StrEnum):
    """What a second of a slot went into, and what that means."""

    meaning: str

    def __new__(cls, label: str, meaning: str) -> Self:
        """Return the member with its label as its text."""
        member = str.__new__(cls, label)
        member._value_, member.meaning = label, meaning
        return member

    TRAINING = "training", "Steps that count: their reports, or a checkpoint after them, were used."
    LOST = "lost", "Training after the last commit of an attempt that was lost: trained again if the trial trains on."
    START = "start and import", "The launch, a queue, the journal, the process, the import and `setup`."
    RESTORING = "restoring", "The download of the checkpoint, and `load_checkpoint`."
    SAVING = "saving", "Training stood still for `save_checkpoint`, its copy, or an upload."
    WAITING = "waiting for a decision", "Training stood still until the search answered."
    ENDING = "ending", "From the trial's last message until its slot is free: last uploads, `cleanup`, the journal."
    IDLE = "idle", "No attempt had the slot."

    @property
    def key(self) -> str:
        """Its name in JSON and tables."""
        return self.name.lower()


_PHASES = tuple(each for each in Category if each.key in PhaseSeconds.model_fields)
"""What an attempt measures of itself."""


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """What an attempt cost."""

    trial: str
    attempt: int
    began_at: datetime
    """When it got its slot; when it began, where that is not known."""
    seconds: Mapping[Category, float]
    """All but idle."""
    use: AttemptUse | None
    """Its processors and memory; None for an attempt that runs, or was lost."""
    is_bounded: bool = False
    """Whether its begin by another clock was outside its slot or its run, and was moved to the nearest time in it."""

    @property
    def rank_ends(self) -> Sequence[RankEnd]:
        """How ranks ended that did not end like the others."""
        return self.use.ends if isinstance(self.use, GroupUse) else ()

    @property
    def total_seconds(self) -> float:
        """How long it held its slot."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class RunCost:
    """The slots of one run, and how long it had them."""

    began_at: datetime
    seconds: float
    slots: int | None
    """None if nothing limited them: then it has as many as it used, and none is idle."""


@dataclass(frozen=True, slots=True, repr=False)
class ExperimentCost:
    """What an experiment cost so far; printed as a sentence, and in a notebook with a table of the categories."""

    runs: Sequence[RunCost]
    attempts: Sequence[AttemptCost]
    """By trial, in the order in which the trials were added."""
    seconds: Mapping[Category, float]
    """The seconds of slots in each category; their sum is `slot_seconds`."""

    @property
    def slot_seconds(self) -> float:
        """The seconds of all slots in all runs."""
        return sum(self.seconds.values())

    @property
    def run_seconds(self) -> float:
        """The time of all runs, without the time between them."""
        return sum(each.seconds for each in self.runs)

    def __repr__(self) -> str:
        """Return the sentence, and the number of attempts."""
        attempts = plural(len(self.attempts), "attempt", "attempts")
        return f"<ExperimentCost of {attempts}: {cost_sentence(self) or 'no slot was held yet'}>"

    def _repr_html_(self) -> str:
        total = self.slot_seconds or 1.0
        rows = [
            (str(category), format_seconds(seconds), format_share(seconds / total), category.meaning)
            for category, seconds in self.seconds.items()
            if seconds / total >= _LEAST_SHARE
        ]
        sentence = cost_sentence(self) or "no slot was held yet"
        return cell_html(Text([sentence]), Table(("slots", "time", "share", ""), rows))

    def by_trial(self) -> Mapping[str, Sequence[AttemptCost]]:
        """Return the attempts of each trial that has any."""
        found: dict[str, list[AttemptCost]] = {}
        for each in self.attempts:
            found.setdefault(each.trial, []).append(each)
        return found


_USED = tuple(each for each in Category if each is not Category.IDLE)


def cost_of(experiment: Experiment, until: datetime) -> ExperimentCost:
    """Return what the experiment cost.

    Args:
        experiment: by its journal; running trials may have newer reports.
        until: the time of what is known of running trials: their attempts have lasted until then.
    """
    runs = _runs(experiment, until)
    attempts = [cost for trial in experiment.trials.values() for cost in _attempts(trial, runs, until)]
    seconds: Counter[Category] = Counter()
    for each in attempts:
        seconds.update(each.seconds)
    found = [RunCost(each.begin, (each.end - each.begin).total_seconds(), each.slots) for each in runs]
    idle = (max(0.0, (each.slots or 0) * each.seconds - _held_in(each, attempts)) for each in found)
    return ExperimentCost(found, attempts, {each: seconds[each] for each in _USED} | {Category.IDLE: sum(idle)})


@dataclass(frozen=True, slots=True)
class _Span:
    """A run and its times, by its own clock."""

    term: int
    begin: datetime
    end: datetime
    slots: int | None


def _runs(experiment: Experiment, until: datetime) -> Sequence[_Span]:
    """Return each run; it has lasted at least as long as what its attempts have journaled."""
    times = ((run, parse_time(run.began_at), parse_time(run.ended_at or run.began_at)) for run in experiment.runs)
    runs = [
        _Span(run.term, begin, end, run.slots) for run, begin, end in times if begin is not None and end is not None
    ]
    for trial in experiment.trials.values():
        for record in trial.records:
            began = parse_time(record.began_at or "")
            if began is None or record.slot_at is not None or not runs:
                continue  # its run has ended after it, or is known to have
            place = _place(runs, record, began)
            last = _later(_first_in(runs, place, began), record.seconds.total)
            if trial.phase is Phase.RUNNING and record is trial.records[-1]:
                place, last = len(runs) - 1, max(last, until)
            runs[place] = replace(runs[place], end=max(runs[place].end, last))
    return runs


def _place(runs: Sequence[_Span], record: AttemptRecord, began: datetime) -> int:
    """Return the place of the run in which an attempt began; by the time of day where the journal has no owner."""
    by_time = max((place for place, run in enumerate(runs) if run.begin <= began), default=0)
    return next((place for place, run in enumerate(runs) if run.term == record.term), by_time)


def _first_in(runs: Sequence[_Span], place: int, began: datetime) -> datetime:
    """Return the begin of an attempt in a run of a search, moved between it and the next run if another clock set it.

    The attempts of a flow of one's own have no slots, and stay where they are.
    """
    run, following = runs[place], next(iter(runs[place + 1 :]), None)
    if run.slots is None:
        return began
    first = max(began, run.begin)
    return min(first, following.begin) if following is not None and following.begin > run.begin else first


def _later(at: datetime, seconds: float) -> datetime:
    return at + timedelta(seconds=seconds)


def _attempts(trial: Trial, runs: Sequence[_Span], until: datetime) -> Iterator[AttemptCost]:
    """Yield what each attempt cost; one whose times are not known is left out."""
    free_at: datetime | None = None
    for place, record in enumerate(trial.records):
        following = next(iter(trial.records[place + 1 :]), None)
        is_running = trial.phase is Phase.RUNNING and following is None
        began, slot_at = parse_time(record.began_at or ""), parse_time(record.slot_at or "")
        outlives = slot_at is not None and 0 < record.term < record.slot_term
        if slot_at is not None and not outlives:
            first = slot_at
        elif slot_at is not None and record.use is not None:
            # The slot is of the last run, and the attempt has measured all of its time.
            first = _later(slot_at, min(0.0, record.slot_seconds - record.seconds.total))
        elif began is not None:
            first = _first_in(runs, _place(runs, record, began), began) if runs else began
        else:
            continue
        is_bounded = slot_at is None and first != began
        first = max(first, free_at or first)
        if is_running:
            newest = record.seconds.plus("training", unsaved_seconds(trial, trial.trained_seconds))
            record = record.model_copy(update={"seconds": newest})  # noqa: PLW2901  with its newest report
            free_at = max(until, _later(began or first, record.seconds.total))
        else:
            free_at = _freed_at(record, first, following, runs)
        free_at = max(first, free_at)
        held_seconds, before = (free_at - first).total_seconds(), 0.0
        if began is not None and slot_at is not None and not outlives:
            gap = (began - first).total_seconds()
            before = min(max(0.0, gap), max(0.0, held_seconds - record.seconds.total))
            is_bounded = gap != before
        seconds = _shared_out(record, before, held_seconds, is_running=is_running)
        yield AttemptCost(trial.trial, record.attempt, first, seconds, record.use, is_bounded)


def _freed_at(
    record: AttemptRecord, first: datetime, following: AttemptRecord | None, runs: Sequence[_Span]
) -> datetime:
    """Return when an attempt that is over left its slot."""
    slot_at, began = parse_time(record.slot_at or ""), parse_time(record.began_at or "")
    if slot_at is not None:
        return _later(slot_at, record.slot_seconds)
    known = _later(first, record.seconds.total)
    if record.use is not None or not runs:
        return known
    run = runs[_place(runs, record, began or first)]
    if run.slots is None:
        return known  # of a flow of one's own
    is_same_run = following is not None and following.term == record.term
    next_began = parse_time(following.began_at or "") if following is not None and is_same_run else None
    return max(known, min(run.end, next_began or run.end))


def _shared_out(
    record: AttemptRecord, before: float, held_seconds: float, *, is_running: bool
) -> Mapping[Category, float]:
    """Return the seconds in a slot by category: what was measured, what precedes it, and the rest by what it can be."""
    measured = {each: float(getattr(record.seconds, each.key)) for each in _PHASES}
    seconds = dict.fromkeys(_USED, 0.0) | measured
    seconds[Category.START] += before
    rest = held_seconds - sum(seconds.values())
    has_trained = record.seconds.start > 0  # from the entry of a commit: else where its start ended is not known
    if record.use is not None:
        of_rest = Category.ENDING
    elif not has_trained:
        of_rest = Category.START
    else:
        of_rest = Category.TRAINING if is_running else Category.LOST
    if record.is_lost:
        seconds[Category.LOST] = max(0.0, record.seconds.training - record.saved_seconds)
        seconds[Category.TRAINING] -= seconds[Category.LOST]
    if rest >= 0:
        return seconds | {of_rest: seconds[of_rest] + rest}
    measured_seconds = sum(seconds.values())  # more than a slot had: two clocks, or a slot that was freed meanwhile
    return {each: found * held_seconds / measured_seconds for each, found in seconds.items()}


def _held_in(run: RunCost, attempts: Sequence[AttemptCost]) -> float:
    """Return for how long the run's slots were held together."""
    end = _later(run.began_at, run.seconds)
    overlaps = (
        min(end, _later(each.began_at, each.total_seconds)) - max(run.began_at, each.began_at) for each in attempts
    )
    return sum(max(0.0, each.total_seconds()) for each in overlaps)


# The cost in words.

LOSSES_NAMED = 3
_LEAST_SHARE = 0.005
"""Smaller shares are 0 % in words, and are not named."""


def cost_sentence(cost: ExperimentCost) -> str:
    """Return `81 % of 4 h 10 min of 2 slots was training; the largest losses: idle 9 %, saving 4 %`.

    The time is that of the runs, if all have the same number of slots; else the sum over the slots. Empty if no slot
    was held yet.
    """
    if not cost.attempts or not cost.slot_seconds:
        return ""
    shares = {category: seconds / cost.slot_seconds for category, seconds in cost.seconds.items()}
    trained = format_share(shares.pop(Category.TRAINING))
    losses = sorted((each for each in shares.items() if each[1] >= _LEAST_SHARE), key=lambda each: -each[1])
    named = ", ".join(f"{category} {format_share(share)}" for category, share in losses[:LOSSES_NAMED])
    label = "the largest losses" if len(losses) > 1 else "the only loss"
    counts = {each.slots for each in cost.runs}
    (count,) = counts if len(counts) == 1 else (None,)
    if count is None or abs(count * cost.run_seconds - cost.slot_seconds) > 0.01 * cost.slot_seconds:
        slots = f"{format_seconds(cost.slot_seconds)} of all slots"
    else:
        slots = f"{format_seconds(cost.run_seconds)} of {plural(count, 'slot', 'slots')}"
    return f"{trained} of {slots} was training" + (f"; {label}: {named}" if named else "")


def format_share(share: float) -> str:
    """Return a share as a percentage: `9 %`."""
    return f"{100 * share:.0f} %"
