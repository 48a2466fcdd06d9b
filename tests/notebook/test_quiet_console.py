"""Prefect's console log while a cell shows a search."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from prefect_tune.notebook.cell_output import quiet_console


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    """The output of Prefect's console handler."""
    stream = io.StringIO()
    handler = PrefectConsoleHandler(stream=stream)
    logger = logging.getLogger("prefect.of_a_cell")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def test_the_console_has_warnings_only_until_the_last_of_several_searches_ends(console: io.StringIO) -> None:
    log = logging.getLogger("prefect.of_a_cell")
    with quiet_console():
        with quiet_console():
            log.info("one")
        log.info("two")
        log.warning("three")
    log.info("four")
    assert console.getvalue().split() == ["three", "four"]


def test_at_the_level_debug_everything_is_written(console: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("prefect"), "level", logging.DEBUG)
    logging.getLogger("prefect").manager._clear_cache()  # type: ignore[attr-defined]  # logging caches enabled levels
    with quiet_console():
        logging.getLogger("prefect.of_a_cell").info("one")
    assert console.getvalue().split() == ["one"]
