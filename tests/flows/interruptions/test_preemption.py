"""SIGTERM and Ctrl-C: save, commit, and end resumable within the grace period."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Started
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.flows.conftest import s3_at
from tests.flows.driver import Driver, Drivers, until
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import (
    entries_at,
    log_of_flow_run,
    owners_at,
    state_of_flow_run,
    trial_at,
    undisturbed,
    violations,
)

_NAME = "preempted"
_STEPS = 60
_INTERVAL = 5
_SLACK_SECONDS = 8  # a busy machine, and the end of a flow run


class _Preempted(MlpTraining):
    """One experiment that is asked to stop."""

    def __init__(self, drivers: Drivers, target: StorageTarget, folder: Path) -> None:
        super().__init__(drivers, target, folder, _NAME, _STEPS)
        self.config["step_seconds"] = 0.05

    def until_at(self, act: str, step: int) -> None:
        self.until(lambda: max(self.acts(act), default=0) >= step)

    def require_resumable(self) -> None:
        assert trial_at(self.target, _NAME).status is Status.INTERRUPTED
        assert violations(self.target, _NAME, undisturbed(_STEPS)) == []

    def require_continued(self, *, from_step: int) -> None:
        """Start again; it resumes from `from_step` and ends like an undisturbed run."""
        self.require_identical_end(self.start().wait())
        assert self.acts("loaded") == ([from_step] if from_step else [])


@pytest.fixture
def preempted(drivers: Drivers, local_target: StorageTarget, tmp_path: Path) -> _Preempted:
    return _Preempted(drivers, local_target, tmp_path)


def _ended_by(driver: Driver, number: signal.Signals, *, within: float) -> Mapping[str, Any]:
    """Send the signal; return the result of the driver, which must end within so many seconds."""
    sent = time.monotonic()
    driver.signal(number)
    outcome = driver.wait(seconds=within + _SLACK_SECONDS)
    driver.require_no_leftovers()
    if number == signal.SIGTERM:
        assert driver.process.exitcode == -signal.SIGTERM  # as every program that is terminated
    assert time.monotonic() - sent < within + _SLACK_SECONDS
    return outcome


@pytest.mark.parametrize(("grace_seconds", "commit"), [pytest.param(2, "async", marks=pytest.mark.deep), (30, "sync")])
def test_a_terminated_flow_saves_its_last_step_and_ends_resumable(
    preempted: _Preempted, grace_seconds: float, commit: Literal["sync", "async"]
) -> None:
    preempted.options |= {"grace_period_seconds": grace_seconds, "sync": SyncConfig(commit=commit)}
    preempted.config["save_seconds"] = 0.2
    driver = preempted.start()
    preempted.until_at("trained", 7)
    _ended_by(driver, signal.SIGTERM, within=2)
    assert preempted.committed() == max(preempted.acts("trained")) >= 7  # not one step is lost
    preempted.require_resumable()
    owner = owners_at(preempted.target, _NAME)[driver.pid]
    assert state_of_flow_run(owner)[0] == "Crashed"
    assert f"experiment {_NAME!r}: resumable at step {preempted.committed()}; " in log_of_flow_run(owner)
    preempted.require_continued(from_step=preempted.committed())


@pytest.mark.long
@pytest.mark.parametrize(("grace_seconds", "save_seconds"), [(0, 0.0), (2, 60.0)])
def test_a_trial_that_cannot_save_within_the_grace_is_ended_and_loses_at_most_an_interval(
    preempted: _Preempted, grace_seconds: float, save_seconds: float
) -> None:
    preempted.options["grace_period_seconds"] = grace_seconds
    preempted.config |= {"save_seconds": save_seconds, "slow_from_step": 8}
    driver = preempted.start()
    preempted.until_at("trained", 8)
    _ended_by(driver, signal.SIGTERM, within=grace_seconds)
    assert max(preempted.acts("trained")) - preempted.committed() <= _INTERVAL
    preempted.require_resumable()


@pytest.mark.deep
def test_a_terminated_flow_does_not_wait_for_a_hung_target_beyond_its_grace(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        preempted = _Preempted(drivers, s3_at(proxy.port), tmp_path)
        preempted.options |= {"grace_period_seconds": 3, "sync": SyncConfig(commit="async")}
        preempted.config |= {"save_seconds": 1.0, "slow_from_step": 8}  # time to cut the line before step 10 is sent
        driver = preempted.start()
        preempted.until_at("begin", 8)
        until(lambda: preempted.committed() == 5, seconds=30, what=lambda: driver.log)
        proxy.swallow()
        preempted.until_at("saving", 10)
        _ended_by(driver, signal.SIGTERM, within=3)
        until(lambda: proxy.established == 0, seconds=5, what=lambda: f"{proxy.established} connections left")
        proxy.restore()
        assert preempted.committed() == 5
        preempted.require_continued(from_step=5)


def test_a_group_wide_termination_still_lets_the_trial_save(preempted: _Preempted) -> None:
    driver = preempted.start()
    preempted.until_at("trained", 7)
    for pid in driver.trials():
        os.kill(pid, signal.SIGTERM)
    _ended_by(driver, signal.SIGTERM, within=25)
    assert preempted.committed() == max(preempted.acts("trained"))
    preempted.require_resumable()


@pytest.mark.deep
def test_a_function_trainable_hears_of_the_termination_and_saves(preempted: _Preempted) -> None:
    preempted.trainable = "tests.trainables.numpy_mlp:train"
    driver = preempted.start()
    preempted.until_at("trained", 7)
    _ended_by(driver, signal.SIGTERM, within=25)
    assert preempted.committed() == max(preempted.acts("trained"))
    preempted.require_continued(from_step=preempted.committed())


@pytest.mark.deep
def test_a_termination_before_the_first_step_ends_resumable_too(preempted: _Preempted) -> None:
    def has_begun() -> bool:  # its process is there before
        return any(
            isinstance(event, Started) for entry in entries_at(preempted.target, _NAME) for event in entry.events
        )

    driver = preempted.start()
    until(has_begun, seconds=60, what=lambda: driver.log)
    _ended_by(driver, signal.SIGTERM, within=25)
    preempted.require_resumable()
    preempted.require_continued(from_step=preempted.committed())


@pytest.mark.long
def test_ctrl_c_saves_and_ends_resumable(preempted: _Preempted) -> None:
    driver = preempted.start()
    preempted.until_at("trained", 7)
    assert _ended_by(driver, signal.SIGINT, within=25)["error"] == "KeyboardInterrupt"
    assert preempted.committed() == max(preempted.acts("trained"))
    preempted.require_continued(from_step=preempted.committed())


def test_a_second_ctrl_c_does_not_wait_for_a_slow_save(preempted: _Preempted) -> None:
    preempted.config |= {"save_seconds": 60.0, "slow_from_step": 8}
    driver = preempted.start()
    preempted.until_at("trained", 8)
    driver.signal(signal.SIGINT)
    preempted.until_at("saving", 8)
    assert _ended_by(driver, signal.SIGINT, within=1)["error"] == "KeyboardInterrupt"
    assert preempted.committed() == 5
