"""Trials on several nodes, each a flow run of a process worker: the nodes share the target only."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.flows.tune import tune
from prefect_tune.testing import without_server
from tests.flows.training import require_trained_by_two_nodes

STEPS = 6


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server", "worker")
@pytest.mark.timeout(900)
def test_two_nodes_train_a_trial_and_after_the_death_of_a_rank_its_next_attempt(local_target: LocalTarget) -> None:
    results = tune(
        "tests.trainables.grouped:Sharded",
        {"rank": 3, "at": 5, "does": "die", "others": "hang"},
        target=local_target,
        experiment="nodes",
        num_samples=1,
        stop={"step": STEPS},
        checkpoint=Cadence(every_steps=2),
        trials="deployment",
        processes_per_trial=2,
        nodes_per_trial=2,
    )
    require_trained_by_two_nodes(results, local_target, steps=STEPS, attempts=2)


def test_what_nodes_cannot_be_is_refused_before_anything_is_written(local_target: LocalTarget) -> None:
    with without_server(), pytest.raises(InvalidInput, match="nodes_per_trial=2: expected trials='deployment'"):
        tune("tests.trainables.grouped:Sharded", {}, target=local_target, nodes_per_trial=2)
    with pytest.raises(InvalidInput, match="min_nodes=3: expected at most nodes_per_trial, which is 2"):
        tune(
            "tests.trainables.grouped:Sharded",
            {},
            target=local_target,
            nodes_per_trial=2,
            min_nodes=3,
            trials="deployment",
        )
    assert not list(Path(local_target.path).glob("*"))
