"""What every test may ask for, and the surroundings in which all of them run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Prefect: neither the settings nor the server of whoever runs the tests is touched,
# and nothing is sent anywhere. Child processes inherit it.
_HOME = Path(tempfile.mkdtemp(prefix="prefect-tune-tests-"))
for _name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[_name]
os.environ |= {
    "PREFECT_HOME": str(_HOME),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests that need a Prefect server time: the first of them waits for it to start."""
    for item in items:
        if "prefect_server" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


def pytest_unconfigure() -> None:
    """Leave no folder behind."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """Return the API address of a Prefect server on an empty database, shared by the session's tests.

    Started when first asked for. Flows and tasks called in the test use it without being told; give the
    address as `PREFECT_API_URL` to child processes.
    """
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    # The first start runs every migration: 16 s on an idle machine, more than 80 s on a busy one.
    with prefect_test_harness(server_startup_timeout=180):
        yield str(get_current_settings().api.url)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests recorded with `record_property("figure: ...", number)`, summed by name."""
    figures: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        figures.update({name: value for name, value in report.user_properties if name.startswith("figure: ")})
    for name, total in sorted(figures.items()):
        terminalreporter.write_line(f"{name.removeprefix('figure: ')}: {total}")
