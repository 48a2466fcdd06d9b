"""A trainable whose losses are in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.trainables.counting import Counting


class Scripted(Counting):
    """Reports `config["losses"]`, one a step, and is done after the last; where there is none it raises."""

    def step(self) -> Mapping[str, Any]:
        losses = self.config["losses"]
        if not losses:
            raise ValueError("no losses")
        self.count += 1
        return {"loss": losses[self.count - 1], "eval": {"size": self.count}, "done": self.count == len(losses)}
