"""Two runs of one experiment, and attempts whose search is gone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, StorageTarget, SyncConfig
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Event, TrialFinished
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.executors.trial_executor import AttemptExited
from prefect_tune.journal_access import (
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    write_entry_directly,
)
from tests.fakes.searches.planned_search import PlannedSearch, UnreliableExecutor, make_remote_experiment
from tests.flows.driver import Driver, Drivers
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import entries_at, experiment_at, objects_at, owners_at, state_of_flow_run, trial_at
from tests.long_cases import deep_count
from tests.trainables.digits_table import EPOCHS
from tests.trainables.witness import acts_of

_STEPS = 60
_NAME = "contested"


class _Contest(MlpTraining):
    """Several drivers of one experiment."""

    def __init__(self, drivers: Drivers, target: StorageTarget, folder: Path) -> None:
        sync = SyncConfig(sync_period_seconds=0.05)
        super().__init__(drivers, target, folder, _NAME, _STEPS, retention=Retention(last=2), sync=sync)

    def wait_for_saves(self, times: int) -> None:
        """Wait until so many further saves begin."""
        total = len(self.steps_of("saving")) + times
        self.wait_until(lambda: len(self.steps_of("saving")) >= total)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.deep)])
def contest(request: pytest.FixtureRequest, drivers: Drivers, tmp_path: Path) -> _Contest:
    return _Contest(drivers, request.getfixturevalue(f"{request.param}_target"), tmp_path)


def _freeze(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def _thaw(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_of_two_runs_of_one_trial_one_goes_on_and_the_other_ends_superseded(contest: _Contest) -> None:
    contest.hold_at(18)
    first = contest.start()
    contest.wait_for_saves(3)
    second = contest.start()
    second.wait_until(lambda: len(owners_at(contest.target, _NAME)) == 2, seconds=60)
    contest.gate.touch()
    outcome = first.wait()
    contest.require_identical_end(second.wait())
    assert outcome["error"] == "Superseded"
    owners = owners_at(contest.target, _NAME)
    assert f"pid {second.pid}" in outcome["message"]
    first.require_no_leftovers()
    name, message = state_of_flow_run(owners[first.pid])
    assert name == "Failed"
    assert "Superseded" in message
    assert state_of_flow_run(owners[second.pid])[0] == "Completed"


@pytest.mark.deep
def test_two_runs_that_resume_at_the_same_moment_leave_one_owner(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    contest = _Contest(drivers, local_target, tmp_path)
    contest.hold_at(28)
    dead = contest.start()
    contest.wait_for_saves(2)
    dead.kill_everything()
    both = (contest.start(), contest.start())
    both[0].wait_until(lambda: len(owners_at(local_target, _NAME)) == 3, seconds=60)
    contest.gate.touch()
    outcomes = [driver.wait() for driver in both]
    (winner,) = (outcome for outcome in outcomes if "status" in outcome)
    contest.require_identical_end(winner)
    (loser,) = (outcome for outcome in outcomes if "error" in outcome)
    assert loser["error"] == "Superseded"


@pytest.mark.parametrize(
    ("frozen", "wakes"), [pytest.param("flow", "during", marks=pytest.mark.deep), ("machine", "after")]
)
def test_an_owner_that_was_paused_past_the_takeover_commits_and_deletes_nothing(
    contest: _Contest, frozen: str, wakes: str
) -> None:
    _require_harmless_wakeup(contest, frozen, wakes, random.Random(f"{frozen} {wakes}"))


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(deep_count(5)))
def test_an_owner_that_was_paused_at_any_moment_commits_and_deletes_nothing(contest: _Contest, seed: int) -> None:
    rng = random.Random(seed)
    _require_harmless_wakeup(contest, rng.choice(["flow", "machine"]), rng.choice(["during", "after"]), rng)


def _require_harmless_wakeup(contest: _Contest, frozen: str, wakes: str, rng: random.Random) -> None:
    contest.hold_at(48)
    if wakes == "after":
        contest.gate.touch()
    zombie = contest.start()
    contest.wait_for_saves(rng.randint(1, 5))
    time.sleep(rng.uniform(0, 0.15))
    pids = (zombie.pid, *(zombie.find_trial_pids() if frozen == "machine" else ()))
    _freeze(*pids)
    owner = contest.start()
    if wakes == "during":
        contest.wait_for_saves(2)
    else:
        contest.require_identical_end(owner.wait())
    before = {entry.number: entry.term for entry in entries_at(contest.target, _NAME)}
    _thaw(*pids)
    outcome = zombie.wait()
    contest.gate.touch()
    contest.require_identical_end(owner.wait())
    assert outcome.get("error") == "Superseded", outcome
    assert str(owner.pid) in outcome["message"]
    zombie.require_no_leftovers()
    after = {entry.number: entry.term for entry in entries_at(contest.target, _NAME)}
    assert {number: after[number] for number in before} == before
    assert all(term == max(before.values()) for number, term in after.items() if number not in before)
    trial = TrialKey(experiment=_NAME, generation=1, trial="trial")
    paths = objects_at(contest.target, trial.checkpoints_folder)
    keys = [key for path in paths if (key := CheckpointKey.from_manifest_path(trial, path))]
    live = {(checkpoint.step, checkpoint.sequence) for checkpoint in trial_at(contest.target, _NAME).checkpoints}
    assert live <= {(key.step, key.sequence) for key in keys}, "every live checkpoint has its manifest"


@pytest.mark.usefixtures("process_model")
@pytest.mark.parametrize("process_model", [pytest.param("forked", marks=pytest.mark.deep), "started"], indirect=True)
def test_a_paused_trial_whose_flow_was_killed_dies_as_soon_as_it_wakes(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    contest = _Contest(drivers, local_target, tmp_path)
    dead = contest.start()
    contest.wait_for_saves(2)
    (trial,) = dead.find_trial_pids()
    _freeze(trial)
    dead.kill()
    outcome = contest.start().wait()
    acts = len(acts_of(contest.witness))
    _thaw(trial)
    dead.require_no_leftovers()
    assert len(acts_of(contest.witness)) <= acts + 2  # it may finish its current step
    contest.require_identical_end(outcome)


@pytest.mark.usefixtures("process_model")
def test_a_trial_in_the_middle_of_a_long_step_dies_with_its_flow(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    contest = _Contest(drivers, local_target, tmp_path)
    contest.hold_at(8)
    dead = contest.start()
    contest.wait_until(lambda: acts_of(contest.witness)[-1:] and acts_of(contest.witness)[-1].step == 7)
    assert dead.find_trial_pids()
    dead.kill()
    dead.require_no_leftovers()


# When the process of a search cannot continue, it stops all trials: none waits for an answer.


class FailingWriter:
    """A writer of a journal whose target fails after so many entries."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(
        self, target: StorageTarget, state: Experiment, events: Sequence[Event], stamp: WriteStamp | None
    ) -> Experiment:
        if not self._left:
            raise StoreUnavailable("the target is away")
        self._left -= 1
        return write_entry_directly(target, state, events, stamp)


class Stoppable(UnreliableExecutor):
    """Records that it was stopped; its trials then send no further message."""

    is_stopped = False

    def stop_all(self) -> None:
        self.is_stopped = True
        self._inbox.clear()
        self._inbox.extend(AttemptExited(trial) for trial in self._trials)


STOPPING = ASHA(max_t=9, grace_period=3, variant="stopping")


@pytest.mark.parametrize("entries", [2, 3, 5])
def test_a_search_that_cannot_write_its_journal_has_its_trials_end(entries: int, local_target: LocalTarget) -> None:
    executor = Stoppable()
    with pytest.raises(StoreUnavailable, match="the target is away"):
        PlannedSearch(local_target, executor=executor).run(scheduler=STOPPING, write=FailingWriter(entries))
    assert executor.is_stopped
    assert len(executor) == 0


def test_what_outlives_its_search_is_left_to_the_next_owner(local_target: LocalTarget) -> None:
    executor = Stoppable()
    executor.attempts_outlive_search = True
    with pytest.raises(StoreUnavailable):
        PlannedSearch(local_target, executor=executor).run(scheduler=STOPPING, write=FailingWriter(2))
    assert not executor.is_stopped
    assert len(executor) == 3


def test_what_keeps_trials_from_ending_does_not_hide_why_the_search_ended(local_target: LocalTarget) -> None:
    class Unreachable(UnreliableExecutor):
        def stop_all(self) -> None:
            raise StoreUnavailable("no trial can be reached")

    with pytest.raises(StoreUnavailable, match="the target is away"):
        PlannedSearch(local_target, executor=Unreachable()).run(write=FailingWriter(2))


def test_an_outbox_that_cannot_be_read_at_once_is_read_again(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote_experiment(local_target, TrialFinished(trial="00000", reason="done"))
    refusals, open_target = iter([False, True]), LocalTarget.open

    def fail_once(target: LocalTarget, **options: Any) -> Any:
        if next(refusals, False):  # opening the search's journal comes first
            raise StoreUnavailable("away for a moment")
        return open_target(target, **options)

    monkeypatch.setattr(LocalTarget, "open", fail_once)
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
    driver.wait_until(lambda: len(acts_of(witness)) >= 2)
    acquire_and_adopt_with_retries(
        local_target,
        JournalKey(experiment="e", generation=1),
        OwnershipRequest(make_process_owner(), new_write_stamp()),
    )
    assert driver.wait(seconds=45)["error"] == "Superseded"
    driver.require_no_leftovers()
    assert "error" not in start(0).wait(seconds=90)
    experiment = experiment_at(local_target, "e")
    assert all(trial.status in {Status.COMPLETED, Status.PRUNED} for trial in experiment.trials.values())
