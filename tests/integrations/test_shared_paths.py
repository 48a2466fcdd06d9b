"""Two trials that get the same path from a framework do not write to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.integrations.common import make_trial_path
from prefect_tune.runtime.trainable import activate_session
from prefect_tune.testing import without_server
from tests.integrations import shared_paths
from tests.integrations.undisturbed import StepCountingSession

os.environ.setdefault("KERAS_BACKEND", "torch")  # before anything imports Keras


def make_path_in_trial(name: str, directory: Path, path: str) -> str:
    session: Any = StepCountingSession({}, 0, directory)
    info = session.make_trial_info()
    session.make_trial_info = lambda: type(info)(name, "e", 1, directory, {}, 0, 1, 0, session)

    def make_path() -> str:
        activate_session(session, whole_process=False)
        return make_trial_path(path)

    return copy_context().run(make_path)


@pytest.mark.parametrize("trial", ["00001", "alpha"])
def test_a_path_that_other_trials_have_too_becomes_one_below_the_trials_directory(
    trial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "scratch" / "artifacts"
    monkeypatch.chdir(tmp_path)
    expected = {
        ".": str(own),
        "out": str(own / "out"),
        "./out/logs/": str(own / "out" / "logs"),
        str(tmp_path / "out"): str(own / "out"),
        "/data/out": str(own / "data" / "out"),
        "../out": str(own.joinpath(*tmp_path.parent.parts[1:], "out")),
        "/data/run-100001/out": str(own / "data" / "run-100001" / "out"),
        "s3://bucket/out/": f"s3://bucket/out/{trial}",
        f"out/{trial}": f"out/{trial}",
        f"/data/out-{trial}.keras": f"/data/out-{trial}.keras",
        f"s3://bucket/{trial}/out": f"s3://bucket/{trial}/out",
        str(own / "logs"): str(own / "logs"),
        "~/out": str(own.joinpath(*Path.home().parts[1:], "out")),
    }
    assert {path: make_path_in_trial(trial, own, path) for path in expected} == expected


@pytest.fixture
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with without_server():
        yield


@pytest.mark.integrations
@pytest.mark.usefixtures("_in_empty_folder")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [None, "/absolute", "{trial}"])
@pytest.mark.parametrize("framework", ["hugging_face", "lightning", "keras", "xgboost"])
def test_concurrent_trials_with_the_same_paths_train_and_save_as_if_alone(
    framework: str, path: str | None, tmp_path: Path
) -> None:
    pytest.importorskip({"hugging_face": "transformers"}.get(framework, framework))
    shared = str(tmp_path / "absolute") if path == "/absolute" else path
    results = pt.tune(
        getattr(shared_paths, framework),
        {"path": shared, "lr": pt.grid_search([0.1, 0.2])},
        target=str(tmp_path / "runs"),
        experiment="e",
        max_concurrent_trials=2,
        checkpoint=pt.Cadence(every_steps=1),
    )
    assert [(trial.status, trial.attempt) for trial in results.trials.values()] == [("completed", 1)] * 2
    for trial in results.trials:
        with results.checkpoint(trial).as_directory() as directory:
            assert any(Path(directory).iterdir())
    written = [file for folder in ("here", "absolute") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert bool(written) == (path == "{trial}")
