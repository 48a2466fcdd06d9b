"""Fixtures: examples that run against the session's server, and modules whose trials run in a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attempt.processes.modules import (  # noqa: F401 - fixtures
    module,
    module_pool,
    module_processes,
    pool,
    processes,
    recorder,
    train_trials,
)
from tests.integrations.examples import Example


@pytest.fixture
def example(prefect_server: str, tmp_path: Path) -> Callable[[str, str], Example]:
    def make_example(framework: str, trainable: str) -> Example:
        return Example(f"{framework}_digits.py", f"{framework}-digits", trainable, tmp_path, prefect_server)

    return make_example
