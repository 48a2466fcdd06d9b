"""The pool of trial processes: what an attempt trains in.

    kept by a class with `reset_config` ──► declines, fails or dies before its first report ─┐
    forked: from a template, or from the plain fork server (see `fork_servers`) ◄────────────┤    (no attempt is lost)
    started, where trials are not forked (`StartedProcess`) ◄────────────────────────────────┘

A fork that does not begin its trial within 60 s is replaced by a process of its own, and the template forks no more.
Never: a function in a used process; a trial in a process in which another one failed or was interrupted; more
processes that wait than free slots; a wait for an import after `stop`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from prefect_tune.attempt.processes.fork_servers import ForkServers, ProcessKey, make_environment
from prefect_tune.attempt.processes.process_channel import (
    AS_IT_IS,
    StartedProcess,
    SupervisedProcess,
    TrialChannel,
    make_process_end,
)
from prefect_tune.attempt.processes.process_output import Log, TrialOutput, WaitLog
from prefect_tune.attempt.trial_spec import import_path
from prefect_tune.core.messages.process_messages import FromTrial, Start, ToTrial, TrainableLoaded, TrialEnded
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.core.shown_text import first_line, visible
from prefect_tune.linux import is_linux
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.deadline import Deadline
from prefect_tune.terminal.formatting import with_last_output

_KILL_TIMEOUT = timedelta(seconds=0.2)
_EXIT_TIMEOUT = timedelta(seconds=5)
_BEGIN_TIMEOUT = timedelta(seconds=60)
"""A fork begins in milliseconds, unless a lock that it has inherited stays locked."""
_FIRST_REPORT = timedelta(minutes=10)
_IDLE_TIMEOUT = timedelta(seconds=30)
"""How long a pool outlives its last attempt: the scheduler may send the search's next one to this worker."""
_NO_REPORT = "no report yet; if it hangs here, but not with reuse='never', its import does not bear forks"


class TrialProcessPool:
    """A pool of trial processes. Enter it, then call `process`, from any number of threads.

    On Linux processes are forked from a fork server that has imported what every trial needs, or from a template that
    has imported the trainable's module, if `reuse` says so; `prepare` or the first `process` starts it. Elsewhere each
    is started anew.
    A class trainable whose `reset_config` accepts the next trial's configuration serves that trial too, in the same
    process and with the same object, without `cleanup` and `setup`; a function gets a new process each time. A
    process that failed, was interrupted or declined serves no other trial.

    Args:
        slots: the most processes, used and waiting together, up to which one is kept. With 0 each process serves one
            trial, and cleans up before it reports the trial's end. With None, the most processes that were in use at
            the same time.
        reuse: how the import of the trainable's module is shared; see `Reuse`.
    """

    def __init__(self, *, slots: int | None, reuse: Reuse = "never") -> None:
        self._grows = slots is None
        self._slots = slots if slots is not None else 1
        self.servers = ForkServers("never" if slots == 0 or not is_linux() else reuse)
        self._guard = threading.Lock()
        self._used_count = 0
        self._idle: list[_LeasedProcess] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the waiting processes; those in use serve their trial to its end."""
        with self._guard:
            self._closed = True
            is_used = self._used_count > 0
        self.dismiss()
        self.servers.close(is_used=is_used)

    def dismiss(self, *, slots: int = 0) -> None:
        """End the longest-waiting processes, until no more than `slots` are left, those in use included."""
        with self._guard:
            surplus = max(0, self._used_count + len(self._idle) - slots)
            leaving, self._idle = self._idle[:surplus], self._idle[surplus:]
        _end_idle(leaving)

    def prepare(self, trainable: str, log: Log, environment: Mapping[str, str] = AS_IT_IS) -> None:
        """Begin to import `trainable` (as in `Start`) if `reuse` says so; do not wait for it."""
        if is_linux():
            self.servers.prepare(ProcessKey.of(trainable, import_path(), environment), log)

    @contextmanager
    def process(
        self,
        start: Start,
        log: Log,
        environment: Mapping[str, str] = AS_IT_IS,
        stop: threading.Event | None = None,
    ) -> Iterator[TrialChannel]:
        """Train in a process of the pool. Leaving the block ends the process, unless it is kept for another trial.

        On Linux all its descendants end with it, in any session, even if this process or the trial's is killed;
        elsewhere those in its process group.

        Args:
            log: the log that receives its output, in the caller's context.
            environment: variables of this trial, added to this process's environment or replacing them.
            stop: ends the wait for the import of the trainable's module: the process then imports it by itself.

        Raises:
            OSError: no process could be made, for example for lack of memory or process ids.
        """
        key = ProcessKey.of(start.trainable, start.import_path, environment)
        with self._guard:
            self._used_count += 1
            if self._grows:
                self._slots = max(self._slots, self._used_count)
        try:
            start = start.model_copy(update={"waits": start.waits and self._slots > 0})
            channel = _PooledChannel(self, _Request(start, log, key, stop or threading.Event()), self._take_idle(key))
            try:
                channel.begin()
                yield channel
            except BaseException:
                channel.keeps = False
                raise
            finally:
                channel.close()
        finally:
            with self._guard:
                self._used_count -= 1

    def _take_idle(self, key: ProcessKey) -> SupervisedProcess | None:
        """Return a waiting process with this key; None if there is none."""
        while True:
            with self._guard:
                idle = next((idle for idle in reversed(self._idle) if idle.key == key), None)
                if idle is None:
                    return None
                self._idle.remove(idle)
            if idle.process.is_alive():
                return idle.process
            idle.process.end()

    def make_process(self, request: _Request) -> SupervisedProcess:
        """Return a new process, after ending waiting processes with other keys if there are too many."""
        self.dismiss(slots=self._slots)
        if not is_linux():
            return StartedProcess(request.key.whole_environment)
        return self.servers.fork(request.key, request.log, request.stop, self._slots)

    def keep(self, process: _LeasedProcess) -> None:
        """Keep a process for another trial; end it if there are enough."""
        with self._guard:
            is_kept = not self._closed and self._used_count + len(self._idle) <= self._slots
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end_idle([process])


@dataclass(frozen=True, slots=True)
class _Request:
    start: Start
    log: Log
    key: ProcessKey
    stop: threading.Event


class _LeasedProcess:
    """A process that serves an attempt, or waits for another one; its output goes to the log of its last attempt."""

    def __init__(self, process: SupervisedProcess, log: Log, key: ProcessKey) -> None:
        self.process, self.key, self._log = process, key, log
        self.output = TrialOutput(log)
        self._end: ProcessEnd | None = None
        self.exits = False
        """Whether the process has sent the end of its last trial: its handlers of `atexit` run."""

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> ProcessEnd:
        if self._end is None:
            self._end = self.end_within(_EXIT_TIMEOUT if self.exits else _KILL_TIMEOUT)
        return self._end

    def end_within(self, timeout: timedelta) -> ProcessEnd:
        code = self.process.stop(timeout)
        if self.exits and self.process.was_killed:
            self._log.warning(
                "its process had not exited %g s after its end, and was killed: handlers of atexit, or the trainable's "
                "cleanup, did not run to their end",
                _EXIT_TIMEOUT.total_seconds(),
            )
        return make_process_end(code, self.output.stop())


def _end_idle(leaving: Sequence[_LeasedProcess]) -> None:
    """Let all exit at the same time, since each may take time to clean up; then end what is left after 5 s."""
    for idle in leaving:
        idle.process.connection.close()
    deadline = Deadline.after(_EXIT_TIMEOUT)
    for idle in leaving:
        idle.end_within(timedelta(seconds=deadline.remaining_seconds))
        idle.process.end()


class _PooledChannel(TrialChannel):
    """The channel of an attempt in a pooled process; a kept process that cannot serve it is replaced."""

    def __init__(self, pool: TrialProcessPool, request: _Request, kept: SupervisedProcess | None) -> None:
        self._leased = _LeasedProcess(kept or pool.make_process(request), request.log, request.key)
        super().__init__(self._leased.process.connection, self._leased, self._leased.output)
        self._pool = pool
        self._request = request
        self._is_kept = kept is not None  # until the kept process has reported a step, asked or ended
        self._has_reported = False
        self._sent: list[ToTrial] = []  # messages up to the first report, to be sent again to a replacement
        self._changing = threading.RLock()
        self._closed = False
        self._begin_deadline: Deadline | None = None
        self._wait_log: WaitLog | None = None
        self.keeps = False

    def begin(self, *, has_deadline: bool = True) -> None:
        """Send the process its environment and the trial's start message; replace it if it does not begin in time."""
        self._begin_deadline = Deadline.after(_BEGIN_TIMEOUT) if has_deadline else None
        self._wait_log = WaitLog(self._request.log, "its process has not begun")
        process = self._leased.process
        self._leased.output.start(process.output)
        environment = make_environment(process.make_temporary_directory(), self._request.key.whole_environment)
        for message in (environment, self._request.start, *self._sent):
            super().tell(message)

    def tell(self, message: ToTrial) -> None:
        with self._changing:
            if not self._has_reported:
                self._sent.append(message)
            if not self._closed:  # the process may serve another trial by then
                super().tell(message)

    def receive(self, patience: timedelta) -> FromTrial | None:
        had_begun = self.has_begun
        try:
            message = super().receive(patience)
        except EOFError:
            if not self._is_kept:
                raise
            self._replace()
            return None
        if self._is_kept and isinstance(message, TrialEnded) and message.raised:
            self._replace(f"failed before its first report ({first_line(message.outcome.reason)})")
            return None
        self._has_reported |= message is not None and not isinstance(message, TrainableLoaded)
        self._is_kept &= message is None or isinstance(message, TrainableLoaded)
        self.keeps = isinstance(message, TrialEnded) and message.waits
        self._leased.exits |= isinstance(message, TrialEnded)
        if isinstance(message, TrainableLoaded):
            self._wait_log = WaitLog(self._request.log, _NO_REPORT, _FIRST_REPORT)
        elif self.has_begun and not had_begun:
            self._wait_log = WaitLog(self._request.log, f"importing {self._request.key}, or in its setup")
        elif message is not None:
            self._wait_log = None
        elif not self.has_begun and self._begin_deadline is not None and not self._begin_deadline.remaining_seconds:
            reason = f"did not begin its trial within {_BEGIN_TIMEOUT.total_seconds():g} s"
            self._pool.servers.refuse(
                self._request.key, f"a process that was forked after it {reason}", self._request.log
            )
            self._replace(reason, has_deadline=False)
        elif self._wait_log is not None:
            self._wait_log.note()
        return message

    def end(self) -> ProcessEnd:
        if not self.keeps:
            return super().end()
        self._leased.output.stop()
        return ProcessEnd(reason=make_reason("process-kept"))

    def close(self) -> None:
        """Return the process to the pool, or end it."""
        self.end()
        with self._changing:
            self._closed = True
        if self.keeps:
            self._pool.keep(self._leased)
        else:
            self._leased.process.end()

    def _replace(self, reason: str | None = None, *, has_deadline: bool = True) -> None:
        """Take a new process: this one declined the trial, was killed, failed or hung, before it reported anything.

        A failure there may be due to an earlier trial: some settings can be made only once in a process.
        """
        end, request = self._leased.end(), self._request
        if reason or end.exit_code != 0:
            which = "a process that was kept from an earlier trial" if self._is_kept else "its process"
            request.log.warning(
                "%s %s; a new one is started", which, visible(reason or with_last_output(end, end.output))
            )
        self._leased.process.end()
        with self._changing:
            self._leased = _LeasedProcess(self._pool.make_process(request), request.log, request.key)
            self.go_over_to(self._leased.process.connection, self._leased, self._leased.output)
            self._is_kept = False
            self.begin(has_deadline=has_deadline)


# ------------------------------------------------------------------------------------------ the pools of a worker


@dataclass(slots=True)
class _SharedPool:
    pool: TrialProcessPool
    user_count: int = 0
    end: threading.Timer | None = None


_guard = threading.Lock()
_pools: dict[Hashable, _SharedPool] = {}


@contextmanager
def worker_pool(search: Hashable, reuse: Reuse) -> Iterator[TrialProcessPool]:
    """Yield the pool of a run of a search in this process. It stays for 30 s after its last attempt.

    Idle pools of other searches are closed at once, since their processes may hold memory of a GPU.
    """
    with _guard:
        others = [_pools.pop(key) for key, each in [*_pools.items()] if key != search and not each.user_count]
    for each in others:
        each.pool.close()
    with _guard:
        shared = _pools.setdefault(search, _SharedPool(TrialProcessPool(slots=None, reuse=reuse)))
        shared.user_count += 1
        if shared.end is not None:
            shared.end.cancel()
    try:
        yield shared.pool
    finally:
        with _guard:
            shared.user_count -= 1
            if not shared.user_count:
                shared.end = threading.Timer(_IDLE_TIMEOUT.total_seconds(), _close_if_idle, (search, shared))
                shared.end.daemon = True
                shared.end.start()


def _close_if_idle(search: Hashable, shared: _SharedPool) -> None:
    with _guard:
        if shared.user_count or _pools.get(search) is not shared:
            return
        del _pools[search]
    shared.pool.close()


@atexit.register
def _close_all() -> None:
    """Close the pools when the worker exits: they remove their temporary directories."""
    while _pools:
        _pools.popitem()[1].pool.close()
