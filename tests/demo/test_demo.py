"""The demo: its claims are measured, and the whole command works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, StoreRefused, TuneError
from prefect_tune.core.models import Digest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Listed
from prefect_tune.demo import run_demo as story
from prefect_tune.demo.claims import Findings, Killed, claims
from prefect_tune.demo.model import Digits
from prefect_tune.demo.run_demo import DemoOptions, run_demo
from prefect_tune.demo.screen import DemoScreen, Track, cells
from prefect_tune.demo.server import temporary_server, without_prefect
from prefect_tune.demo.target_probe import TargetProbe, TrialListing
from prefect_tune.demo.training_process import TrainingParameters, training_process
from tests.flows.driver import until

CONFIG: dict[str, object] = {"width": 32, "batch": 64, "rate": 0.001, "seed": 1}
KILLED = Killed(
    exit_code=-signal.SIGKILL, step=18, trained_until=18, newest_step=12, arrived={"a": 10, "b": 5}, torn_files=1
)
HELD = Findings(
    killed=KILLED,
    resumed_at=12,
    whole_bytes=20,
    whole_blobs={"a": 10, "b": 5, "c": 5},
    undisturbed={"weights.npy": "1f", "state.json": "2e"},
    resumed={"weights.npy": "1f", "state.json": "2e"},
)


@pytest.mark.timeout(400)
def test_a_run_killed_in_the_middle_of_an_upload_ends_as_the_undisturbed_one(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    console = Console(record=True, width=80, force_terminal=False)
    options = DemoOptions(target=str(tmp_path / "target"), steps=4, width=1792)
    assert run_demo(options, console), console.export_text()
    said = console.export_text()
    assert said.count("✓") == 4
    assert "resumed from step 2, the newest one committed" in said
    left = [path for path in (tmp_path / "target").rglob("*") if path.is_file() and ".tmp" not in path.parts]
    assert left == [], "without --keep nothing stays"


def test_everything_that_was_found_as_it_should_be_is_claimed() -> None:
    assert [claim.held for claim in claims(HELD)] == [True] * 4


def test_an_upload_that_lacked_only_its_manifest_is_called_that() -> None:
    found = replace(HELD, whole_bytes=15, whole_blobs=dict(KILLED.arrived))
    _, hit, _, sent = claims(found)
    assert (hit.held, sent.held) == (True, True)
    assert hit.text.endswith("between its last blob and its manifest")
    assert sent.shown_by[0].endswith("only the manifest was missing")
    assert claims(HELD)[1].text.endswith("in its middle")


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (0, replace(HELD, resumed={"weights.npy": "1e", "state.json": "2e"})),
        (0, replace(HELD, resumed={"weights.npy": "1f", "state.json": "2f"})),
        (0, replace(HELD, resumed={"weights.npy": "1f"})),
        (0, replace(HELD, undisturbed={}, resumed={})),
        (1, replace(HELD, killed=replace(KILLED, exit_code=0))),
        (1, replace(HELD, killed=replace(KILLED, exit_code=-signal.SIGTERM))),
        (1, replace(HELD, killed=replace(KILLED, arrived={}))),
        (1, replace(HELD, killed=replace(KILLED, newest_step=18), resumed_at=18)),
        (2, replace(HELD, resumed_at=6)),
        (2, replace(HELD, resumed_at=0, killed=replace(KILLED, newest_step=0))),
        (3, replace(HELD, whole_blobs={"a": 10, "c": 10})),
        (3, replace(HELD, whole_blobs={"a": 10, "b": 10})),
    ],
)
def test_a_claim_that_was_not_measured_is_not_made(number: int, found: Findings) -> None:
    assert [index for index, claim in enumerate(claims(found)) if not claim.held] == [number]


LATE = replace(KILLED, newest_step=18, arrived={})


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[Killed]:
    """The results of the next kills, in order: a test fills the list."""
    come: list[Killed] = []
    monkeypatch.setattr(story, "_train_until_killed", lambda *_: come.pop(0))
    return come


def stage(tmp_path: Path, at_end: ExitStack) -> story._Stage:
    target = LocalTarget(path=str(tmp_path))
    screen = DemoScreen(Console(quiet=True), 24)
    return story._Stage(DemoOptions(), screen, target, target.uri, "demo", iter(()), "a server", at_end)


def be_killed(stage: story._Stage) -> tuple[TargetProbe, Killed]:
    return story._be_killed(stage, stage.screen.tracks[1])


def test_a_kill_that_came_too_late_is_tried_again_on_another_experiment(tmp_path: Path, kills: list[Killed]) -> None:
    kills += [LATE, KILLED]
    with ExitStack() as at_end:
        probe, killed = be_killed(stage(tmp_path, at_end))
        assert (probe.trial.experiment, killed) == ("demo-killed-2", KILLED)


def test_kills_that_only_ever_come_too_late_are_no_success(tmp_path: Path, kills: list[Killed]) -> None:
    kills += [LATE, LATE, LATE]
    with ExitStack() as at_end, pytest.raises(TuneError, match="came too late"):
        be_killed(stage(tmp_path, at_end))


@pytest.mark.parametrize(("steps", "save_every", "interrupted"), [(24, 6, 18), (4, 1, 3), (27, 6, 24), (101, 25, 100)])
def test_the_last_checkpoint_but_one_is_the_one_whose_upload_is_hit(
    tmp_path: Path, steps: int, save_every: int, interrupted: int
) -> None:
    with ExitStack() as at_end:
        long = replace(stage(tmp_path, at_end), options=DemoOptions(steps=steps))
    assert (long.save_every, long.interrupted_step) == (save_every, interrupted)


def test_blobs_of_a_save_without_a_manifest_are_in_flight_and_reused_ones_are_not() -> None:
    trial = TrialKey(experiment="e", trial="t")
    old, new = (trial.blob_path(Digest(name * 64), sequence) for name, sequence in (("a", 3), ("b", 7)))
    manifest = CheckpointKey(trial=trial, step=6, sequence=3).manifest_path
    sight = TrialListing.of(
        trial, [Listed(old, 10), Listed(new, 5), Listed(manifest, 1), Listed(f"{trial.folder}/x", 9)]
    )
    assert sight.newest_step == 6
    assert [blob.path for blob in sight.in_flight] == [new]
    assert sight.in_flight_bytes == 5
    later = CheckpointKey(trial=trial, step=12, sequence=9).manifest_path
    assert TrialListing.of(trial, [Listed(old, 10), Listed(new, 5), Listed(later, 1)]).in_flight == ()


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
    assert cells(track, 12).plain == picture


def test_the_model_that_was_loaded_goes_on_with_the_very_bits(tmp_path: Path) -> None:
    undisturbed, resumed = Digits(), Digits()
    undisturbed.setup(CONFIG)
    for step in range(6):
        if step == 3:
            undisturbed.save_checkpoint(str(tmp_path))
        undisturbed.step()
    resumed.setup(CONFIG)
    resumed.load_checkpoint(str(tmp_path))
    for _ in range(3):
        resumed.step()
    assert resumed.weights.tobytes() == undisturbed.weights.tobytes()
    assert resumed.random.bit_generator.state == undisturbed.random.bit_generator.state


def test_the_model_learns() -> None:
    model = Digits()
    model.setup(CONFIG)
    for _ in range(150):
        reached = model.step()
    assert float(str(reached["accuracy"])) > 0.85


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.demo.run_demo.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install 'prefect-tune\[demo\]'"):
        run_demo(DemoOptions(), Console(quiet=True))


def test_a_target_that_cannot_be_used_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefused, match=f"^{(tmp_path / 'file').as_uri()}: "):  # the words of its check
        run_demo(DemoOptions(target=str(tmp_path / "file")), Console(quiet=True))


def test_a_run_that_fails_is_told_with_its_last_words() -> None:
    with training_process({"PYTHONHOME": "/nowhere"}) as process:
        process.wait()
        process.begin(TrainingParameters(target="t", experiment="e", steps=4, save_every=1, width=8))
        with pytest.raises(TuneError, match="/nowhere"):
            process.require_success()


def test_the_surroundings_of_a_server_are_its_own() -> None:
    environment = without_prefect({"PREFECT_API_URL": "https://mine", "HOME": "/h", "NO_PROXY": "corp"})
    assert environment == {"HOME": "/h", "NO_PROXY": "corp,127.0.0.1,localhost", "no_proxy": "corp,127.0.0.1,localhost"}


def test_a_server_that_does_not_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with temporary_server(tmp_path / "home") as server, pytest.raises(TuneError, match="Python"):
        server.wait_until_ready()


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from prefect_tune.demo.server import temporary_server\n"
        "with temporary_server(Path(sys.argv[1])) as server:\n"
        "    print(server.server.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "home")], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert ended(int(killed.stdout))


def ended(pid: int) -> bool:
    """Wait for the end of an orphaned process."""
    from time import sleep

    for _ in range(600):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        sleep(0.1)
    return False


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_whole_command_needs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    environment = without_prefect({"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
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
