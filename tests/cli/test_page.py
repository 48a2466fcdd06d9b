"""The claims of the docs page on the command line are true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.fakes.command_line import Run
from tests.fakes.pages import ROOT, blocks_of, run_blocks

PAGE = ROOT / "docs" / "cli.md"


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_search_on_the_page_works_from_beginning_to_end(prefect_server: str, tmp_path: Path) -> None:
    done = run_blocks(blocks_of(PAGE), tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout
    counts = json.loads((tmp_path / "rates.json").read_text())[
        "trials_by_status"
    ]  # which are pruned depends on their order
    assert set(counts) == {"completed", "pruned"}
    assert sum(counts.values()) == 10
    assert (tmp_path / "rates.md").read_text().startswith("# rates\n")


def test_the_page_names_every_command(run: Run) -> None:
    shown = set(re.findall(r"^│ (\w+) +[A-Z]", run("--help").out, re.MULTILINE))
    assert shown == set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE))
