"""A file of rows, one for each step, in which a step that is trained again takes the place of what it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prefect_tune.loggers.folders import replace_file, sync_to_disk

__all__ = ["RowFile"]


class RowFile:
    """Lines of text, of which all from the `head`th on are rows.

    A line that a crash has torn counts as never written. Each row is handed to the operating system as it
    comes, and is safe from a power cut once `sync` returns.
    """

    def __init__(self, path: Path, step_of: Callable[[str], int | None], *, head: int = 0) -> None:
        """Look at what is there.

        Args:
            step_of: the step that a row is of; None for what is no row.
            head: how many lines come before the rows.
        """
        self.path = path
        self._step_of = step_of
        self._head = head
        self.last = 0
        """The last step that it has."""
        self._is_dirty = False
        self.keep_up_to(None)

    def lines(self) -> Sequence[str]:
        """Return all lines that are whole."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text.split("\n")[:-1]

    def keep_up_to(self, step: int | None) -> None:
        """Remove the rows of later steps, and what is no row; None keeps all rows."""
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
        """Add the row of a step, in place of it and of all later ones."""
        if step <= self.last:
            self.keep_up_to(step - 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        self.last = step
        self._is_dirty = True

    def rewrite(self, lines: Sequence[str]) -> None:
        """Put these lines in place of all."""
        replace_file(self.path, "".join(f"{line}\n" for line in lines).encode())
        self._is_dirty = True

    def sync(self) -> None:
        """Return when every row is safe."""
        if self._is_dirty:
            sync_to_disk(self.path)
            sync_to_disk(self.path.parent)
            self._is_dirty = False
