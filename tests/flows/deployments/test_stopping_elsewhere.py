"""Trials that run as deployments are stopped through their search, and also when no process runs the search."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.journal.journal import load
from prefect_tune.core.journal_events import Cause, FinishKind
from prefect_tune.core.search.domains import grid_search
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.tuner.stop_requests import stop
from tests.flows.driver import Drivers, until
from tests.flows.training import experiment_at
from tests.trainables.witness import acts_of

pytestmark = pytest.mark.deep

_STEPS = 27


def of_search(target: LocalTarget, trial: str) -> Trial:
    """Return the trial by its own journal, whether or not a search has read that."""
    with target.open(timeout=timedelta(seconds=30)) as store:
        return load(store, JournalKey(experiment="e", generation=1, trial=trial), side_by_side=map).trial(trial)


@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_a_trial_elsewhere_is_stopped_with_its_search_and_without_it(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    driver = drivers.start(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search([3, 5]), "witness": str(witness), "step_seconds": 5},
        flow="tune",
        target=local_target,
        experiment="e",
        num_samples=1,
        stop={"step": _STEPS},
        max_concurrent_trials=2,
        checkpoint=Cadence(every_steps=1),
        trials="deployment",
        trial_tags=["elsewhere"],
    )
    until(lambda: len({each.pid for each in acts_of(witness)}) == 2, seconds=400, what=lambda: driver.log[-3000:])
    stopped = stop("e", target=local_target, trial="00000", wait_seconds=120)
    kind = stopped.experiment.trial("00000").finish_kind
    assert (stopped.status, kind) == ("stopped", FinishKind.STOPPED), stopped.message
    driver.kill()
    alone = stop("e", target=local_target, wait_seconds=20)
    assert (alone.status, "1 attempts got the request directly" in alone.message) == ("unanswered", True), alone.message
    until(
        lambda: of_search(local_target, "00001").status is Status.INTERRUPTED,
        seconds=120,
        what=lambda: str(of_search(local_target, "00001")),
    )
    left = of_search(local_target, "00001")
    assert (left.cause, left.checkpoints[-1].step) == (Cause.PREEMPTED, left.step)
    assert experiment_at(local_target, "e").trial("00001").phase is not Phase.FINISHED
