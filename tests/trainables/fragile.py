"""A trainable that raises in some configurations, and trains until the test opens its gate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tests.trainables.counting import Counting
from tests.trainables.witness import hold, record_act


class Fragile(Counting):
    """Its loss is `config["x"]`. Raises at step 2 if `config["breaks"]`; step 3 waits for the file `config["gate"]`."""

    def step(self) -> Mapping[str, Any]:
        self.count += 1
        time.sleep(float(self.config.get("step_seconds", 0)))
        if self.count == 2 and self.config.get("breaks"):
            raise ArithmeticError(f"x is too large: {self.config['x']}")
        record_act(self.config.get("witness"), "trained", self.count)
        if self.count == 3:
            hold(self.config.get("gate"))
        return {"loss": float(self.config["x"])}
