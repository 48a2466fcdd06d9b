"""Run the nodes of an attempt on this machine, as processes that share only a target."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import prefect_tune as pt
from prefect_tune.attempt import nodes
from prefect_tune.attempt.attempt import Attempt
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, serialize_for_trial
from prefect_tune.blocks import LocalTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.stoppers import as_stopper
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.outbox import close_outbox, read_posts
from prefect_tune.core.journal_events import AttemptLaunched, Event, OutboxClosed, PostReceived, TrialAdded
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.executors.remote_executor import RemoteSearchChannel
from prefect_tune.journal_access import (
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    make_process_owner,
    write_entry_directly,
)
from prefect_tune.tasks.checkpoints import download_checkpoint
from prefect_tune.testing import without_server
from tests.attempt.direct_tasks import DirectTasks
from tests.flows.forked_programs import get_preloaded_context, start_own_session

JOURNAL = JournalKey(experiment="e", generation=1)
TRIAL = JOURNAL.trial_key("00000")
STEPS = 6
_MINUTE = timedelta(minutes=1)


def end_reason(output: str) -> Reason:
    """Return why a node ended, from its output."""
    (line,) = [line for line in output.splitlines() if line.startswith("ENDED ")]
    return Reason.model_validate_json(line.removeprefix("ENDED "))


def silence_reason(node: int, seconds: float) -> Reason:
    """Return the end reason of node 0 after another node, with one rank, became silent."""
    silence = make_reason("node-silent", node=node, seconds=seconds)
    return make_reason("process-ended", detail=make_reason("node-lost", node=node, error=silence), rank=node)


class Cluster:
    """Starts the nodes of attempts, each in its own session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = LocalTarget(path=str(folder / "target"))
        self.search = acquire_and_adopt_with_retries(
            self.target, JOURNAL, OwnershipRequest(make_process_owner(), new_write_stamp())
        )
        self.launched: dict[int, Trial] = {}
        """The trial in the request of each attempt, by attempt number."""
        self.nodes: list[BaseProcess] = []

    def start(self, node: int, attempt: int = 1, config: dict[str, Any] | None = None, **options: Any) -> Path:
        """Start a node; return the file with its output."""
        self._launch(attempt, config or {})
        log = self.folder / f"node-{node}-{attempt}.log"
        args = (log, self.folder, node, self.launched[attempt], options)
        process = get_preloaded_context().Process(target=run_node_process, args=args, daemon=False)
        process.start()
        self.nodes.append(process)
        return log

    def train(self, attempt: int = 1, config: dict[str, Any] | None = None, **options: Any) -> list[str]:
        """Train an attempt on `nodes_per_trial` nodes, by default two; return their output."""
        count = options.get("nodes_per_trial", 2)
        logs = [self.start(node, attempt, config, **options) for node in range(count)]
        self.wait()
        return [log.read_text() for log in logs]

    def wait(self) -> None:
        for node in self.nodes:
            node.join(120)

    def kill(self) -> None:
        for node in self.nodes:
            if node.is_alive():
                self.kill_node(node)

    def kill_node(self, node: BaseProcess) -> None:
        assert node.pid is not None
        os.killpg(node.pid, signal.SIGKILL)
        node.join(60)

    def _launch(self, attempt: int, config: dict[str, Any]) -> None:
        """Open an outbox for the attempt, as its search does after the previous attempt."""
        if attempt in self.launched:
            return
        events: list[Event] = [] if self.search.trials else [TrialAdded(trial="00000", config=config)]
        count = self.load_trial().outbox_count if self.search.trials else 0
        events.append(AttemptLaunched(trial="00000", outbox=count + 1))
        self.search = write_entry_directly(self.target, self.search, events)
        self.launched[attempt] = self.search.trial("00000")

    def end_attempt(self) -> None:
        """Close the outbox of an attempt whose node 0 was killed."""
        with self.target.open(timeout=_MINUTE) as store:
            trial = self.load_trial()
            assert trial.outbox is not None
            assert not close_outbox(store, TRIAL, trial.outbox, trial.last_post, "the test", new_write_stamp()).posts
            self.search = write_entry_directly(self.target, self.search, [OutboxClosed(trial="00000")])
            self.search = write_entry_directly(self.target, self.search, make_adoption_events(store, self.search))

    def load_trial(self) -> Trial:
        """Journal all posts of the trial's attempts; return the trial."""
        trial = self.search.trial("00000")
        if trial.outbox is not None:
            with self.target.open(timeout=_MINUTE) as store:
                posts = read_posts(store, TRIAL, trial.outbox, trial.last_post)
            for number, post in enumerate(posts, trial.last_post + 1):
                events = [PostReceived(trial="00000", post=number), *post.events]
                self.search = write_entry_directly(self.target, self.search, events)
        return self.search.trial("00000")

    def list_manifests(self) -> list[Path]:
        return list(Path(self.target.path).glob("e/1/trials/*/checkpoints/*/manifest.json"))

    def download_newest_checkpoint(self) -> Path:
        key = TRIAL.checkpoint_key(self.load_trial().checkpoints[-1])
        return download_checkpoint.fn(self.target, key, self.folder / f"restored-{time.monotonic()}")

    def read_states(self) -> dict[str, list[float]]:
        """Return the numbers of all ranks in the newest checkpoint."""
        return read_rank_states(self.download_newest_checkpoint())

    def list_leftovers(self) -> list[str]:
        """Return the messages between nodes that are still on the target."""
        return [str(path) for path in Path(self.target.path).glob("e/1/trials/*/nodes/**/*") if path.is_file()]


def read_rank_states(directory: Path) -> dict[str, list[float]]:
    assert (directory / "shared.txt").read_text() == "the same on each rank"
    return {path.name: json.loads(path.read_text()) for path in directory.glob("rank-*.json")}


def final_states(ranks: int) -> dict[str, list[float]]:
    """Return the states of all ranks after an attempt without failures."""
    numbers = [float(rank + 1) for rank in range(ranks)]
    for step in range(1, STEPS + 1):
        numbers = [(number * 1.5 + step) % 97 for number in numbers]
    return {f"rank-{rank}.json": [STEPS, number] for rank, number in enumerate(numbers)}


# One node, forked from a process that has imported everything.


def make_spec(folder: Path, **options: Any) -> TrialSpec:
    return TrialSpec(
        **{
            "target": LocalTarget(path=str(folder / "target")),
            "trial": TrialKey(experiment="e", generation=1, trial="00000"),
            "trainable": "tests.trainables.grouped:Sharded",
            "stopper": serialize_for_trial(as_stopper({"step": STEPS})),
            "needs_history": False,
            "cadence": pt.Cadence(every_steps=2),
            "proposed_by_search": True,
            "nodes_per_trial": 2,
            **options,
        }
    )


def run_node(folder: Path, node: int, trial: Trial, options: dict[str, Any]) -> AnyReason:
    """Run one attempt on a node; return why it ended."""
    secret = options.pop("secret", f"of attempt {trial.attempt + 1}")
    spec, log = make_spec(folder, **options), logging.getLogger(f"node-{node}")
    request = AttemptRequest(owner_term=1, trial=trial, secret=secret)
    attempt = request.attempt
    with without_server(), TrialProcessPool(slots=0) as pool:
        channel = RemoteSearchChannel(spec.target, spec.trial, attempt, pool=pool).use_stop_event(threading.Event())
        try:
            if node:
                return train_node(spec, request, node, channel, DirectTasks(spec), log)
            channel.start_polling()
            return Attempt(spec, request, channel, DirectTasks(spec), log).run().outcome.reason
        finally:
            channel.close()


def _fail_first_upload(fault: str) -> None:
    """Let the target hang at this node's first part, refuse it, or lose the reply to its last request."""
    send, faults = nodes._upload_part, [fault]

    def upload_or_fail(*args: Any) -> None:
        match faults.pop() if faults else "none":
            case "hangs":
                time.sleep(9)
                raise StoreUnavailable("no answer")
            case "refuses":
                raise StoreRefused("no space is left")
            case "loses the reply":
                send(*args)
                raise StoreUnavailable("the connection was reset")
        send(*args)

    vars(nodes)["_upload_part"] = upload_or_fail


def run_node_process(log: Path, folder: Path, node: int, trial: Trial, options: Any) -> None:
    """Run a node in its own session; write its output to `log`."""
    start_own_session(log)
    os.environ["OF_TEST"] = str(folder)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    nodes.NODE_TIMEOUT = timedelta(seconds=options.pop("silence", 60))
    nodes.HEARTBEAT_INTERVAL = timedelta(seconds=1)
    nodes._MIN_NODES_DELAY = timedelta(seconds=2)
    if fault := options.pop("fault", None):
        vars(nodes)["PARTS_TIMEOUT"] = timedelta(seconds=6)
        if node == options["nodes_per_trial"] - 1:
            _fail_first_upload(fault)
    reason = run_node(folder, node, trial, options)
    assert isinstance(reason, Reason), reason
    print("ENDED", reason.model_dump_json(), flush=True)
