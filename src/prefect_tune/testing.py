"""Run searches in unit tests without a Prefect server.

The flows of this package work as usual (journal, checkpoints, trials, schedulers, callbacks), in flow runs that no
server knows. Each request to Prefect's API fails at once, as in an outage, and no event is sent.
Prefect's states, retries, forms and automations need a server, so test them with `prefect_test_harness`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import httpx
from prefect import State
from prefect import settings as prefect_settings
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.results import get_result_store
from prefect.settings import temporary_settings
from prefect.states import Running

from prefect_tune.core.errors import TuneError
from prefect_tune.prefect_api import task_runs
from prefect_tune.prefect_api.flow_with_server import FlowWithServer, validate_arguments

__all__ = ["tune_folder", "without_server"]

_PREFECT_SETTINGS = {
    "PREFECT_API_URL": "http://without-server.invalid/api",  # without a URL, Prefect would start a server
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}


@contextmanager
def without_server() -> Iterator[None]:
    """Within this context `pt.tune`, `pt.durable_trainable`, `pt.resume` and `pt.maintain` need no Prefect server.

    Their results, errors and writes to the target are the same as with a server. Call your own flow as
    `my_flow.fn(...)`, since `my_flow(...)` would need a server. Not thread-safe.
    """
    settings = {getattr(prefect_settings, name): value for name, value in _PREFECT_SETTINGS.items()}
    with ExitStack() as changes:
        changes.callback(refresh_global_settings_context)  # runs last, after the environment is restored
        changes.enter_context(patch.dict(os.environ, _PREFECT_SETTINGS))
        refresh_global_settings_context()  # for other threads; `temporary_settings` changes only the present context
        changes.enter_context(temporary_settings(settings))
        changes.enter_context(patch.object(PrefectHttpxSyncClient, "send", _refuse_request))
        changes.enter_context(patch.object(PrefectHttpxAsyncClient, "send", _refuse_async_request))
        changes.enter_context(patch("prefect.events.utilities.should_emit_events", return_value=False))
        changes.enter_context(patch.object(FlowWithServer, "__call__", _run_flow))
        # Ignore concurrency limits, which are on the server: an attempt with tags would wait for the server forever.
        changes.enter_context(patch.object(task_runs, "_holding_slots", lambda *_: nullcontext()))
        yield


def _refuse_request(_client: object, request: httpx.Request, **_options: object) -> httpx.Response:
    raise httpx.ConnectError("prefect_tune.testing runs without a Prefect server", request=request)


async def _refuse_async_request(_client: object, request: httpx.Request, **_options: object) -> httpx.Response:
    return _refuse_request(_client, request)


def _run_flow(flow: FlowWithServer[Any, Any], *args: Any, **options: Any) -> Any:
    """Validate the arguments, and call the flow's function in the context of a flow run.

    If it raises a `TuneError`, omit this package's frames from the traceback, so that a test failure is readable.
    """
    __tracebackhide__ = True
    try:
        arguments = validate_arguments(flow, args, options)
        with (
            flow.call_context(flow.name),
            flow.task_runner.duplicate() as runner,
            get_client(sync_client=True) as client,
            FlowRunContext(
                flow=flow,
                flow_run=FlowRun(id=uuid4(), flow_id=uuid4(), name="without-server", state=Running(), run_count=1),
                client=client,
                task_runner=runner,
                parameters=dict(arguments),
                result_store=get_result_store().update_for_flow(flow, _sync=True),  # type: ignore[call-arg]  # of async_dispatch
                persist_result=False,
            ),
        ):
            returned = flow.fn(*args, **options)
        if isinstance(returned, State):  # the search failed
            raise cast(Exception, returned.data)
    except TuneError as error:
        raise error.with_traceback(None)  # noqa: B904  it is the same error
    return returned


with suppress(ImportError):  # without pytest, only the fixture is missing
    import pytest

    @pytest.fixture
    def tune_folder(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[str]:
        """Yield an empty folder as a target, and run the test within `without_server`.

        If pytest captures the log, Prefect's handler does not also write it to stderr.
        """
        with without_server(), ExitStack() as changes:
            if pytestconfig.pluginmanager.has_plugin("logging-plugin"):
                changes.enter_context(patch.object(PrefectConsoleHandler, "emit"))
            yield str(tmp_path / "tune")
