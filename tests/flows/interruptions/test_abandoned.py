"""When the process of a search cannot continue, it stops all trials: none waits for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Event, Finished
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import Stamp
from prefect_tune.executors.trial_executor import AttemptExited
from prefect_tune.journal_access import Opening, current_owner, new_write_id, open_journal, write_directly
from tests.fakes.searches.planned_search import PlannedSearch, UnreliableExecutor, began_elsewhere
from tests.flows.driver import Driver, Drivers, until
from tests.flows.training import experiment_at
from tests.trainables.digits_table import EPOCHS
from tests.trainables.witness import acts_of


class WritesUntil:
    """A journal's writer whose target fails after so many entries."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(
        self, target: StorageTarget, state: Experiment, events: Sequence[Event], stamp: Stamp | None
    ) -> Experiment:
        if not self._left:
            raise StoreUnavailable("the target is away")
        self._left -= 1
        return write_directly(target, state, events, stamp)


class Stoppable(UnreliableExecutor):
    """Records that it was stopped: its trials then send no further message."""

    is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True
        self._inbox.clear()
        self._inbox.extend(AttemptExited(trial) for trial in self._trials)


STOPPING = ASHA(max_t=9, grace_period=3, variant="stopping")


@pytest.mark.parametrize("entries", [2, 3, 5])
def test_a_search_that_cannot_write_its_journal_has_its_trials_end(entries: int, local_target: LocalTarget) -> None:
    executor = Stoppable()
    with pytest.raises(StoreUnavailable, match="the target is away"):
        PlannedSearch(local_target, executor=executor).run(scheduler=STOPPING, write=WritesUntil(entries))
    assert executor.is_stopped
    assert len(executor) == 0


def test_what_outlives_its_search_is_left_to_the_next_owner(local_target: LocalTarget) -> None:
    executor = Stoppable()
    executor.survives_search = True
    with pytest.raises(StoreUnavailable):
        PlannedSearch(local_target, executor=executor).run(scheduler=STOPPING, write=WritesUntil(2))
    assert not executor.is_stopped
    assert len(executor) == 3


def test_what_keeps_trials_from_ending_does_not_hide_why_the_search_ended(local_target: LocalTarget) -> None:
    class Unreachable(UnreliableExecutor):
        def stop(self) -> None:
            raise StoreUnavailable("no trial can be reached")

    with pytest.raises(StoreUnavailable, match="the target is away"):
        PlannedSearch(local_target, executor=Unreachable()).run(write=WritesUntil(2))


def test_an_outbox_that_cannot_be_read_at_once_is_read_again(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_elsewhere(local_target, Finished(trial="00000", reason="done"))
    refusals, real = iter([False, True]), LocalTarget.open

    def away_once(target: LocalTarget, **options: Any) -> Any:
        if next(refusals, False):  # opening the search's journal comes first
            raise StoreUnavailable("away for a moment")
        return real(target, **options)

    monkeypatch.setattr(LocalTarget, "open", away_once)
    monkeypatch.setattr("prefect_tune.storage_retries.time.sleep", lambda _: None)
    state = PlannedSearch(local_target).run(num_samples=1)
    assert state.trial("00000").status is Status.COMPLETED


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(900)
def test_a_search_that_was_taken_over_ends_with_its_trials_though_one_waits_for_an_answer(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"

    def start(step_seconds: float) -> Driver:
        return drivers.start(
            "tests.trainables.digits_table:DigitsTable",
            {"row": pt.grid_search([1, 2]), "witness": str(witness), "step_seconds": step_seconds},
            flow="tune",
            target=local_target,
            experiment="e",
            metric="error",
            num_samples=1,
            scheduler=ASHA(max_t=EPOCHS, grace_period=3, variant="stopping"),
            max_concurrent_trials=2,
        )

    driver = start(0.5)
    until(lambda: len(acts_of(witness)) >= 2, seconds=90, what=lambda: driver.log[-3000:])
    open_journal(local_target, JournalKey(experiment="e", generation=1), Opening(current_owner(), new_write_id()))
    assert driver.wait(seconds=45)["error"] == "Superseded"
    driver.require_no_leftovers()
    assert "error" not in start(0).wait(seconds=90)
    ended = experiment_at(local_target, "e")
    assert all(each.status in {Status.COMPLETED, Status.PRUNED} for each in ended.trials.values())
