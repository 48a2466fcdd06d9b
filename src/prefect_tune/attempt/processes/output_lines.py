r"""Split output into lines, as a terminal would show them in the end: of a progress bar, its last state.

A bar overwrites its line: "\r", then the new state. Of several bars, each but the first moves down and up again for
each state: "\n\r", the state, "\x1b[A". So a line is held back while the bars above the cursor may return to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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
        """The lines to which a bar may return; the text of that at `_at` is in `_pieces`."""
        self._at = 0
        self._depth = 0
        """So many lines a bar has moved up."""
        self._pieces: list[str] = []
        self._count = 0  # the characters of `_pieces`, and of what was left out
        self._is_redrawn = False
        """Whether the line begins with a carriage return."""
        self._is_new = True
        """Whether no text has come since the cursor is in this line."""
        self._is_at_begin = False
        """Whether the next text replaces that of the line."""
        self._rest = ""  # a control sequence whose end has not arrived yet

    def feed(self, text: str) -> None:
        text = self._rest + text
        begun = _BEGUN_CONTROL.search(text)
        self._rest = begun[0] if begun else ""
        for token in _CONTROL.split(text.removesuffix(self._rest)):
            match token:
                case "\n" | "\r\n":
                    self._end_line()
                case _ if up := _UP.fullmatch(token):
                    for _ in range(int(up[1] or 1)):
                        self._move_up()
                    self._is_redrawn = True
                case _ if _CONTROL.fullmatch(token):
                    self._is_redrawn = self._is_at_begin = True
                case _:
                    self._add(_ERASE_REST.sub("", token))

    def unfinished(self) -> list[str]:
        """Return the lines that were not emitted yet, as they are now."""
        self._rows[self._at] = "".join(self._pieces)
        return [row for row in self._rows if row.strip()]

    def close(self) -> None:
        """Emit the lines that have no end."""
        self._add(self._rest)
        for row in self.unfinished():
            self._emit(row)
        self._rows, self._at, self._pieces = [""], 0, []

    def _add(self, piece: str) -> None:
        """Append to the current line; emit it when it reaches the limit, and drop the rest of it."""
        if not piece:
            return
        if self._is_at_begin:
            if not self._is_redrawn:  # an ordinary line where a bar was
                self._emit_unless_blank("".join(self._pieces))
            self._pieces, self._count, self._is_at_begin = [], 0, False
        self._is_new = False
        room = _MAX_LINE_CHARACTERS - self._count
        if room < 0:
            return
        self._pieces.append(piece[:room])
        self._count += len(piece)
        if len(piece) > room:
            rest = f"… (the line is longer than {_MAX_LINE_CHARACTERS:,} characters: its rest is left out)"
            self._emit(f"{''.join(self._pieces)} {rest}")
            self._pieces.clear()

    def _end_line(self) -> None:
        self._rows[self._at] = line = "".join(self._pieces)
        if self._is_redrawn or (self._is_new and self._depth):
            self._at += 1
            if self._at == len(self._rows):
                self._rows.append("")
            while self._at > self._depth:
                self._emit_unless_blank(self._rows.pop(0))
                self._at -= 1
        else:
            for row in self._rows[: self._at]:
                self._emit_unless_blank(row)
            if self._count <= _MAX_LINE_CHARACTERS:
                self._emit(line)
            self._rows, self._at = self._rows[self._at + 1 :] or [""], 0
        self._go_to_row()

    def _move_up(self) -> None:
        self._rows[self._at] = "".join(self._pieces)
        if self._at:
            self._at -= 1
        elif len(self._rows) < _MAX_ROWS:
            self._rows.insert(0, "")  # it was emitted, before a bar returned to it for the first time
        self._depth = max(self._depth, len(self._rows) - 1 - self._at)
        self._go_to_row()

    def _go_to_row(self) -> None:
        row = self._rows[self._at]
        self._pieces, self._count = [row] if row else [], len(row)
        self._is_redrawn, self._is_at_begin, self._is_new = False, bool(row), True

    def _emit_unless_blank(self, row: str) -> None:
        if row.strip():
            self._emit(row)
