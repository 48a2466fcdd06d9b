"""A live table in a real pseudo terminal: other output, hang-ups, broken pipes, a slow reader."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from prefect_tune.terminal import live_display as module
from prefect_tune.terminal.live_display import (
    NOTICE,
    LiveDisplay,
    OutputCapture,
    can_show_display,
    end_display,
    live_display,
)
from tests.fakes.trial_processes import wait_until

wait_for = partial(wait_until, seconds=60)


class Terminal:
    """A pseudo terminal of 80 columns, its stream, and what it was made to show."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.stream: io.TextIOWrapper = os.fdopen(slave, "w", encoding="utf-8", buffering=1)
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        """Start to read the output; until then the terminal accepts only what its buffer holds."""
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 4096):
                self._output += data

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        if self._reader.is_alive():
            self._reader.join()  # or it would read from the next file with this descriptor number
        if self._master >= 0:
            os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def errors() -> list[Exception]:
    return []


def render_table(width: int, height: int) -> RenderableType:
    return Text(f"a table of {width} x {height}")


def test_the_table_stands_there_and_is_gone_afterwards_or_when_it_is_ended_from_outside(
    terminal: Terminal, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.read()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with live_display(render_table, errors.append, terminal.stream):
        wait_for(lambda: "a table of 80 x 24" in terminal.output)
        assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")  # the cursor is visible again
        end_display()
        wait_for(lambda: terminal.output.endswith("\x1b[2K"))  # its line is erased
        print("still here")
        wait_for(lambda: "still here" in terminal.output)
        assert "a table" not in terminal.output[terminal.output.index("still here") :]
    end_display()  # there is none any more
    with live_display(render_table, errors.append, terminal.stream):
        wait_for(lambda: "a table" in terminal.output[terminal.output.index("still here") :])
    wait_for(lambda: terminal.output.endswith("\x1b[2K"))
    assert errors == []


def test_what_is_printed_and_logged_meanwhile_stands_above_it(
    terminal: Terminal, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.read()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    handler = logging.StreamHandler(terminal.stream)
    logging.getLogger("a library").addHandler(handler)
    try:
        with live_display(render_table, errors.append, terminal.stream):
            print("printed")
            logging.getLogger("a library").warning("logged")
            wait_for(lambda: "logged\r\n" in terminal.output)
            assert "printed\r\n" in terminal.output
            print("without an end", end="")
    finally:
        logging.getLogger("a library").removeHandler(handler)
    wait_for(lambda: "without an end" in terminal.output)
    assert sys.stdout is handler.stream is terminal.stream


def test_handlers_with_a_console_of_their_own_write_only_warnings_and_notices_meanwhile(
    terminal: Terminal, errors: list[Exception]
) -> None:
    terminal.read()
    handler: Any = logging.StreamHandler(terminal.stream)
    handler.console = Console(file=terminal.stream)  # as Prefect's has
    logger = logging.getLogger("used by tasks")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with live_display(render_table, errors.append, terminal.stream):
            logger.info("a task has finished")
            logger.info("a trial resumes", extra=NOTICE)
            logger.warning("a trial has failed")
            wait_for(lambda: "a trial has failed" in terminal.output)
        assert "a task has finished" not in terminal.output
        assert "a trial resumes" in terminal.output
        logger.info("the search has finished")
        wait_for(lambda: "the search has finished" in terminal.output)
        assert handler.console.file is terminal.stream
    finally:
        logger.removeHandler(handler)


def test_a_terminal_that_hangs_up_ends_the_table_and_nothing_else(terminal: Terminal, errors: list[Exception]) -> None:
    with live_display(render_table, errors.append, terminal.stream):
        terminal.hang_up()
        wait_for(lambda: errors)
    assert isinstance(errors[0], OSError)


def test_a_pipe_that_breaks_ends_neither_the_process_nor_its_stdout(errors: list[Exception]) -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    console = LiveDisplay(render_table, errors.append, stream, OutputCapture(stream)).console
    os.close(reading)
    with pytest.raises(BrokenPipeError, match="the reader has closed it"):
        console.print("a table")
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_table_that_cannot_be_drawn_ends_and_what_is_printed_goes_on(
    terminal: Terminal, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(_width: int, _height: int) -> RenderableType:
        raise ZeroDivisionError("a bug")

    terminal.read()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with live_display(raise_error, errors.append, terminal.stream):
        wait_for(lambda: errors)
        print("still here")
        wait_for(lambda: "still here" in terminal.output)
    assert isinstance(errors[0], ZeroDivisionError)


def test_a_terminal_that_takes_nothing_holds_nobody_up(
    terminal: Terminal, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    start = time.monotonic()
    with live_display(lambda _width, _height: Text("x" * 100_000), errors.append, terminal.stream):
        time.sleep(0.2)  # its buffer is full by then
        for _ in range(1000):
            print("y" * 1000)
    assert time.monotonic() - start < 30  # 2 s of patience, on a busy machine
    assert sys.stdout is terminal.stream
    terminal.read()  # or its thread would never end


def test_it_is_drawn_rarely_where_drawing_is_expensive(terminal: Terminal, errors: list[Exception]) -> None:
    times: list[float] = []

    def render_slowly(_width: int, _height: int) -> RenderableType:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        times.append(time.monotonic())
        return Text("expensive")

    terminal.read()
    with live_display(render_slowly, errors.append, terminal.stream):
        wait_for(lambda: len(times) == 2)
    assert times[1] - times[0] >= 1.9  # a 20th of the time


@pytest.mark.parametrize(
    ("environment", "is_shown"), [({}, True), ({"TERM": "dumb"}, False), ({"PREFECT_TUNE_PROGRESS": "off"}, False)]
)
def test_a_table_is_shown_in_a_terminal_unless_somebody_wants_none(
    terminal: Terminal, environment: dict[str, str], is_shown: bool
) -> None:
    assert can_show_display(terminal.stream, environment) is is_shown


def test_a_file_a_closed_stream_and_one_without_letters_are_no_place_for_it(terminal: Terminal) -> None:
    assert not can_show_display(None, {})
    assert not can_show_display(io.StringIO(), {})
    terminal.stream.reconfigure(encoding="ascii")
    assert not can_show_display(terminal.stream, {})
    terminal.stream.close()
    assert not can_show_display(terminal.stream, {})


def test_what_stands_in_for_a_terminal_is_one_to_whoever_writes(terminal: Terminal) -> None:
    capture = OutputCapture(terminal.stream)
    assert (capture.isatty(), capture.fileno(), capture.encoding) == (True, terminal.stream.fileno(), "utf-8")
    assert capture.buffer is terminal.stream.buffer
    print("one\ntwo", end="", file=capture, flush=True)
    assert (capture.take_lines(), capture.take_lines()) == (["one"], [])
    print(" is whole now", file=capture)
    assert capture.take_lines() == ["two is whole now"]


def test_lines_that_are_dropped_are_said_to_be_missing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CHUNKS", 4)
    capture = OutputCapture(terminal.stream)
    for number in range(9):
        capture.write(f"{number}\n")
    missing, *lines = capture.take_lines()
    assert "lines are missing here" in missing
    assert lines == ["5", "6", "7", "8"]
    capture.write("9\n")
    assert capture.take_lines() == ["9"]
