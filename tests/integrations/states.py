"""Saved states as plain values, for bitwise comparison; a pickle that runs code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def to_plain(state: Any) -> Any:
    """Return the state with each tensor as its type and its numbers."""
    if isinstance(state, dict):
        return {str(name): to_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_plain(value) for value in state]
    return (str(state.dtype), state.tolist()) if hasattr(state, "tolist") else state


class DirectoryMaker:
    """Makes a directory when its pickle is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))
