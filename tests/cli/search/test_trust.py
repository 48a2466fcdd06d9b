"""The code that `prefect-tune resume` runs: the command line names it, never a target."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fakes.command_line import Run
from tests.fakes.untrusted import TRAIN, Untrusted, describe, untrusted_folder

pytestmark = pytest.mark.usefixtures("no_prefect_server")


@pytest.fixture
def untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Untrusted:
    return untrusted_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize("road", ["trainable", "sample_from", "stop", "callbacks", "syncer"])
def test_what_a_journal_chooses_is_refused_in_words_that_say_what_to_pass(
    road: str, run: Run, untrusted: Untrusted
) -> None:
    untrusted.forge(road)
    named = [] if road == "trainable" else ["--trainable", TRAIN]
    done = run("resume", untrusted.target.path, "e", *named)
    assert done.code == 1
    assert f"'{untrusted.module}:" in done.err
    assert "If it is yours, pass it: pt.resume('e'" in done.err
    assert not untrusted.marker.exists()
    assert untrusted.module not in sys.modules


def test_a_trainable_that_is_named_is_run(run: Run, untrusted: Untrusted) -> None:
    describe(untrusted.target, "e", {"trainable": TRAIN, "space": {"x": 1.0}, "num_samples": 1, "metric": "loss"})
    assert run("resume", untrusted.target.path, "e").code == 1
    assert run("resume", untrusted.target.path, "e", "--trainable", TRAIN).code == 0
