"""The output of read-only commands for a forged journal."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal_events.experiment_events import Described, Owner
from prefect_tune.core.models import Stamp
from prefect_tune.stores.posix.posix_store import make_root
from tests.fakes.command_line import Run


def forged(folder: Path, metric: Any) -> str:
    """Write a search whose entries carry no times; return where."""
    make_root(folder)
    with LocalTarget(path=str(folder)).open(timeout=timedelta(seconds=60)) as store:
        stamps = (Stamp(write_id=name, at="some day") for name in ("first", "second"))
        state = take_over(store, "e", Owner(name="they", host="there", pid=1), next(stamps), side_by_side=map)
        append(store, state, [Described(settings={"metric": metric})], next(stamps))
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
