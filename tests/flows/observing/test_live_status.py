"""Output of `show`, `ls` and `report` about a running search, and about a killed one, from another process."""

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

_PATIENT = "tests.trainables.counting:Patient"
_SOON_SECONDS = 240
"""Far less than the period in which reports are journaled, which is the default of 300 s here."""


def looked(*arguments: object) -> str:
    """Return what the command line prints; the search runs in another process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["prefect-tune", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return printed.getvalue()


def shown(target: LocalTarget, *options: str) -> dict[str, Any]:
    """Return the output of `show`; empty while there is no experiment yet."""
    if not list(Path(target.path, "e", "1", "journal").glob("*.json")):
        return {}
    found: dict[str, Any] = json.loads(looked("show", target.path, "e", "--json", *options))
    return found


def started(
    drivers: Drivers, target: LocalTarget, until_there: Path, period: float | None, flow: Flow = "tune"
) -> Driver:
    return drivers.start(
        _PATIENT,
        {"until": str(until_there)},
        flow=flow,
        target=target,
        experiment="e",
        metric="loss",
        num_samples=2,
        max_concurrent_trials=2,
        stop={"step": 4},
        sync=SyncConfig(live_period_seconds=period),
    )


def steps(target: LocalTarget) -> list[tuple[str, int]]:
    """Return status and step of each trial, as `show` prints them."""
    return [(each["status"], each["step"]) for each in shown(target).get("trials", ())]


@pytest.mark.long
@pytest.mark.parametrize("flow", ["tune", "tune on Dask"])
def test_another_process_sees_start_host_and_newest_step_of_a_running_trial_before_any_of_it_is_due(
    flow: Flow, drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    driver = started(drivers, local_target, tmp_path / "go", 1, flow)
    wait_until(
        lambda: steps(local_target) == [("running", 2)] * 2, seconds=_SOON_SECONDS, what=lambda: driver.log[-3000:]
    )
    found = shown(local_target)
    assert found["trials_by_status"] == {"running": 2}
    wait_until(lambda: not shown(local_target)["is_stale"], seconds=_SOON_SECONDS, what=lambda: driver.log[-3000:])
    for each in found["trials"]:
        assert (each["host"], each["attempts"], each["metrics"]) == (socket.gethostname(), 1, {"loss": 0.5})
        assert each["attempt_began_at"] < each["reported_at"]
    of_trial = shown(local_target, "--trial", "00001")
    assert (of_trial["step"], of_trial["host"]) == (2, socket.gethostname())
    (listed,) = json.loads(looked("ls", local_target.path, "--json"))
    assert (listed["trials"], listed["best"]) == ({"running": 2}, {"loss": 0.5})
    assert listed["as_of"] > listed["written_at"][:19]
    report = json.loads(looked("report", local_target.path, "e", "--json"))
    assert [(each["step"], each["host"]) for each in report["trials"]] == [(2, socket.gethostname())] * 2
    (tmp_path / "go").touch()
    driver.wait()
    assert shown(local_target)["trials_by_status"] == {"completed": 2}
    left = [*Path(local_target.path).glob("e/1/live/*"), *Path(local_target.path).glob("e/1/trials/*/live/*")]
    assert not left, "it is of no use any more"


@pytest.mark.long
def test_of_a_killed_search_it_says_how_old_it_is_and_the_next_run_replaces_it(
    drivers: Drivers, local_target: LocalTarget, tmp_path: Path
) -> None:
    driver = started(drivers, local_target, tmp_path / "go", period=1)
    wait_until(
        lambda: steps(local_target) == [("running", 2)] * 2, seconds=_SOON_SECONDS, what=lambda: driver.log[-3000:]
    )
    driver.kill_everything()
    wait_until(
        lambda: shown(local_target)["is_stale"], seconds=120, what=lambda: looked("show", local_target.path, "e")
    )
    assert shown(local_target)["age_seconds"] > 3
    said = looked("show", local_target.path, "e")
    assert " s ago; updates every 1 s are missing: its process has probably ended" in said
    assert f"resume with  prefect-tune resume {local_target.path} e\n" in said.replace(" \n", "\n")
    assert "the process has probably ended: e\n" in looked("ls", local_target.path)
    assert "its process has probably ended" in looked("report", local_target.path, "e")
    (tmp_path / "go").touch()
    started(drivers, local_target, tmp_path / "go", period=1).wait()
    assert shown(local_target)["trials_by_status"] == {"completed": 2}
    assert not list(Path(local_target.path).glob("e/1/live/*"))
    assert _wasted(local_target) == [(2, True)] * 2


def _wasted(target: LocalTarget) -> list[tuple[int, bool]]:
    found = shown(target)
    return [(each["recomputed_steps"], each["recomputed_is_lower_bound"]) for each in found.get("trials", [found])]
