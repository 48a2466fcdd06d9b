"""The demo: a drill on its own model; the whole command works, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.demo import make_demo_plan
from tests.fakes.trial_processes import wait_until


@pytest.mark.parametrize(("steps", "save_every", "hit"), [(24, 6, 18), (4, 1, 3), (27, 6, 24), (101, 25, 100)])
def test_the_upload_of_the_last_checkpoint_but_one_is_hit(steps: int, save_every: int, hit: int) -> None:
    plan = make_demo_plan(steps)
    assert (plan.save_every, plan.kills) == (save_every, ((hit, "upload"),))


def test_the_model_that_was_loaded_goes_on_with_the_very_bits(tmp_path: Path) -> None:
    from prefect_tune.demo.model import Digits  # brings scikit-learn and SciPy, which other workers do not need

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
    from prefect_tune.demo.model import Digits

    model = Digits()
    model.setup({"width": 4000})
    for _ in range(24):
        metrics = model.step()
    assert float(str(metrics["accuracy"])) > 0.85


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.demo.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install 'prefect-tune\[demo\]'"):
        make_demo_plan(24)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_whole_command_needs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", "from prefect_tune.cli import main; main()", "demo"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("✓") == 1
    assert process.stderr == ""
    assert not list(tmp_path.glob("prefect-tune-drill-*"))


@pytest.mark.timeout(300)
def test_a_demo_that_is_terminated_removes_its_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [Path(sys.executable).with_name("prefect-tune"), "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PREFECT_HOME": str(tmp_path / "home")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: list(tmp_path.glob("prefect-tune-drill-*")), seconds=120, what=lambda: f"{process.poll()}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("prefect-tune-drill-*"))
