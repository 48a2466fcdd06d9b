"""The output of a process becomes log lines, in order, until the reader is stopped."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from multiprocessing.connection import wait

import pytest

from prefect_tune.attempt.processes import process_output
from prefect_tune.attempt.processes.process_output import OutputLineSplitter, TrialOutput
from tests.fakes.trial_processes import LogRecorder, make_log, no_leaks, wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe; the fixture closes the writing end unless the test does."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def start_logging(pipe: tuple[int, int], ask: Callable[[], object] = lambda: None) -> tuple[LogRecorder, TrialOutput]:
    recorder = LogRecorder(ask)
    output = TrialOutput(make_log(recorder))
    output.start(pipe[0])
    return recorder, output


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"no end", ["no end"]),
        (b"\n\nthree\n", ["", "", "three"]),
        (b" 10%\r 20%\r\ndone", [" 20%", "done"]),
        (b"\r 10%\r 20%\nnext\r\nlast\r", [" 20%", "next", "last"]),
        (b"\r 10%\r    \rdone\n", ["done"]),
        (b"a\x1b[31mb\x1b[0m\nc\x1b", ["a\x1b[31mb\x1b[0m", "c\x1b"]),
        (b"\xff\xfe not text\n", ["\ufffd\ufffd not text"]),
        ("snö".encode(), ["snö"]),
        (b"", []),
        (b"y" * 50_000, ["y" * 50_000]),
        (b"y" * 65_536, ["y" * 65_536]),
        (b"y" * 65_000 + b"\nnext", ["y" * 65_000, "next"]),
    ],
)
def test_what_is_printed_before_the_stop_is_logged_line_by_line(
    pipe: tuple[int, int], printed: bytes, lines: list[str]
) -> None:
    recorder, output = start_logging(pipe)
    os.write(pipe[1], printed)
    assert output.stop() == "\n".join(lines)
    assert recorder.lines == lines


def test_a_line_and_a_letter_that_come_in_pieces_are_one(pipe: tuple[int, int]) -> None:
    recorder, output = start_logging(pipe)
    for piece in (b"sn", "ö".encode()[:1], "ö".encode()[1:], b"w\nand ", b"more\n"):
        os.write(pipe[1], piece)
        wait_until(lambda: not wait([pipe[0]], 0), what=lambda: "the pipe is read")
    output.stop()
    assert recorder.lines == ["snöw", "and more"]


def format_bar(name: str, below: int, percent: int) -> str:
    """Return what tqdm writes for a bar that is `below` lines below the first."""
    return "\n" * below + f"\r{name} {percent}%" + "\x1b[A" * below


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        ("".join(f"\r{percent}%" for percent in range(101)) + "\n", ["100%"]),
        ("".join(f"{percent}%\r" for percent in range(101)), ["100%"]),
        ("".join(format_bar(f"b{n}", n, percent) for percent in range(101) for n in range(3)) + "\n\n\n",
         ["b0 0%", "b0 100%", "b1 100%", "b2 100%"]),
        ("\n".join(f"\repoch {n} 0%\repoch {n} 100%" for n in range(3)) + "\nend\n",
         [*(f"epoch {n} 100%" for n in range(3)), "end"]),
        ("\router 0%" + "".join(format_bar("inner", 1, n) for n in range(9)) + "\n\r       \r\x1b[A\router 9%\ndone\n",
         ["outer 0%", "outer 9%", "done"]),
        ("\router 0%" + format_bar("inner", 1, 50) + "\router 9%\nan ordinary line\n",
         ["outer 0%", "inner 50%", "outer 9%", "an ordinary line"]),
        ("0%\x1b[G1%\x1b[1G2%\x1b[K\n", ["2%"]),
        ("".join(f"\x1b[1A\x1b[2K{percent}%\n" for percent in range(9)) + "end\n", ["8%", "end"]),
        ("0%\n" + "".join(f"\x1b[1F{percent}%\n" for percent in range(9)) + "end\n", ["0%", "8%", "end"]),
    ],
    ids=["one bar", "the return last", "three bars", "a bar for each epoch", "a nested bar", "text over a bar",
         "to a column", "up and erase", "to the line before"],
)  # fmt: skip
@pytest.mark.parametrize("is_in_pieces", [False, True], ids=["whole", "in pieces"])
def test_of_a_progress_bar_the_last_state_is_logged(printed: str, lines: list[str], is_in_pieces: bool) -> None:
    emitted: list[str] = []
    output = OutputLineSplitter(emitted.append)
    for piece in printed if is_in_pieces else [printed]:
        output.feed(piece)
    output.close()
    assert emitted == lines


_MEBIBYTE = 1024**2


@pytest.mark.parametrize("printed", [b"y", "ö".encode(), b"\0", b"\xff"])
def test_a_line_that_does_not_end_is_cut_and_its_rest_takes_no_memory(pipe: tuple[int, int], printed: bytes) -> None:
    recorder, output = start_logging(pipe)
    tracemalloc.start()
    for _ in range(16):
        os.write(pipe[1], printed * (_MEBIBYTE // len(printed)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.write(pipe[1], b"\nnext\n")
    output.stop()
    cut, following = recorder.lines
    assert cut.startswith(printed.decode(errors="replace") * 65_536 + " … (the line is longer than 65,536 characters")
    assert following == "next"
    assert peak_bytes < 8 * _MEBIBYTE


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        (b"", ""),
        (b"one\ntwo", "one\ntwo"),
        (b"".join(b"%d\n" % number for number in range(30)), "\n".join(map(str, range(10, 30)))),
        (b"\r 10%\r 20%", " 20%"),
        (b"\r 10%\r 20%\r     \rdone", "done"),
        (b"y" * 9_000, "y" * 8_192),
        ("ö".encode() * 9_000 + b"!", "ö" * 4_095 + "!"),
        (b"\xff\xfe\0\n", "\ufffd\ufffd\0"),
    ],
    ids=["nothing", "no end", "30 lines", "a bar", "a cleared bar", "a long line", "long letters", "no text"],
)
def test_the_last_lines_are_known_while_a_process_runs_and_after_it(
    pipe: tuple[int, int], printed: bytes, last: str
) -> None:
    _, output = start_logging(pipe)
    os.write(pipe[1], printed)
    assert output.last_lines() == last
    output.stop()
    assert output.last_lines() == last


def test_of_a_line_of_a_mebibyte_the_last_lines_are_short_and_say_that_it_was_cut(pipe: tuple[int, int]) -> None:
    _, output = start_logging(pipe)
    os.write(pipe[1], b"y" * _MEBIBYTE)
    last = output.last_lines()
    assert len(last.encode()) == 8_192
    assert last.endswith("characters: its rest is dropped)")
    output.stop()


def test_it_stops_although_a_process_prints_without_end(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    is_printing = True

    def print_lines() -> None:
        while is_printing:
            os.write(writing, b"more\n" * 100)

    printer = threading.Thread(target=print_lines)
    output = TrialOutput(make_log(LogRecorder()))
    output.start(reading)
    printer.start()
    stopper = threading.Thread(target=output.stop)
    stopper.start()
    stopper.join(4)
    assert not stopper.is_alive()
    is_printing = False
    output.start(reading)  # so that a printing process never blocks
    printer.join()
    output.stop()


def test_what_is_printed_after_the_stop_is_for_the_next_log(pipe: tuple[int, int]) -> None:
    for line in ("first", "second"):
        recorder, output = start_logging(pipe)
        os.write(pipe[1], f"{line}\n".encode())
        output.stop()
        assert recorder.lines == [line]


CALLER: ContextVar[str] = ContextVar("caller")


def test_lines_are_logged_in_the_context_of_the_start_and_nothing_is_left(pipe: tuple[int, int]) -> None:
    with no_leaks():
        CALLER.set("this task")
        recorder, output = start_logging(pipe, CALLER.get)
        os.write(pipe[1], b"one\n")
        output.stop()
        output.stop()
        assert recorder.answers == ["this task"]


def test_of_a_flood_the_log_gets_the_beginning_and_the_number_of_the_dropped_lines(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_output, "_MAX_LINES_PER_SECOND", 0)
    recorder, output = start_logging(pipe)
    lines = [f"line {number}" for number in range(20_000)]
    for line in lines:
        os.write(pipe[1], f"{line}\n".encode())
    last = output.stop()
    *begin, notice, count = recorder.lines
    assert begin == lines[:1000]
    assert "dropped until the rate decreases" in notice
    assert count == "19000 lines of output were dropped"
    assert last.splitlines() == lines[-20:]


def test_after_a_flood_lines_are_logged_again(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_output, "_MAX_LINES_PER_SECOND", 0)
    recorder, output = start_logging(pipe)
    os.write(pipe[1], b"x" * 10 + b"\n" + b"y\n" * 2000)
    wait_until(lambda: len(recorder.lines) > 1000, what=lambda: f"a flood, not {len(recorder.lines)} lines")
    wait_until(lambda: not wait([pipe[0]], 0), what=lambda: "the pipe is read")
    monkeypatch.setattr(process_output, "_MAX_LINES_PER_SECOND", 1e9)
    os.write(pipe[1], b"a step\n")
    output.stop()
    assert recorder.lines[-1] == "a step"
    (count,) = (line for line in recorder.lines if line.endswith("lines of output were dropped"))
    assert int(count.split()[0]) == 2002 - (len(recorder.lines) - 2)  # the other one says that the flood begins
