"""Records of what attempts and runs used: seconds by phase, processors and memory, and the slots that were held.

An attempt measures itself with monotonic clocks. A time of day only places it among the other attempts; no decision
uses any of these values.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Self, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.values import Message, Value, parse_time

_MOST_SECONDS = 1e9
"""30 years: a time of day that far ahead is still a time."""
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_MOST_SECONDS)]


class PhaseSeconds(Value):
    """The seconds of an attempt so far, by phase; each second is in one of them. Of several ranks, those of rank 0."""

    start: Seconds = 0.0
    """Until the trainable is loaded, without the restore: the journal, the process, the import, `setup`."""
    restoring: Seconds = 0.0
    """Downloading the checkpoint, and `load_checkpoint`."""
    training: Seconds = 0.0
    saving: Seconds = 0.0
    """Training stood still for a checkpoint: `save_checkpoint`, its copy, and waiting for the upload."""
    waiting: Seconds = 0.0
    """Training stood still for a decision of the search."""
    ending: Seconds = 0.0
    """From the last message of the trial to the entry of its end."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.start + self.restoring + self.training + self.saving + self.waiting + self.ending

    def plus(self, phase: str, seconds: float) -> Self:
        """Return a copy with `seconds` more in `phase`; what a trial reports may be any number."""
        return self.model_copy(update={phase: min(_MOST_SECONDS, max(0.0, getattr(self, phase) + seconds))})


class RankEnd(Value):
    """How ranks ended that did not end like the others of their attempt."""

    ranks: tuple[int, ...]
    how: AnyReason
    is_cause: bool = False
    """Whether the attempt failed for this reason."""


class AttemptUse(Value):
    """What an attempt used, measured by its supervisor; None where it was not measured."""

    seconds: PhaseSeconds
    cpu_seconds: Seconds | None = None
    """Processor time of its processes since the trainable was loaded; None if it ended before a second sample."""
    peak_memory_bytes: int | None = None
    """The highest sample of the resident memory of its processes together."""
    mean_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    """The highest sample of the memory in use on the GPUs that it sees."""
    mean_gpu_utilization: float | None = None
    """The mean share of the time in which those GPUs computed, from 0 to 1."""
    output: Message = ""
    """The last lines that its processes printed."""


class GroupUse(AttemptUse):
    """The same of an attempt some of whose ranks did not end like the others."""

    ends: tuple[RankEnd, ...]


Use: TypeAlias = GroupUse | AttemptUse


class AttemptRecord(Value):
    """One attempt of a trial, as far as the journal knows it."""

    attempt: int
    began_at: str | None = None
    """When it began, by the clock of its machine."""
    term: int = 0
    """The owner during whose term it began; 0 if that is not known."""
    slot_term: int = 0
    """The owner that freed its slot; another one than `term` if the attempt has outlived its search."""
    slot_at: str | None = None
    """When the search gave it a slot, by the clock of the run; None until the slot was freed."""
    slot_seconds: Seconds = 0.0
    """How long it held the slot."""
    seconds: PhaseSeconds = PhaseSeconds()
    """At its end; of an attempt that did not journal them there, up to its last known step."""
    saved_seconds: Seconds = 0.0
    """The training time of this attempt up to its last commit."""
    use: Use | None = None
    """At its end; None for an attempt that runs, or was lost."""
    is_over: bool = False
    is_lost: bool = False
    """Whether its training after the last commit has no successor but the same steps, trained again."""

    def saved(self, seconds: PhaseSeconds | None, trained_seconds: float) -> AttemptRecord:
        """Return it after a commit.

        Args:
            seconds: those of the attempt at the checkpoint's step; None if they are not known.
            trained_seconds: the trial's training time since its last commit.
        """
        if seconds is None:
            seconds = self.seconds.plus("training", trained_seconds)
        return self.model_copy(update={"seconds": seconds, "saved_seconds": seconds.training})

    def ended(self, use: AttemptUse | None, trained_seconds: float, *, is_lost: bool) -> AttemptRecord:
        """Return it after its end; `trained_seconds` is the trial's training time since its last commit."""
        seconds = use.seconds if use else self.seconds.plus("training", trained_seconds)
        use = use.model_copy(update={"output": ""}) if use and use.output else use  # only the event holds it
        return self.model_copy(update={"use": use, "seconds": seconds, "is_over": True, "is_lost": is_lost})


class RunRecord(Value):
    """The time during which one run owned the experiment."""

    term: int
    began_at: str
    ended_at: str | None = None
    """The last time at which it is known to have run; None if there is none after its begin."""
    slots: int | None = None
    """How many trials it trained at a time; None if nothing limited them."""


def slot_freed(
    records: tuple[AttemptRecord, ...], attempt: int, slot_at: str, seconds: float
) -> tuple[AttemptRecord, ...]:
    """Return the records of a trial after the slot of an attempt was freed; the attempt may not be known yet."""
    held = {"slot_at": slot_at, "slot_seconds": seconds}
    if any(each.attempt == attempt for each in records):
        return tuple(each.model_copy(update=held) if each.attempt == attempt else each for each in records)
    return (*records, AttemptRecord(attempt=attempt, **held))


def ended_after(runs: tuple[RunRecord, ...], since: str, seconds: float) -> tuple[RunRecord, ...]:
    """Return the records after the last run has freed a slot that was held for `seconds` since the time `since`."""
    begin = parse_time(since)
    return (*runs[:-1], *(_ended(each, begin, seconds) for each in runs[-1:]))


def seen(runs: tuple[RunRecord, ...], at: str | None) -> tuple[RunRecord, ...]:
    """Return the records after a takeover: the run before the last one still ran at `at`."""
    if at is None or len(runs) < 2:
        return runs
    return (*runs[:-2], _ended(runs[-2], parse_time(at), 0.0), runs[-1])


def _ended(run: RunRecord, begin: datetime | None, seconds: float) -> RunRecord:
    """Return it with a later end, `seconds` after `begin`; a text that is no time changes nothing."""
    known = parse_time(run.ended_at or run.began_at)
    if begin is None or known is None or (begin - known).total_seconds() + seconds <= 0:
        return run
    try:
        at = begin + timedelta(seconds=seconds)
    except OverflowError:  # in the year 9999
        return run
    return run.model_copy(update={"ended_at": at.isoformat(timespec="milliseconds")})
