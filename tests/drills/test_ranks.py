"""A drill of a training of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.drills.findings import DrillReport
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.probe import Victim
from prefect_tune.drills.run_drill import environment_with_api, run_drill

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
MODULE = "tests.drills.own_generators"


def drilled(
    name: str, server: str, folder: Path, kills: tuple[tuple[int, Victim], ...], forgets: int | None = None
) -> DrillReport:
    plan = DrillPlan(f"{MODULE}:{name}", {"forgets": forgets}, 6, 2, kills, processes=2)
    environment = {**environment_with_api(), "PREFECT_API_URL": server}
    return run_drill(plan, LocalTarget(path=str(folder)), environment)


@pytest.mark.parametrize("name", ["OwnGenerators", "own_generators"])
def test_ranks_that_save_everything_are_exact_whichever_is_killed(
    name: str, prefect_server: str, tmp_path: Path
) -> None:
    found = drilled(name, prefect_server, tmp_path, ((2, "rank"), (4, "trial"), (5, "upload")))
    assert found.is_exact, list(found.lines())
    assert [(each.victim, each.resumed_from > 0) for each in found.kills][:2] == [("rank", True), ("trial", True)]
    assert found.compared_files >= 2 * 3, "the files of both ranks"


def test_what_another_rank_has_forgotten_is_a_difference_in_its_file(prefect_server: str, tmp_path: Path) -> None:
    found = drilled("OwnGenerators", prefect_server, tmp_path, ((3, "rank"),), forgets=1)
    assert not found.is_exact
    assert "`rank-1.json`" in "\n".join(found.lines()), list(found.lines())


def test_ranks_that_a_launcher_in_the_trial_has_started_are_killed_and_compared(
    prefect_server: str, tmp_path: Path
) -> None:
    plan = DrillPlan("tests.trainables.grouped:runs_programs", {}, 6, 2, ((3, "trial"), (5, "search")))
    environment = {**environment_with_api(), "PREFECT_API_URL": prefect_server}
    found = run_drill(plan, LocalTarget(path=str(tmp_path)), environment)
    assert found.is_exact, list(found.lines())
    assert [(each.victim, each.resumed_from) for each in found.kills] == [("trial", 2), ("search", 4)]
    assert found.compared_files >= 2 * 3, "the files of both ranks"
