"""Output of `show`, `ls` and `report` about a search that runs or was killed in another process."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from prefect_tune import cli
from prefect_tune.blocks import LocalTarget, SyncConfig
from tests.fakes.trial_processes import wait_until
from tests.flows.driver import Driver, Drivers, Flow

_TIMEOUT_SECONDS = 240
"""Less than 300 s, the default of `sync_period_seconds`, after which reports are journaled."""


def run_cli(*args: object) -> str:
    """Return the output of the command line."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["prefect-tune", *map(str, args)])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return printed.getvalue()


def show(target: LocalTarget, *options: str) -> dict[str, Any]:
    """Return the output of `show`, or {} if there is no experiment yet."""
    if not list(Path(target.path, "e", "1", "journal").glob("*.json")):
        return {}
    return dict(json.loads(run_cli("show", target.path, "e", "--json", *options)))


def start_search(drivers: Drivers, target: LocalTarget, gate: Path, flow: Flow = "tune") -> Driver:
    return drivers.start(
        "tests.trainables.counting:Patient",
        {"until": str(gate)},
        flow=flow,
        target=target,
        experiment="e",
        metric="loss",
        num_samples=2,
        max_concurrent_trials=2,
        stop={"step": 4},
        sync=SyncConfig(live_period_seconds=1),
    )


def is_at_step_2(target: LocalTarget) -> bool:
    """Return whether both trials run and have trained two steps, by the output of `show`."""
    return [(trial["status"], trial["step"]) for trial in show(target).get("trials", ())] == [("running", 2)] * 2


@pytest.mark.long
@pytest.mark.parametrize("flow", ["tune", "tune on Dask"])
def test_another_process_sees_start_host_and_newest_step_of_a_running_trial_before_any_of_it_is_due(
    flow: Flow, drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    driver = start_search(drivers, local_target, tmp_path / "go", flow)
    driver.wait_until(lambda: is_at_step_2(local_target), seconds=_TIMEOUT_SECONDS)
    states: list[dict[str, Any]] = []

    def is_fresh() -> bool:
        states.append(show(local_target))
        return not states[-1]["is_stale"] and all(trial["reported_at"] for trial in states[-1]["trials"])

    driver.wait_until(is_fresh, seconds=_TIMEOUT_SECONDS)
    state = states[-1]
    assert state["trials_by_status"] == {"running": 2}
    for trial in state["trials"]:
        assert (trial["host"], trial["attempts"], trial["metrics"]) == (socket.gethostname(), 1, {"loss": 0.5})
        assert trial["attempt_began_at"] < trial["reported_at"]
    trial = show(local_target, "--trial", "00001")
    assert (trial["step"], trial["host"]) == (2, socket.gethostname())
    (row,) = json.loads(run_cli("ls", local_target.path, "--json"))
    assert (row["trials"], row["best"]) == ({"running": 2}, {"loss": 0.5})
    assert row["as_of"] > row["written_at"][:19]
    report = json.loads(run_cli("report", local_target.path, "e", "--json"))
    assert [(trial["step"], trial["host"]) for trial in report["trials"]] == [(2, socket.gethostname())] * 2
    (tmp_path / "go").touch()
    driver.wait()
    assert show(local_target)["trials_by_status"] == {"completed": 2}
    assert not [*Path(local_target.path).glob("e/1/live/*"), *Path(local_target.path).glob("e/1/trials/*/live/*")]


@pytest.mark.long
def test_of_a_killed_search_it_says_how_old_it_is_and_the_next_run_replaces_it(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    driver = start_search(drivers, local_target, tmp_path / "go")
    driver.wait_until(lambda: is_at_step_2(local_target), seconds=_TIMEOUT_SECONDS)
    driver.kill_everything()
    wait_until(lambda: show(local_target)["is_stale"], seconds=120, what=lambda: str(show(local_target)))
    assert show(local_target)["age_seconds"] >= 3
    text = run_cli("show", local_target.path, "e")
    assert " s ago; updates every 1 s are missing; the process has probably ended" in text
    assert f"resume with  prefect-tune resume {local_target.path} e\n" in text.replace(" \n", "\n")
    assert "the process has probably ended: e\n" in run_cli("ls", local_target.path)
    assert "the process has probably ended" in run_cli("report", local_target.path, "e")
    (tmp_path / "go").touch()
    start_search(drivers, local_target, tmp_path / "go").wait()
    state = show(local_target)
    assert state["trials_by_status"] == {"completed": 2}
    assert not list(Path(local_target.path).glob("e/1/live/*"))
    recomputed = [(trial["recomputed_steps"], trial["recomputed_is_lower_bound"]) for trial in state["trials"]]
    assert recomputed == [(2, True)] * 2
