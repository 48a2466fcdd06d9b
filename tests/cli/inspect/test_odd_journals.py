"""The output of read-only commands for a forged journal, and for a search that has fallen silent."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Configured,
    Owner,
    Started,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import LiveStatus, RunningTrial, write_live_status
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import Stamp
from prefect_tune.stores.posix_store import PosixStore, make_root
from tests.fakes.checkpoints import first_generation
from tests.fakes.command_line import Run


def forged(folder: Path, metric: Any) -> str:
    """Write a search whose entries carry no times; return where."""
    make_root(folder)
    with LocalTarget(path=str(folder)).open(timeout=timedelta(seconds=60)) as store:
        stamps = (Stamp(write_id=name, at="some day") for name in ("first", "second"))
        state = take_over(
            store, first_generation("e"), Owner(name="they", host="there", pid=1), next(stamps), side_by_side=map
        )
        append(store, state, [Configured(settings={"metric": metric})], next(stamps))
    return str(folder)


def test_a_report_is_made_where_the_times_are_none(run: Run, tmp_path: Path) -> None:
    done = run("report", forged(tmp_path / "runs", "loss"), "e")
    assert done.code == 0
    assert done.out.startswith("# e\n")


@pytest.mark.parametrize("metric", [3, [["loss"]], {"a": 1}])
def test_a_metric_that_is_no_name_is_one_line(metric: Any, run: Run, tmp_path: Path) -> None:
    for command in ("report", "show"):
        done = run(command, forged(tmp_path / command, metric), "e")
        assert done.code == 2
        assert done.err.strip() == f"prefect-tune: metric: expected a name, or a list of names, found {metric!r}"


@pytest.mark.parametrize(("age", "is_stale"), [(timedelta(minutes=-1), False), (timedelta(minutes=1), True)])
def test_running_trials_without_updates_are_dim_and_have_no_reason(
    age: timedelta, is_stale: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_root(tmp_path / "runs")
    store, key = PosixStore(tmp_path / "runs"), JournalKey(experiment="e", generation=1)
    stamps = (Stamp(write_id=str(number), at="2026-11-21T08:00:00+00:00") for number in count())
    state = take_over(
        store, first_generation("e"), Owner(name="they", host="there", pid=1), next(stamps), side_by_side=map
    )
    lost = AttemptEnded(trial="first", cause=Cause.MACHINE, reason="its owner vanished")
    started = [Started(trial="first", attempt=number, from_step=0) for number in (1, 2)]
    for event in (Configured(settings={"seed": 1}), TrialAdded(trial="first", config={}), started[0], lost, started[1]):
        state = append(store, state, [event], next(stamps))
    at = (datetime.now(UTC) - age).isoformat()
    running = RunningTrial(trial="first", attempt=2)
    document = {"term": state.term, "owner": state.owner, "number": 1, "at": at, "period_seconds": 5}
    write_live_status(store, key, LiveStatus(**document, trials=(running,)))
    shown = json.loads(run("show", tmp_path / "runs", "e", "--json").out)
    assert (shown["is_stale"], shown["trials"][0]["reason"]) == (is_stale, "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for line in (
        next(each for each in run("show", tmp_path / "runs", "e").out.splitlines() if "first" in each),
        next(each for each in run("ls", tmp_path / "runs").out.splitlines() if "1 running" in each),
    ):
        assert line.startswith("\x1b[2m") == is_stale
