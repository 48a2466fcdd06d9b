"""An attempt on two nodes, programs that share a target: whichever is killed, both continue and end the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import pytest

import prefect_tune as pt
from prefect_tune.attempt.trial_spec import pickled_or_path
from prefect_tune.core.experiment.stoppers import as_stopper
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.messages.target_messages import Arrived, NodeMessages, write_messages
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.layout import NodesKey
from tests.attempt.nodes.cluster import JOURNAL, Cluster, make_silent, read_end
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
    first, second = cluster.train(processes_per_trial=processes, metrics_from="mean")
    trial, ends = cluster.trial(), undisturbed(2 * processes)
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 1), first
    assert trial.metrics["world_size"] == 2 * processes
    assert trial.metrics["number"] == fmean(number for _, number in ends.values()), "of the ranks of both nodes"
    assert (ranks := trial.records[-1].ranks) is not None
    assert (len(ranks.writing), len(ranks.sending)) == (2 * processes, 2)
    assert all(each > 0 for each in ranks.sending)
    assert cluster.state() == ends
    assert read_end(second) == make_reason("attempt-over")
    assert cluster.left() == []


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_after_the_death_of_a_rank_on_either_node_both_continue_from_the_last_commit(
    rank: int, cluster: Cluster
) -> None:
    first, second = cluster.train(config={"rank": rank, "at": 5, "does": "die"})
    assert read_end(first) == make_reason("process-ended", signal="SIGKILL", rank=rank)
    assert read_end(second) == make_reason("attempt-over")
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
    silent = make_silent(1, 8.0) if node else make_reason("node-silent", node=0, seconds=8.0)
    assert read_end(logs[1 - node].read_text()) == silent
    wait_until(lambda: not _trials_below(cluster.folder), logs)
    cluster.train(attempt=2)
    assert (cluster.trial().phase, cluster.trial().step, cluster.trial().attempt) == (Phase.FINISHED, STEPS, 2)
    assert cluster.state() == undisturbed(2)
    assert cluster.left() == []


def _train_on_two_of_three(cluster: Cluster) -> str:
    logs = [cluster.start(node, nodes_per_trial=3, min_nodes=2) for node in range(2)]
    cluster.wait()
    return logs[0].read_text()


@pytest.mark.long
def test_with_fewer_nodes_than_wanted_an_attempt_begins_if_they_are_enough(cluster: Cluster) -> None:
    first = _train_on_two_of_three(cluster)
    assert "2 of 3 nodes have arrived: the attempt begins with these" in first
    assert (cluster.trial().phase, cluster.trial().metrics["world_size"]) == (Phase.FINISHED, 2)


@pytest.mark.long
def test_a_node_that_cannot_be_read_is_one_that_is_missing(cluster: Cluster) -> None:
    write_as_node(cluster, 2, "of a stranger")
    first = _train_on_two_of_three(cluster)
    assert "2 of 3 nodes have arrived" in first
    assert (cluster.trial().phase, cluster.trial().metrics["world_size"]) == (Phase.FINISHED, 2)


@pytest.mark.long
def test_a_node_of_another_request_joins_no_attempt(cluster: Cluster) -> None:
    logs = [cluster.start(0), cluster.start(1), cluster.start(2, secret="of another request")]
    cluster.wait()
    assert cluster.state() == undisturbed(2)
    assert read_end(logs[2].read_text()) == make_reason("node-not-needed")
    assert cluster.left() == []


def test_a_request_that_is_repeated_after_its_attempt_died_ends_at_once(cluster: Cluster) -> None:
    """As Dask and Ray repeat the task of a dead worker: the other nodes of that attempt are gone."""
    first = cluster.start(0, secret="of the request")
    wait_until(lambda: any(each.endswith("/0000000001.json") for each in cluster.left()), [first])
    cluster.kill()
    again = cluster.start(0, secret="of the request")
    cluster.wait()
    assert "its worker is gone, and the other nodes with it: all begin again" in again.read_text()
    assert cluster.trial().attempt == 2
    assert cluster.left() == []


def test_a_second_process_of_one_node_trains_nothing(cluster: Cluster) -> None:
    write_as_node(cluster, 1, "of attempt 1")  # the first process
    logs = [cluster.start(0, silence=5), cluster.start(1, silence=5)]
    cluster.wait()
    assert read_end(logs[1].read_text()) == make_reason("node-displaced", node=1, attempt=1)
    assert read_end(logs[0].read_text()) == make_silent(1, 5.0)
    assert cluster.checkpoints() == []


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(("fault", "is_saved"), [("hangs", False), ("refuses", False), ("loses the reply", True)])
def test_a_target_that_fails_a_node_fails_that_save_alone_while_all_train_on(
    fault: str, is_saved: bool, nodes: int, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    first, *_ = cluster.train(
        trainable="tests.trainables.grouped:Paced",
        stopper=pickled_or_path(as_stopper({"step": 60})),
        cadence=pt.Cadence(every_steps=20),
        sync=pt.SyncConfig(commit="async"),
        nodes_per_trial=nodes,
        fault=fault,
    )
    trial = cluster.trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, 60, 1), first
    steps = sorted(int(each.parent.name.partition("-")[0]) for each in cluster.checkpoints())
    assert (20 in steps) == is_saved, steps
    assert len(steps) > 1, "the next save commits"
    assert steps[-1] == 60
    assert ("step 20 is not committed" in first) != is_saved, first
    record_property("longest time between two steps, seconds", trial.metrics["longest"])


def test_what_another_one_writes_for_a_node_is_not_read(cluster: Cluster) -> None:
    write_as_node(cluster, 1, "of a stranger")
    log = cluster.start(0)
    cluster.wait()
    reason = read_end(log.read_text())
    assert reason.code == "nodes-missing"
    assert "node 1 wrote what cannot be read" in str(reason)
    assert "expected the signature of a node of this attempt" in str(reason)
    assert cluster.trial().step == 0


def write_as_node(cluster: Cluster, node: int, secret: str) -> None:
    """Write the first message of a node, as another process than that of the test."""
    nodes = NodesKey(trial=JOURNAL.of_experiment.trial_key("00000"), attempt=1)
    forged = NodeMessages(write_id="of another process", has_read={}, messages=(Arrived(host="elsewhere"),))
    with cluster.target.open(timeout=timedelta(seconds=30)) as store:
        write_messages(store, nodes, node, 1, forged, secret)


def wait_until(condition: Callable[[], bool], logs: Sequence[Path]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "\n".join(each.read_text() for each in logs)
        time.sleep(0.1)
