"""The output of a cell: the end of a search also after a failed update, and only warnings of Prefect's log."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from prefect_tune.core.html_tables import Html
from prefect_tune.notebook import CellOutput, Ending, live_output, quiet_console


class Cell(CellOutput):
    """A cell whose first update fails."""

    def __init__(self) -> None:
        self.shown: list[Html] = []
        self.failed = threading.Event()

    def show(self, html: Html, text: str) -> None:
        del text
        if not self.failed.is_set():
            self.failed.set()
            raise OSError("the kernel's channel is closed")
        self.shown.append(html)


def test_the_end_is_drawn_also_after_an_update_that_failed() -> None:
    cell, errors = Cell(), list[Exception]()
    with live_output(cell, lambda ending, _: (Html(str(ending)), ""), errors.append, threading.Event()):
        assert cell.failed.wait(60)
    assert [str(each) for each in cell.shown] == [str(Ending.DONE)]
    assert [str(each) for each in errors] == ["the kernel's channel is closed"]


@pytest.mark.parametrize(
    ("error", "end"), [(KeyboardInterrupt(), "interrupted "), (ValueError("no\nmore"), "failed ValueError: no")]
)
def test_how_it_ended_is_drawn_and_an_interrupt_is_no_failure(error: BaseException, end: str) -> None:
    cell = Cell()
    shown = live_output(cell, lambda *ending: (Html(" ".join(ending)), ""), lambda _: None, threading.Event())
    with pytest.raises(type(error)), shown:
        raise error
    assert cell.shown[-1:] == [end]


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
