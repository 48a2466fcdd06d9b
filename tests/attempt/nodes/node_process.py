"""One node of an attempt, as a process in a session of its own, forked from one that has imported everything."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import prefect_tune as pt
from prefect_tune.attempt import nodes
from prefect_tune.attempt.attempt import Attempt
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, pickled_or_path
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.stoppers import as_stopper
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.reasons import AnyReason, Reason
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.executors.remote_executor import StoreLink
from prefect_tune.testing import without_server
from tests.attempt.direct_tasks import DirectTasks
from tests.flows.forked_programs import in_own_session

STEPS = 6


def spec_of(folder: Path, **options: Any) -> TrialSpec:
    return TrialSpec(
        **{
            "target": LocalTarget(path=str(folder / "target")),
            "trial": TrialKey(experiment="e", generation=1, trial="00000"),
            "trainable": "tests.trainables.grouped:Sharded",
            "stopper": pickled_or_path(as_stopper({"step": STEPS})),
            "needs_curve": False,
            "cadence": pt.Cadence(every_steps=2),
            "of_search": True,
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
        link = StoreLink(spec.target, spec.trial, attempt, pool=pool).stopped_by(threading.Event())
        try:
            if node:
                return train_node(spec, request, node, link, DirectTasks(spec), log)
            return Attempt(spec, request, link, DirectTasks(spec), log).run().outcome.reason
        finally:
            link.close()


def _fail_once(fault: str) -> None:
    """Let the first part of this node meet a target that hangs, refuses it, or loses the reply to its last request."""
    send, faults = nodes._send, [fault]

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

    vars(nodes)["_send"] = failing


def run_process(log: Path, folder: Path, node: int, trial: Trial, options: Any) -> None:
    """Run a node, as a machine of its own would; all output goes to `log`."""
    in_own_session(log)
    os.environ["OF_TEST"] = str(folder)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    silence = timedelta(seconds=options.pop("silence", 60))
    nodes.SILENCE_TIMEOUT = silence
    nodes.ALIVE_INTERVAL = timedelta(seconds=1)
    nodes._FEWER_AFTER = timedelta(seconds=2)
    if fault := options.pop("fault", None):
        vars(nodes)["PARTS_WITHIN"] = timedelta(seconds=6)
        if node == options["nodes_per_trial"] - 1:
            _fail_once(fault)
    reason = run_node(folder, node, trial, options)
    assert isinstance(reason, Reason), reason
    print("ENDED", reason.model_dump_json(), flush=True)
