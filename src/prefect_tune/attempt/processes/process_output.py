"""Log the output of a trial's process, line by line, in the log of its task run."""

from __future__ import annotations

import codecs
import fcntl
import logging
import os
import re
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from contextvars import copy_context
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, TypeAlias, cast

Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"
_MAX_LAST_LINES = 20
_STOP_TIMEOUT = timedelta(seconds=5)
_FIRST_NOTE_DELAY = timedelta(seconds=10)
_CHUNK_BYTES = 64 * 1024
_MAX_BURST_LINES, _MAX_LINES_PER_SECOND, _CHARACTERS_PER_LINE = 1000.0, 100, 1000  # a longer line counts as several
_MAX_LAST_BYTES = 64 * 1024  # of all last lines together, as `stop` returns them
_MAX_JOURNALED_BYTES = 8 * 1024  # of all last lines together, as `last_lines` returns them for the journal
_CATCH_UP_TIMEOUT = timedelta(seconds=0.5)


class TrialLog(logging.LoggerAdapter[logging.Logger]):
    """A log that prefixes each message with `subject`, such as the trial, because a flow run's log has many trials."""

    def __init__(self, log: Log, subject: str) -> None:
        super().__init__(cast("logging.Logger", log))  # a cast, because `log` may also be an adapter
        self.subject = subject

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"{self.subject}: {msg}", kwargs


def make_rank_log(log: Log, rank: int) -> TrialLog:
    """Return the log of a rank, with the prefix `trial 00003/rank 1`, or `rank 1` if `log` has no trial."""
    if isinstance(log, TrialLog):
        return TrialLog(log.logger, f"{log.subject}/rank {rank}")
    return TrialLog(log, f"rank {rank}")


class WaitLog:
    """Logs what this process waits for and how long, first after `first_delay` (10 s), then at growing intervals."""

    def __init__(self, log: Log, activity: str, first_delay: timedelta = _FIRST_NOTE_DELAY) -> None:
        self._log, self._activity = log, activity
        self._start_time, self._next_seconds = time.monotonic(), first_delay.total_seconds()

    def log_if_due(self) -> None:
        """Log the activity and its duration if a line is due. Call this about once a second."""
        seconds = time.monotonic() - self._start_time
        if seconds >= self._next_seconds:
            self._next_seconds = 3 * seconds
            self._log.info("%s (%.0f s so far)", self._activity, seconds)


class TrialOutput:
    """Logs the lines that arrive on a descriptor until `stop`. Of a progress bar, only the last state is logged.

    A line is cut and logged as soon as it has more than 65,536 characters; the rest is dropped, so that an endless line
    takes little memory. Prefect takes about a millisecond to log a line, which slows down a process that prints faster.
    So after a burst of 1,000 lines, further lines are dropped and counted.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lines = OutputLineSplitter(self._log_line)
        self._last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        self._line_budget, self._budget_updated_at = _MAX_BURST_LINES, time.monotonic()
        self._dropped_count = 0
        self._read_lock = threading.Lock()
        self._source: int | None = None
        self._reader: threading.Thread | None = None
        self._stop_pipe: int | None = None

    def start(self, descriptor: int) -> None:
        """Start a thread that logs the output, in the caller's context, because this selects the Prefect server."""
        stop_reader, self._stop_pipe = os.pipe()
        # The thread reads and closes a duplicate, so that no other file gets the descriptor's number while it reads.
        self._source = os.dup(descriptor)
        work = (self._log_output, self._source, stop_reader)
        self._reader = threading.Thread(target=copy_context().run, args=work, name="trial-output", daemon=True)
        self._reader.start()

    def stop(self) -> str:
        """Log the output up to now, then stop; return the last 20 lines."""
        if self._stop_pipe is not None and self._reader is not None:
            os.close(self._stop_pipe)
            self._stop_pipe = None
            self._reader.join(_STOP_TIMEOUT.total_seconds())
        return self._format_last_lines(_MAX_LAST_BYTES)

    def last_lines(self) -> str:
        """Return the last 20 lines of the output up to now, at most 8 KiB. Wait up to 0.5 s until all of it is read."""
        deadline = time.monotonic() + _CATCH_UP_TIMEOUT.total_seconds()
        while True:
            with self._read_lock:
                if self._source is None or not _count_readable_bytes(self._source) or time.monotonic() > deadline:
                    return self._format_last_lines(_MAX_JOURNALED_BYTES)
            time.sleep(_CATCH_UP_TIMEOUT.total_seconds() / 100)

    def _format_last_lines(self, max_bytes: int) -> str:
        lines = [*self._last_lines, *self._lines.list_unfinished_lines()][-_MAX_LAST_LINES:]
        return "\n".join(lines).encode()[-max_bytes:].decode(errors="ignore")

    def _log_output(self, output: int, stop_reader: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with os.fdopen(output, "rb"), os.fdopen(stop_reader, "rb"):  # closes both
            while stop_reader not in wait([output, stop_reader]):
                with self._read_lock:
                    data = os.read(output, _CHUNK_BYTES)
                    self._lines.feed(decoder.decode(data))
                if not data:
                    break  # all writers have closed the pipe
            with self._read_lock:
                self._lines.feed(decoder.decode(os.read(output, _count_readable_bytes(output)), final=True))
                self._lines.close()
                self._log_dropped_count()
                self._source = None

    def _log_line(self, line: str) -> None:
        self._last_lines.append(line)
        now = time.monotonic()
        refill = (now - self._budget_updated_at) * _MAX_LINES_PER_SECOND
        self._line_budget, self._budget_updated_at = min(_MAX_BURST_LINES, self._line_budget + refill), now
        if self._line_budget <= 0 or (self._dropped_count and self._line_budget < _MAX_BURST_LINES / 2):
            if not self._dropped_count:
                self._log.warning("too much output for the log: lines are dropped until the rate decreases")
            self._dropped_count += 1
            return
        self._log_dropped_count()
        self._line_budget -= 1 + len(line) // _CHARACTERS_PER_LINE
        self._log.info("%s", line)

    def _log_dropped_count(self) -> None:
        if self._dropped_count:
            self._log.warning("%d lines of output were dropped", self._dropped_count)
            self._dropped_count = 0


def _count_readable_bytes(pipe: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))
    return int(count)


# Split output into the lines that a terminal shows in the end, with only the last state of a progress bar.
#
# A bar overwrites its line with "\r" and the new state. A second bar below it moves the cursor down, writes its state,
# and moves the cursor up again: "\n\r", the state, "\x1b[A". So a line is not emitted while a bar may return to it.

_UP = re.compile(r"\x1b\[(\d{0,2})[AF]")
_CONTROL = re.compile(r"(\r?\n|\r|\x1b\[\d{0,2}[AF]|\x1b\[[01]?G|\x1b\[2K)")
_ERASE_REST = re.compile(r"\x1b\[[01]?K")  # ignored, because the new state of a bar replaces the whole line
_PARTIAL_CONTROL = re.compile(r"\x1b(\[\d{0,2})?\Z")
_MAX_LINE_CHARACTERS = 64 * 1024  # Prefect's server rejects log entries of more than a million bytes
_MAX_ROWS = 50


class OutputLineSplitter:
    """Calls `emit` with each line. An endless line takes the memory of at most 65,536 characters."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rows: list[str] = [""]
        """The lines to which a bar may return, and the line with the cursor."""
        self._cursor_row = self._rows_moved_up = 0  # `_rows_moved_up`: how many lines a bar has moved up
        self._is_redrawn = False
        """Whether the cursor came to its present line by moving up, or has returned to the start of this line."""
        self._is_at_line_start = True
        """Whether the next text replaces the text of the line with the cursor."""
        self._is_cut = False
        self._rest = ""  # an incomplete control sequence

    def feed(self, text: str) -> None:
        text = self._rest + text
        partial = _PARTIAL_CONTROL.search(text)
        self._rest = partial[0] if partial else ""
        for token in _CONTROL.split(text.removesuffix(self._rest)):
            if token in ("\n", "\r\n"):
                self._end_line()
            elif _CONTROL.fullmatch(token):
                if up := _UP.fullmatch(token):
                    self._move_up(int(up[1] or 1))
                self._is_redrawn = self._is_at_line_start = True
            else:
                self._add_text(_ERASE_REST.sub("", token))

    def list_unfinished_lines(self) -> list[str]:
        """Return the current state of the lines that are not emitted yet."""
        return [row for row in self._rows if row.strip()]

    def close(self) -> None:
        """Emit the unfinished lines."""
        self._add_text(self._rest)
        for row in self.list_unfinished_lines():
            self._emit(row)
        self._rows, self._cursor_row = [""], 0

    def _add_text(self, piece: str) -> None:
        """Append `piece` to the current line. If the line exceeds the limit, emit its beginning, and drop the rest."""
        if not piece:
            return
        line = self._rows[self._cursor_row]
        if self._is_at_line_start:
            if not self._is_redrawn:  # an ordinary line replaces this line of a bar: emit the bar's last state
                self._emit_unless_blank(line)
            line, self._is_at_line_start, self._is_cut = "", False, False
        if self._is_cut:
            return
        line += piece
        if len(line) > _MAX_LINE_CHARACTERS:
            rest = f"… (the line is longer than {_MAX_LINE_CHARACTERS:,} characters: its rest is dropped)"
            self._emit(f"{line[:_MAX_LINE_CHARACTERS]} {rest}")
            line, self._is_cut = "", True
        self._rows[self._cursor_row] = line

    def _end_line(self) -> None:
        if self._is_redrawn or (self._is_at_line_start and self._rows_moved_up):
            self._cursor_row += 1
            if self._cursor_row == len(self._rows):
                self._rows.append("")
            while self._cursor_row > self._rows_moved_up:
                self._emit_unless_blank(self._rows.pop(0))
                self._cursor_row -= 1
        else:
            for row in self._rows[: self._cursor_row]:
                self._emit_unless_blank(row)
            if not self._is_cut:
                self._emit(self._rows[self._cursor_row])
            self._rows, self._cursor_row = self._rows[self._cursor_row + 1 :] or [""], 0
        self._is_redrawn, self._is_at_line_start, self._is_cut = False, True, False

    def _move_up(self, count: int) -> None:
        for _ in range(count):
            if self._cursor_row:
                self._cursor_row -= 1
            elif len(self._rows) < _MAX_ROWS:
                self._rows.insert(0, "")  # stands for a line that was already emitted
            self._rows_moved_up = max(self._rows_moved_up, len(self._rows) - 1 - self._cursor_row)

    def _emit_unless_blank(self, row: str) -> None:
        if row.strip():
            self._emit(row)
