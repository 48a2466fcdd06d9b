"""Nodes of an attempt on this machine: processes in sessions of their own, which share a target only."""

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
    current_owner,
    write_entry_directly,
)
from prefect_tune.tasks.checkpoints import download_checkpoint
from prefect_tune.testing import without_server
from tests.attempt.direct_tasks import DirectTasks
from tests.flows.forked_programs import in_own_session, preloaded

JOURNAL = JournalKey(experiment="e", generation=1)
TRIAL = JOURNAL.trial_key("00000")
_MINUTE = timedelta(minutes=1)


def read_end(output: str) -> Reason:
    """Return why a node has ended, from its output."""
    (line,) = [line for line in output.splitlines() if line.startswith("ENDED ")]
    return Reason.model_validate_json(line.removeprefix("ENDED "))


def make_silent(node: int, seconds: float) -> Reason:
    """Return the reason by which node 0 ends without another node, which has one rank and sends nothing any more."""
    silent = make_reason("node-silent", node=node, seconds=seconds)
    return make_reason("process-ended", detail=make_reason("node-lost", node=node, error=silent), rank=node)


class Cluster:
    """Starts the nodes of attempts, each with its own session, as machines have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = LocalTarget(path=str(folder / "target"))
        self.search = acquire_and_adopt_with_retries(
            self.target, JOURNAL, OwnershipRequest(current_owner(), new_write_stamp())
        )
        self.launched: dict[int, Trial] = {}
        """By attempt, the trial as its request has it."""
        self.nodes: list[BaseProcess] = []

    def start(self, node: int, attempt: int = 1, config: dict[str, Any] | None = None, **options: Any) -> Path:
        """Start a node; return the file with its output."""
        self._launch(attempt, config or {})
        log = self.folder / f"node-{node}-{attempt}.log"
        call = (log, self.folder, node, self.launched[attempt], options)
        process = preloaded().Process(target=run_process, args=call, daemon=False)
        process.start()
        self.nodes.append(process)
        return log

    def train(self, attempt: int = 1, config: dict[str, Any] | None = None, **options: Any) -> list[str]:
        """Train an attempt on two nodes, or on `nodes_per_trial`; return their output."""
        nodes = range(options.get("nodes_per_trial", 2))
        logs = [self.start(node, attempt, config, **options) for node in nodes]
        self.wait()
        return [each.read_text() for each in logs]

    def wait(self) -> None:
        for each in self.nodes:
            each.join(120)

    def kill(self) -> None:
        for each in self.nodes:
            if each.is_alive():
                self.kill_node(each)

    def kill_node(self, node: BaseProcess) -> None:
        assert node.pid is not None
        os.killpg(node.pid, signal.SIGKILL)
        node.join(60)

    def _launch(self, attempt: int, config: dict[str, Any]) -> None:
        """Open an outbox for the attempt, as its search does, after the attempt before it is over."""
        if attempt in self.launched:
            return
        events: list[Event] = [] if self.search.trials else [TrialAdded(trial="00000", config=config)]
        count = self.trial().outbox_count if self.search.trials else 0
        self.search = write_entry_directly(
            self.target, self.search, [*events, AttemptLaunched(trial="00000", outbox=count + 1)]
        )
        self.launched[attempt] = self.search.trial("00000")

    def end_attempt(self) -> None:
        """Fence off an attempt whose node 0 was killed."""
        with self.target.open(timeout=_MINUTE) as store:
            trial = self.trial()
            assert trial.outbox is not None
            assert not close_outbox(store, TRIAL, trial.outbox, trial.last_post, "the test", new_write_stamp()).posts
            self.search = write_entry_directly(self.target, self.search, [OutboxClosed(trial="00000")])
            self.search = write_entry_directly(self.target, self.search, make_adoption_events(store, self.search))

    def trial(self) -> Trial:
        """Return the trial after all that its attempts have posted."""
        trial = self.search.trial("00000")
        if trial.outbox is not None:
            with self.target.open(timeout=_MINUTE) as store:
                posts = read_posts(store, TRIAL, trial.outbox, trial.last_post)
            for number, post in enumerate(posts, trial.last_post + 1):
                events = [PostReceived(trial="00000", post=number), *post.events]
                self.search = write_entry_directly(self.target, self.search, events)
        return self.search.trial("00000")

    def checkpoints(self) -> list[Path]:
        return list(Path(self.target.path).glob("e/1/trials/*/checkpoints/*/manifest.json"))

    def newest_checkpoint(self) -> Path:
        """A directory with the newest checkpoint."""
        key = TRIAL.checkpoint_key(self.trial().checkpoints[-1])
        return download_checkpoint.fn(self.target, key, self.folder / f"restored-{time.monotonic()}")

    def state(self) -> dict[str, list[float]]:
        """The numbers of all ranks, in the newest checkpoint."""
        directory = self.newest_checkpoint()
        assert (directory / "shared.txt").read_text() == "the same on each rank"
        return {each.name: json.loads(each.read_text()) for each in directory.glob("rank-*.json")}

    def left(self) -> list[str]:
        """What the nodes have left on the target for one another."""
        return [str(each) for each in Path(self.target.path).glob("e/1/trials/*/nodes/**/*") if each.is_file()]


# One node, forked from a process that has imported everything.


STEPS = 6


def spec_of(folder: Path, **options: Any) -> TrialSpec:
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
    spec, log = spec_of(folder, **options), logging.getLogger(f"node-{node}")
    request = AttemptRequest(search_term=1, trial=trial, secret=secret)
    attempt = request.attempt
    with without_server(), TrialProcessPool(slots=0) as pool:
        link = RemoteSearchChannel(spec.target, spec.trial, attempt, pool=pool).use_stop_event(threading.Event())
        try:
            if node:
                return train_node(spec, request, node, link, DirectTasks(spec), log)
            link.start_polling()
            return Attempt(spec, request, link, DirectTasks(spec), log).run().outcome.reason
        finally:
            link.close()


def _fail_once(fault: str) -> None:
    """Let the first part of this node meet a target that hangs, refuses it, or loses the reply to its last request."""
    send, faults = nodes._upload_part, [fault]

    def failing(*arguments: Any) -> None:
        match faults.pop() if faults else "none":
            case "hangs":
                time.sleep(9)
                raise StoreUnavailable("no answer")
            case "refuses":
                raise StoreRefused("no space is left")
            case "loses the reply":
                send(*arguments)
                raise StoreUnavailable("the connection was reset")
        send(*arguments)

    vars(nodes)["_upload_part"] = failing


def run_process(log: Path, folder: Path, node: int, trial: Trial, options: Any) -> None:
    """Run a node, as a machine of its own would; all output goes to `log`."""
    in_own_session(log)
    os.environ["OF_TEST"] = str(folder)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    silence = timedelta(seconds=options.pop("silence", 60))
    nodes.NODE_TIMEOUT = silence
    nodes.HEARTBEAT_INTERVAL = timedelta(seconds=1)
    nodes._MIN_NODES_DELAY = timedelta(seconds=2)
    if fault := options.pop("fault", None):
        vars(nodes)["PARTS_TIMEOUT"] = timedelta(seconds=6)
        if node == options["nodes_per_trial"] - 1:
            _fail_once(fault)
    reason = run_node(folder, node, trial, options)
    assert isinstance(reason, Reason), reason
    print("ENDED", reason.model_dump_json(), flush=True)
