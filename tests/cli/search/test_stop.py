"""`prefect-tune stop` where no process runs the search: its messages, and its exit code."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.fakes.command_line import Run
from tests.fakes.pages import ROOT, blocks_of


def test_the_commands_on_the_page_ask_for_what_they_say(
    moods: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(moods / "moods", tmp_path / "runs" / "moods")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "stopping.md"
    lines = "".join(each.code for each in blocks_of(page) if each.language == "bash").splitlines()
    stops = [line for line in lines if line.startswith("prefect-tune stop ")]
    one, whole = (shlex.split(line.replace(" digits", " moods"))[1:] for line in stops)
    trial = run(*one, "--wait-seconds", 0)
    assert (trial.code, trial.out) == (0, "trial 00001 is completed at step 3: step 3 of 3\n")
    asked = run(*whole)
    assert (asked.code, asked.out) == (0, "experiment 'moods' has ended, with all of its 4 trials\n")
    assert not (tmp_path / "runs" / "moods" / "1" / "requests").exists()


def test_where_nobody_answers_it_ends_with_1(moods: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(moods / "moods", tmp_path / "moods")
    shutil.rmtree(tmp_path / "moods" / "1" / "results")  # between two trials, or killed before it could publish them
    done = run("stop", tmp_path, "moods", "--wait-seconds", 0.1, "--json")
    assert done.code == 1
    answer = json.loads(done.out)
    assert (answer["status"], "no run has answered" in answer["message"]) == ("unanswered", True)
    assert "a run that begins later is not stopped by this" in answer["message"]
    assert len(list((tmp_path / "moods" / "1" / "requests").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone"], "there is no experiment 'gone'"),
        (["moods", "--trial", "00009"], "there is no trial '00009' among its 4"),
    ],
)
def test_what_is_not_there_cannot_be_stopped(arguments: list[str], said: str, moods: Path, run: Run) -> None:
    done = run("stop", moods, *arguments)
    assert done.code == 2
    assert said in done.err


def test_the_training_of_one_trial_is_told_how_it_is_stopped(target: Path, run: Run) -> None:
    done = run("stop", target, "digits")
    assert done.code == 2
    assert "is not a search: cancel its flow run" in done.err
    assert not (target / "digits" / "1" / "requests").exists()
