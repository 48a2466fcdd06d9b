"""The site builds without warnings, and the build fails on broken pages."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer

import prefect_tune as pt
from prefect_tune.cli import load_application
from tools.docs_links import find_broken_links
from tools.docs_site import ROOT, build, find_api_names, find_unlisted_pages, link_to_api, stage_pages

pytestmark = pytest.mark.long  # it builds the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    assert build(folder) == []
    return folder


def read_text(page: Path) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page.read_text())).split())


def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    assert {page for page in pages if page.name != "index"} <= built


def test_every_public_name_has_its_place_in_the_api(site: Path) -> None:
    homes = {name: page for page, names in find_api_names().items() for name in names}
    assert set(homes) == set(pt.__all__) - {"__version__"}
    for name, page in homes.items():
        assert f'id="prefect_tune.{name}"' in (site / "api" / page / "index.html").read_text()


def test_every_command_is_shown_with_every_option(site: Path) -> None:
    page_text = read_text(site / "cli" / "index.html")

    def list_options(command: Any) -> set[str]:
        own = {option for param in command.params for option in param.opts if option.startswith("--")}
        return own.union(*map(list_options, getattr(command, "commands", {}).values()))

    options = list_options(typer.main.get_command(load_application()))
    assert {option for option in options if option not in page_text} == set()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<a href="gone.html">', "nothing is there"),
        ('<a href="other.html#gone">', "no such place"),
        ('<a href="#gone">', "no such place"),
        ('<img src="gone.png">', "nothing is there"),
        ('<a href="http://plain.example.com">', "no https address"),
        ('<a href="https://nowhere">', "no https address"),
        ('<script src="https://cdn.example.com/x.js">', "loaded from elsewhere"),
        ('<link rel="stylesheet" href="https://fonts.example.com/x.css">', "loaded from elsewhere"),
    ],
)
def test_a_link_that_leads_nowhere_is_a_complaint(body: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(body)
    (tmp_path / "other.html").write_text('<p id="there">')
    assert [complaint in line for line in find_broken_links(tmp_path)] == [True]


def test_a_link_that_leads_somewhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text('<p id="a b">')
    links = ["folder/", "folder/#a%20b", "folder/index.html", "#here", "https://example.com/x#y", "data:image/png,"]
    (tmp_path / "page.html").write_text('<p id="here">' + "".join(f'<a href="{link}">' for link in links))
    assert list(find_broken_links(tmp_path)) == []


def test_a_page_that_no_list_has_is_a_complaint(tmp_path: Path) -> None:
    stage_pages(tmp_path)
    assert list(find_unlisted_pages(tmp_path)) == []
    (tmp_path / "docs" / "more.md").write_text("# More\n")
    (tmp_path / "docs" / "start.md").unlink()
    complaints = [line.partition(": ")[2] for line in find_unlisted_pages(tmp_path)]
    assert complaints == ["not in the nav of zensical.toml", "there is no page start.md"]


def test_a_public_name_is_linked_where_prose_says_it_first() -> None:
    page = "# `pt.tune`\n`pt.tune(x)`, `pt.tune`, [`pt.ASHA`](a.md), `pt.Unknown`\n```python\n`pt.ASHA`\n```\n"
    linked = link_to_api(page, {"tune": "api#tune", "ASHA": "api#ASHA"})
    assert linked == page.replace("`pt.tune(x)`", "[`pt.tune(x)`](api#tune)")
