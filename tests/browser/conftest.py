"""One server, one worker and one Chromium for all of these tests, which run one after another in one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Response, sync_playwright

from tests.browser.prefect_ui import Installation, Ui, running_installation
from tests.fakes.servers.prefect_database import migrated_database

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
_TIMEOUT_MS = 120_000
_LOG_CHARACTERS = 10_000
_FEW_FRAMES = """
    const drawn = window.requestAnimationFrame.bind(window)
    window.requestAnimationFrame = draw => setTimeout(() => drawn(draw), 200)
"""
"""Without a GPU the processor draws the graph of a run, sixty times a second: five are enough for screenshots."""
_ARGUMENTS = [
    "--no-sandbox",  # without it Chromium does not start for root
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing leaves this machine
]


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Installation]:
    with running_installation(tmp_path_factory.mktemp("installation"), migrated_database(pytestconfig)) as installation:
        yield installation


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Ended with the module: while it lives, its event loop is this thread's."""
    path = _find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


def _find_chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("Chromium is not there. Debian: apt-get install chromium; Ubuntu: snap install chromium")


@pytest.fixture
def ui(installation: Installation, chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Ui]:
    """A browser tab. When a test fails, a picture of it is kept, and refused requests are printed with reasons."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(_TIMEOUT_MS)
    context.add_init_script(_FEW_FRAMES)
    ui = Ui(context.new_page(), installation.ui_url, PICTURES)
    ui.page.on("response", _print_refusal)
    failed = request.session.testsfailed
    yield ui
    if request.session.testsfailed > failed:
        ui.take_picture(f"failed-{request.node.name}")
        print(installation.server_log.read_text()[-_LOG_CHARACTERS:])
    context.close()


def _print_refusal(response: Response) -> None:
    if response.status >= 400:
        print(response.status, response.request.method, response.url, response.request.post_data, response.text())
