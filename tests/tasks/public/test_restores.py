"""Restoring a checkpoint while the trial's owner deletes it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune import task_values
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.journal_access import read_experiment_by_name
from prefect_tune.tasks import checkpoints
from tests.fakes.checkpoints import read_files
from tests.tasks.public.conftest import Caller
from tests.tasks.public.test_checkpoints import damage_checkpoint

NEWEST_ONLY = pt.Retention(last=1)


def save_after_each_read(caller: Caller, steps: list[int]) -> None:
    """Save a step and delete the earlier ones after each read of the journal by a restore."""

    def read_and_save(target: StorageTarget, experiment: str) -> Experiment:
        state = read_experiment_by_name(target, experiment)
        if steps:
            caller.save_checkpoint(steps.pop(0), retention=NEWEST_ONLY)
        return state

    caller.patch.setattr(checkpoints, "read_experiment_by_name", read_and_save)


def take_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return warnings


def test_a_name_that_may_be_misspelt_is_a_warning_and_no_error(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "prefect_tune")
    caller.experiment = "descent"
    caller.save_checkpoint(1, trial="slow")
    options = {"target": caller.target, "experiment": "descent"}
    uri = caller.target.uri

    assert pt.restore_checkpoint.fn(**{**options, "experiment": "decsent"}) is None
    message = f"There is no experiment 'decsent' at {uri}; did you mean 'descent'?"
    assert take_warnings(caplog) == [f"Nothing was restored. {message}"]
    with pytest.raises(pt.CheckpointNotFound, match=r"committed steps: none\. There is no experiment 'decsent' at"):
        pt.restore_checkpoint.fn(**{**options, "experiment": "decsent"}, step=1)

    assert caller.restore_checkpoint(trial="Slow") is None
    message = f"Experiment 'descent' at {uri} has no trial 'Slow'; did you mean 'slow'?"
    assert take_warnings(caplog) == [f"Nothing was restored. {message}"]

    pt.restore_experiment_state.fn(**{**options, "experiment": "descant"})
    assert take_warnings(caplog) == [f"Experiment 'descant' at {uri} is new; did you mean 'descent'?"]
    pt.restore_experiment_state.fn(**options)
    assert caller.restore_checkpoint(trial="slow") is not None
    assert take_warnings(caplog) == []


@pytest.mark.parametrize("name", ["other", "fold-b", "rate-0.2", "x2"])
def test_a_first_start_beside_others_finds_nothing_and_warns_of_nothing(
    caller: Caller, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.WARNING, "prefect_tune")
    for trial in ("fold-a", "rate-0.1", "x1"):
        caller.save_checkpoint(1, trial=trial)
        caller.experiment = trial
        caller.save_checkpoint(1)
    caplog.clear()
    caller.experiment = name
    assert caller.restore_checkpoint() is None
    caller.experiment = "e"
    assert caller.restore_checkpoint(trial=name) is None
    assert take_warnings(caplog) == []


def test_a_target_whose_experiments_cannot_be_listed_restores_nothing_without_a_warning(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise pt.StoreRefused("listing is not allowed")

    caller.save_checkpoint(1)
    caller.experiment = "E"
    caller.patch.setattr(task_values, "list_experiment_names", refuse)
    with caplog.at_level(logging.WARNING, "prefect_tune"):
        assert caller.restore_checkpoint() is None
    assert take_warnings(caplog) == []


def test_a_checkpoint_that_retention_deletes_meanwhile_is_not_damaged(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caller.save_checkpoint(1)
    caller.save_checkpoint(2)
    save_after_each_read(caller, [3, 4])
    with caplog.at_level(logging.WARNING, "prefect_tune"):
        restored = caller.restore_checkpoint()
    assert restored is not None
    assert (restored.step, read_files(restored.directory)) == (4, read_files(caller.write_directory(4)))
    trial = caller.load_state().trial("trial")
    assert (trial.quarantined_sequences, trial.lost_checkpoint_count) == ((), 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_step_that_retention_deletes_meanwhile_is_not_found(caller: Caller) -> None:
    caller.save_checkpoint(1)
    save_after_each_read(caller, [2])
    with pytest.raises(pt.CheckpointNotFound, match=r"no checkpoint of step 1 is committed; committed steps: \[2\]"):
        caller.restore_checkpoint(1)


def test_a_run_that_deletes_faster_than_a_download_lasts_is_an_error_that_says_so(caller: Caller) -> None:
    caller.patch.setattr(checkpoints, "MAX_WRITE_RACES", 3)
    caller.save_checkpoint(1)
    save_after_each_read(caller, list(range(2, 9)))
    with pytest.raises(pt.CheckpointNotFound, match="run deleted the checkpoint during the download 3 times"):
        caller.restore_checkpoint()


def test_a_damaged_checkpoint_is_passed_over_with_credentials_that_only_read(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caller.save_checkpoint(1)
    caller.save_checkpoint(2)
    damage_checkpoint(caller, 2)

    def refuse(*_: object, **__: object) -> None:
        raise pt.StoreRefused("read only")

    caller.patch.setattr(checkpoints, "quarantine_in_journal", refuse)
    with caplog.at_level(logging.WARNING, "prefect_tune"):
        restored = caller.restore_checkpoint()
    assert restored is not None
    assert restored.step == 1
    assert "step 2 cannot be restored" in caplog.text
    assert "could not be quarantined: read only" in caplog.text
