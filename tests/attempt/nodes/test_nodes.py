"""An attempt on two nodes, programs that share a target: whichever is killed, both continue and end the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.core.experiment.trial_transitions import Phase
from tests.attempt.nodes.cluster import Cluster
from tests.attempt.nodes.node_process import STEPS
from tests.long_cases import long_after


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill()


def _trials_below(folder: Path) -> list[int]:
    """The processes that work for the nodes of a test."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdecimal() and str(folder).encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
    return found


def undisturbed(ranks: int) -> dict[str, list[float]]:
    numbers = [float(each + 1) for each in range(ranks)]
    for step in range(1, STEPS + 1):
        numbers = [(number * 1.5 + step) % 97 for number in numbers]
    return {f"rank-{rank}.json": [STEPS, number] for rank, number in enumerate(numbers)}


@pytest.mark.parametrize("processes", long_after(1, [1, 2]))
def test_the_ranks_of_all_nodes_train_and_one_checkpoint_holds_their_files(processes: int, cluster: Cluster) -> None:
    first, second = cluster.train(processes_per_trial=processes)
    trial = cluster.trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 1), first
    assert trial.metrics["world_size"] == 2 * processes
    assert (ranks := trial.records[-1].ranks) is not None
    assert (len(ranks.writing), len(ranks.sending)) == (2 * processes, 2)
    assert all(each > 0 for each in ranks.sending)
    assert cluster.state() == undisturbed(2 * processes)
    assert "ENDED the attempt is over" in second
    assert cluster.left() == []


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_after_the_death_of_a_rank_on_either_node_both_continue_from_the_last_commit(
    rank: int, cluster: Cluster
) -> None:
    first, second = cluster.train(config={"rank": rank, "at": 5, "does": "die"})
    assert f"rank {rank}'s process ended by SIGKILL" in first
    assert "ENDED the attempt is over" in second
    assert cluster.trial().phase is Phase.PENDING
    assert [each.step for each in cluster.trial().checkpoints][-1] == 4
    cluster.train(attempt=2)
    assert (cluster.trial().phase, cluster.trial().step, cluster.trial().attempt) == (Phase.FINISHED, STEPS, 2)
    assert cluster.state() == undisturbed(2)


@pytest.mark.parametrize("node", long_after(1, [0, 1]))
def test_a_node_that_is_killed_ends_the_attempt_on_both_and_the_next_one_continues(node: int, cluster: Cluster) -> None:
    config = {"rank": 0, "at": 5, "does": "nothing", "others": "hang"}
    logs = [cluster.start(each, config=config, silence=8) for each in range(2)]
    wait_until(lambda: len(cluster.checkpoints()) >= 2, logs)
    cluster.kill_node(cluster.nodes[node])
    killed_at = time.monotonic()
    cluster.nodes[1 - node].join(60)
    assert time.monotonic() - killed_at < 30
    said = logs[1 - node].read_text()
    assert f"node {node}" in said
    assert "has written nothing for 8 s" in said
    wait_until(lambda: not _trials_below(cluster.folder), logs)
    cluster.train(attempt=2)
    assert (cluster.trial().phase, cluster.trial().step, cluster.trial().attempt) == (Phase.FINISHED, STEPS, 2)
    assert cluster.state() == undisturbed(2)
    assert cluster.left() == []


@pytest.mark.long
def test_with_fewer_nodes_than_wanted_an_attempt_begins_if_they_are_enough(cluster: Cluster) -> None:
    first, _ = cluster.train(nodes_per_trial=3, min_nodes=2)
    assert "2 of 3 nodes have arrived: the attempt begins with these" in first
    assert (cluster.trial().phase, cluster.trial().metrics["world_size"]) == (Phase.FINISHED, 2)


@pytest.mark.long
def test_a_node_that_cannot_be_read_is_one_that_is_missing(cluster: Cluster) -> None:
    options: dict[str, Any] = {"nodes_per_trial": 3, "min_nodes": 2}
    logs = [cluster.start(0, **options), cluster.start(1, **options), cluster.start(2, secret="other", **options)]
    cluster.wait()
    assert "2 of 3 nodes have arrived" in logs[0].read_text()
    assert (cluster.trial().phase, cluster.trial().metrics["world_size"]) == (Phase.FINISHED, 2)
    assert "ENDED node 0 wrote what cannot be read" in logs[2].read_text()


def test_a_second_process_of_one_node_trains_nothing(cluster: Cluster) -> None:
    logs = [cluster.start(0), cluster.start(1)]
    other = cluster.folder / "other"
    other.mkdir()
    (other / "target").symlink_to(cluster.target.path)
    twin = Cluster.__new__(Cluster)
    twin.folder, twin.target, twin.nodes = other, cluster.target, cluster.nodes
    log = twin.start(1)
    cluster.wait()
    ended = [each.read_text().partition("ENDED ")[2] for each in (logs[1], log)]
    assert sorted(each.strip() for each in ended) == ["another process is node 1 of attempt 1", "the attempt is over"]
    assert cluster.state() == undisturbed(2)


def test_what_another_one_writes_for_a_node_is_not_read(cluster: Cluster) -> None:
    logs = [cluster.start(0), cluster.start(1, secret="of a stranger")]
    cluster.wait()
    first, second = (each.read_text() for each in logs)
    assert "node 1 wrote what cannot be read" in first
    assert "expected the signature of a node of this attempt" in first
    assert "ENDED node 0 wrote what cannot be read" in second
    assert cluster.trial().step == 0


def wait_until(condition: Callable[[], bool], logs: Sequence[Path]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "\n".join(each.read_text() for each in logs)
        time.sleep(0.1)
