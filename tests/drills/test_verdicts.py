"""Drills of trainings that differ after a resume though little shows it, and of some that are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.probe import Victim
from prefect_tune.drills.run_drill import make_run_environment, run_drill

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
MODULE = "tests.drills.unlike_trainings"


def drilled(
    trainable: str,
    config: dict[str, object],
    server: str,
    folder: Path,
    kills: tuple[tuple[int, Victim], ...] = ((5, "trial"),),
    *,
    steps: int = 8,
    processes: int = 1,
) -> pt.DrillReport:
    name = trainable if ":" in trainable else f"{MODULE}:{trainable}"
    plan = DrillPlan(name, config, steps, 2, kills, processes=processes)
    environment = {**make_run_environment(), "PREFECT_API_URL": server}
    return run_drill(plan, pt.LocalTarget(path=str(folder)), environment)


@pytest.mark.parametrize(
    ("trainable", "config", "verdict", "first"),
    [
        ("draws_without_a_seed", {}, "not deterministic", "at step 1: random generator `random`: another state"),
        ("draws_without_a_seed", {"hidden": True}, "not deterministic", "at step 1: metric `loss`"),
        ("weighs_without_a_seed", {}, "not deterministic", "at step 2: `state.json`, `weight`"),
        ("saves_no_more_after_a_resume", {}, "not exact", "at step 6: no checkpoint, expected one"),
        ("leaves_weights_in_its_directory", {}, "not exact", "at step 5: metric `loss`"),
        (
            "reports_otherwise_after_a_resume",
            {"metric": "nested"},
            "not exact",
            "at step 5: metric `eval/loss`: missing",
        ),
        ("reports_otherwise_after_a_resume", {"metric": "minus"}, "not exact", "at step 5: metric `eval/loss`: -0.0"),
        ("reports_otherwise_after_a_resume", {"metric": "whole"}, "not exact", "at step 5: metric `eval/loss`: 0,"),
    ],
)
def test_a_training_that_differs_is_not_exact(
    trainable: str, config: dict[str, object], verdict: str, first: str, prefect_server: str, tmp_path: Path
) -> None:
    report = drilled(trainable, config, prefect_server, tmp_path)
    assert report.verdict == verdict, list(report.lines())
    assert first in next(report.lines()), list(report.lines())


@pytest.mark.parametrize(
    ("trainable", "left_out"),
    [("keeps_books", {"seconds", "saved_at", "save", "took"}), ("packs_its_checkpoint", set[str]())],
)
def test_times_and_identifiers_do_not_make_a_training_inexact(
    trainable: str, left_out: set[str], prefect_server: str, tmp_path: Path
) -> None:
    report = drilled(trainable, {}, prefect_server, tmp_path)
    assert report.is_exact, list(report.lines())
    assert {difference.detail.key for difference in report.unstable} == left_out
    assert all(any(f"`{name}`" in line for line in report.lines()) for name in left_out), list(report.lines())


@pytest.mark.parametrize("name", ["OwnGenerators", "own_generators"])
def test_ranks_that_save_everything_are_exact_whichever_is_killed(
    name: str, prefect_server: str, tmp_path: Path
) -> None:
    found = drilled(
        name,
        {"forgets": None},
        prefect_server,
        tmp_path,
        ((2, "rank"), (4, "trial"), (5, "upload")),
        steps=6,
        processes=2,
    )
    assert found.is_exact, list(found.lines())
    assert [(each.victim, each.resumed_from > 0) for each in found.kills][:2] == [("rank", True), ("trial", True)]
    assert found.compared_file_count >= 2 * 3, "the files of both ranks"
