"""A flow run of two unnamed searches, in a process of its own: `python -m tests.flows.resuming.unnamed_run RUN FOLDER`.

Its second search is held in its second step, until the file `gate` exists.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

import prefect_tune as pt
from tests.trainables.witness import hold, record_act

SIZES = ("small", "large")


def train(config: Mapping[str, Any]) -> None:
    """Count to 3, from the checkpoint on, and witness the first step of this process."""
    folder, size = Path(config["folder"]), config["size"]
    begin, restored = 0, pt.get_checkpoint()
    if restored is not None:
        with restored.as_directory() as directory:
            saved = json.loads(Path(directory, "state.json").read_text())
        if saved["size"] != size:
            raise AssertionError(f"asked for {size}, got the weights of {saved['size']}")
        begin = saved["step"]
    record_act(folder / f"witness-{size}", "begin", begin + 1)
    for step in range(begin + 1, 4):
        if size == SIZES[1] and step == 2:
            record_act(folder / f"witness-{size}", "held", step)
            hold(folder / "gate")
        state = json.dumps({"step": step, "size": size})
        pt.report_step({"loss": float(step)}, partial(_write_state, state))


def _write_state(state: str, directory: str) -> None:
    Path(directory, "state.json").write_text(state)


@flow(name="unnamed-run")
def two_searches(folder: Path, sizes: tuple[str, ...]) -> None:
    for size in sizes:
        options: dict[str, Any] = {"checkpoint": pt.Cadence(every_steps=1)}
        results = pt.tune(
            train,
            {"size": size, "folder": str(folder)},
            target=str(folder / "runs"),
            metric="loss",
            num_samples=1,
            **options,
        )
        (folder / f"experiment-{size}").write_text(results.experiment.name)


if __name__ == "__main__":
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(sys.argv[1])  # type: ignore[arg-type]  # it is sent as text anyway
    run_flow(two_searches, flow_run=run, parameters={"folder": Path(sys.argv[2]), "sizes": tuple(sys.argv[3:])})
