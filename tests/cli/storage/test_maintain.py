"""`maintain`, and the release of a quarantined checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment


def _damage(target: Path, step: int) -> tuple[Path, bytes]:
    """Truncate the manifest of a step, and return its former bytes."""
    (path,) = target.rglob(f"{step:010d}-*/manifest.json")
    was = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(was[:-1])
    return path, was


@pytest.mark.usefixtures("no_prefect_server")
def test_maintain_ends_with_4_where_it_finds_damage_and_what_is_whole_again_is_released(run: Run, target: Path) -> None:
    path, was = _damage(target, 6)
    done = run("maintain", target, "--verify", "all", "--json")
    assert done.code == 4
    assert json.loads(done.out)["experiments"][0]["damaged"][0]["step"] == 6
    assert "damaged, and quarantined: " in done.err
    again = run("maintain", target, "digits", "--verify", "all", "--keep-last", "1", "--dry-run")
    assert (again.code, "1 would be pruned" in again.out) == (0, True)

    refused = run("verify", target, "digits", "--release", 6)
    assert (refused.code, "DAMAGED" in refused.err) == (1, True)
    path.write_bytes(was)
    released = run("verify", target, "digits", "--release", 6)
    assert (released.code, "whole" in released.out) == (0, True)
    rows = json.loads(run("checkpoints", target, "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "live"), (6, "live")]


def test_what_its_owner_quarantined_is_released_too(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_experiment(target, "digits", [2, 4], quarantined=(4,))
    assert run("gc", target, "digits", "--delete").code == 0
    assert run("verify", target, "digits", "--release", 4).code == 0
    assert run("verify", target, "digits").out.startswith("steps 2, 4: ")


def test_what_is_not_put_aside_cannot_be_released(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_experiment(target, "digits", [2, 4], quarantined=(4,))
    done = run("verify", target, "digits", "--release", 2)
    assert (done.code, "step 2 is not quarantined; there are: 4" in done.err) == (2, True)
