"""The log of the package's own Prefect server."""

from __future__ import annotations

import asyncio
import logging

import pytest

from prefect_tune.prefect_api.local_server import is_cut_short


@pytest.mark.parametrize(("error", "is_reported"), [(asyncio.CancelledError, False), (OSError, True)])
def test_a_batch_that_the_end_cuts_short_is_no_error(
    error: type[BaseException], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise error
    except error:
        logging.getLogger("recorder").exception("Error flushing 35 events (35 to retry, 0 dropped)")
    logging.getLogger("recorder").error("without an exception")
    assert [not is_cut_short(record) for record in caplog.records] == [is_reported, True]
