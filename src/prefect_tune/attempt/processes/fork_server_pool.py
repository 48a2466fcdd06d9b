"""What a pool forks its trials from: a plain fork server, and a template for each kind of trial.

    fork server (no user code) ──► template: imports the trainable, is inspected ──► READY: trials are forked from it
           │                                   └─► a reason why not: logged once, the template ends
           └──► a process that imports the trainable itself: `reuse="never"`, no template, or `stop` during the import

Never: a fork of an import that was found unsafe, or from which a fork has hung; an import that is waited for after
`stop` or for more than 10 minutes; a template that outlives the pool, except for trials that it has forked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeAlias, TypeVar

from prefect_tune.attempt.processes.fork_client import (
    REASON_BYTES,
    ForkedProcess,
    ForkServer,
    PendingFork,
    fork_from,
    message_of,
)
from prefect_tune.attempt.processes.process_channel import added_to_this, fixed_by_this, read_at_start
from prefect_tune.attempt.processes.process_output import Log, TrialOutput, WaitLog
from prefect_tune.core.messages.process_messages import READY
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.deadline import Deadline
from prefect_tune.terminal.live_display import NOTICE

_LOOK_AGAIN = timedelta(seconds=0.2)
_IMPORT = timedelta(minutes=10)  # of PyTorch and more from a cold network disk
_GOODBYE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class TrialKind:
    """The properties that a trial and a kept process must share, for the process to serve the trial."""

    trainable: str
    import_path: tuple[str, ...]
    environment: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, trainable: str, import_path: tuple[str, ...], environment: Mapping[str, str]) -> Self:
        """Return the kind of a trial with this environment; a worker's scheduler may change devices between trials."""
        return cls(trainable, import_path, frozenset({**fixed_by_this(), **environment}.items()))

    @property
    def whole_environment(self) -> Mapping[str, str]:
        """The variables of this process, and those of the trial added to them or replacing them."""
        return added_to_this(dict(self.environment))

    @property
    def read_at_start(self) -> Mapping[str, str]:
        """Those of them that a process reads at its start."""
        return read_at_start(self.whole_environment)

    def __str__(self) -> str:
        return f"trainable {self.trainable!r}" if ":" in self.trainable else "the trainable"


class Template:
    """A process that imports a trainable and then forks its trials. It runs under a subreaper, as a trial does.

    Whatever the import starts ends with it; if it cannot be forked safely, it ends before `is_ready` returns True.
    """

    def __init__(self, server: ForkServer, kind: TrialKind, log: Log) -> None:
        self.server = server
        self._pending, control = server.import_first(kind.trainable, kind.import_path, kind.whole_environment)
        self._control = control
        self._process: ForkedProcess | None = None
        self._output = TrialOutput(log)
        self._waits = WaitLog(log, f"importing {kind}")
        self._ready = threading.Event()
        self._leaving = threading.Event()
        self.why_not = ""
        """Why no trial can be forked from it; empty if it can. Valid when it is ready."""
        context = copy_context()
        threading.Thread(target=context.run, args=(self._watch,), name="template", daemon=True).start()

    def is_ready(self, patience: timedelta) -> bool:
        """Wait up to `patience`; return whether the import is over, however it ended."""
        return self._ready.wait(patience.total_seconds())

    @property
    def was_forked(self) -> bool:
        """Whether its fork server has answered. Valid when it is ready."""
        return self._process is not None

    def fork(self) -> PendingFork:
        """Request a trial's process. Call it when the template is ready and `why_not` is empty."""
        return fork_from(self._control)

    def end(self) -> None:
        """End it: it exits after the processes that it forked. During the import: end it at once."""
        self._close()
        self._end(_GOODBYE)

    def let_go(self) -> None:
        """Send no more requests, and do not wait: it exits after the last process that it forked."""
        self._close()
        threading.Thread(target=self._end, args=(None,), name="template", daemon=True).start()

    def kill(self) -> None:
        """Kill it, and all that it forked."""
        self._close()
        self._end(timedelta(0))

    def _close(self) -> None:
        """Send no more requests: the import, if it still runs, is not waited for."""
        self._leaving.set()
        self._ready.wait()
        self._control.close()

    def _watch(self) -> None:
        """Wait for the end of the import."""
        try:
            self._process = self._pending.child()
            self.why_not = self._imported(self._process) if self._process else "its process could not be forked"
            if self.why_not:
                self._end(timedelta(0))
        except Exception as error:  # noqa: BLE001 - else threads that wait for `ready` wait for ever
            self.why_not = f"its import could not be observed: {type(error).__name__}: {error}"
        finally:
            self._ready.set()

    def _imported(self, process: ForkedProcess) -> str:
        until = Deadline.after(_IMPORT)
        self._output.start(process.output)  # until its end: what fork handlers print must not fill the pipe
        while not self._leaving.is_set():
            said = message_of(self._control, _LOOK_AGAIN, most_bytes=REASON_BYTES)
            if said:
                return "" if said == READY else said
            if said is not None or not process.is_alive():
                return "its import ended the process"
            self._waits.note()
            if until.remaining_seconds <= 0:
                return f"its import took longer than {_IMPORT}"
        return "it is not needed any more"

    def _end(self, patience: timedelta | None) -> None:
        if self._process is not None:
            self._process.end(patience)
            self._output.stop()


Forks: TypeAlias = ForkServer | Template
_Variables: TypeAlias = frozenset[tuple[str, str]]
_K = TypeVar("_K")
_F = TypeVar("_F", ForkServer, Template)


class ForkServers:
    """What a pool forks its trials from: fork servers, and templates that have imported a trainable. Safe for threads.

    Trials with other values of variables that a process reads at its start get a fork server of their own; each kind
    of trial gets a template of its own, if imports are shared by forks.
    """

    def __init__(self, reuse: Reuse) -> None:
        self._has_templates = reuse == "auto"
        self._guard = threading.RLock()
        self._servers: dict[_Variables, ForkServer] = {}  # these two in the order of their last use
        self._templates: dict[TrialKind, Template] = {}
        self._unfit: dict[TrialKind, str] = {}
        self._closed = False

    def begin(self, kind: TrialKind, log: Log) -> Forks:
        """Start what trials of this kind are forked from, if it does not run; do not wait for it.

        Raises:
            RuntimeError: `close` was called.
        """
        if not self._has_templates or kind in self._unfit:
            return self.plain(kind)
        return self._found(self._templates, kind, lambda: Template(self.plain(kind), kind, log))

    def ready(self, kind: TrialKind, log: Log, stop: threading.Event) -> Forks:
        """Return it after its import; a plain fork server if the import cannot be shared, or if `stop` is set before.

        Why an import cannot be shared is logged once.
        """
        forks = self.begin(kind, log)
        if isinstance(forks, ForkServer):
            return forks
        while not forks.is_ready(_LOOK_AGAIN):
            if stop.is_set():
                return self.plain(kind)
        if not forks.why_not:
            return forks
        if forks.was_forked:
            if self._is_news(kind, forks.why_not, log):
                forks.end()
        else:  # its fork server is gone: a template of a new one may do better
            self.lose(forks)
            self.lose(forks.server)
        return self.plain(kind)

    def running(self, kind: TrialKind) -> Forks | None:
        """Return what trials of this kind are forked from if it runs and is ready, else None."""
        with self._guard:
            if not self._has_templates or kind in self._unfit:
                return _used(self._servers, frozenset(kind.read_at_start.items()))
            own = _used(self._templates, kind)
            return own if own is not None and own.is_ready(timedelta(0)) and not own.why_not else None

    def plain(self, kind: TrialKind) -> ForkServer:
        """Return the fork server that has imported no trainable; start it if it does not run."""
        own = kind.read_at_start
        return self._found(self._servers, frozenset(own.items()), lambda: ForkServer.start(added_to_this(own)))

    def lose(self, forks: Forks) -> None:
        """Kill and forget one that has died or is stopped. Processes of a fork server do not need it.

        If it is forgotten already, do nothing: another thread ends it.
        """
        with self._guard:
            is_known = _removed(self._servers, forks) or _removed(self._templates, forks)
        if is_known:
            forks.kill()

    def end_surplus(self, slots: int) -> None:
        """End those that were used longest ago, beyond the number that trials in `slots` slots may need."""
        with self._guard:
            idle = [kind for kind, each in self._templates.items() if each.is_ready(timedelta(0))]
            unused = idle[: max(0, len(self._templates) - 2 * slots)]
            surplus: list[Forks] = [self._templates.pop(each) for each in unused]
            surplus += [self._servers.pop(each) for each in [*self._servers][: max(0, len(self._servers) - slots - 1)]]
        for each in surplus:
            each.let_go()

    def close(self, *, is_used: bool) -> None:
        """End all; do not wait for them if processes that they forked are in use."""
        with self._guard:
            self._closed = True
            running: list[Forks] = [*self._templates.values(), *self._servers.values()]  # templates are forks of these
            self._templates, self._servers = {}, {}
        for each in running:
            each.let_go() if is_used else each.end()

    def _found(self, running: dict[_K, _F], key: _K, start: Callable[[], _F]) -> _F:
        with self._guard:
            if self._closed:
                raise RuntimeError("the pool of trial processes is closed")
            if (found := _used(running, key)) is None:
                running[key] = found = start()
            return found

    def refuse(self, kind: TrialKind, why: str, log: Log) -> None:
        """Fork no more trials of this kind after its import, if they are; those that were forked train on."""
        with self._guard:
            template = self._templates.get(kind)
        if self._has_templates and self._is_news(kind, why, log) and template is not None:
            template.let_go()

    def _is_news(self, kind: TrialKind, why_not: str, log: Log) -> bool:
        """Note, and log once, why trials of this kind are not forked after its import; return whether that is news."""
        with self._guard:
            if kind in self._unfit:
                return False
            self._unfit[kind] = why_not
            self._templates.pop(kind, None)
        line = "%s: trials cannot be forked after its import; each trial imports it: %s"
        log.info(line, kind, why_not, extra=NOTICE)
        return True


def _used(running: dict[_K, _F], key: _K) -> _F | None:
    """Return what runs under this key, and put it last: they are ordered by their last use."""
    if (found := running.pop(key, None)) is not None:
        running[key] = found
    return found


def _removed(running: dict[_K, _F], forks: Forks) -> bool:
    """Remove it; return whether it was there."""
    keys = [key for key, each in running.items() if each is forks]
    for key in keys:
        del running[key]
    return bool(keys)
