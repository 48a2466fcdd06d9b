"""Records of the resource usage of attempts and runs: seconds by phase, CPU, memory and slots.

Durations are measured with monotonic clocks; wall-clock times only order the attempts. No decision uses these values.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Self, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.values import Message, Value, parse_time

_MAX_SECONDS = 1e9
"""About 30 years, so that the present time plus this duration is still a valid time."""
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_MAX_SECONDS)]


class PhaseSeconds(Value):
    """The time of an attempt so far, in seconds, divided into phases. With several ranks, only rank 0 counts."""

    start: Seconds = 0.0
    """The time until the trainable has loaded: for the journal, process, import and `setup`, not for the restore."""
    restoring: Seconds = 0.0
    """The time of the download of the checkpoint, and of `load_checkpoint`."""
    training: Seconds = 0.0
    saving: Seconds = 0.0
    """The time in which a save blocked training: `save_checkpoint`, the copy of the files, the wait for the upload."""
    waiting: Seconds = 0.0
    """The time in which training waited for a decision of the search."""
    ending: Seconds = 0.0
    """The time from the last message of the trial to the journal entry that ends the attempt."""

    @property
    def total(self) -> float:
        return self.start + self.restoring + self.training + self.saving + self.waiting + self.ending

    def with_added_seconds(self, phase: str, seconds: float) -> Self:
        """Return a copy with `seconds` added to `phase`; limit the sum, since a trial may report any number."""
        return self.model_copy(update={phase: min(_MAX_SECONDS, max(0.0, getattr(self, phase) + seconds))})


class RankEnd(Value):
    """How `ranks` ended: differently from the other ranks of the attempt."""

    ranks: tuple[int, ...]
    how: AnyReason
    is_cause: bool = False
    """Whether the attempt failed because of this end."""


class AttemptUsage(Value):
    """The resource usage of an attempt, measured by its supervisor. A field is None if it was not measured."""

    seconds: PhaseSeconds
    cpu_seconds: Seconds | None = None
    """The CPU time of its processes from the first measurement (when the trainable has loaded) to the last one."""
    peak_memory_bytes: int | None = None
    """The highest measured resident memory of all its processes together."""
    mean_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    """The highest measured memory in use on all its visible GPUs together."""
    mean_gpu_utilization: float | None = None
    """The mean utilization of its visible GPUs, from 0 to 1."""
    output: Message = ""
    """The last lines that its processes printed."""


class GroupUsage(AttemptUsage):
    """The resource usage of an attempt in which some ranks ended differently from the others."""

    ends: tuple[RankEnd, ...]


AnyUsage: TypeAlias = GroupUsage | AttemptUsage


class AttemptRecord(Value):
    """One attempt of a trial, according to the journal."""

    attempt: int
    began_at: str | None = None
    """The time at which the attempt began, by the clock of its machine."""
    term: int = 0
    """The term of the owner when the attempt began; 0 if unknown."""
    slot_term: int = 0
    """The term of the owner that freed the slot; differs from `term` if a new owner has taken over."""
    slot_at: str | None = None
    """The time at which the attempt got its slot, by the clock of the run; None until the slot is freed."""
    slot_seconds: Seconds = 0.0
    """The time for which the attempt held the slot."""
    seconds: PhaseSeconds = PhaseSeconds()
    """The time of the attempt up to its end, by phase; if the end is unknown, up to the attempt's last known step."""
    saved_seconds: Seconds = 0.0
    """The training time of the attempt up to its last commit."""
    usage: AnyUsage | None = None
    """The usage at the end of the attempt; None if the attempt runs or was lost."""
    has_ended: bool = False
    is_lost: bool = False
    """Whether the training after the last commit is lost, so that its steps must be trained again."""

    def with_commit(self, seconds: PhaseSeconds | None, trained_seconds: float) -> AttemptRecord:
        """Return the record after a commit; `trained_seconds` is the training time since the previous commit.

        `seconds` is the time of the attempt up to the checkpoint's step, by phase; None if unknown.
        """
        if seconds is None:
            seconds = self.seconds.with_added_seconds("training", trained_seconds)
        return self.model_copy(update={"seconds": seconds, "saved_seconds": seconds.training})

    def with_end(self, usage: AttemptUsage | None, trained_seconds: float, *, is_lost: bool) -> AttemptRecord:
        """Return the record after the attempt's end; `trained_seconds` is the training time since the last commit."""
        seconds = usage.seconds if usage else self.seconds.with_added_seconds("training", trained_seconds)
        if usage and usage.output:
            usage = usage.model_copy(update={"output": ""})  # only the journal's event keeps the output
        return self.model_copy(update={"usage": usage, "seconds": seconds, "has_ended": True, "is_lost": is_lost})


class RunRecord(Value):
    """The time during which one run owned the experiment."""

    term: int
    began_at: str
    ended_at: str | None = None
    """The last time at which the run is known to have been active; None if no time after `began_at` is known."""
    slots: int | None = None
    """The number of trials that the run trained in parallel; None if unlimited."""


def record_slot_freed(
    records: tuple[AttemptRecord, ...], attempt: int, slot_at: str, seconds: float
) -> tuple[AttemptRecord, ...]:
    """Return a trial's records after the slot of an attempt was freed. The attempt may have no record yet."""
    slot = {"slot_at": slot_at, "slot_seconds": seconds}
    if any(record.attempt == attempt for record in records):
        return tuple(record.model_copy(update=slot) if record.attempt == attempt else record for record in records)
    return (*records, AttemptRecord(attempt=attempt, **slot))


def extend_last_run(runs: tuple[RunRecord, ...], since: str, seconds: float) -> tuple[RunRecord, ...]:
    """Return the records after the last run freed a slot that it had held for `seconds` from the time `since`."""
    return (*runs[:-1], *(_extend_run(run, parse_time(since), seconds) for run in runs[-1:]))


def extend_previous_run(runs: tuple[RunRecord, ...], at: str | None) -> tuple[RunRecord, ...]:
    """Return the records after a change of owner; `at` is a time at which the previous run was still active."""
    if at is None or len(runs) < 2:
        return runs
    return (*runs[:-2], _extend_run(runs[-2], parse_time(at), 0.0), runs[-1])


def _extend_run(run: RunRecord, begin: datetime | None, seconds: float) -> RunRecord:
    """Return `run`, extended to `seconds` after `begin` if it ended earlier. An unreadable time changes nothing."""
    last_known = parse_time(run.ended_at or run.began_at)
    if begin is None or last_known is None or (begin - last_known).total_seconds() + seconds <= 0:
        return run
    try:
        end = begin + timedelta(seconds=seconds)
    except OverflowError:  # after the year 9999
        return run
    return run.model_copy(update={"ended_at": end.isoformat(timespec="milliseconds")})
