"""Fixtures of these tests; a test file may define its own of the same name."""

from tests.supervisor.processes.modules import module, ours, recorder, trains  # noqa: F401 - fixtures
from tests.supervisor.processes.pools import one_pool, pool, whole_family  # noqa: F401 - fixtures
