"""Trials on several nodes, each a flow run of a process worker: the nodes share the target only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.flows.tune import tune
from prefect_tune.testing import without_server

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
    [trial] = results.trials.values()
    assert (trial.status, trial.step, trial.attempt) == ("completed", STEPS, 2)
    assert trial.metrics["world_size"] == 4
    checkpoint = results.checkpoint(trial.trial)
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        ranks = {each.name: json.loads(each.read_text())[0] for each in Path(directory).glob("rank-*.json")}
    assert ranks == {f"rank-{rank}.json": STEPS for rank in range(4)}
    assert not [each for each in Path(local_target.path).glob("nodes/1/trials/*/nodes/**/*") if each.is_file()]


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
