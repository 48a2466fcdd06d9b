"""Flows that find or start a Prefect server if no API is configured. They start the server faster than Prefect does.

When Prefect starts a server, it also imports the complete server into the client process. This import takes half of the
time before a script's first trial, 80 MB of memory, and a quarter of the CPU time of a short search. Prefect also gives
up after 20 s, but the server's first start on a machine runs all migrations, and may take longer.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_type_hints
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.exceptions import ObjectNotFound, PrefectException, TerminationSignal
from prefect.flows import Flow
from prefect.futures import PrefectFuture
from prefect.logging import get_logger
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from prefect.states import Cancelled
from prefect.utilities.collections import visit_collection
from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.display_text import did_you_mean_or_list
from prefect_tune.core.errors import IllegalTransition, InvalidInput, TuneError
from prefect_tune.core.values import argument_error
from prefect_tune.prefect_api.api_client import require_api
from prefect_tune.prefect_api.call_paths import isolated_run_context
from prefect_tune.prefect_api.flow_runs import clear_cancellation
from prefect_tune.prefect_api.held_signals import holding_signals, raise_held_signal
from prefect_tune.prefect_api.local_server import LOOPBACK, find_user_server, start_prefect_server
from prefect_tune.runtime.load_named import require_not_importing

if TYPE_CHECKING:
    from typing import Self

_log = get_logger("prefect_tune")
_RESTART_TIMEOUT_SECONDS = 15.0
_SERVER_MODULE = "prefect.server.api.server"
_guard = threading.Lock()
_started_urls: set[str] = set()  # URLs of APIs that this process started
_user_server_urls: set[str] = set()  # URLs of this user's server
_flow_names: set[str] = set()  # the names of our flows
_RUN_BEGAN_ATTRIBUTE = "flow run has begun"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def had_run_begun(interrupt: KeyboardInterrupt) -> bool:
    """Return whether the interrupt came from a call of a flow whose run had begun."""
    return _RUN_BEGAN_ATTRIBUTE in vars(interrupt)


class FlowWithServer(Flow[_P, _R]):
    """A flow that, if no API is configured, uses this user's Prefect server or starts a server for this process."""

    call_context: Callable[[str], AbstractContextManager[object]]
    """Takes the flow's name, and returns the context in which a call runs; a server starts within the context."""

    def __repr__(self) -> str:
        return f"<flow {self.name!r}>"

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> _R:  # type: ignore[override]  # one signature, see below
        """Validate the arguments, then run the flow as Prefect does.

        `return_state=True` works as in Prefect, but has no overload. With Prefect's overloads, type checkers report a
        misspelt option as a call that matches none of five signatures, and do not name the option.

        Raises:
            InvalidInput: an argument is wrong, or nothing answers at the configured `PREFECT_API_URL`; no run was
                started.
            KeyboardInterrupt: Ctrl-C. The message names the next step. If the flow run had begun (`had_run_begun`), the
                run ends as *Interrupted*, of type Cancelled.
        """
        marks: dict[str, bool] = {}
        advice = f"{self.name} was interrupted before it began: run it again"
        try:
            require_not_importing(self.name)
            with holding_signals(), ExitStack() as resources:
                arguments = validate_arguments(self, args, options)
                import_module("prefect.main")  # sets up logging; too slow to be imported with a flow
                raise_held_signal()
                resources.enter_context(self.call_context(self.name))
                _ensure_server(resources)
                raise_held_signal()
                require_storable_arguments(self, arguments)
                advice = f"{self.name} was interrupted: run it again to continue"
                marks[_RUN_BEGAN_ATTRIBUTE] = True
                with _deferring_interrupts():
                    return super().__call__(*args, **options)
        except IllegalTransition:
            raise  # may be a bug: keep the traceback
        except ObjectNotFound as error:
            raise _deleted_run_error(self.name, error) from None
        except TuneError as error:
            raise error.with_traceback(None) from None  # omits the traceback's lines of Prefect's engine
        except KeyboardInterrupt as interrupt:
            # Raise no subclass, because Python ends a script by SIGINT only after `KeyboardInterrupt` itself.
            again = KeyboardInterrupt(*(interrupt.args or (advice,)))
            vars(again).update(marks)
            raise again from None

    def with_options(self, **options: Any) -> Self:
        """Return a copy with other options, as in Prefect, but the copy is a `FlowWithServer`, too.

        To ask upstream: that `Flow.with_options` returns an object of the same class, not a plain `Flow`.
        """
        other = copy(self)
        vars(other).update(vars(super().with_options(**options)))
        return other


def flow_with_server(
    *, call_context: Callable[[str], AbstractContextManager[object]] = nullcontext, **options: Any
) -> Callable[[Callable[_P, _R]], FlowWithServer[_P, _R]]:
    """Return a decorator that makes a `FlowWithServer` with this `call_context` and the options of `prefect.flow`."""

    def decorate(function: Callable[_P, _R]) -> FlowWithServer[_P, _R]:
        flow = FlowWithServer(_wrap_interruptible(function), **options)
        _flow_names.add(flow.name)
        flow.call_context = call_context
        return flow

    return decorate


def showing_search_output(flow: str) -> AbstractContextManager[object]:
    """Return the context that shows a search in a notebook's cell; import the notebook module only at this call."""
    output = import_module("prefect_tune.notebook").showing_search_output
    return cast("AbstractContextManager[object]", output(flow))


# The deferred interrupts of this context's flow call; None in a deployment's run, whose state Prefect itself sets.
_deferred_interrupts: ContextVar[list[KeyboardInterrupt] | None] = ContextVar("_deferred_interrupts", default=None)


@contextmanager
def _deferring_interrupts() -> Iterator[None]:
    interrupts: list[KeyboardInterrupt] = []
    token = _deferred_interrupts.set(interrupts)
    try:
        yield
    finally:
        _deferred_interrupts.reset(token)
        if interrupts:
            raise interrupts[0]


# The flow run of the last call in this context, while the call is active.
_last_run_id: ContextVar[UUID | None] = ContextVar("_last_run_id", default=None)


def record_flow_run() -> None:
    """Record the id of this flow run. `_try_defer_interrupt` says why this is a separate function."""
    context = FlowRunContext.get()
    _last_run_id.set(context.flow_run.id if context is not None and context.flow_run is not None else None)


def _is_top_level_call() -> bool:
    """Return whether this flow run was called in this process, and not by another run."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return _deferred_interrupts.get() is not None and run is not None and run.parent_task_run_id is None


def _try_defer_interrupt(interrupt: KeyboardInterrupt) -> bool:
    """Defer an interrupt if a call is active, and return whether a call is active.

    This is a separate function, because Dask pickles the globals that a flow uses, and cannot pickle a `ContextVar`.
    """
    if (interrupts := _deferred_interrupts.get()) is None:
        return False
    interrupts.append(interrupt)
    return True


def _wrap_interruptible(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap the function of a flow so that Ctrl-C ends the run as Interrupted; Prefect would treat it as a crash."""
    # Evaluate the annotations, since Prefect does not. Omit the return type, which is slower to import than the flow.
    function.__annotations__.pop("return", None)
    function.__annotations__ = get_type_hints(function, include_extras=True)

    @wraps(function)
    def run_flow(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            record_flow_run()
            with isolated_run_context():
                return function(*args, **options)
        except KeyboardInterrupt as interrupt:
            if not _try_defer_interrupt(interrupt):
                raise
            return cast("_R", Cancelled(name="Interrupted", message=str(interrupt)))  # a flow may return its state
        except TerminationSignal:
            if not _is_top_level_call() or not clear_cancellation():
                raise
            return cast("_R", Cancelled(message="the flow run was cancelled, and can be resumed: run it again"))

    return run_flow


def _deleted_run_error(flow: str, error: ObjectNotFound) -> Exception:
    """Return the error for a call whose run was deleted on the server; return `error` if the run exists."""
    run = _last_run_id.get()
    if run is None:
        return error
    try:
        with get_client(sync_client=True) as client:
            client.read_flow_run(run)
    except ObjectNotFound:
        return TuneError(
            f"flow run {run} of {flow} was deleted on the Prefect server while it ran. The experiment is still on its "
            "target: call the flow again with its name (experiment='...') to continue, or read it with pt.load_results"
        )
    except (PrefectException, httpx.HTTPError, OSError):
        return error
    return error


def _ensure_server(resources: ExitStack) -> None:
    """Use the configured API or this user's server; without either, start a server for this process and its children.

    No server is started if ephemeral servers are off, or if Prefect has loaded its own server. `resources` stay open
    for the duration of the flow.

    Raises:
        InvalidInput: nothing answers at the configured URL, or the server rejects the request, or is no Prefect API.
    """
    with _guard:
        current, is_within_run = get_current_settings(), FlowRunContext.get() is not None
        url = current.api.url
        if url in _user_server_urls and not is_within_run and find_user_server() != url:
            _set_api_url(None)  # the server has exited
            url = None
        if url is None and not is_within_run and _SERVER_MODULE not in sys.modules:
            url = find_user_server()
            if url is not None:
                _log.info("Using your Prefect server at %s", url)
                _set_api_url(url)
                _user_server_urls.add(url)
        if url is None and current.server.ephemeral.enabled and _SERVER_MODULE not in sys.modules:
            _start_own_server(resources)
            return
    if url in _started_urls:
        resources.enter_context(_disabling_heartbeats())
    elif url is not None:
        _skip_heartbeat_joins()
        if not is_within_run and url not in _user_server_urls:  # within a run, do not check: it survives an outage
            _wait_for_server(url)
            require_api()


def _start_own_server(resources: ExitStack) -> None:
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    server = start_prefect_server({**LIGHT_SERVER_SETTINGS, **os.environ, **settings}, services="few")
    _log.info(
        "Starting a Prefect server for this process at %s. This takes some seconds, or a minute the first time on a "
        "machine, when the server creates its database. A permanent server (`prefect server start`) saves this time",
        server.url,
    )
    atexit.register(server.terminate)
    is_healthy = False
    try:
        _set_api_url(server.url)  # requests wait until the server is ready; it starts during the imports below
        resources.enter_context(_disabling_heartbeats())
        for name in _MODULES_TO_PRELOAD:
            with suppress(ImportError):  # raised again by the code that needs the module
                import_module(name)
        is_healthy = server.wait_until_healthy()
    finally:
        if not is_healthy:  # without our server, Prefect starts its own, and reports any error
            resources.close()
            _set_api_url(None)
            server.terminate()
    if is_healthy:
        _started_urls.add(server.url)


def _wait_for_server(url: str) -> None:
    """Wait until a server, which may be restarting, accepts connections; return at once if a proxy is used.

    Raises:
        InvalidInput: the server accepts no connection within 15 s, or `url` is no HTTP URL.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port = None, 0
    if host is None or parts.scheme not in ("http", "https"):
        raise InvalidInput(f"PREFECT_API_URL={url}: expected a URL such as http://127.0.0.1:4200/api")
    if getproxies().keys() & {parts.scheme, "all"} and not proxy_bypass(host):
        return
    deadline, is_logged = time.monotonic() + _RESTART_TIMEOUT_SECONDS, False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if time.monotonic() >= deadline:
            raise InvalidInput(
                f"no Prefect server answers at PREFECT_API_URL={url} ({reason}). Start it (prefect server start); or "
                "remove the setting (unset PREFECT_API_URL, prefect config unset PREFECT_API_URL), and this process "
                "starts its own server"
            )
        if not is_logged:
            message = "No Prefect server answers at %s (%s): waiting up to %.0f s, since it may be restarting"
            _log.warning(message, url, reason, _RESTART_TIMEOUT_SECONDS)
            is_logged = True
        time.sleep(0.2)


def _set_api_url(url: str | None) -> None:
    """Set the API's URL for this process and its children; None removes it."""
    if url is None:
        os.environ.pop("PREFECT_API_URL", None)
    else:
        os.environ["PREFECT_API_URL"] = url
        if (proxies := getproxies()) and not proxy_bypass(LOOPBACK):
            hosts = ",".join(filter(None, [proxies.get("no"), LOOPBACK]))
            os.environ |= {"NO_PROXY": hosts, "no_proxy": hosts}
    refresh_global_settings_context()


def _disabling_heartbeats() -> AbstractContextManager[object]:
    """Switch heartbeats off: no automation of our server needs them, and they delay each flow's end by up to 1 s."""
    return temporary_settings(set_defaults={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})


def _skip_heartbeat_joins() -> None:
    """Let our flow runs end without waiting up to 1 s for Prefect's heartbeat thread; the thread ends by itself.

    To ask upstream: that this thread waits for its stop event, instead of sleeping a second at a time.
    """
    flow_engine = import_module("prefect.flow_engine")
    send = getattr(flow_engine, "_send_heartbeats", None)  # None in a release of Prefect without it
    if send is None or send.__module__ == __name__:
        return

    def send_heartbeats(engine: Any, join_on_exit: bool = True) -> AbstractContextManager[None]:  # noqa: FBT001, FBT002 - Prefect's
        return cast("AbstractContextManager[None]", send(engine, join_on_exit and engine.flow.name not in _flow_names))

    vars(flow_engine)["_send_heartbeats"] = send_heartbeats


LIGHT_SERVER_SETTINGS: Mapping[str, str] = {
    # Defaults of the server; the user's settings override them.
    # Record the states of task runs in batches, not each in its own transaction. Batches delay the UI by 1 s at most.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Automations need a permanent server, and evaluating them would take a twelfth of this server's CPU time.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # At its start, a server imports every installed integration, such as Dask, to list its blocks in the UI. This
    # server has no UI, and a block's type is registered when the block is saved.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_MODULES_TO_PRELOAD = (
    *("fastapi.encoders", "prefect.flow_engine", "prefect.task_engine"),
    *("prefect_tune.tuner.run_search", "pyarrow.parquet", "pandas"),
)
"""Modules that the flow needs later; as they are imported while the server starts, the first trial begins earlier."""


# Check the arguments of a call before a flow run begins: names and types here, their meaning in `SearchPlan`.

_CONSUMED_BY_PREFECT = frozenset({"return_state", "wait_for"})
_OTHER_LIBRARY_NAMES: Mapping[str, str] = {
    "checkpoint": "checkpoint_config checkpoint_freq",
    "config": "param_space",
    "experiment": "name study_name",
    "failures": "max_failures",
    "max_concurrent_trials": "n_jobs",
    "mode": "direction directions",
    "num_samples": "n_trials",
    "resume": "load_if_exists",
    "retention": "keep_checkpoints_num",
    "scheduler": "pruner",
    "search": "search_alg sampler",
    "space": "param_space search_space config",
    "target": "storage_path local_dir upload_dir storage",
    "time_budget_seconds": "time_budget_s timeout",
    "trainable": "objective func",
}
"""For each of these parameters of our flows: its names in Ray Tune and Optuna, separated by spaces."""


def validate_arguments(flow: Flow[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of a call, except those that contain futures or block references; return the checked ones.

    Raises:
        InvalidInput: an argument is unknown, missing, or of a wrong type.
    """
    keywords = {name: value for name, value in options.items() if name not in _CONSUMED_BY_PREFECT}
    function, parameters = f"pt.{flow.fn.__name__}", signature(flow.fn).parameters
    for name in [keyword for keyword in keywords if keyword not in parameters]:
        ours = [own for own, others in _OTHER_LIBRARY_NAMES.items() if name in others.split() and own in parameters]
        hint = f"did you mean {ours[0]!r}?" if ours else did_you_mean_or_list(name, parameters)
        raise InvalidInput(f"{name}: {function} has no such parameter; {hint}")
    try:
        bound = signature(flow.fn).bind(*args, **keywords).arguments
    except TypeError as error:
        raise InvalidInput(f"{function}: {error}") from None
    checked = {name: value for name, value in bound.items() if not _contains_future_or_reference(value)}
    for name, value in checked.items():
        try:
            _make_type_adapter(flow.fn, name).validate_python(value)
        except ValidationError as error:
            raise argument_error(error, name) from None
    return checked


def require_storable_arguments(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check that Prefect's API accepts the arguments; Prefect's own error would print all arguments.

    Raises:
        InvalidInput: the arguments are too large in total, or an argument contains text that is not Unicode.
    """
    sizes, max_bytes = {}, get_current_settings().server.api.max_parameter_size
    for name, value in arguments.items():
        try:
            stored = flow.serialize_parameters({name: value})
            sizes[name] = len(json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode())
        except UnicodeEncodeError as error:
            text = error.object[max(0, error.start - 20) : error.end + 20]
            raise InvalidInput(
                f"{name}: expected Unicode text, found {text!a}; read the file in the trainable"
            ) from None
        except AssertionError as error:  # raised by Prefect before 3.9, without a message
            raise InvalidInput(
                f"{name}: Prefect cannot store a dataclass type; pass an instance of it, or 'package.module:Name'"
            ) from error
    if 0 < max_bytes < sum(sizes.values()):
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidInput(
            f"{largest}: {sizes[largest]:,} bytes as JSON, but Prefect accepts {max_bytes:,} for all parameters; pass "
            "a path, and read the file in the trainable"
        )


def _contains_future_or_reference(value: object) -> bool:
    parts: list[object] = []
    visit_collection(value, parts.append, return_data=False, max_depth=3)
    return any(isinstance(part, PrefectFuture | State) or (isinstance(part, dict) and "$ref" in part) for part in parts)


@cache
def _make_type_adapter(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function, include_extras=True)[name])
