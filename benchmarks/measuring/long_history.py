"""Write the history of a search to a store in memory that counts requests and bytes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal.journal import compute_snapshot_interval, is_snapshot_due, write_snapshot
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointsAdopted,
    Event,
    Owner,
    StepReported,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport, WriteStamp
from tests.fakes.stores.memory_store import MemoryStore

__all__ = ["NAME", "OWNER", "History", "new_stamp", "next_report", "write_history"]

NAME = "long"
OWNER = Owner(name="driver", host="here", pid=1)
_CONCURRENT_TRIALS = 16
_ENTRIES_OF_A_TRIAL = 6
_BATCH = 100

_MakeEvents = Callable[[Experiment], Sequence[Event]]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class History:
    """The objects on the target after a search, and the cost of an entry: a mean over all entries unless noted."""

    objects: Mapping[str, bytes]
    trials: int
    entries: int
    entry_bytes: float
    requests: float
    """Requests of the entry itself, for which its writer waits."""
    late_requests: float
    """Requests of snapshots, which are written in the background."""
    late_bytes: float
    snapshot_bytes: int
    """The size of the last snapshot."""
    tail: int
    """The number of entries after it."""
    append_microseconds: float
    """CPU time; the mean of the quickest hundred of the last tenth, undisturbed by other load."""
    late_microseconds: float
    """CPU of snapshots."""


def write_history(trial_count: int) -> History:
    """Write six entries for each trial, sixteen trials at a time; stop before the last snapshot is due.

    So opening reads as many entries as it can.
    """
    entries, snapshots = _MeteredStore(), _MeteredStore()
    state = journal.acquire_ownership(entries.store, JournalKey(experiment=NAME, generation=1), OWNER, new_stamp(0))
    for make_events in _search(trial_count):
        state = entries.measure(partial(_append, entries.store, state, make_events(state)))
        if is_snapshot_due(state, state.entry_count - 1):
            snapshots.measure(partial(write_snapshot, snapshots.store, state))
        interval, last = compute_snapshot_interval(state), _ENTRIES_OF_A_TRIAL * trial_count
        if (state.entry_count + 1) % interval == 0 and state.entry_count + interval >= last:
            break
    count = state.entry_count
    return History(
        objects={**entries.store.objects, **snapshots.store.objects},
        trials=len(state.trials),
        entries=count,
        entry_bytes=entries.store.bytes_in / count,
        requests=entries.store.operations.total() / count,
        late_requests=snapshots.store.operations.total() / count,
        late_bytes=snapshots.store.bytes_in / count,
        snapshot_bytes=sum(map(len, snapshots.store.objects.values())),
        tail=count % compute_snapshot_interval(state),
        append_microseconds=entries.mean_seconds() * 1e6,
        late_microseconds=sum(snapshots.seconds) / count * 1e6,
    )


def new_stamp(number: int) -> WriteStamp:
    """Return a stamp as long as a real one."""
    return WriteStamp(write_id=f"{number:032x}", at="2026-11-21T08:23:13.760+00:00")


def next_report(experiment: Experiment, trial: str) -> Sequence[Event]:
    """Return a step and its checkpoint."""
    step = experiment.trial(trial).step + 1
    metrics = {"loss": 1 / (step + 1), "accuracy": 1 - 1 / (step + 2), "examples": 60000 * step}
    report = StepReport(step=step, metrics=metrics, trained_seconds=12.25 * step)
    saved = CheckpointRef(
        step=step,
        sequence=experiment.trial(trial).next_sequence,
        metrics=metrics,
        trained_seconds=report.trained_seconds,
        size_bytes=1 << 26,
    )
    return [StepReported(trial=trial, report=report), CheckpointCommitted(trial=trial, checkpoint=saved)]


class _MeteredStore:
    """A store that measures the CPU time of its calls."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seconds: list[float] = []

    def measure(self, act: Callable[[], _Result]) -> _Result:
        start = time.thread_time()
        result = act()
        self.seconds.append(time.thread_time() - start)
        return result

    def mean_seconds(self) -> float:
        """CPU seconds of one act: the mean of the quickest batch in the last tenth."""
        last = self.seconds[-max(_BATCH, len(self.seconds) // 10) :]
        return min(sum(last[index : index + _BATCH]) / _BATCH for index in range(0, len(last) - _BATCH + 1, _BATCH))


def _append(store: MemoryStore, state: Experiment, events: Sequence[Event]) -> Experiment:
    return journal.append_events(store, state, events, new_stamp(state.entry_count + 1))


def _search(trial_count: int) -> Iterator[_MakeEvents]:
    yield lambda _: [CheckpointsAdopted()]
    waiting = (_trial_events(f"trial-{number:05d}", number) for number in range(trial_count))
    running = deque(trial for _, trial in zip(range(_CONCURRENT_TRIALS), waiting, strict=False))
    while running:
        trial = running.popleft()
        if make_events := next(trial, None):
            yield make_events
            running.append(trial)
        elif next_trial := next(waiting, None):
            running.append(next_trial)


def _trial_events(trial: str, number: int) -> Iterator[_MakeEvents]:
    config: dict[str, object] = {"lr": 10 ** -(1 + number % 40 / 10), "layers": number % 7, "width": 32 << number % 5}
    config |= {"seed": number, "activation": "relu", "optimizer": {"name": "adam", "betas": [0.9, 0.999]}}
    yield lambda _: [TrialAdded(trial=trial, config=config)]
    yield lambda _: [AttemptStarted(trial=trial, attempt=1, from_step=0)]
    for _ in range(_ENTRIES_OF_A_TRIAL - 3):
        yield lambda state: next_report(state, trial)
    yield lambda _: [TrialFinished(trial=trial, reason="3 steps are done")]
