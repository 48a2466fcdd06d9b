"""Fixtures of these tests; a test file may define its own of the same name."""

from tests.attempt.processes.modules import module, ours, recorder, trains  # noqa: F401 - fixtures
from tests.attempt.processes.pools import one_pool, pool, whole_family  # noqa: F401 - fixtures
