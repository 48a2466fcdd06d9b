"""Fixtures of these tests; a test file may define its own of the same name."""

from tests.supervisor.modules import module, ours, recorder, trains  # noqa: F401 - fixtures
from tests.supervisor.pools import one_pool, pool, whole_family  # noqa: F401 - fixtures
