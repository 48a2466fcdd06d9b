"""What people see of a trial's ranks: in the log, in `show --trial`, in the report and in the cost."""

from __future__ import annotations

import json
import logging
import re
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.testing import without_server
from tests.fakes.command_line import Run
from tests.trainables.grouped import Talkative, late_at_last

SAVES = 3


@dataclass(frozen=True)
class Search:
    target: Path
    log: str
    results: pt.Results


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search with one trial, whose rank 1 writes slowly, and is killed in the first attempt."""
    target, lines = tmp_path_factory.mktemp("runs"), _Lines()
    logging.getLogger().addHandler(lines)
    try:
        with without_server():
            results = pt.tune(
                Talkative,
                {"rank": 1, "at": 5, "does": "die"},
                target=str(target),
                experiment="e",
                metric="loss",
                stop={"step": 2 * SAVES},
                num_samples=1,
                checkpoint=pt.Cadence(every_steps=2),
                processes_per_trial=2,
            )
    finally:
        logging.getLogger().removeHandler(lines)
    return Search(target, "\n".join(lines.found), results)


@pytest.mark.long
def test_a_line_of_a_rank_begins_with_its_trial_and_its_rank(search: Search) -> None:
    assert "trial 00000: rank 0 is here" in search.log
    assert "trial 00000/rank 1: rank 1 is here" in search.log


def test_show_and_report_name_the_rank_that_was_killed(run: Run, search: Search) -> None:
    shown = run("show", search.target, "e", "--trial", "00000", columns=200).out
    table = shown[shown.index("attempt  in all") :].splitlines()
    assert table[1].rstrip().endswith("rank 1: ended by SIGKILL, the cause")
    assert "rank 1" not in table[2]
    first, second = json.loads(run("show", search.target, "e", "--trial", "00000", "--json").out)["cost"]
    assert first["ends"] == [{"ranks": [1], "how": "ended by SIGKILL", "is_cause": True}]
    assert "ends" not in second
    page = search.target / "page.html"
    assert run("report", search.target, "e", "--output", page).code == 0
    pictures = [b64decode(each).decode() for each in re.findall(r'svg\+xml;base64,([^"]*)"', page.read_text())]
    assert any("interrupted; rank 1: ended by SIGKILL, the cause" in each for each in pictures)


def test_a_single_process_stores_and_shows_no_ranks(run: Run, tmp_path: Path) -> None:
    with without_server():
        pt.durable_trainable(late_at_last, {"steps": 2}, target=str(tmp_path), experiment="e")
    [attempt] = json.loads(run("show", tmp_path, "e", "--json").out)["cost"]
    assert not attempt.keys() & {"ranks", "ends"}
    assert "ended otherwise" not in run("show", tmp_path, "e").out
    entries = "".join(path.read_text() for path in tmp_path.rglob("journal/*.json"))
    assert '"committed"' in entries
    assert '"ranks"' not in entries
    assert '"ends":[' not in entries
