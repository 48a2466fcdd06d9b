"""PyTorch on two nodes: bit for bit as two ranks of one machine, also after the death of a node or a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.attempt.trial_spec import serialize_for_trial
from prefect_tune.core.experiment.stoppers import as_stopper
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.reasons import make_reason
from prefect_tune.testing import without_server
from tests.attempt.nodes.cluster import Cluster, end_reason
from tests.fakes.trial_processes import wait_until

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
pytest.importorskip("torch")
if True:  # only with torch
    from tests.integrations.ranks.test_torch_ranks import CASES, STEPS, train_case


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill()


def _make_options(case: str) -> dict[str, object]:
    return {
        "trainable": f"{CASES[case][0].__module__}:{CASES[case][0].__name__}",
        "stopper": serialize_for_trial(as_stopper({"step": STEPS})),
        "cadence": pt.Cadence(every_steps=5),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "node 0", "node 1"])
def test_after_a_death_the_state_of_each_rank_is_that_of_two_ranks_of_one_machine(
    case: str, victim: str, cluster: Cluster, tmp_path: Path
) -> None:
    with without_server():
        _, undisturbed = train_case(tmp_path / "undisturbed", case, 2)
    kind, number = victim.split()
    config = {"lr": 0.1, "width": 16, "strike": [int(number), 7] if kind == "rank" else None}
    if kind == "rank":
        first, _ = cluster.train(config=config, **_make_options(case))
        assert end_reason(first) == make_reason("process-ended", signal="SIGKILL", rank=int(number))
    else:
        for node in range(2):
            cluster.start(node, config=config, silence=5, **_make_options(case))
        wait_until(cluster.list_manifests, seconds=300, what=lambda: "the first checkpoint")
        cluster.kill_node(cluster.nodes[int(number)])
        cluster.wait()
        if victim == "node 0":
            cluster.end_attempt()
    cluster.train(attempt=2, config=config, **_make_options(case))
    trial = cluster.load_trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 2)
    assert CASES[case][1](cluster.download_newest_checkpoint()) == undisturbed
