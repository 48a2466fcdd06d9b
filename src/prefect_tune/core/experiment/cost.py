"""The cost of an experiment: where each second of its slots went, from the fold of its journal.

    slots * time of the runs  =  useful training + lost + start + restoring + saving + waiting + ending + idle

A run's time is from its takeover to the last sign of life of it: a freed slot, or its live status if it was killed.
An attempt is in its slot from the start that the search requested until the search has freed the slot; before it
begins it starts, and after its last entry it ends. An attempt without an end of its own lasts until its run's last
sign of life, or until the trial's next attempt: what it did after its last commit is lost. Idle is what is
left of the slots. An attempt that outlives its search adds the time between the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Self

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial import Phase, Trial, newest_checkpoint
from prefect_tune.core.usage_records import AttemptRecord, AttemptUse, GroupUse, PhaseSeconds, RankEnd, RankSeconds
from prefect_tune.core.values import parse_time

__all__ = ["AttemptCost", "Category", "ExperimentCost", "RunCost", "cost_of"]


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
    ranks: RankSeconds | None = None
    """The seconds of its saves by rank; None for a single process."""

    @property
    def rank_ends(self) -> Sequence[RankEnd]:
        """How ranks ended that did not end like the others."""
        return self.use.ends if isinstance(self.use, GroupUse) else ()

    @property
    def waited_for_ranks_seconds(self) -> float | None:
        """How long its saves waited for the slowest rank, of the rank that waited longest; None for one process."""
        return max(self.ranks.waiting) if self.ranks else None

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


@dataclass(frozen=True, slots=True)
class ExperimentCost:
    """What an experiment cost so far."""

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

    @property
    def waited_for_ranks_seconds(self) -> float:
        """How long saves waited for the slowest rank: the sum over attempts, of each that of the longest wait."""
        return sum(each.waited_for_ranks_seconds or 0.0 for each in self.attempts)

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
    found = [RunCost(begin, (end - begin).total_seconds(), slots) for begin, end, slots in runs]
    idle = (max(0.0, (each.slots or 0) * each.seconds - _held_in(each, attempts)) for each in found)
    return ExperimentCost(found, attempts, {each: seconds[each] for each in _USED} | {Category.IDLE: sum(idle)})


_Run = tuple[datetime, datetime, int | None]


def _runs(experiment: Experiment, until: datetime) -> Sequence[_Run]:
    """Return begin, end and slots of each run; it has lasted at least as long as what its attempts have journaled."""
    known = [(parse_time(each.began_at), parse_time(each.ended_at or each.began_at), each) for each in experiment.runs]
    begun = [(begin, end, each.slots) for begin, end, each in known if begin is not None and end is not None]
    reached: dict[int, datetime] = {}
    for trial in experiment.trials.values():
        is_running = trial.phase is Phase.RUNNING
        for record in trial.records:
            if (began := parse_time(record.began_at or "")) is None or record.slot_at is not None:
                continue  # its run has ended after it, or is known to have
            last, is_last = _later(began, record.seconds.total), record is trial.records[-1]
            if is_running and is_last:
                last = max(last, until)
            place = _place(begun, last if is_running and is_last else began)
            reached[place] = max(reached.get(place, last), last)
    return [(begin, max(end, reached.get(place, end)), slots) for place, (begin, end, slots) in enumerate(begun)]


def _place(runs: Sequence[_Run], at: datetime) -> int:
    """Return the place of the run that owned the experiment at a time; 0 for a time before the first one."""
    return max((place for place, (begin, _, _) in enumerate(runs) if begin <= at), default=0)


def _later(at: datetime, seconds: float) -> datetime:
    return at + timedelta(seconds=seconds)


def _attempts(trial: Trial, runs: Sequence[_Run], until: datetime) -> Iterator[AttemptCost]:
    """Yield what each attempt cost; one whose times are not known is left out."""
    free_at: datetime | None = None
    for place, record in enumerate(trial.records):
        following = next(iter(trial.records[place + 1 :]), None)
        times = [found for at in (record.slot_at, record.began_at) if at and (found := parse_time(at)) is not None]
        if not times:
            continue
        first = max(min(times), free_at or min(times))
        is_running = trial.phase is Phase.RUNNING and following is None
        if is_running:
            record = _so_far(trial, record)  # noqa: PLW2901  with its newest report
            free_at = max(until, _later(times[-1], record.seconds.total))
        else:
            free_at = _freed_at(record, first, following, runs)
        free_at = max(first, free_at)
        before = max(0.0, (times[-1] - first).total_seconds()) if record.began_at else 0.0
        seconds = _shared_out(record, before, (free_at - first).total_seconds(), is_running=is_running)
        yield AttemptCost(trial.trial, record.attempt, first, seconds, record.use, record.ranks)


def _so_far(trial: Trial, record: AttemptRecord) -> AttemptRecord:
    newest = newest_checkpoint(trial)
    unsaved_seconds = max(0.0, trial.trained_seconds - (newest.trained_seconds if newest else 0.0))
    return record.model_copy(update={"seconds": record.seconds.plus("training", unsaved_seconds)})


def _freed_at(
    record: AttemptRecord, first: datetime, following: AttemptRecord | None, runs: Sequence[_Run]
) -> datetime:
    """Return when an attempt that is over left its slot."""
    slot_at, began = parse_time(record.slot_at or ""), parse_time(record.began_at or "")
    if slot_at is not None:
        return _later(slot_at, record.slot_seconds)
    known = _later(began or first, record.seconds.total)
    if record.use is not None or not runs:
        return known
    _, end, slots = runs[_place(runs, first)]
    if slots is None:
        return known  # of a flow of one's own
    next_began = parse_time(following.began_at or "") if following else None
    return max(known, min(end, next_began or end))


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
