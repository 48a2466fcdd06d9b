"""The output of a cell: after a failed update it still shows the end of the search."""

from __future__ import annotations

import threading

from prefect_tune.core.html_tables import Html
from prefect_tune.notebook.cell_output import CellOutput, Ending, live_output


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
