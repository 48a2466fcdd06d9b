"""One pool of trial processes for all tests of a module, so that each attempt takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from tests.fakes.trial_processes import Family, family, until


@pytest.fixture(scope="module")
def whole_family() -> Iterator[Family]:
    """All processes that the tests of the module start."""
    with family() as found:
        yield found


@pytest.fixture(scope="module")
def one_pool(whole_family: Family, request: pytest.FixtureRequest) -> Iterator[TrialProcessPool]:
    """A pool with as many slots as the module's `SLOTS`, or one."""
    assert not whole_family.pids()
    with TrialProcessPool(slots=getattr(request.module, "SLOTS", 1)) as made:
        yield made


@pytest.fixture
def pool(one_pool: TrialProcessPool, whole_family: Family) -> Iterator[TrialProcessPool]:
    """The module's pool; no test leaves a trial in it."""
    yield one_pool
    one_pool.dismiss()
    until(lambda: whole_family.names() <= {"tune-forkserver"}, what=lambda: f"the end of {whole_family.names()}")
