"""Unit tests of searches need no Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prefect.settings import get_current_settings

import prefect_tune as pt
from prefect_tune.prefect_api import flow_with_server
from prefect_tune.testing import tune_folder, without_server
from tests.trainables import moody

__all__ = ["tune_folder"]


def train(config: Mapping[str, float]) -> None:
    for step in range(3):
        pt.report({"loss": config["x"] + step})


def fail(_config: Mapping[str, float]) -> None:
    raise ValueError("no data")


class Counts(pt.Trainable):
    count = 0

    def step(self) -> dict[str, float]:
        self.count += 1
        return {"count": self.count}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int((Path(checkpoint_dir) / "count").read_text())


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a Prefect server was started")

    monkeypatch.setattr(flow_with_server, "start_prefect_server", refuse)
    monkeypatch.setattr("prefect.server.api.server.SubprocessASGIServer.start", refuse)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_search_needs_no_server(tune_folder: str, isolation: str, caplog: pytest.LogCaptureFixture) -> None:
    space = {"x": pt.grid_search([1.0, 2.0])}
    results = pt.tune(moody.train, space, target=tune_folder, experiment="two", metric="loss", isolation=isolation)
    assert results.best.config == {"x": 1.0}
    assert [trial.status for trial in results.trials.values()] == ["completed", "completed"]
    assert pt.load_results(tune_folder, "two").best.metrics == {"loss": 1.0}
    assert [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.timeout(60)
def test_a_search_with_tags_waits_for_no_slot(tune_folder: str) -> None:
    options = {"trial_tags": ["mine"], "isolation": "thread", "num_samples": 1}
    assert pt.tune(train, {"x": 1.0}, target=tune_folder, metric="loss", **options).best.metrics == {"loss": 3.0}


def test_a_resume_goes_on_from_the_checkpoint(tune_folder: str) -> None:
    options = {"target": tune_folder, "experiment": "counts", "isolation": "thread"}
    assert pt.durable_trainable(Counts, {}, stop={"step": 2}, **options).metrics["count"] == 2
    assert pt.durable_trainable(Counts, {}, stop={"step": 5}, **options).metrics["count"] == 5


def test_errors_are_those_of_a_run(tune_folder: str) -> None:
    with pytest.raises(pt.InvalidInput, match="did you mean 'experiment'"):
        pt.tune(train, {}, target=tune_folder, experimnt="typo")
    with pytest.raises(pt.SearchFailed, match="no data"):
        pt.tune(fail, {"x": 1.0}, target=tune_folder, isolation="thread")


def test_the_settings_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_TO_API_ENABLED", "true")
    before = {**os.environ}, get_current_settings()
    with without_server():
        assert get_current_settings().api.url == "http://without-server.invalid/api"
    assert ({**os.environ}, get_current_settings()) == before


FAILING = """
import prefect_tune as pt

def broken(config):
    raise ValueError("no data")

def test_a_search_that_fails(tune_folder):
    pt.tune(broken, {"x": 1}, num_samples=1, target=tune_folder, experiment="one", isolation="thread")  # here

def test_an_option_that_is_none(tune_folder):
    pt.tune(broken, {"x": 1}, target=tune_folder, experimnt="one")  # and here
"""


@pytest.mark.long
@pytest.mark.parametrize("logging_plugin", [(), ("-p", "no:logging")], ids=["pytest's capture", "Prefect's handler"])
def test_a_failing_test_shows_its_own_line_and_its_log_once(tmp_path: Path, logging_plugin: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text("from prefect_tune.testing import tune_folder as tune_folder\n")
    (tmp_path / "test_fails.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *logging_plugin, str(tmp_path)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 failed" in process.stdout
    assert "# here\n" in process.stdout
    assert "# and here\n" in process.stdout
    assert "did you mean 'experiment'" in process.stdout
    assert "def _run" not in process.stdout
    assert "flow_with_server.py" not in process.stdout
    assert process.stdout.count("slots: ") == 1
