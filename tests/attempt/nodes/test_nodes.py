"""An attempt on two nodes, programs that share a target: whichever is killed, both continue and end the same."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from statistics import fmean

import pytest

import prefect_tune as pt
from prefect_tune.attempt import nodes
from prefect_tune.attempt.nodes import OtherNodes
from prefect_tune.attempt.trial_spec import AttemptRequest, serialize_for_trial
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.stoppers import as_stopper
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.messages.process_messages import TrainableLoaded
from prefect_tune.core.messages.target_messages import (
    BeginAttempt,
    FromRank,
    NodeAddress,
    NodeArrived,
    NodeMessage,
    find_newest_address,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import NodesKey
from tests.attempt.nodes.cluster import STEPS, TRIAL, Cluster, end_reason, final_states, make_spec, silence_reason
from tests.fakes.trial_processes import make_start, wait_until
from tests.long_cases import long_after


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill()


def _list_node_processes(folder: Path) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and str(folder).encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
    return pids


@pytest.mark.parametrize("processes", long_after(1, [1, 2]))
def test_the_ranks_of_all_nodes_train_and_one_checkpoint_holds_their_files(processes: int, cluster: Cluster) -> None:
    first, second = cluster.train(processes_per_trial=processes, metrics_from="mean")
    trial, states = cluster.load_trial(), final_states(2 * processes)
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 1), first
    assert trial.metrics["world_size"] == 2 * processes
    assert trial.metrics["number"] == fmean(number for _, number in states.values()), "of the ranks of both nodes"
    assert cluster.read_states() == states
    assert end_reason(second) == make_reason("attempt-over")
    assert cluster.list_leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_after_the_death_of_a_rank_on_either_node_both_continue_from_the_last_commit(
    rank: int, cluster: Cluster
) -> None:
    first, second = cluster.train(config={"rank": rank, "at": 5, "does": "die"})
    assert end_reason(first) == make_reason("process-ended", signal="SIGKILL", rank=rank)
    assert end_reason(second) == make_reason("attempt-over")
    assert cluster.load_trial().phase is Phase.PENDING
    assert cluster.load_trial().checkpoints[-1].step == 4
    cluster.train(attempt=2)
    trial = cluster.load_trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 2)
    assert cluster.read_states() == final_states(2)


@pytest.mark.parametrize("node", long_after(1, [0, 1]))
def test_a_node_that_is_killed_ends_the_attempt_on_both_and_the_next_one_continues(node: int, cluster: Cluster) -> None:
    config = {"rank": 0, "at": 5, "does": "nothing", "others": "hang"}
    logs = [cluster.start(index, config=config, silence=8) for index in range(2)]
    wait_with_logs(lambda: len(cluster.list_manifests()) >= 2, logs)
    cluster.kill_node(cluster.nodes[node])
    killed_at = time.monotonic()
    cluster.nodes[1 - node].join(60)
    assert time.monotonic() - killed_at < 30
    silent = silence_reason(1, 8.0) if node else make_reason("node-silent", node=0, seconds=8.0)
    assert end_reason(logs[1 - node].read_text()) == silent
    wait_with_logs(lambda: not _list_node_processes(cluster.folder), logs)
    if node == 0:
        cluster.end_attempt()
    cluster.train(attempt=2)
    trial = cluster.load_trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, STEPS, 2)
    assert cluster.read_states() == final_states(2)
    assert cluster.list_leftovers() == []


def _train_on_two_of_three(cluster: Cluster) -> str:
    logs = [cluster.start(node, nodes_per_trial=3, min_nodes=2) for node in range(2)]
    cluster.wait()
    return logs[0].read_text()


@pytest.mark.long
def test_with_fewer_nodes_than_wanted_an_attempt_begins_if_they_are_enough(cluster: Cluster) -> None:
    first = _train_on_two_of_three(cluster)
    assert "the attempt starts with the 2 of 3 nodes that arrived" in first
    trial = cluster.load_trial()
    assert (trial.phase, trial.metrics["world_size"]) == (Phase.FINISHED, 2)


@pytest.mark.long
def test_a_node_of_another_request_joins_no_attempt(cluster: Cluster) -> None:
    logs = [cluster.start(0), cluster.start(1), cluster.start(2, secret="of another request")]
    for node in cluster.nodes[:2]:
        node.join(120)
    assert cluster.read_states() == final_states(2)  # with it the journal says that the attempt is over
    cluster.wait()
    assert end_reason(logs[2].read_text()) == make_reason("node-not-needed")
    assert cluster.list_leftovers() == []


def test_a_request_that_is_repeated_after_its_attempt_died_ends_at_once(cluster: Cluster) -> None:
    """Dask and Ray repeat the task of a dead worker; the search requests the next attempt."""
    first = cluster.start(0, secret="of the request")
    wait_with_logs(cluster.list_leftovers, [first])
    cluster.kill()
    second = cluster.start(0, secret="of the request")
    cluster.wait()
    assert "another process trains this attempt" in second.read_text()
    assert cluster.load_trial().attempt == 1


def test_a_second_process_of_one_node_trains_nothing(cluster: Cluster) -> None:
    config = {"rank": 0, "at": 5, "does": "nothing", "others": "hang"}
    logs = [cluster.start(node, config=config) for node in range(2)]
    wait_with_logs(lambda: len(cluster.list_manifests()) >= 2, logs)
    extra = cluster.start(1, config=config)
    cluster.nodes[-1].join(60)
    assert end_reason(extra.read_text()) == make_reason("node-not-needed")


def test_a_node_that_is_stopped_is_lost(cluster: Cluster) -> None:
    config = {"rank": 0, "at": 5, "does": "nothing", "others": "hang"}
    logs = [cluster.start(node, config=config, silence=5) for node in range(2)]
    wait_with_logs(lambda: len(cluster.list_manifests()) >= 2, logs)
    pid = cluster.nodes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    cluster.nodes[0].join(60)
    assert end_reason(logs[0].read_text()) == silence_reason(1, 5.0)
    os.kill(pid, signal.SIGCONT)
    cluster.nodes[1].join(60)
    assert end_reason(logs[1].read_text()).code in ("attempt-over", "node-silent")


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(("fault", "is_saved"), [("hangs", False), ("refuses", False), ("loses the reply", True)])
def test_a_target_that_fails_a_node_fails_that_save_alone_while_all_train_on(
    fault: str, is_saved: bool, nodes: int, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    first, *_ = cluster.train(
        trainable="tests.trainables.grouped:Paced",
        stopper=serialize_for_trial(as_stopper({"step": 60})),
        cadence=pt.Cadence(every_steps=20),
        sync=pt.SyncConfig(commit="async"),
        nodes_per_trial=nodes,
        fault=fault,
    )
    trial = cluster.load_trial()
    assert (trial.phase, trial.step, trial.attempt) == (Phase.FINISHED, 60, 1), first
    steps = sorted(int(manifest.parent.name.partition("-")[0]) for manifest in cluster.list_manifests())
    assert (20 in steps) == is_saved, steps
    assert len(steps) > 1, "the next save commits"
    assert steps[-1] == 60
    assert ("step 20 is not committed" in first) != is_saved, first
    record_property("longest time between two steps, seconds", trial.metrics["longest"])


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize(
    ("has_secret", "message"),
    [(False, "AuthenticationError: digest received was wrong"), (True, "expected a JSON object")],
)
def test_a_stranger_and_a_pickle_are_refused_and_the_nodes_train(
    has_secret: bool, message: str, cluster: Cluster, tmp_path: Path
) -> None:
    logs = [cluster.start(0)]
    with cluster.target.open(timeout=timedelta(minutes=1)) as store:
        wait_with_logs(lambda: find_newest_address(store, TRIAL, 1), logs)
        newest = find_newest_address(store, TRIAL, 1)
    assert newest is not None
    key, address = newest
    assert address.host == "127.0.0.1"
    authkey = address.connection_key(key, "of attempt 1" if has_secret else "of a stranger")
    try:
        with Client((address.host, address.port), authkey=authkey) as connection:
            connection.send(Payload(tmp_path / "unpickled"))
            wait_with_logs(lambda: message in logs[0].read_text(), logs)
    except AuthenticationError:
        assert not has_secret
    wait_with_logs(lambda: message in logs[0].read_text(), logs)
    logs.append(cluster.start(1))
    cluster.wait()
    assert cluster.read_states() == final_states(2)
    assert not (tmp_path / "unpickled").exists()


def test_a_node_that_has_read_another_address_has_another_key() -> None:
    key = NodesKey(trial=TRIAL, attempt=1)
    read, real = (NodeAddress(host="127.0.0.1", port=port, request="") for port in (1, 2))
    assert read.connection_key(key, "secret") != real.connection_key(key, "secret")
    assert read.connection_key(key, "secret") != read.connection_key(key.model_copy(update={"attempt": 2}), "secret")


def test_a_node_waits_for_no_answer_of_a_node_0_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts the connection, or another program uses the port."""
    monkeypatch.setattr(nodes, "_JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(nodes, "NODE_TIMEOUT", timedelta(seconds=3))
    spec, key = make_spec(tmp_path), NodesKey(trial=TRIAL, attempt=1)
    request = AttemptRequest(owner_term=1, trial=Trial(id="00000", config={}), secret="of attempt 1")
    reason: Future[object] = Future()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = NodeAddress(host="127.0.0.1", port=listener.getsockname()[1], request="")
        with spec.target.open(timeout=timedelta(minutes=1)) as store:
            store.create(key.address_path, seal(address))
        connect = partial(nodes._connect_to_node_0, spec, request, threading.Event())
        threading.Thread(target=lambda: reason.set_result(connect()), daemon=True).start()
        assert reason.result(30) == make_reason("node-silent", node=0, seconds=3.0)


@pytest.fixture
def node_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OtherNodes:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(nodes, "_CLOSE_TIMEOUT", timedelta(0))
    spec, start = make_spec(tmp_path), make_start(os.getcwd, tmp_path)
    return OtherNodes(spec, start, 1, None, "of attempt 1", logging.getLogger("node-0"))


def _join_as_node_1(node_0: OtherNodes) -> Connection:
    key = node_0._address.connection_key(node_0._key, "of attempt 1")
    connection = nodes._open_connection(node_0._address, key)
    connection.send_bytes(NodeArrived(node=1, host="here").model_dump_json().encode())
    return connection


def test_the_end_of_a_second_process_of_a_node_is_not_that_of_the_node(
    node_0: OtherNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_0, _join_as_node_1(node_0):
        wait_until(lambda: node_0._hosts, what=lambda: "node 1")
        refused: list[NodeMessage] = []

        def send_late(_: nodes.NodeConnection, message: NodeMessage) -> None:
            refused.append(message)
            time.sleep(0.5)

        with monkeypatch.context() as patch:
            patch.setattr(nodes.NodeConnection, "send", send_late)
            _join_as_node_1(node_0).close()
            wait_until(lambda: refused, what=lambda: "a refusal")
            time.sleep(0.5)
        assert node_0._lost_reasons == {}


def test_what_a_node_sends_as_soon_as_it_begins_is_received(
    node_0: OtherNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = TrainableLoaded(pid=1, source_digest="")
    send = node_0._broadcast

    def send_and_wait(message: NodeMessage) -> None:
        send(message)
        if isinstance(message, BeginAttempt):
            connection.recv_bytes()
            connection.send_bytes(FromRank(rank=1, message=loaded).model_dump_json().encode())
            time.sleep(0.5)

    monkeypatch.setattr(node_0, "_broadcast", send_and_wait)
    with node_0, _join_as_node_1(node_0) as connection:
        [channel] = node_0.gather_nodes(threading.Event())
        assert channel.receive(timedelta(seconds=9)) == loaded


def test_a_node_joins_though_node_0_has_no_free_descriptor_at_first(
    node_0: OtherNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_JOIN_TIMEOUT", timedelta(seconds=2))
    accept, errors = socket.socket.accept, [OSError(24, "Too many open files")]

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with node_0, _join_as_node_1(node_0):
        wait_until(lambda: node_0._hosts, what=lambda: "node 1")


def test_an_address_that_cannot_be_written_leaves_no_socket_open(
    node_0: OtherNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        if hasattr(node_0, "_address"):
            raise StoreUnavailable("503")

    monkeypatch.setattr(nodes, "with_store", fail)
    with pytest.raises(StoreUnavailable), node_0:
        pass
    assert node_0._listener.fileno() == -1


def wait_with_logs(condition: Callable[[], object], logs: Sequence[Path]) -> None:
    wait_until(condition, seconds=60, what=lambda: "\n".join(log.read_text() for log in logs))
