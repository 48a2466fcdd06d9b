"""Flows that find or start a Prefect server where no API is configured, the latter faster than Prefect itself does.

Prefect also imports the whole server into the client process: that is half of the time before a script's first trial,
80 MB of memory, and a quarter of the CPU time of a short search. It allows the server 20 s to start; the first start
on a machine runs all migrations, and may take longer.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_type_hints
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.exceptions import ObjectNotFound, PrefectException, TerminationSignal
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from prefect.states import Cancelled

from prefect_tune.core.errors import IllegalTransition, InvalidInput, TuneError
from prefect_tune.prefect_api.api_client import require_api
from prefect_tune.prefect_api.call_paths import own_context
from prefect_tune.prefect_api.flow_runs import end_cancellation
from prefect_tune.prefect_api.held_signals import holding_signals, raise_held_signal
from prefect_tune.prefect_api.local_server import LOOPBACK, find_own_server, start_prefect_server
from prefect_tune.runtime.load_named import require_not_importing

if TYPE_CHECKING:
    from typing import Self


import json
from functools import cache
from inspect import signature

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.utilities.collections import visit_collection
from pydantic import TypeAdapter, ValidationError

from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.values import argument_error

_log = get_logger("prefect_tune")
_RESTART_SECONDS = 15.0
_SERVER_MODULE = "prefect.server.api.server"
_guard = threading.Lock()
_started_here: set[str] = set()  # URLs of the APIs
_found_here: set[str] = set()  # of this user's server
_names: set[str] = set()  # of our flows
_HAS_BEGUN = "flow run has begun"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def has_begun(interrupt: KeyboardInterrupt) -> bool:
    """Return whether a flow run had begun when it was interrupted; False for other interrupts."""
    return _HAS_BEGUN in vars(interrupt)


class FlowWithServer(Flow[_P, _R]):
    """A flow that uses this user's Prefect server if no API is configured, or starts one until the process ends."""

    call_context: Callable[[str], AbstractContextManager[object]]
    """Entered with the flow's name for the duration of each call, the start of a server included."""

    def __repr__(self) -> str:
        return f"<flow {self.name!r}>"

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> _R:  # type: ignore[override]  # one signature, see below
        """Validate the arguments, then run the flow as Prefect does.

        Prefect's overloads for `return_state=True` are left out of the types, and work: with them, checkers report a
        misspelt option as a call that fits none of five signatures, without its name.

        Raises:
            InvalidInput: an argument is wrong, or nothing answers at the configured `PREFECT_API_URL`; nothing was
                started.
            KeyboardInterrupt: Ctrl-C. Its message says what to do.
                `has_begun` says whether the flow run had begun, which then ends as *Interrupted*, of type Cancelled.
        """
        found: dict[str, bool] = {}
        advice = f"{self.name} was interrupted before it began: run it again"
        try:
            require_not_importing(self.name)
            with holding_signals(), ExitStack() as resources:
                arguments = require_valid(self, args, options)
                import_module("prefect.main")  # sets up logging; it takes too long for the import of a flow
                raise_held_signal()
                resources.enter_context(self.call_context(self.name))
                _have_server(resources)
                raise_held_signal()
                require_storable(self, arguments)
                advice = f"{self.name} was interrupted: run it again to continue"
                found[_HAS_BEGUN] = True
                with _interrupts_raised_after_the_run():
                    return super().__call__(*args, **options)
        except IllegalTransition:
            raise  # perhaps a bug
        except ObjectNotFound as error:
            raise _error_of_deleted_run(self.name, error) from None
        except TuneError as error:
            raise error.with_traceback(None) from None  # without the lines of Prefect's engine, which say nothing
        except KeyboardInterrupt as interrupt:
            # No class of its own: Python ends a script by SIGINT only for `KeyboardInterrupt` itself.
            again = KeyboardInterrupt(*(interrupt.args or (advice,)))
            vars(again).update(found)
            raise again from None

    def with_options(self, **options: Any) -> Self:
        """Return a copy with other options, as Prefect does; the copy is a `FlowWithServer` too.

        To ask upstream: that `Flow.with_options` returns an object of its own class, not a plain `Flow`.
        """
        other = copy(self)
        vars(other).update(vars(super().with_options(**options)))
        return other


def flow_with_server(
    *,
    call_context: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> Callable[[Callable[_P, _R]], FlowWithServer[_P, _R]]:
    """Return a decorator that makes a `FlowWithServer`, with the options of `prefect.flow`.

    Args:
        call_context: see `FlowWithServer`.
        options: of `prefect.flow`.
    """

    def made(function: Callable[_P, _R]) -> FlowWithServer[_P, _R]:
        flow = FlowWithServer(_ending_as_interrupted(function), **options)
        _names.add(flow.name)
        flow.call_context = call_context
        return flow

    return made


def search_output(flow: str) -> AbstractContextManager[object]:
    """Show a search in a notebook's cell: a `call_context` that imports what draws it only for a call."""
    output = import_module("prefect_tune.notebook").search_output
    return cast("AbstractContextManager[object]", output(flow))


# The interrupts of the call of a flow in this context. Runs of deployments are not calls: Prefect sets their states.
_interrupts: ContextVar[list[KeyboardInterrupt] | None] = ContextVar("_interrupts", default=None)


@contextmanager
def _interrupts_raised_after_the_run() -> Iterator[None]:
    interrupts: list[KeyboardInterrupt] = []
    token = _interrupts.set(interrupts)
    try:
        yield
    finally:
        _interrupts.reset(token)
        if interrupts:
            raise interrupts[0]


# The flow run of the last call in this context, while that call is active.
_last_run: ContextVar[UUID | None] = ContextVar("_last_run", default=None)


def note_run() -> None:
    """Remember which flow run this is; a function, for the same reason as the next one."""
    context = FlowRunContext.get()
    _last_run.set(context.flow_run.id if context is not None and context.flow_run is not None else None)


def _is_call_of_a_script() -> bool:
    """Whether this flow run is a call in this process, and no other run has called it."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return _interrupts.get() is not None and run is not None and run.parent_task_run_id is None


def _is_raised_after_the_run(interrupt: KeyboardInterrupt) -> bool:
    """A function, since Dask pickles the flow with the variables that it names, and no `ContextVar` can be pickled."""
    if (interrupts := _interrupts.get()) is None:
        return False
    interrupts.append(interrupt)
    return True


def _ending_as_interrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function of a flow whose call ends in the state Interrupted on Ctrl-C, which Prefect calls a crash."""
    # Prefect evaluates no annotations. The import of the class that it returns takes longer than that of the flow.
    function.__annotations__.pop("return", None)
    function.__annotations__ = get_type_hints(function, include_extras=True)

    @wraps(function)
    def run(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            note_run()
            with own_context():
                return function(*args, **options)
        except KeyboardInterrupt as interrupt:
            if not _is_raised_after_the_run(interrupt):
                raise
            return cast("_R", Cancelled(name="Interrupted", message=str(interrupt)))  # a flow may return its state
        except TerminationSignal:
            if not _is_call_of_a_script() or not end_cancellation():
                raise
            return cast("_R", Cancelled(message="the flow run was cancelled, and can be resumed: run it again"))

    return run


def _error_of_deleted_run(flow: str, error: ObjectNotFound) -> Exception:
    """Return the error of a call whose run the server does not know any more; `error` if it knows the run."""
    run = _last_run.get()
    if run is None:
        return error
    try:
        with get_client(sync_client=True) as client:
            client.read_flow_run(run)
    except ObjectNotFound:
        return TuneError(
            f"flow run {run} of {flow} was deleted on the Prefect server while it ran. The experiment is kept on its "
            "target: call the flow again with its name (experiment='...') to continue, or read it by pt.load_results"
        )
    except (PrefectException, httpx.HTTPError, OSError):
        return error
    return error


def _have_server(resources: ExitStack) -> None:
    """Use the configured API, else this user's server, else start one, for this process and its children.

    None is started if ephemeral servers are off, or Prefect has loaded its own server. `resources` are entered for the
    duration of the flow.

    Raises:
        InvalidInput: nothing answers at the URL of the configured API, or it refuses, or is none of Prefect.
    """
    with _guard:
        current, is_within_run = get_current_settings(), FlowRunContext.get() is not None
        url = current.api.url
        if url in _found_here and not is_within_run and find_own_server() != url:
            _set_up(None)  # it has ended since
            url = None
        if url is None and not is_within_run and _SERVER_MODULE not in sys.modules:
            url = find_own_server()
            if url is not None:
                _log.info("Using your Prefect server at %s", url)
                _set_up(url)
                _found_here.add(url)
        if url is None and current.server.ephemeral.enabled and _SERVER_MODULE not in sys.modules:
            _start_server(resources)
            return
    if url in _started_here:
        resources.enter_context(_without_heartbeats())
    elif url is not None:
        _leave_heartbeat_threads()
        if not is_within_run and url not in _found_here:  # a run that has begun outlives an outage
            _require_listening(url)
            require_api()


def _start_server(resources: ExitStack) -> None:
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    server = start_prefect_server({**LIGHTER_SERVER, **os.environ, **settings}, services="few")
    _log.info(
        "Starting a Prefect server for this process at %s: this takes some seconds, and the first time on a machine, "
        "when it creates its database, a minute. A server that keeps running (`prefect server start`) saves them",
        server.url,
    )
    atexit.register(server.end)
    answers = False
    try:
        _set_up(server.url)  # takes about as long as the server's start; early requests wait
        resources.enter_context(_without_heartbeats())
        for name in _IMPORTED_WHILE_IT_STARTS:
            with suppress(ImportError):  # raised again by the code that needs it
                import_module(name)
        answers = server.answers()
    finally:
        if not answers:  # Prefect then starts its own server, and reports what is wrong
            resources.close()
            _set_up(None)
            server.end()
    if answers:
        _started_here.add(server.url)


def _require_listening(url: str) -> None:
    """Wait for a server that may just be restarting to accept connections; behind a proxy, leave that to Prefect.

    Raises:
        InvalidInput: it does not accept any within 15 s, or `url` is none.
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
    until, is_said = time.monotonic() + _RESTART_SECONDS, False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if time.monotonic() >= until:
            raise InvalidInput(
                f"no Prefect server answers at PREFECT_API_URL={url} ({reason}). Start it (prefect server start); or "
                "remove the setting (unset PREFECT_API_URL, prefect config unset PREFECT_API_URL), and this process "
                "starts a server of its own"
            )
        if not is_said:
            wait = "No Prefect server answers at %s (%s): waiting up to %.0f s, since it may be restarting"
            _log.warning(wait, url, reason, _RESTART_SECONDS)
            is_said = True
        time.sleep(0.2)


def _set_up(url: str | None) -> None:
    """Set the API's URL for this process and its children; None removes it."""
    if url is None:
        os.environ.pop("PREFECT_API_URL", None)
    else:
        os.environ["PREFECT_API_URL"] = url
        if (proxies := getproxies()) and not proxy_bypass(LOOPBACK):
            hosts = ",".join(filter(None, [proxies.get("no"), LOOPBACK]))
            os.environ |= {"NO_PROXY": hosts, "no_proxy": hosts}
    refresh_global_settings_context()


def _without_heartbeats() -> AbstractContextManager[object]:
    """Switch heartbeats off: no automation waits for them, and each flow would end up to 1 s later."""
    return temporary_settings(set_defaults={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})


def _leave_heartbeat_threads() -> None:
    """End our flow runs without a wait of up to 1 s for the thread of Prefect's heartbeats, which ends by itself.

    To ask upstream: that this thread waits for the event that ends it, instead of a second at a time.
    """
    flow_engine = import_module("prefect.flow_engine")
    send = getattr(flow_engine, "_send_heartbeats", None)  # None in a release of Prefect without it
    if send is None or send.__module__ == __name__:
        return

    def send_heartbeats(engine: Any, join_on_exit: bool = True) -> AbstractContextManager[None]:  # noqa: FBT001, FBT002 - Prefect's
        return cast("AbstractContextManager[None]", send(engine, join_on_exit and engine.flow.name not in _names))

    vars(flow_engine)["_send_heartbeats"] = send_heartbeats


LIGHTER_SERVER: Mapping[str, str] = {
    # Defaults of the server, which the user's settings override.
    # By default each of a task run's three states is a transaction; a delay of 1 s is short enough for the UI.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Automations need a permanent server; to evaluate them takes a twelfth of this server's CPU time.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # At its start a server imports every installed integration, such as Dask, to list their blocks in the UI. This
    # server has no UI, and saving a block registers its type.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_IMPORTED_WHILE_IT_STARTS = (
    *("fastapi.encoders", "prefect.flow_engine", "prefect.task_engine"),
    *("prefect_tune.tuner.run_search", "pyarrow.parquet", "pandas"),
)
"""Modules that the flow needs later: a script's first trial begins some seconds earlier."""


# The arguments of a call, checked before a flow run begins: names and types here, their meaning in `SearchPlan`.

_CONSUMED_BY_PREFECT = frozenset({"return_state", "wait_for"})
_OTHER_NAMES: Mapping[str, str] = {
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
"""Parameters of the flows, and their names in Ray Tune and Optuna."""


def require_valid(flow: Flow[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of a call as Prefect will; arguments that hold futures or block references are left to it.

    Returns:
        the arguments that it has checked, by name.

    Raises:
        InvalidInput: an argument is unknown, missing, or of a wrong type.
    """
    given = {name: value for name, value in options.items() if name not in _CONSUMED_BY_PREFECT}
    called, parameters = f"pt.{flow.fn.__name__}", signature(flow.fn).parameters
    for name in [each for each in given if each not in parameters]:
        ours = [each for each, others in _OTHER_NAMES.items() if name in others.split() and each in parameters]
        hint = f"did you mean {ours[0]!r}?" if ours else did_you_mean_or_has(name, parameters)
        raise InvalidInput(f"{name}: {called} has no such parameter; {hint}")
    try:
        bound = signature(flow.fn).bind(*args, **given).arguments
    except TypeError as error:
        raise InvalidInput(f"{called}: {error}") from None
    checked = {name: value for name, value in bound.items() if not _is_for_later(value)}
    for name, value in checked.items():
        try:
            _adapter(flow.fn, name).validate_python(value)
        except ValidationError as error:
            raise argument_error(error, name) from None
    return checked


def require_storable(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check that Prefect's API takes the arguments: its own error would print all of them.

    Raises:
        InvalidInput: they are too large together, or one holds text that is not Unicode.
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
        except AssertionError as refused:  # before Prefect 3.9; it carries no message
            raise InvalidInput(
                f"{name}: Prefect cannot store a dataclass type; pass an instance of it, or 'package.module:Name'"
            ) from refused
    if 0 < max_bytes < sum(sizes.values()):
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidInput(
            f"{largest}: {sizes[largest]:,} bytes as JSON, and Prefect takes {max_bytes:,} for all parameters; pass a "
            "path, and read the file in the trainable"
        )


def _is_for_later(value: object) -> bool:
    parts: list[object] = []
    visit_collection(value, parts.append, return_data=False, max_depth=3)
    return any(isinstance(part, PrefectFuture | State) or (isinstance(part, dict) and "$ref" in part) for part in parts)


@cache
def _adapter(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function, include_extras=True)[name])
