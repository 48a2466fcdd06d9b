"""A trainable for searches that are watched in the UI: a plausible curve, and slow steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trainables.counting import Counting
from tests.trainables.witness import hold


class Descent(Counting):
    """A falling loss: fastest where `rate` is 0.1; the larger `width`, the lower its end.

    From step `config["lingers_at"]` on each step takes five seconds, until the file `config["hurry"]` is there. Where
    `rate` is above `config["breaks_above"]` step 2 raises, until the file `config["mended"]` is there.
    """

    def step(self) -> Mapping[str, Any]:
        if self.count + 1 >= self.config.get("lingers_at", math.inf):
            hold(self.config["hurry"], seconds=5)
        self.count += 1
        self._maybe_break()
        return {"loss": self._floor + math.exp(-self._speed * self.count)}

    def _maybe_break(self) -> None:
        too_fast = float(self.config["rate"]) > float(self.config.get("breaks_above", math.inf))
        if too_fast and self.count == 2 and not Path(self.config["mended"]).exists():
            raise ArithmeticError(f"diverged: rate {self.config['rate']} is too large")

    @property
    def _speed(self) -> float:
        return 0.05 / (1 + math.log10(float(self.config["rate"]) / 0.1) ** 2)

    @property
    def _floor(self) -> float:
        return 1 / (8 + float(self.config.get("width", 16)))
