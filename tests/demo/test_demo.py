"""The demo: its claims are measured, and the whole command works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefect_tune.core.errors import InvalidInput, StoreRefused, TuneError
from prefect_tune.core.models import Digest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.demo.model import Digits
from prefect_tune.demo.run_demo import Demo, Findings, Track
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.posix_store import open_folder
from tests.flows.driver import until

HELD = Findings(
    hit_step=18,
    trained_until=18,
    newest_step=12,
    arrived={"a": 10, "b": 5},
    whole={"a": 10, "b": 5, "c": 5},
    resumed_at=12,
    undisturbed={"weights.npy": "1f", "state.json": "2e"},
    resumed={"weights.npy": "1f", "state.json": "2e"},
)


@pytest.mark.timeout(600)
def test_a_run_killed_in_the_middle_of_an_upload_ends_as_the_undisturbed_one(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    console = Console(record=True, width=100, force_terminal=False)
    assert Demo(str(tmp_path / "target"), steps=4, width=60_000).run(console), console.export_text()
    said = console.export_text(clear=False)
    assert said.count("✓") == 4
    assert "resumed from the newest committed step, 2" in said
    left = [path for path in (tmp_path / "target").rglob("*") if path.is_file() and ".tmp" not in path.parts]
    assert left == [], "without --keep nothing stays"


def test_everything_that_was_found_as_it_should_be_is_claimed() -> None:
    assert [held for held, _, _ in HELD.claims()] == [True] * 4


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (0, {"resumed": {"weights.npy": "1e", "state.json": "2e"}}),
        (0, {"resumed": {"weights.npy": "1f", "state.json": "2f"}}),
        (0, {"resumed": {"weights.npy": "1f"}}),
        (0, {"undisturbed": {}, "resumed": {}}),
        (1, {"arrived": {}}),
        (1, {"newest_step": 18, "resumed_at": 18}),
        (2, {"resumed_at": 6}),
        (2, {"resumed_at": 0, "newest_step": 0}),
        (3, {"whole": {"a": 10, "c": 10}}),
        (3, {"whole": {"a": 10, "b": 10}}),
    ],
)
def test_a_claim_that_was_not_measured_is_not_made(number: int, found: Mapping[str, Any]) -> None:
    claims = HELD._replace(**found).claims()
    assert [index for index, (held, _, _) in enumerate(claims) if not held] == [number]


def staged(monkeypatch: pytest.MonkeyPatch, *sights: tuple[Mapping[int, Any], Mapping[str, int]]) -> Demo:
    """A demo whose runs do nothing, and whose listings of killed runs are these, in order."""
    demo, left = Demo(), list(sights)
    monkeypatch.setattr(Demo, "train", lambda *given, **_: TrialKey(experiment=given[2], generation=1, trial="trial"))
    monkeypatch.setattr(Demo, "look", lambda *_: left.pop(0))
    return demo


def test_kills_that_only_ever_come_too_late_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    late: tuple[Mapping[int, Any], Mapping[str, int]] = ({12: None, 18: None}, {})
    with pytest.raises(TuneError, match="came too late"):
        staged(monkeypatch, late, late, late).perform()


@pytest.mark.parametrize(("steps", "save_every", "hit"), [(24, 6, 18), (4, 1, 3), (27, 6, 24), (101, 25, 100)])
def test_the_last_checkpoint_but_one_is_the_one_whose_upload_is_hit(steps: int, save_every: int, hit: int) -> None:
    demo = Demo(steps=steps)
    assert (demo.save_every, demo.hit_step) == (save_every, hit)


def test_blobs_of_a_save_without_a_manifest_have_arrived_and_reused_ones_have_not(tmp_path: Path) -> None:
    trial, demo = TrialKey(experiment="e", generation=1, trial="t"), Demo()
    demo.store = open_folder(tmp_path / "target", must_exist=False, deadline=Deadline.never())
    old, new = (trial.blob_path(Digest(name * 64), sequence) for name, sequence in (("a", 3), ("b", 7)))
    keys = [CheckpointKey(trial=trial, step=step, sequence=sequence) for step, sequence in ((6, 3), (12, 9))]
    for path, data in ((old, b"old"), (new, b"newer"), (keys[0].manifest_path, b"{}"), (f"{trial.folder}/x", b"x")):
        demo.store.put(path, data)
    assert demo.look(trial) == ({6: keys[0]}, {new: 5})
    demo.store.put(keys[1].manifest_path, b"{}")
    assert demo.look(trial) == ({6: keys[0], 12: keys[1]}, {})


@pytest.mark.parametrize(
    ("track", "picture"),
    [
        (Track("not yet", 12), "············"),
        (Track("begun", 12, step=5, committed=frozenset({3})), "━━●━━·······"),
        (Track("scaled", 24, step=24, committed=frozenset({6, 12, 18, 24})), "━━●━━●━━●━━●"),
        (Track("killed", 12, step=9, committed=frozenset({3, 6}), killed_at=9), "━━●━━●━━✗   "),
        (Track("back", 12, resumed_at=6, step=10, committed=frozenset({3, 6, 9})), "     ↻━━●━··"),
        (Track("one step per many cells", 4, step=2, committed=frozenset({1})), "━━●━━━······"),
    ],
)
def test_a_track_shows_each_step_in_its_place(track: Track, picture: str) -> None:
    assert track.cells(12).plain == picture


def test_the_model_that_was_loaded_goes_on_with_the_very_bits(tmp_path: Path) -> None:
    undisturbed, resumed = Digits(), Digits()
    undisturbed.setup({"width": 32})
    for step in range(6):
        if step == 3:
            undisturbed.save_checkpoint(str(tmp_path))
        undisturbed.step()
    resumed.setup({"width": 32})
    resumed.load_checkpoint(str(tmp_path))
    for _ in range(3):
        resumed.step()
    for name, array in undisturbed.arrays.items():
        assert resumed.arrays[name].tobytes() == array.tobytes()
    assert resumed.random.bit_generator.state == undisturbed.random.bit_generator.state


def test_the_model_learns() -> None:
    model = Digits()
    model.setup({"width": 4000})
    for _ in range(24):
        reached = model.step()
    assert float(str(reached["accuracy"])) > 0.85


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.demo.run_demo.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install 'prefect-tune\[demo\]'"):
        Demo().run(Console(quiet=True))


def test_a_target_that_cannot_be_used_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefused, match=f"^{(tmp_path / 'file').as_uri()}: "):  # the words of its check
        Demo(str(tmp_path / "file")).run(Console(quiet=True))


@pytest.mark.parametrize("api", ["http://127.0.0.1:9/api", None], ids=["a run", "the server"])
def test_a_run_or_a_server_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str | None
) -> None:
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    if api:
        monkeypatch.setenv("PREFECT_API_URL", api)
    with pytest.raises(TuneError, match="nowhere"):
        Demo(str(tmp_path / "target")).run(Console(quiet=True))


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_whole_command_needs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "from prefect_tune.cli import main; main()", "demo"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 4
    assert done.stderr == ""
    assert not list(tmp_path.glob("prefect-tune-demo-*"))


@pytest.mark.timeout(300)
def test_a_demo_that_is_terminated_removes_its_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [Path(sys.executable).with_name("prefect-tune"), "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PREFECT_HOME": str(tmp_path / "home")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: list(tmp_path.glob("prefect-tune-demo-*")), seconds=120, what=lambda: f"{process.poll()}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("prefect-tune-demo-*"))
