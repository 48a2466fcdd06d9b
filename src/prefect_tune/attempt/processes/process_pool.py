"""The pool of processes in which attempts train. An attempt gets its process in one of these ways.

    reused    for a class with `reset_config` ──► declines, fails or exits before its first report ─┐
    forked    from a template, or from the fork server (see `fork_servers`) ◄───────────────────────┤ replaces it in
    started   on systems other than Linux (`SpawnedProcess`) ◄──────────────────────────────────────┘ the same attempt

If a forked process does not begin its trial within 60 s, it is replaced by a process that imports the trainable itself,
and the trainable's template ends. There are never more idle processes than free slots. An attempt whose `stop` event is
set does not wait for a shared import.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from prefect_tune.attempt.processes.fork_servers import ForkSources, ProcessKey, make_process_environment
from prefect_tune.attempt.processes.process_channel import (
    NO_EXTRA_ENV,
    SpawnedProcess,
    SupervisedProcess,
    TrialChannel,
    make_process_end,
)
from prefect_tune.attempt.processes.process_output import Log, TrialOutput, WaitLog
from prefect_tune.attempt.trial_spec import get_absolute_sys_path
from prefect_tune.core.display_text import first_line, make_visible
from prefect_tune.core.messages.process_messages import FromTrial, Start, ToTrial, TrainableLoaded, TrainingEnded
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.linux import uses_linux_calls
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.deadline import Deadline
from prefect_tune.terminal.formatting import append_last_output

_KILL_TIMEOUT = timedelta(seconds=0.2)
_EXIT_TIMEOUT = timedelta(seconds=5)
_START_TIMEOUT = timedelta(seconds=60)
"""After this time, a process that has not begun is replaced, because a lock that was held at its fork may block it."""
_FIRST_REPORT_NOTE_DELAY = timedelta(minutes=10)
_IDLE_TIMEOUT = timedelta(seconds=30)
"""How long a pool stays open after its last attempt, in case this worker gets the search's next attempt."""
_NO_REPORT_NOTE = "no report yet; if the trial hangs here only with reuse='auto', its import makes forks unsafe"


class TrialProcessPool:
    """A pool of trial processes. Enter the context, then call `open_process`, from any number of threads.

    On Linux, processes are forked from a fork server, which has imported the modules that every trial needs; or,
    depending on `reuse`, from a template, which has also imported the trainable's module. `start_import` or the first
    `open_process` starts the fork server and the template. On other systems, processes are started, not forked.
    If the `reset_config` of a class trainable accepts the next trial's configuration, that trial is trained in the same
    process and with the same object, without `cleanup` and `setup`. A function trainable always gets a new process. A
    process that failed, was interrupted or declined a configuration is not reused.

    Args:
        slots: how many processes to keep, used and idle together. With 0, each process serves one trial, and
            cleans up before it reports the trial's end. With None, as many as were ever in use at the same time.
        reuse: how the import of the trainable's module is shared; see `Reuse`.
    """

    def __init__(self, *, slots: int | None, reuse: Reuse = "never") -> None:
        self._grows = slots is None
        self._slots = slots if slots is not None else 1
        self.fork_servers = ForkSources("never" if slots == 0 or not uses_linux_calls() else reuse)
        self._guard = threading.Lock()
        self._used_count = 0
        self._idle: list[_PooledProcess] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the idle processes; processes in use complete their trials."""
        with self._guard:
            self._closed, is_used = True, self._used_count > 0
        self.end_idle_processes()
        self.fork_servers.close(is_used=is_used)

    def end_idle_processes(self, *, keep_count: int = 0) -> None:
        """End idle processes, longest idle first, until at most `keep_count` processes are idle or in use."""
        with self._guard:
            surplus = max(0, self._used_count + len(self._idle) - keep_count)
            to_end, self._idle = self._idle[:surplus], self._idle[surplus:]
        _end_idle_processes(to_end)

    def start_import(self, trainable: str, log: Log, environment: Mapping[str, str] = NO_EXTRA_ENV) -> None:
        """Start to import `trainable` (see `Start`), without waiting, if `reuse` lets trials share the import."""
        if uses_linux_calls():
            self.fork_servers.start_fork_source(
                ProcessKey.for_trial(trainable, get_absolute_sys_path(), environment), log
            )

    @contextmanager
    def open_process(
        self, start: Start, log: Log, environment: Mapping[str, str] = NO_EXTRA_ENV, stop: threading.Event | None = None
    ) -> Iterator[TrialChannel]:
        """Open the channel to a process for one attempt. At the end of the block, keep or end the process.

        On Linux, all descendants of the trial's process end with it, even those in other sessions, and even if that
        process or its supervisor is killed. On other systems, only the descendants in its process group end with it.

        Args:
            log: receives the lines that the process prints.
            environment: variables of this trial, which extend and override this process's environment.
            stop: if set, the trial's process does not wait for a shared import, but imports the trainable itself.

        Raises:
            OSError: the process could not be created, for example for lack of memory or process ids.
        """
        key = ProcessKey.for_trial(start.trainable, start.import_path, environment)
        with self._guard:
            self._used_count += 1
            if self._grows:
                self._slots = max(self._slots, self._used_count)
        try:
            start = start.model_copy(update={"reusable": start.reusable and self._slots > 0})
            request = _ProcessRequest(start, log, key, stop or threading.Event())
            channel = _PooledChannel(self, request, self._take_idle_process(key))
            try:
                channel.start_trial()
                yield channel
            except BaseException:
                channel.is_reusable = False
                raise
            finally:
                channel.close()
        finally:
            with self._guard:
                self._used_count -= 1

    def _take_idle_process(self, key: ProcessKey) -> SupervisedProcess | None:
        """Remove and return an idle process with this key; return None if no idle process has this key."""
        while True:
            with self._guard:
                idle = next((idle for idle in reversed(self._idle) if idle.key == key), None)
                if idle is None:
                    return None
                self._idle.remove(idle)
            if idle.process.is_alive():
                return idle.process
            idle.process.end()

    def make_process(self, request: _ProcessRequest) -> SupervisedProcess:
        """Return a new process. If there are too many processes, first end those that have been idle longest."""
        self.end_idle_processes(keep_count=self._slots)
        if not uses_linux_calls():
            return SpawnedProcess(request.key.full_environment)
        return self.fork_servers.fork(request.key, request.log, request.stop, self._slots)

    def keep_or_end(self, process: _PooledProcess) -> None:
        """Keep a process for another trial; if the pool is full or closed, end the process."""
        with self._guard:
            is_kept = not self._closed and self._used_count + len(self._idle) <= self._slots
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end_idle_processes([process])


@dataclass(frozen=True, slots=True)
class _ProcessRequest:
    start: Start
    log: Log
    key: ProcessKey
    stop: threading.Event


class _PooledProcess:
    """A process that serves an attempt or is idle. Its output goes to the log of its newest attempt."""

    def __init__(self, process: SupervisedProcess, log: Log, key: ProcessKey) -> None:
        self.process, self.key, self._log = process, key, log
        self.output = TrialOutput(log)
        self._end: ProcessEnd | None = None
        self.is_exiting = False
        """Whether the process has sent the end of its last trial, and so may be running `atexit` handlers."""

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> ProcessEnd:
        if self._end is None:
            self._end = self.stop(_EXIT_TIMEOUT if self.is_exiting else _KILL_TIMEOUT)
        return self._end

    def stop(self, timeout: timedelta) -> ProcessEnd:
        code = self.process.stop(timeout)
        if self.is_exiting and self.process.was_killed:
            self._log.warning(
                "the process was still running %g s after the end of its trial, and was killed: atexit handlers or the "
                "trainable's cleanup did not complete",
                _EXIT_TIMEOUT.total_seconds(),
            )
        return make_process_end(code, self.output.stop())


def _end_idle_processes(processes: Sequence[_PooledProcess]) -> None:
    """Let all processes exit in parallel, because each may take time to clean up. After 5 s, kill those that remain."""
    for idle in processes:
        idle.process.connection.close()
    deadline = Deadline.after(_EXIT_TIMEOUT)
    for idle in processes:
        idle.stop(timedelta(seconds=deadline.remaining_seconds))
        idle.process.end()


class _PooledChannel(TrialChannel):
    """The channel of an attempt in a pooled process. A reused process that cannot serve the attempt is replaced."""

    def __init__(self, pool: TrialProcessPool, request: _ProcessRequest, idle: SupervisedProcess | None) -> None:
        self._pooled = _PooledProcess(idle or pool.make_process(request), request.log, request.key)
        super().__init__(self._pooled.process.connection, self._pooled, self._pooled.output)
        self._pool, self._request = pool, request
        self._is_reused = idle is not None  # until the first message other than `TrainableLoaded`
        self._has_reported = self._closed = self.is_reusable = False
        self._sent: list[ToTrial] = []  # the messages before the first report; a replacement process gets them, too
        self._changing = threading.RLock()
        self._begin_deadline: Deadline | None = None
        self._wait_log: WaitLog | None = None

    def start_trial(self, *, has_deadline: bool = True) -> None:
        """Send environment, start message and `_sent`. If `has_deadline`, `receive` replaces a hanging process."""
        self._begin_deadline = Deadline.after(_START_TIMEOUT) if has_deadline else None
        self._wait_log = WaitLog(self._request.log, "waiting for its process to begin")
        process = self._pooled.process
        self._pooled.output.start(process.output)
        environment = make_process_environment(process.make_temporary_directory(), self._request.key.full_environment)
        for message in (environment, self._request.start, *self._sent):
            super().send(message)

    def send(self, message: ToTrial) -> None:
        with self._changing:
            if not self._has_reported:
                self._sent.append(message)
            if not self._closed:  # after `close`, the process may serve another trial
                super().send(message)

    def receive(self, timeout: timedelta) -> FromTrial | None:
        had_begun = self.has_started
        try:
            message = super().receive(timeout)
        except EOFError:
            if not self._is_reused:
                raise
            self._replace_process()
            return None
        if self._is_reused and isinstance(message, TrainingEnded) and message.raised:
            self._replace_process(f"failed before its first report ({first_line(message.outcome.reason)})")
            return None
        self._has_reported |= message is not None and not isinstance(message, TrainableLoaded)
        self._is_reused &= message is None or isinstance(message, TrainableLoaded)
        self.is_reusable = isinstance(message, TrainingEnded) and message.awaits_reuse
        self._pooled.is_exiting |= isinstance(message, TrainingEnded)
        if isinstance(message, TrainableLoaded):
            self._wait_log = WaitLog(self._request.log, _NO_REPORT_NOTE, _FIRST_REPORT_NOTE_DELAY)
        elif self.has_started and not had_begun:
            self._wait_log = WaitLog(self._request.log, f"importing {self._request.key}, or running its setup")
        elif message is not None:
            self._wait_log = None
        elif not self.has_started and self._begin_deadline is not None and not self._begin_deadline.remaining_seconds:
            reason = f"did not begin its trial within {_START_TIMEOUT.total_seconds():g} s"
            why_unsafe = f"a process that was forked after the import {reason}"
            self._pool.fork_servers.stop_forking(self._request.key, why_unsafe, self._request.log)
            self._replace_process(reason, has_deadline=False)
        elif self._wait_log is not None:
            self._wait_log.log_if_due()
        return message

    def end(self) -> ProcessEnd:
        if not self.is_reusable:
            return super().end()
        self._pooled.output.stop()
        return ProcessEnd(reason=make_reason("process-kept"))

    def close(self) -> None:
        """Return the process to the pool, or end it."""
        self.end()
        with self._changing:
            self._closed = True
        if self.is_reusable:
            self._pool.keep_or_end(self._pooled)
        else:
            self._pooled.process.end()

    def _replace_process(self, reason: str | None = None, *, has_deadline: bool = True) -> None:
        """Use a new process, because the old one declined the trial, or was killed, failed or hung before a report.

        An earlier trial in the old process may be the cause, because a process can make some settings only once.
        """
        end, request = self._pooled.end(), self._request
        if reason or end.exit_code != 0:
            subject = "the process reused from an earlier trial" if self._is_reused else "its process"
            failure = make_visible(reason or append_last_output(end, end.output))
            request.log.warning("%s %s; starting a new process", subject, failure)
        self._pooled.process.end()
        with self._changing:
            self._pooled = _PooledProcess(self._pool.make_process(request), request.log, request.key)
            self.switch_process(self._pooled.process.connection, self._pooled, self._pooled.output)
            self._is_reused = False
            self.start_trial(has_deadline=has_deadline)


# --------------------------------------------------------------------------------- the shared pools of a worker


@dataclass(slots=True)
class _SharedPool:
    pool: TrialProcessPool
    user_count: int = 0
    end: threading.Timer | None = None


_guard = threading.Lock()
_pools: dict[Hashable, _SharedPool] = {}


@contextmanager
def shared_pool(search: Hashable, reuse: Reuse) -> Iterator[TrialProcessPool]:
    """Yield the pool that a search's attempts share in this process; it stays open for 30 s after the last attempt.

    Idle pools of other searches are closed immediately, since their processes may hold GPU memory.
    """
    with _guard:
        idle = [_pools.pop(key) for key, other in [*_pools.items()] if key != search and not other.user_count]
    for other in idle:
        other.pool.close()
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
def _close_all_pools() -> None:
    """Close the pools at the exit of the worker, to remove their temporary directories."""
    while _pools:
        _pools.popitem()[1].pool.close()
