"""Trainables that log by Prefect's run logger, and by a library's logger."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any


def train(_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Log before and after the import of Prefect."""
    is_imported = "prefect" in sys.modules
    logging.getLogger("a_library").info("said by a library")
    from prefect import get_run_logger

    get_run_logger().info("said to the run")
    get_run_logger().debug("said to nobody")
    return {"loss": 1.0, "is_imported": is_imported}
