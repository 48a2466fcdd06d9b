"""Fixtures of these tests; a test file may define its own of the same name."""

from tests.attempt.processes.modules import (  # noqa: F401 - fixtures
    module,
    one_pool,
    ours,
    pool,
    recorder,
    trains,
    whole_family,
)
