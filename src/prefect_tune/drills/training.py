"""The program of one run of a drill: it trains one trial durably, and kills itself as planned."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import prefect_tune as pt
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.drills.probe import RunPlan


class _KillingStore:
    """A proxy of a store; kills this process after the first blob of an upload if a kill during that upload is due."""

    def __init__(self, store: Any, plan: RunPlan) -> None:
        self._store = store
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, path: str, data: Buffer) -> None:
        self._store.create(path, data)
        self._kill_if_due(path)

    def put(self, path: str, data: Buffer) -> None:
        self._store.put(path, data)
        self._kill_if_due(path)

    def _kill_if_due(self, path: str) -> None:
        if "/blobs/" not in path:
            return
        with self._plan.records_path.open(encoding="utf-8") as records:
            last = deque(records, maxlen=1)[0]  # the record of the saved step, written before the save
        if (number := self._plan.next_due_kill(json.loads(last)["step"], "upload")) is not None:
            self._plan.kill(number, os.getpid())


@contextmanager
def _killing_during_upload(target: type[Any], plan: RunPlan) -> Iterator[None]:
    """In the `with` block, all targets of the class `target` open stores that kill this process as planned."""
    open_store = target.open

    @contextmanager
    def open_killing_store(self: Any, *args: Any, **options: timedelta) -> Iterator[Any]:
        with open_store(self, *args, **options) as store:
            yield _KillingStore(store, plan)

    with patch.object(target, "open", open_killing_store):
        yield


def _exit_with_drill() -> None:
    while os.read(0, 1):  # until EOF, which comes when the process of the drill ends
        pass
    os._exit(1)


def main() -> None:
    """Train with the options in the only command-line argument, a JSON document."""
    from prefect_tune.blocks import resolve_target

    threading.Thread(target=_exit_with_drill, daemon=True).start()
    options: dict[str, Any] = json.loads(sys.argv[1])
    plan = replace(RunPlan.from_environment(), search_pid=os.getpid())
    os.environ |= plan.to_environment()
    target = resolve_target(options["target"])
    try:
        with _killing_during_upload(type(target), plan):
            pt.durable_trainable(
                "prefect_tune.drills.probe:Probed",
                options["config"],
                target=target,
                experiment=options["experiment"],
                stop={"step": options["steps"]},
                checkpoint=pt.Cadence(every_steps=options["save_every"], every_seconds=None),
                failures=pt.FailurePolicy(max_machine_failures=len(plan.kills) + 1),
                processes_per_trial=options["processes"],
            )
    except pt.TuneError as error:
        sys.exit(str(error))  # the log has the details


if __name__ == "__main__":
    main()
