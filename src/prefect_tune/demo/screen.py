"""Show the three tracks on a terminal while the runs of the demo go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from prefect_tune.demo.render import Track, tracks

__all__ = ["DemoScreen"]


class DemoScreen:
    """What is shown. Each act has a number, from 0, and a track."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._tracks = [Track(name, steps) for name in ("undisturbed", "killed", "resumed")]
        self._status = ""
        self._live = Live(console=console, refresh_per_second=10, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status = ""
        self._live.stop()
        if not self._console.is_terminal:
            self._console.print()  # there, Rich's live display ends without a line break

    def say(self, status: str) -> None:
        """Show the current status."""
        self._status = status

    def change(self, act: int, **changes: Any) -> None:
        """Change the track of an act."""
        self._tracks[act] = replace(self._tracks[act], **changes)

    def trained(self, act: int, step: int, newest_step: int) -> None:
        """Show how far an act has come, and the newest checkpoint that it has committed."""
        committed = self._tracks[act].committed | ({newest_step} - {0})
        self.change(act, step=max(step, newest_step), committed=committed)

    @contextmanager
    def act(self, act: int) -> Iterator[None]:
        """Begin the act, and take its time."""
        began = time.monotonic()
        self.change(act, begun=True)
        yield
        self.change(act, seconds=time.monotonic() - began)

    def _render(self) -> RenderableType:
        return tracks(self._tracks, self._console.width, self._status)
