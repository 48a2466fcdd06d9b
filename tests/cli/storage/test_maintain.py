"""`maintain`, and the release of a quarantined checkpoint."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.operations.scrub import share_of
from prefect_tune.core.storage.layout import TrialKey
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment
from tests.flows.training import trial_at


def _damage(target: Path, step: int) -> tuple[Path, bytes]:
    """Truncate the manifest of a step, and return its former bytes."""
    (path,) = target.rglob(f"{step:010d}-*/manifest.json")
    was = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(was[:-1])
    return path, was


@pytest.mark.usefixtures("prefect_server")
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


def test_verify_reads_a_part_of_the_checkpoints_and_refuses_what_is_no_share(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_experiment(target, "digits", [2, 4, 6, 8])
    days = [datetime.now(UTC).date()]
    read = json.loads(run("verify", target, "digits", "--share", "1/2", "--json").out)
    days.append(datetime.now(UTC).date())  # midnight may have passed
    live = trial_at(LocalTarget(path=str(target)), "digits").checkpoints
    key = TrialKey(experiment="digits", generation=1, trial="trial")
    parts = [share_of("1/2", day) for day in days]
    expected = [[each.step for each in live if part.has(key.checkpoint_key(each))] for part in parts]
    assert [each["step"] for each in read] in expected
    done = run("verify", target, "digits", "--share", "half")
    assert (done.code, "share: expected one part of several, such as '1/7', found 'half'" in done.err) == (2, True)
    _damage(target, 2)
    assert run("verify", target, "digits", "--share", "1").code == 1
