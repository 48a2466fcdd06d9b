"""Drills of trainings that differ inconspicuously after a resume, and of some that are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.probe import Victim
from prefect_tune.drills.run_drill import make_run_environment, run_drill

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
MODULE = "tests.drills.unlike_trainings"


def run_training_drill(
    trainable: str,
    config: dict[str, object],
    server: str,
    folder: Path,
    kills: tuple[tuple[int, Victim], ...] = ((5, "trial"),),
    *,
    steps: int = 8,
    processes: int = 1,
) -> pt.DrillReport:
    plan = DrillPlan(f"{MODULE}:{trainable}", config, steps, 2, kills, processes=processes)
    environment = {**make_run_environment(), "PREFECT_API_URL": server}
    return run_drill(plan, pt.LocalTarget(path=str(folder)), environment)


@pytest.mark.parametrize(
    ("trainable", "config", "verdict", "first"),
    [
        ("draw_without_seed", {}, "not deterministic", "at step 1: random generator `random`: another state"),
        ("draw_without_seed", {"hidden": True}, "not deterministic", "at step 1: metric `loss`"),
        ("weigh_without_seed", {}, "not deterministic", "at step 2: `state.json`, `weight`"),
        ("stop_saving_after_resume", {}, "not exact", "at step 6: no checkpoint, expected one"),
        ("leave_weights_in_directory", {}, "not exact", "at step 5: metric `loss`"),
        ("report_otherwise_after_resume", {"metric": "nested"}, "not exact", "at step 5: metric `eval/loss`: missing"),
        ("report_otherwise_after_resume", {"metric": "minus"}, "not exact", "at step 5: metric `eval/loss`: -0.0"),
        ("report_otherwise_after_resume", {"metric": "whole"}, "not exact", "at step 5: metric `eval/loss`: 0,"),
    ],
)
def test_a_training_that_differs_is_not_exact(
    trainable: str, config: dict[str, object], verdict: str, first: str, prefect_server: str, tmp_path: Path
) -> None:
    report = run_training_drill(trainable, config, prefect_server, tmp_path)
    assert report.verdict == verdict, list(report.lines())
    assert first in next(report.lines()), list(report.lines())


@pytest.mark.parametrize(
    ("trainable", "left_out"),
    [("keep_books", {"seconds", "saved_at", "save", "took"}), ("pack_checkpoint", set[str]())],
)
def test_times_and_identifiers_do_not_make_a_training_inexact(
    trainable: str, left_out: set[str], prefect_server: str, tmp_path: Path
) -> None:
    report = run_training_drill(trainable, {}, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())
    assert {difference.detail.key for difference in report.unstable} == left_out
    assert all(any(f"`{name}`" in line for line in report.lines()) for name in left_out), list(report.lines())


@pytest.mark.parametrize("name", ["OwnGenerators", "own_generators"])
def test_ranks_that_save_everything_are_exact_whichever_is_killed(
    name: str, prefect_server: str, tmp_path: Path
) -> None:
    kills: tuple[tuple[int, Victim], ...] = ((2, "rank"), (4, "trial"), (5, "upload"))
    config: dict[str, object] = {"forgets": None}
    report = run_training_drill(name, config, prefect_server, tmp_path, kills, steps=6, processes=2)
    assert report.is_exact, list(report.lines())
    assert [(kill.victim, kill.resumed_from > 0) for kill in report.kills][:2] == [("rank", True), ("trial", True)]
    assert report.compared_file_count >= 2 * 3, "the files of both ranks"
