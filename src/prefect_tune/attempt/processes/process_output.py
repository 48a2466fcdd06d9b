"""Log the output of a trial's process, line by line, in the log of its task."""

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
_LAST_WORDS = 20
_GOODBYE = timedelta(seconds=5)
_FIRST_NOTE = timedelta(seconds=10)
_CHUNK_BYTES = 64 * 1024
_BURST_LINES, _LINES_PER_SECOND, _LINE_CHARACTERS = 1000.0, 100, 1000  # what is logged: at once, and for long
_LAST_BYTES = 64 * 1024  # of the last lines together, of a process that died
_JOURNALED_BYTES = 8 * 1024  # of the same, for each attempt
_CATCH_UP = timedelta(seconds=0.5)


class TrialLog(logging.LoggerAdapter[logging.Logger]):
    """A log that begins each message with `subject`, such as the trial: the log of a flow run shows many trials."""

    def __init__(self, log: Log, subject: str) -> None:
        super().__init__(cast("logging.Logger", log))  # an adapter of an adapter works as well
        self.subject = subject

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"{self.subject}: {msg}", kwargs


def rank_log(log: Log, rank: int) -> TrialLog:
    """Return the log of a rank: each message begins with `trial 00003/rank 1`, or `rank 1` where `log` has no trial."""
    if isinstance(log, TrialLog):
        return TrialLog(log.logger, f"{log.subject}/rank {rank}")
    return TrialLog(log, f"rank {rank}")


class WaitLog:
    """Logs what is under way and for how long, after `first` (10 s), and then ever more seldom."""

    def __init__(self, log: Log, what: str, first: timedelta | None = None) -> None:
        self._log, self._what = log, what
        self._began, self._next_seconds = time.monotonic(), (first or _FIRST_NOTE).total_seconds()

    def note(self) -> None:
        """Log it if that is due; call this every second or so."""
        waited = time.monotonic() - self._began
        if waited >= self._next_seconds:
            self._next_seconds = 3 * waited
            self._log.info("%s (%.0f s so far)", self._what, waited)


class TrialOutput:
    """Logs the lines that arrive on a descriptor, until `stop`; of a progress bar, its last state.

    Only the first 65,536 characters of a line are logged, as soon as they have arrived: a line without end takes no
    more memory than that. Prefect's log takes about a millisecond for each line, while the process waits: of a flood,
    1,000 lines are logged, and the others are dropped and counted.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lines = OutputLines(self._log_line)
        self._last: deque[str] = deque(maxlen=_LAST_WORDS)
        self._room, self._counted_at = _BURST_LINES, time.monotonic()
        self._dropped_count = 0
        self._reading = threading.Lock()
        self._source: int | None = None
        self._pump: threading.Thread | None = None
        self._stop: int | None = None

    def start(self, descriptor: int) -> None:
        """Start a thread in the caller's context, which determines the log's server."""
        stopped, self._stop = os.pipe()
        # The thread owns a duplicate: if it ends late, the number was not reused for another file.
        self._source = os.dup(descriptor)
        work = (self._pass_on, self._source, stopped)
        self._pump = threading.Thread(target=copy_context().run, args=work, name="trial-output", daemon=True)
        self._pump.start()

    def stop(self) -> str:
        """Log the output up to now, and no more; return the last 20 lines."""
        if self._stop is not None and self._pump is not None:
            os.close(self._stop)
            self._stop = None
            self._pump.join(_GOODBYE.total_seconds())
        return self._last_lines(_LAST_BYTES)

    def last_lines(self) -> str:
        """Return the last 20 lines of what was written up to now, at most 8 KiB; of a flood, what 0.5 s read of it."""
        until = time.monotonic() + _CATCH_UP.total_seconds()
        while True:
            with self._reading:
                if self._source is None or not _waiting_bytes(self._source) or time.monotonic() > until:
                    return self._last_lines(_JOURNALED_BYTES)
            time.sleep(_CATCH_UP.total_seconds() / 100)

    def _last_lines(self, max_bytes: int) -> str:
        lines = [*self._last, *self._lines.unfinished()][-_LAST_WORDS:]
        return "\n".join(lines).encode()[-max_bytes:].decode(errors="ignore")

    def _pass_on(self, output: int, stopped: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with os.fdopen(output, "rb"), os.fdopen(stopped, "rb"):  # closes both
            while stopped not in wait([output, stopped]):
                with self._reading:
                    data = os.read(output, _CHUNK_BYTES)
                    self._lines.feed(decoder.decode(data))
                if not data:
                    break  # every writer has closed its end
            with self._reading:
                self._lines.feed(decoder.decode(os.read(output, _waiting_bytes(output)), final=True))
                self._lines.close()
                self._log_dropped_count()
                self._source = None

    def _log_line(self, line: str) -> None:
        self._last.append(line)
        now = time.monotonic()
        self._room = min(_BURST_LINES, self._room + (now - self._counted_at) * _LINES_PER_SECOND)
        self._counted_at = now
        if self._room <= 0 or (self._dropped_count and self._room < _BURST_LINES / 2):
            if not self._dropped_count:
                self._log.warning("more output than the log can take: lines are dropped until there is less of it")
            self._dropped_count += 1
            return
        self._log_dropped_count()
        self._room -= 1 + len(line) // _LINE_CHARACTERS
        self._log.info("%s", line)

    def _log_dropped_count(self) -> None:
        if self._dropped_count:
            self._log.warning("%d lines of output were dropped", self._dropped_count)
            self._dropped_count = 0


def _waiting_bytes(pipe: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))
    return int(count)


# Split output into lines, as a terminal would show them in the end: of a progress bar, its last state.
#
# A bar overwrites its line: "\r", then the new state. Of several bars, each but the first moves down and up again for
# each state: "\n\r", the state, "\x1b[A". So a line is held back while the bars above the cursor may return to it.

_UP = re.compile(r"\x1b\[(\d{0,2})[AF]")
_CONTROL = re.compile(r"(\r?\n|\r|\x1b\[\d{0,2}[AF]|\x1b\[[01]?G|\x1b\[2K)")
_ERASE_REST = re.compile(r"\x1b\[[01]?K")  # a new state of the bar precedes or follows
_BEGUN_CONTROL = re.compile(r"\x1b(\[\d{0,2})?\Z")
_MAX_LINE_CHARACTERS = 64 * 1024  # Prefect's server takes no log entry of more than a million bytes
_MAX_ROWS = 50


class OutputLines:
    """Calls `emit` with each line. A line without end takes no more memory than 65,536 characters."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rows: list[str] = [""]
        """The lines to which a bar may return, and the one with the cursor."""
        self._at = 0
        self._depth = 0
        """So many lines a bar has moved up."""
        self._is_redrawn = False
        """Whether the cursor has returned to this line, or to its begin."""
        self._is_at_begin = True
        """Whether the next text replaces that of the line."""
        self._is_cut = False
        self._rest = ""  # a control sequence whose end has not arrived yet

    def feed(self, text: str) -> None:
        text = self._rest + text
        begun = _BEGUN_CONTROL.search(text)
        self._rest = begun[0] if begun else ""
        for token in _CONTROL.split(text.removesuffix(self._rest)):
            if token in ("\n", "\r\n"):
                self._end_line()
            elif up := _UP.fullmatch(token):
                self._move_up(int(up[1] or 1))
            elif _CONTROL.fullmatch(token):
                self._is_redrawn = self._is_at_begin = True
            else:
                self._add(_ERASE_REST.sub("", token))

    def unfinished(self) -> list[str]:
        """Return the lines that were not emitted yet, as they are now."""
        return [row for row in self._rows if row.strip()]

    def close(self) -> None:
        """Emit the lines that have no end."""
        self._add(self._rest)
        for row in self.unfinished():
            self._emit(row)
        self._rows, self._at = [""], 0

    def _add(self, piece: str) -> None:
        """Append to the current line; emit it when it reaches the limit, and drop the rest of it."""
        if not piece:
            return
        line = self._rows[self._at]
        if self._is_at_begin:
            if not self._is_redrawn:  # an ordinary line where a bar was
                self._emit_unless_blank(line)
            line, self._is_at_begin, self._is_cut = "", False, False
        if self._is_cut:
            return
        line += piece
        if len(line) > _MAX_LINE_CHARACTERS:
            rest = f"… (the line is longer than {_MAX_LINE_CHARACTERS:,} characters: its rest is left out)"
            self._emit(f"{line[:_MAX_LINE_CHARACTERS]} {rest}")
            line, self._is_cut = "", True
        self._rows[self._at] = line

    def _end_line(self) -> None:
        if self._is_redrawn or (self._is_at_begin and self._depth):
            self._at += 1
            if self._at == len(self._rows):
                self._rows.append("")
            while self._at > self._depth:
                self._emit_unless_blank(self._rows.pop(0))
                self._at -= 1
        else:
            for row in self._rows[: self._at]:
                self._emit_unless_blank(row)
            if not self._is_cut:
                self._emit(self._rows[self._at])
            self._rows, self._at = self._rows[self._at + 1 :] or [""], 0
        self._is_redrawn, self._is_at_begin, self._is_cut = False, True, False

    def _move_up(self, count: int) -> None:
        for _ in range(count):
            if self._at:
                self._at -= 1
            elif len(self._rows) < _MAX_ROWS:
                self._rows.insert(0, "")  # it was emitted, before a bar returned to it for the first time
            self._depth = max(self._depth, len(self._rows) - 1 - self._at)
        self._is_redrawn = self._is_at_begin = True

    def _emit_unless_blank(self, row: str) -> None:
        if row.strip():
            self._emit(row)
