"""A flow that ends by an error of this package: it fails, and is retried if it has retries."""

from __future__ import annotations

import pytest
from prefect import flow

from prefect_tune.core.errors import TrialFailed
from prefect_tune.prefect_api.flow_runs import failed_by

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(("retries", "runs"), [(0, 1), (2, 3)])
def test_the_error_is_raised_where_the_flow_is_called_after_all_of_its_retries(retries: int, runs: int) -> None:
    begun = []

    @flow(retries=retries)
    def fails() -> str:
        begun.append(1)
        return failed_by(TrialFailed("as expected"), str)

    with pytest.raises(TrialFailed, match="as expected"):
        fails()
    assert len(begun) == runs


def test_the_state_is_failed_with_the_error_and_its_message() -> None:
    @flow
    def fails() -> str:
        return failed_by(TrialFailed("as expected"), str)

    state = fails(return_state=True)
    assert (state.is_failed(), state.message) == (True, "as expected")
    assert isinstance(state.result(raise_on_failure=False), TrialFailed)
