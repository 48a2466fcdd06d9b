"""SIGTERM while all trials wait for a slot of a concurrency limit."""

from __future__ import annotations

import signal
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Phase
from tests.flows.driver import Drivers, until
from tests.flows.training import experiment_at


@pytest.mark.long
def test_a_search_whose_trials_wait_ends_and_no_trial_has_lost_an_attempt(
    drivers: Drivers, local_target: LocalTarget
) -> None:
    tag = f"big-{uuid4().hex}"
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=f"tag:{tag}", limit=0))
    options = {"metric": "loss", "num_samples": 2, "trial_tags": [tag], "grace_period_seconds": 5}
    driver = drivers.start(
        "tests.trainables.moody:Moody", {}, target=local_target, experiment="e", flow="tune", **options
    )
    until(lambda: driver.log.count("the trial waits") == 2, seconds=120, what=lambda: driver.log[-3000:])
    driver.signal(signal.SIGTERM)
    driver.wait(seconds=60)
    driver.require_no_leftovers()
    assert driver.process.exitcode == -signal.SIGTERM
    assert [(each.phase, each.attempt) for each in experiment_at(local_target, "e").trials.values()] == [
        (Phase.PENDING, 0)
    ] * 2
