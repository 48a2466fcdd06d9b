"""A notebook in JupyterLab, in both themes: screenshots, with readable text."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser, Page

from tests.browser.conftest import PICTURES
from tests.fakes.kernels import Kernel, executed, exported, kernel_in, shipped

_CONTRAST = """
() => {
    const numbers = color => (color.match(/[\\d.]+/g) || []).map(Number)
    const light = ([r, g, b]) => [r, g, b]
        .map(each => each / 255)
        .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0)
    const ground = element => {
        for (let each = element; each; each = each.parentElement) {
            const color = numbers(getComputedStyle(each).backgroundColor)
            if (color.length === 3 || color[3] === 1) return color
        }
        return [255, 255, 255]
    }
    const texts = [...document.querySelectorAll('.prefect-tune p, .prefect-tune td, .prefect-tune th')]
    return Math.min(...texts.map(element => {
        const [a, b] = [numbers(getComputedStyle(element).color), ground(element)].map(light).sort((x, y) => y - x)
        return (a + 0.05) / (b + 0.05)
    }))
}
"""
"""The smallest contrast of a text with its background, as WCAG defines it."""


@pytest.fixture(scope="module")
def notebook(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The shipped notebook with its outputs, and those of a search with an error: while it runs, and at its end."""
    folder, environment = tmp_path_factory.mktemp("notebook"), {"PREFECT_API_URL": prefect_server}
    made = executed(shipped(), folder, environment)
    with kernel_in(folder, environment) as kernel:
        outputs = [_displayed(each) for each in _with_an_error(kernel)]
    made.cells.append(nbformat.v4.new_code_cell(_SEARCH.strip(), outputs=outputs))
    return made


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_notebook_is_readable(notebook: NotebookNode, chromium: Browser, theme: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(exported(notebook, theme))
    page = chromium.new_page(viewport={"width": 1100, "height": 900})
    page.goto(f"file://{tmp_path}/page.html")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"8-notebook-{theme}.png", full_page=True)
    assert page.evaluate(_CONTRAST) > 4.5
    assert _is_within_its_cell(page)
    page.close()


def _is_within_its_cell(page: Page) -> bool:
    """Whether the page fits the window's width: wider content scrolls in its cell."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


_BREAKS = """
import time
import prefect_tune as pt

def train(config):
    for step in range(1, 9):
        time.sleep(0.4)
        if step == 3 and config["rate"] == 0.1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB <GPU 0>")
        pt.report({"loss": config["rate"] / step})
"""
_SEARCH = """
pt.tune(train, {"width": pt.grid_search([16, 64]), "rate": pt.grid_search([0.01, 0.1]), "note": "x" * 200},
        target="./runs", experiment="widths", metric="loss", num_samples=1, max_concurrent_trials=2)
"""


def _with_an_error(kernel: Kernel) -> list[str]:
    """Return a display of a search that runs, and the last one, which has errors."""
    kernel.run(_BREAKS)
    shown = kernel.run(_SEARCH)
    return [[each for each in shown.updates if "running for" in each][-1], shown.html]


def _displayed(html: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", data={"text/html": html})
