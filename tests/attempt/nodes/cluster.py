"""Nodes of an attempt on this machine: programs with sessions of their own, which share a target only."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.outbox import close_outbox, read_posts
from prefect_tune.core.journal_events import Event, Launched, OutboxClosed, Received, TrialAdded
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.restore import adopt
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.journal_access import Opening, current_owner, new_write_id, open_journal, write_directly
from prefect_tune.tasks.checkpoints import download_checkpoint
from tests.attempt.nodes.node_process import run_process
from tests.flows.forked_programs import preloaded

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
        self.search = open_journal(self.target, JOURNAL, Opening(current_owner(), new_write_id()))
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
        self.search = write_directly(self.target, self.search, [*events, Launched(trial="00000", outbox=count + 1)])
        self.launched[attempt] = self.search.trial("00000")

    def end_attempt(self) -> None:
        """Fence off an attempt whose node 0 was killed."""
        with self.target.open(timeout=_MINUTE) as store:
            trial = self.trial()
            assert trial.outbox is not None
            assert not close_outbox(store, TRIAL, trial.outbox, trial.post, "the test", new_write_id()).posts
            self.search = write_directly(self.target, self.search, [OutboxClosed(trial="00000")])
            self.search = write_directly(self.target, self.search, adopt(store, self.search))

    def trial(self) -> Trial:
        """Return the trial after all that its attempts have posted."""
        trial = self.search.trial("00000")
        if trial.outbox is not None:
            with self.target.open(timeout=_MINUTE) as store:
                posts = read_posts(store, TRIAL, trial.outbox, trial.post)
            for number, post in enumerate(posts, trial.post + 1):
                events = [Received(trial="00000", post=number), *post.events]
                self.search = write_directly(self.target, self.search, events)
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
