"""A file with one row per step; a step that is trained again replaces its earlier row and all later rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prefect_tune.loggers.folder_logger import replace_file, sync_to_disk


class RowFile:
    """A text file with `head` header lines, followed by rows.

    A line that a crash cut off is ignored. Each row is passed to the operating system at once, and survives a
    power cut after `sync`.
    """

    def __init__(self, path: Path, step_of: Callable[[str], int | None], *, head: int = 0) -> None:
        """Open the file, which may have rows already.

        Args:
            step_of: returns the step of a row; None for a line that is not a row.
            head: the number of lines before the rows.
        """
        self.path = path
        self._step_of = step_of
        self._head = head
        self.last = 0
        """The last step in the file."""
        self._is_dirty = False
        self.keep_up_to(None)

    def lines(self) -> Sequence[str]:
        """Return all complete lines."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text.split("\n")[:-1]

    def keep_up_to(self, step: int | None) -> None:
        """Remove the rows of later steps, and lines that are not rows; None keeps all rows."""
        lines = self.lines()
        kept = [*lines[: self._head], *self._rows(lines[self._head :], step)]
        if len(kept) < len(lines) or self._is_torn():
            self.rewrite(kept)
        self.last = (self._step_of(kept[-1]) or 0) if len(kept) > self._head else 0

    def _rows(self, lines: Sequence[str], step: int | None) -> Iterator[str]:
        for line in lines:
            found = self._step_of(line)
            if found is not None and (step is None or found <= step):
                yield line

    def _is_torn(self) -> bool:
        data = self.path.read_bytes() if self.path.exists() else b""
        return bool(data) and not data.endswith(b"\n")

    def append(self, step: int, line: str) -> None:
        """Write the row of a step, replacing the rows of this and all later steps."""
        if step <= self.last:
            self.keep_up_to(step - 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        self.last = step
        self._is_dirty = True

    def rewrite(self, lines: Sequence[str]) -> None:
        """Replace the content by these lines."""
        replace_file(self.path, "".join(f"{line}\n" for line in lines).encode())
        self._is_dirty = True

    def sync(self) -> None:
        """Sync all rows to the disk."""
        if self._is_dirty:
            sync_to_disk(self.path)
            sync_to_disk(self.path.parent)
            self._is_dirty = False
