"""Commands on an experiment of one training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.operations.scrub import inspect_one
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.fakes.checkpoints import files_in
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment


def blobs(target: Path) -> list[Path]:
    return sorted(target.glob("digits/1/trials/trial/blobs/*"), key=lambda path: path.name.rpartition("-")[2])


def test_checkpoints_are_listed_with_step_size_and_metrics(run: Run, target: Path) -> None:
    done = run("checkpoints", target, "digits", "--json")
    rows = json.loads(done.out)
    assert [(row["step"], row["status"], row["size_bytes"]) for row in rows] == [
        (2, "live", 5_000_001),
        (4, "live", 5_000_001),
        (6, "live", 5_000_001),
    ]
    assert rows[1]["metrics"] == {"loss": 0.25}
    assert (target / rows[1]["path"] / "manifest.json").is_file()
    assert done.code == 0


def test_for_people_the_list_is_a_table(run: Run, target: Path) -> None:
    lines = run("checkpoints", target.as_uri(), "digits").out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "4", "6"]
    assert "4.77 MiB" in lines[1]
    assert "loss 0.5" in lines[1]


def test_a_checkpoint_that_was_put_aside_is_listed_as_quarantined(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "digits", [2, 4], quarantined=(4,))
    rows = json.loads(run("checkpoints", tmp_path / "target", "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "quarantined")]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_manifest_that_is_gone_or_torn_does_not_hide_the_others(
    run: Run, target: Path, damage: Callable[[Path], object]
) -> None:
    damage(sorted(target.glob("digits/1/trials/trial/checkpoints/*/manifest.json"))[1])
    rows = json.loads(run("checkpoints", target, "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "damaged"), (6, "live")]


def test_show_tells_how_the_trial_stands(run: Run, target: Path) -> None:
    shown = json.loads(run("show", target, "digits", "--json").out)
    assert shown["status"] == "completed"
    assert shown["reason"] == "had enough"
    assert shown["step"] == 6
    assert shown["checkpoints"] == [2, 4, 6]
    assert shown["config"] == {"rate": 0.5}
    assert (shown["term"], shown["owner"]) == (1, "a test (pid 1 on here)")
    lines = run("show", target, "digits").out.splitlines()
    assert any(line.split() == ["reason", "had", "enough"] for line in lines)
    assert any(line.split()[:3] == ["owner", "1:", "a"] for line in lines)
    assert "term" not in "".join(lines)
    assert any(line.split() == ["checkpoints", "2,", "4,", "6"] for line in lines)


def test_verify_reads_every_live_checkpoint(run: Run, target: Path) -> None:
    done = run("verify", target, "digits")
    assert done.code == 0
    assert done.out == "steps 2, 4, 6: 14.3 MiB in 6 files, whole\n"


def test_verify_finds_a_single_flipped_bit_and_says_where(run: Run, target: Path) -> None:
    damaged = blobs(target)[1]
    damaged.chmod(0o644)
    data = bytearray(damaged.read_bytes())
    data[12345] ^= 1
    damaged.write_bytes(data)
    done = run("verify", target, "digits")
    assert done.code == 1
    assert done.err.startswith("step 4: DAMAGED: 'model/weights.bin' in ")
    assert done.out == "steps 2, 6: 9.54 MiB in 4 files, whole\n"
    verified = run("verify", target, "digits", "--json")
    assert (verified.code, verified.err) == (1, "")
    assert [row["damage"] is None for row in json.loads(verified.out)] == [True, False, True]


def test_verify_prints_damage_also_if_the_target_fails_later(
    run: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_the_last(store: ObjectStore, key: CheckpointKey, **more: Any) -> Sequence[object]:
        if key.step == 6:
            raise StoreUnavailable("the network is down")
        return inspect_one(store, key, **more)

    blobs(target)[0].unlink()
    monkeypatch.setattr("prefect_tune.cli.storage.inspect_one", until_the_last)
    done = run("verify", target, "digits")
    assert done.code == 1
    damage, error = done.err.splitlines()
    assert damage.startswith("step 2: DAMAGED: ")
    assert error == "prefect-tune: the network is down"


def test_export_writes_the_newest_checkpoint_as_a_plain_directory(run: Run, target: Path, tmp_path: Path) -> None:
    assert run("export", target, "digits", tmp_path / "plain", "--plain").code == 0
    assert files_in(tmp_path / "plain") == {"model/weights.bin": b"\x06" * 5_000_000, "state.json": b"6"}


def test_export_writes_the_checkpoint_of_a_step(run: Run, target: Path, tmp_path: Path) -> None:
    assert run("export", target, "digits", "--step", 2, tmp_path / "plain").code == 0
    assert files_in(tmp_path / "plain")["state.json"] == b"2"


def test_export_leaves_a_directory_that_is_in_use_alone(run: Run, target: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine").touch()
    done = run("export", target, "digits", tmp_path / "plain")
    assert done.code == 2
    assert str(tmp_path / "plain") in done.err
    assert list(files_in(tmp_path / "plain")) == ["mine"]


def test_asking_for_a_step_that_has_no_checkpoint_tells_which_there_are(run: Run, target: Path, tmp_path: Path) -> None:
    done = run("export", target, "digits", "--step", 3, tmp_path / "plain")
    assert (done.code, done.out) == (2, "")
    assert done.err == "prefect-tune: experiment 'digits': there is no checkpoint of step 3; there are: 2, 4, 6\n"


@pytest.mark.parametrize("command", ["checkpoints", "show", "verify"])
def test_an_experiment_that_is_not_there_is_one_line_and_exit_code_2(run: Run, target: Path, command: str) -> None:
    done = run(command, target, "digit")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"prefect-tune: there is no experiment 'digit' at {target.as_uri()}; did you mean 'digits'?\n"


def test_an_argument_that_is_missing_is_a_usage_error(run: Run, target: Path) -> None:
    done = run("show", target)
    assert done.code == 2
    assert "EXPERIMENT" in done.err
