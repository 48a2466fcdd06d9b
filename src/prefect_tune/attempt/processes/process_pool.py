"""The pool of trial processes: what an attempt trains in.

    kept by a class with `reset_config` ──► declines, fails or dies before its first report ─┐
    forked in advance                                                                        ├──► a new fork
    forked now: from the template, or from the plain fork server (see `fork_server_pool`) ───┘    (no attempt is lost)

A fork that does not begin its trial within 60 s is replaced by a process of its own, and the template forks no more.
Never: a function in a used process; a trial in a process in which another one failed or was interrupted; more
processes that wait than free slots; a wait for an import after `stop`.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from prefect_tune.attempt.processes.fork_client import ForkedProcess, ForksUnfit, PendingFork, surroundings
from prefect_tune.attempt.processes.fork_server_pool import ForkServers, Template, TrialKind
from prefect_tune.attempt.processes.process_channel import (
    AS_IT_IS,
    MEMORY_SIGNALS,
    TrialChannel,
    make_process_end,
    trial_process,
)
from prefect_tune.attempt.processes.process_output import Log, TrialOutput, WaitLog
from prefect_tune.attempt.trial_spec import import_path
from prefect_tune.core.messages.process_messages import (
    FromTrial,
    Preload,
    Start,
    ToTrial,
    TrainableLoaded,
    TrialEnded,
)
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.core.shown_text import first_line, visible
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.deadline import Deadline
from prefect_tune.terminal.formatting import with_last_output

_TRIES = 3
_LOOK_AGAIN = timedelta(seconds=0.2)
_LONGEST_PRELOAD = 64 * 1024  # characters; the kernel takes them before the process is forked, so that none waits
_MOMENT = timedelta(seconds=0.2)
_GOODBYE = timedelta(seconds=5)
_WHAT_WAS_CUT = "handlers of atexit, or the trainable's cleanup, did not run to their end"
_BEGINS = timedelta(seconds=60)  # a fork begins in milliseconds, unless a lock that it has inherited stays locked
_FIRST_REPORT = timedelta(minutes=10)
_IDLE = timedelta(seconds=30)
"""How long a pool outlives its last attempt: the scheduler may send the search's next one to this worker."""
_NO_REPORT = "no report yet; if it hangs here, but not with reuse='never', its import does not bear forks"


class TrialProcessPool:
    """A pool of trial processes. Enter it, then call `process`, from any number of threads.

    Processes are forked from a fork server that has imported what every trial needs, and the trainable's module if
    `reuse` says so; `prepare` or the first `process` starts it.
    A class trainable whose `reset_config` accepts the next trial's configuration serves that trial too, in the same
    process and with the same object, without `cleanup` and `setup`; a function gets a new process each time. A
    process that failed, was interrupted or declined serves no other trial: a replacement is forked in advance.

    Args:
        slots: the most processes, used and waiting together, up to which one is kept or forked in advance. With 0
            each process serves one trial, and cleans up before it reports the trial's end. With None, the most
            processes that were in use at the same time.
        reuse: how the import of the trainable's module is shared; see `Reuse`.
    """

    def __init__(self, *, slots: int | None, reuse: Reuse = "never") -> None:
        self._grows = slots is None
        self._slots = slots if slots is not None else 1
        self._forks = ForkServers("never" if slots == 0 else reuse)
        self._guard = threading.RLock()
        self._used_count = 0
        self._waiting: list[_Kept] = []
        self._expected: list[tuple[TrialKind, PendingFork]] = []
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
        self._forks.close(is_used=is_used)

    def dismiss(self) -> None:
        """End the waiting processes, to free what they hold; the next trials get new processes."""
        self._end_waiting()
        self._end_expected()

    def prepare(self, trainable: str, log: Log, environment: Mapping[str, str] = AS_IT_IS) -> None:
        """Begin to import `trainable` (as in `Start`), and do not wait for it.

        The fork server imports it if `reuse` says so; with no slots, a process that is forked in advance.
        """
        if sys.platform == "linux":
            kind = TrialKind.of(trainable, import_path(), environment)
            self._forks.begin(kind, log) if self._slots else self._import_ahead(kind)

    @contextmanager
    def process(
        self,
        start: Start,
        log: Log,
        environment: Mapping[str, str] = AS_IT_IS,
        stop: threading.Event | None = None,
    ) -> Iterator[TrialChannel]:
        """Train in a process of the pool. Leaving the block ends the process, unless it is kept for another trial.

        All its descendants end with it, in any session, even if this process or the trial's is killed. (On systems
        other than Linux: only those in its session.)

        Args:
            log: the log that receives its output, in the caller's context.
            environment: variables of this trial, added to this process's environment or replacing them.
            stop: ends the wait for the import of the trainable's module: the process then imports it by itself.

        Raises:
            OSError: no process could be forked, for example for lack of memory or process ids.
        """
        if sys.platform != "linux":
            with trial_process(start, log, environment) as alone:
                yield alone
            return
        kind, stop = TrialKind.of(start.trainable, start.import_path, environment), stop or threading.Event()
        with self._using():
            child = self._waiting_child(kind)
            borrowed = _Borrowed(child or self.new_child(kind, log, stop), log)
            request = _Request(start.model_copy(update={"waits": start.waits and self._slots > 0}), log, kind, stop)
            channel = _PooledChannel(self, request, borrowed, has_served=child is not None)
            try:
                channel.begin()
                yield channel
            except BaseException:
                channel.keeps = False
                raise
            finally:
                channel.close()
        if not channel.keeps:
            self._expect(kind)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Count one more process as in use."""
        with self._guard:
            self._used_count += 1
            if self._grows:
                self._slots = max(self._slots, self._used_count)
        try:
            yield
        finally:
            with self._guard:
                self._used_count -= 1

    def _waiting_child(self, kind: TrialKind) -> ForkedProcess | None:
        """Return a waiting process of this kind; None if there is none."""
        with self._guard:
            mine = [each for each in self._waiting if each.kind == kind]
            self._waiting = [each for each in self._waiting if each not in mine[-1:]]
        if not mine:
            return None
        child = mine[-1].child
        if child.is_alive():
            return child
        child.end()
        return self._waiting_child(kind)

    def _expect(self, kind: TrialKind) -> None:
        """Fork a process in advance, in place of one that has ended, so that the next trial need not wait."""
        with self._guard, suppress(OSError):  # `new_child` raises it if a trial then needs a process
            in_sight = self._used_count + len(self._waiting) + len(self._expected)
            if not self._closed and in_sight < self._slots and (forks := self._forks.running(kind)) is not None:
                self._expected.append((kind, forks.fork()))

    def _import_ahead(self, kind: TrialKind) -> None:
        """Fork a process in advance, and have it import the trainable, unless that is a long pickle."""
        request = Preload(trainable=kind.trainable, import_path=kind.import_path)
        if len(kind.trainable) > _LONGEST_PRELOAD or any(each[0] == kind for each in self._expected):
            return
        self._end_expected(timedelta(0))  # one of another kind serves no trial: without slots there is one trainable
        with self._guard, suppress(OSError):
            self._expected.append((kind, pending := self._forks.plain(kind).fork()))
            pending.import_ahead(request, kind.whole_environment)

    def new_child(self, kind: TrialKind, log: Log, stop: threading.Event) -> ForkedProcess:
        """Return a new process, after ending waiting processes of other kinds if there are too many."""
        self._end_waiting(slots=self._slots)
        while (expected := self._next_expected(kind)) is not None:
            with self._refusing(kind, log):
                if (child := expected.child()) is None:
                    continue
                waits = WaitLog(log, f"importing {kind}")
                if child.is_alive() and (not expected.imports or _has_imported(child, log, stop, waits)):
                    return child
                child.end(timedelta(0))
        for _ in range(_TRIES):
            forks = self._forks.ready(kind, log, stop)
            self._forks.end_surplus(self._slots)
            try:
                if (child := forks.fork().child()) is not None:
                    return child
                self._forks.lose(forks)
            except TimeoutError as error:  # such as a fork handler that hangs
                self._forks.lose(forks)
                self._forks.refuse(kind, str(error), log)
            except OSError as error:  # such as a thread that runs in it now, or a limit that its import has lowered
                if not isinstance(forks, Template):
                    raise
                self._forks.refuse(kind, str(error), log)
        raise OSError(f"cannot fork a trial's process: {_TRIES} fork servers in a row did not answer")

    @contextmanager
    def _refusing(self, kind: TrialKind, log: Log) -> Iterator[None]:
        """Go on without a process that was forked in advance; fork no more of its kind if it hangs, or must not be."""
        try:
            yield
        except (TimeoutError, ForksUnfit) as error:
            self._forks.refuse(kind, str(error), log)
        except OSError:
            pass  # a fork that is needed fails for the same reason, and says so

    def forks_after_import(self, kind: TrialKind) -> bool:
        """Return whether trials of this kind are forked from a process that has imported their trainable."""
        return isinstance(self._forks.running(kind), Template)

    def refuse_forks(self, kind: TrialKind, why: str, log: Log) -> None:
        """Fork no more trials of this kind after its import: one of them has failed for that, as `why` says."""
        self._forks.refuse(kind, why, log)
        self._end_expected(timedelta(0))

    def _next_expected(self, kind: TrialKind) -> PendingFork | None:
        with self._guard:
            mine = [each for each in self._expected if each[0] == kind]
            self._expected = [each for each in self._expected if each not in mine[:1]]
        return mine[0][1] if mine else None

    def keep(self, kind: TrialKind, child: ForkedProcess, log: Log) -> None:
        """Keep a process for another trial; end it if there are enough. `log` is that of its last trial."""
        kept = _Kept(kind, child, log)
        with self._guard:
            is_kept = not self._closed and self._used_count + len(self._waiting) <= self._slots
            if is_kept:
                self._waiting.append(kept)
        if not is_kept:
            _dismiss([kept])

    def _end_waiting(self, *, slots: int = 0) -> None:
        """End the longest-waiting processes, until no more than `slots` are left, those in use included."""
        with self._guard:
            surplus = max(0, self._used_count + len(self._waiting) - slots)
            leaving, self._waiting = self._waiting[:surplus], self._waiting[surplus:]
        _dismiss(leaving)

    def _end_expected(self, patience: timedelta = _GOODBYE) -> None:
        with self._guard:
            leaving, self._expected = self._expected, []
        for _, each in leaving:
            each.dismiss()
        deadline = Deadline.after(patience)
        for _, each in leaving:
            each.end(timedelta(seconds=deadline.remaining_seconds))


@dataclass(frozen=True, slots=True)
class _Request:
    start: Start
    log: Log
    kind: TrialKind
    stop: threading.Event


def _has_imported(child: ForkedProcess, log: Log, stop: threading.Event, waits: WaitLog) -> bool:
    """Wait for its import; return False if it ended the process, or if `stop` is set before.

    Until then the process reads nothing, so that sending it a long message would block.
    """
    output = TrialOutput(log)
    output.start(child.output)
    try:
        while not child.has_imported(_LOOK_AGAIN):
            waits.note()
            if stop.is_set():
                return False
    except (EOFError, OSError):
        return False
    finally:
        output.stop()
    return True


@dataclass(frozen=True, slots=True)
class _Kept:
    """A process that waits for another trial."""

    kind: TrialKind
    child: ForkedProcess
    log: Log
    """Of its last trial."""


def _dismiss(leaving: list[_Kept]) -> None:
    """Let all exit at the same time, since each may take time to clean up; then end what is left after 5 s."""
    for each in leaving:
        each.child.dismiss()
    deadline = Deadline.after(_GOODBYE)
    for each in leaving:
        each.child.end(timedelta(seconds=deadline.remaining_seconds))
        _log_cut(each.child, each.log)


def _log_cut(child: ForkedProcess, log: Log) -> None:
    if child.was_cut:
        seconds = _GOODBYE.total_seconds()
        log.warning("its process had not exited %g s after its end, and was killed: %s", seconds, _WHAT_WAS_CUT)


class _Borrowed:
    """A process that serves an attempt; its output goes to the attempt's log."""

    def __init__(self, child: ForkedProcess, log: Log) -> None:
        self.child = child
        self._log = log
        self.output = TrialOutput(log)
        self._end: ProcessEnd | None = None
        self.exits = False
        """Whether the process has sent the end of its last trial: its handlers of `atexit` run."""

    def begin(self) -> None:
        self.output.start(self.child.output)

    def is_alive(self) -> bool:
        return self.child.is_alive()

    def end(self) -> ProcessEnd:
        if self._end is None:
            code = self.child.end(_GOODBYE if self.exits else _MOMENT)
            self._end = make_process_end(code, self.output.stop())
            if self.exits:
                _log_cut(self.child, self._log)
        return self._end

    def let_go(self) -> None:
        """Stop reading its output, and let the process run."""
        self.output.stop()


class _PooledChannel(TrialChannel):
    """The channel of an attempt in a pooled process; a kept process that cannot serve it is replaced."""

    def __init__(self, pool: TrialProcessPool, request: _Request, borrowed: _Borrowed, *, has_served: bool) -> None:
        super().__init__(borrowed.child.connection, borrowed, borrowed.output)
        self._pool = pool
        self._request = request
        self._borrowed = borrowed
        self._is_on_trial = has_served  # until the kept process has reported a step, asked or ended
        self._has_reported = False
        self._sent: list[ToTrial] = []  # messages up to the first report, to be sent again to a replacement
        self._changing = threading.RLock()
        self._closed = False
        self._begins: Deadline | None = None
        self._waits: WaitLog | None = None
        self.keeps = False

    def begin(self, *, has_deadline: bool = True) -> None:
        """Send the process its environment and the trial's start message; replace it if it does not begin in time."""
        self._begins = Deadline.after(_BEGINS) if has_deadline else None
        self._waits = WaitLog(self._request.log, "its process has not begun")
        self._borrowed.begin()
        temporary = self._borrowed.child.new_temporary_directory()
        super().tell(surroundings(temporary, self._request.kind.whole_environment))
        for message in (self._request.start, *self._sent):
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
            if not self._is_on_trial and not self._broke_by_its_fork():
                raise
            self._replace()
            return None
        if self._is_on_trial and isinstance(message, TrialEnded) and message.raised:
            self._replace(f"failed before its first report ({first_line(message.outcome.reason)})")
            return None
        self._has_reported |= message is not None and not isinstance(message, TrainableLoaded)
        self._is_on_trial &= message is None or isinstance(message, TrainableLoaded)
        self.keeps = isinstance(message, TrialEnded) and message.waits
        self._borrowed.exits |= isinstance(message, TrialEnded)
        self._note_wait(message, had_begun)
        return message

    def _broke_by_its_fork(self) -> bool:
        """Whether it was forked after the import, and died of a signal of its own before its first report.

        Memory that a fork does not get (`MADV_DONTFORK`), or a driver that it may not use, end it so. From now on each
        process imports the trainable, so that this is tried once.
        """
        if self._has_reported or not self._pool.forks_after_import(self._request.kind):
            return False
        end = self._borrowed.end()
        if end.signal not in MEMORY_SIGNALS:
            return False
        why = f"a process that was forked after it {end} before its first report"
        self._pool.refuse_forks(self._request.kind, why, self._request.log)
        return True

    def _note_wait(self, message: FromTrial | None, had_begun: bool) -> None:  # noqa: FBT001 - of one call
        """Log how long the trial has not come to its first report; replace a process that has not even begun."""
        if isinstance(message, TrainableLoaded):
            self._waits = WaitLog(self._request.log, _NO_REPORT, _FIRST_REPORT)
        elif self.has_begun and not had_begun:
            self._waits = WaitLog(self._request.log, f"importing {self._request.kind}, or in its setup")
        elif message is not None:
            self._waits = None
        elif not self.has_begun and self._begins is not None and self._begins.remaining_seconds <= 0:
            why = f"did not begin its trial within {_BEGINS.total_seconds():g} s"
            self._pool.refuse_forks(self._request.kind, f"a process that was forked after it {why}", self._request.log)
            self._replace(why, has_deadline=False)
        elif self._waits is not None:
            self._waits.note()

    def end(self) -> ProcessEnd:
        if not self.keeps:
            return super().end()
        self._borrowed.let_go()
        return ProcessEnd(reason=make_reason("process-kept"))

    def close(self) -> None:
        """Return the process to the pool, or end it."""
        self.end()
        with self._changing:
            self._closed = True
        if self.keeps:
            self._pool.keep(self._request.kind, self._borrowed.child, self._request.log)

    def _replace(self, why: str = "", *, has_deadline: bool = True) -> None:
        """Take a new process: this one declined the trial, was killed, failed or hung, before it reported anything.

        A failure there may be due to an earlier trial: some settings can be made only once in a process.
        """
        end = self._borrowed.end()
        if why or end.exit_code != 0:
            which = "a process that was kept from an earlier trial" if self._is_on_trial else "its process"
            self._request.log.warning(
                "%s %s; a new one is started", which, visible(why or with_last_output(end, end.output))
            )
        with self._changing:
            request = self._request
            self._borrowed = _Borrowed(self._pool.new_child(request.kind, request.log, request.stop), request.log)
            self.go_over_to(self._borrowed.child.connection, self._borrowed, self._borrowed.output)
            self._is_on_trial = False
            self.begin(has_deadline=has_deadline)


# ------------------------------------------------------------------------------------------ the pools of a worker


class _SharedPool:
    def __init__(self, reuse: Reuse) -> None:
        self.pool = TrialProcessPool(slots=None, reuse=reuse)
        self.user_count = 0
        self.end: threading.Timer | None = None


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
        shared = _pools.setdefault(search, _SharedPool(reuse))
        shared.user_count += 1
        if shared.end is not None:
            shared.end.cancel()
    try:
        yield shared.pool
    finally:
        with _guard:
            shared.user_count -= 1
            if not shared.user_count:
                shared.end = threading.Timer(_IDLE.total_seconds(), _close_if_idle, (search, shared))
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
