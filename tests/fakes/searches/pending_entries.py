"""A pending entry of an experiment whose journal is a list, in a search without a scheduler; the limits of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import Event
from prefect_tune.core.schedulers.base import FIFO
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import WriteStamp
from prefect_tune.journal_access import JournalWriter
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.parameters.plan_checks import SearchLimits
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.tuner.pending_entry import BackgroundWorker, PendingEntry
from prefect_tune.tuner.search_policy import SearchPolicy
from tests.fakes.checkpoints import first_generation

LOSS = Objective(metrics=("loss",), modes=("min",))


class WrittenEntries:
    """A journal that is a list; a write raises `error`, if there is one."""

    def __init__(self) -> None:
        self.entries: list[Sequence[Event]] = []
        self.stamps: list[WriteStamp | None] = []
        self.error: BaseException | None = None

    def __call__(
        self, _target: StorageTarget, state: Experiment, events: Sequence[Event], stamp: WriteStamp | None
    ) -> Experiment:
        self.stamps.append(stamp)
        if self.error is not None:
            raise self.error
        self.entries.append(tuple(events))
        for event in events:
            state = apply_event(state, event, state.entry_count + 1)
        return state.model_copy(update={"entry_count": state.entry_count + 1})


def make_random_policy() -> SearchPolicy:
    return SearchPolicy(RandomSearch(9).begin({}, LOSS, 1), FIFO().begin(LOSS, 1))


def make_pending_entry(
    written: WrittenEntries,
    policy: SearchPolicy,
    observer: SearchObserver | None = None,
    period: timedelta = timedelta(0),
) -> PendingEntry:
    target = LocalTarget(path="/nowhere")
    journal_writer = JournalWriter(target, make_empty_experiment(first_generation("e")), written)
    return PendingEntry(journal_writer, policy, observer or SearchObserver(), period, BackgroundWorker(target))


def make_limits(
    max_concurrent_trials: int, *, stays_finished: Callable[[Trial], bool] = lambda _: True, **options: Any
) -> SearchLimits:
    plan = SearchPlan(trainable=print, target="/nowhere", experiment="e", **options)
    return SearchLimits(plan, max_concurrent_trials, stays_finished=stays_finished)
