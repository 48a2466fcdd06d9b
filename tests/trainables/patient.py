"""A trainable that continues once a file exists."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trainables.counting import Counting


class Patient(Counting):
    """Waits before its third step until `config["until"]` is there."""

    def step(self) -> Mapping[str, Any]:
        while self.count == 2 and not Path(self.config["until"]).exists():
            time.sleep(0.02)
        self.count += 1
        return {"loss": 1 / self.count}
