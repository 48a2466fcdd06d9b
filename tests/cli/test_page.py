"""The claims of the docs page on the command line are true."""

from __future__ import annotations

import re

from tests.fakes.command_line import Run
from tests.fakes.pages import ROOT

PAGE = ROOT / "docs" / "cli.md"


def test_the_page_names_every_command(run: Run) -> None:
    shown = set(re.findall(r"^│ (\w+) +[A-Z]", run("--help").out, re.MULTILINE))
    assert shown == set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE))
