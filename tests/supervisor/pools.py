"""One pool of trial processes for the tests of a module, which then take milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefect_tune.supervisor.processes.process_pool import TrialProcessPool
from tests.fakes.trial_processes import Family, family, until


@pytest.fixture(scope="module")
def whole_family() -> Iterator[Family]:
    """Every process that the tests of the module start."""
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
    """The same one for many tests; none of them leaves a trial."""
    yield one_pool
    one_pool.dismiss()
    until(lambda: whole_family.names() <= {"tune-forkserver"}, what=lambda: f"the end of {whole_family.names()}")
