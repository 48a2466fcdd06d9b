"""Fixtures of these tests; a test file may override them."""

from tests.attempt.processes.modules import (  # noqa: F401 - fixtures
    module,
    module_pool,
    module_processes,
    pool,
    processes,
    recorder,
    train_trials,
)
