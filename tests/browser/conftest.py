"""One server, one worker and one Chromium for all of these tests, which run one after the other in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import prefect
import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.installation import Installation, installed


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Installation]:
    assert pytestconfig.cache is not None
    template = pytestconfig.cache.mkdir("prefect-database") / f"{prefect.__version__}.db"
    with installed(tmp_path_factory.mktemp("installation"), template) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Ended with the module: while it lives, its event loop is this thread's."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_found(), args=["--no-sandbox"])  # CI runs as root
        yield browser
        browser.close()


def _found() -> Path:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return Path(path)
    missing = "Chromium is not there. Debian: apt-get install chromium; Ubuntu: snap install chromium"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
