"""Flows that bring a Prefect server of their own where none is set up, as Prefect does, and sooner.

Prefect loads the whole server into the process that only wants to speak with it: half of what a script waits for
before its first trial, 80 MB that it keeps, and a quarter of all that a short search computes. And it gives the
server 20 s to start, which the first start on a machine, with all its migrations, may not keep.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import refresh_global_settings_context
from prefect.logging import get_logger
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

from prefect_tune.flows.arguments import require_valid
from prefect_tune.prefect_server import start_prefect_server

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FlowWithServer", "flow_with_server"]

_PREFECTS_OWN = "prefect.server.api.server"
_guard = threading.Lock()
_started_here: set[str] = set()  # by the URLs of their APIs
_P = ParamSpec("_P")
_R = TypeVar("_R")


class FlowWithServer(Flow[_P, _R]):
    """A flow that can be called where no API is set up: it starts a server, which serves until the process ends."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run it, as Prefect does; but first look at the arguments: InvalidInput says what is wrong with them."""
        require_valid(self, args, options)
        with ExitStack() as settings:
            _have_server(settings)
            return super().__call__(*args, **options)

    def with_options(self, **options: Any) -> Self:
        """Return it with other options, as Prefect does."""
        other: Any = super().with_options(**options)
        other.__class__ = type(self)  # Prefect makes a plain one
        return other  # type: ignore[no-any-return]  # it is of this class now


def flow_with_server(**options: Any) -> Callable[[Callable[_P, _R]], FlowWithServer[_P, _R]]:
    """Make a flow of a function, as `prefect.flow` does."""
    return lambda function: FlowWithServer(function, **options)


def _have_server(settings: ExitStack) -> None:
    """Start a server unless one is set up, none is wanted, or Prefect has loaded its own here already.

    Args:
        settings: what is set while somebody speaks with a server that was started here.
    """
    with _guard:
        current = get_current_settings()
        if current.api.url or not current.server.ephemeral.enabled or _PREFECTS_OWN in sys.modules:
            if current.api.url in _started_here:
                settings.enter_context(_heard_by_nobody())
            return
        server = start_prefect_server(_surroundings())
        get_logger("prefect_tune").info("Starting a Prefect server for this process at %s", server.url)
        atexit.register(server.end)
        answers = False
        try:
            _set_up(server.url)  # it takes its time, as the server does; who is too early is answered later
            settings.enter_context(_heard_by_nobody())
            _warm_up()
            answers = server.answers()
        finally:
            if not answers:  # or, without an error, Prefect starts its own, and says what is wrong
                settings.close()
                _set_up(None)
                server.end()
        if answers:
            _started_here.add(server.url)


def _set_up(url: str | None) -> None:
    """Name the API for this process and its children."""
    if url is None:
        os.environ.pop("PREFECT_API_URL", None)
    else:
        os.environ["PREFECT_API_URL"] = url
    refresh_global_settings_context()


def _heard_by_nobody() -> AbstractContextManager[object]:
    """No heartbeats, since no automation waits for them: they would have each flow end up to a second later."""
    return temporary_settings(set_defaults={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})


def _surroundings() -> Mapping[str, str]:
    """What Prefect starts its own with, and what makes it lighter unless the user has said otherwise."""
    return {
        **_LIGHTER,
        **os.environ,
        **_EPHEMERAL,
        **get_current_settings().to_environment_variables(exclude_unset=True),
    }


_LIGHTER = {
    # By default each of a task run's three states is a transaction; a second is soon enough for who looks at the UI.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # An automation needs a server that stays: evaluating each event for them is a twelfth of what this one computes.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # Or it would import every integration that is installed, Dask and all, to list their blocks in a UI that it has
    # not. A block that is saved registers its type itself.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


_WANTED_LATER = (
    "fastapi.encoders",  # for the parameters of a flow run
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect_tune.flows.search",
    "pyarrow.parquet",
    "pandas",  # pyarrow imports it with the first array, where it is installed
)


def _warm_up() -> None:
    """Import what the flow will want anyway, while there is nothing else to do."""
    for name in _WANTED_LATER:
        with suppress(ImportError):  # it is said where it is needed
            import_module(name)
