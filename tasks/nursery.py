"""Trials' processes that begin in milliseconds, and serve trial after trial where the trainable allows it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from prefect_tune.core.wire import FromTrial, Start, Surroundings, ToTrial, TrialEnded
from prefect_tune.stores.deadline import Deadline
from prefect_tune.tasks.forked import Child, Expected, Forks
from prefect_tune.tasks.trial_channel import AS_IT_IS, TrialChannel, became, trial_process
from prefect_tune.tasks.trial_output import Log, TrialOutput

__all__ = ["Nursery", "supervised_process"]

# Read when an interpreter or the C library starts: a fork has what its parent was started with.
_READ_AT_START = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON")
_TRIES = 3
_MOMENT = timedelta(seconds=0.2)
_GOODBYE = timedelta(seconds=5)


class Nursery:
    """Processes for many trials. Enter it, then call `process`, from as many threads as you like.

    They are forked from one process that has imported what every trial needs; the first call starts it, or `prepare`.
    Trials whose environment has other variables that are read at a process's start are forked from one of their own.
    A class trainable whose `reset_config` accepts the next trial's configuration serves that trial too, in the same
    process and with the same object, without `cleanup` and `setup`; a function gets a new process each time. A
    process that failed, was interrupted, or whose trainable has declined serves no other trial: the next one is
    forked in its place before it is asked for.

    Args:
        slots: no process is kept, or forked ahead, where there would then be more than so many, those in use among
            them. With 0, each process serves one trial, and cleans up before it says that the trial has ended.
    """

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._pool = _Pool(slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what waits for a trial; what serves one goes on to its end."""
        self._pool.close()

    def dismiss(self) -> None:
        """End what waits for a trial, so that it holds nothing any more; the next trials get new processes."""
        self._pool.dismiss_waiting()
        self._pool.forget_expected()

    def prepare(self) -> None:
        """Start what the first trial will need, and do not wait for it."""
        if sys.platform == "linux":
            self._pool.forks(AS_IT_IS)

    @contextmanager
    def process(self, start: Start, log: Log, environment: Mapping[str, str] = AS_IT_IS) -> Iterator[TrialChannel]:
        """Train in a process that serves nothing else meanwhile. Leaving the block ends it, unless it is kept.

        Whatever it has started ends with it, in whatever session, also where this process is killed, or the trial's
        is. (Where there is no Linux: what has not left its session.)

        Args:
            log: where its output goes, in the caller's context.
            environment: variables of this trial, beside or in place of this process's own.

        Raises:
            OSError: the machine has no room for another process.
        """
        if sys.platform != "linux":
            with trial_process(start, log, environment) as alone:
                yield alone
            return
        start = start.model_copy(update={"waits": self._slots > 0})
        request = _Request(start, log, _Kind(start.trainable, start.import_path, frozenset(environment.items())))
        with self._pool.using():
            child = self._pool.waiting_child(request.kind)
            borrowed = _Borrowed(child or self._pool.new_child(environment), log)
            channel = _PooledChannel(self._pool, request, borrowed, has_served=child is not None)
            try:
                channel.begin()
                yield channel
            except BaseException:
                channel.keeps = False
                raise
            finally:
                channel.close()
        if not channel.keeps:
            self._pool.expect(environment)


@contextmanager
def supervised_process(start: Start, log: Log, environment: Mapping[str, str] = AS_IT_IS) -> Iterator[TrialChannel]:
    """Train in a process that serves no other trial, as `Nursery.process` does; nothing of it outlives the block."""
    with Nursery(slots=0) as nursery, nursery.process(start, log, environment) as channel:
        yield channel


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a process must have been made for to serve a trial without being made anew."""

    trainable: str
    import_path: tuple[str, ...]
    environment: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Request:
    start: Start
    log: Log
    kind: _Kind


class _Pool:
    """The processes of a nursery: who is in use, and who waits for a trial."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._guard = threading.RLock()
        self._used_count = 0
        self._waiting: list[tuple[_Kind, Child]] = []
        self._expected: list[tuple[Forks, Expected]] = []
        self._forks: dict[frozenset[tuple[str, str]], Forks] = {}
        self._closed = False

    def forks(self, environment: Mapping[str, str]) -> Forks:
        """Return what forks processes that can have this environment, started where it is not running."""
        read_at_start = frozenset(_read_at_start({**os.environ, **environment}).items())
        with self._guard:
            if self._closed:
                raise RuntimeError("the nursery is closed")
            if (found := self._forks.pop(read_at_start, None)) is None:
                found = Forks.start({**os.environ, **dict(read_at_start)})
            self._forks[read_at_start] = found  # the one that was used last comes last
            if len(self._forks) > self._slots + 1:
                self._forks.pop(next(iter(self._forks))).let_go()
            return found

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count one process more in use."""
        with self._guard:
            self._used_count += 1
        try:
            yield
        finally:
            with self._guard:
                self._used_count -= 1

    def waiting_child(self, kind: _Kind) -> Child | None:
        """Return a process that has served such a trial before; None where none waits."""
        with self._guard:
            mine = [each for each in self._waiting if each[0] == kind]
            self._waiting = [each for each in self._waiting if each not in mine[-1:]]
        if not mine:
            return None
        _, child = mine[-1]
        if child.is_alive():
            return child
        child.end()
        return self.waiting_child(kind)

    def expect(self, environment: Mapping[str, str]) -> None:
        """Have a process forked in place of one that has ended: the next trial need not wait for it."""
        with self._guard, suppress(OSError):  # no room: whoever needs one will be told
            in_sight = self._used_count + len(self._waiting) + len(self._expected)
            if self._forks and not self._closed and in_sight < self._slots:
                forks = self.forks(environment)
                self._expected.append((forks, forks.fork()))

    def new_child(self, environment: Mapping[str, str]) -> Child:
        """Return a new process, in place of those that wait for another kind of trial where there are too many."""
        self.dismiss_waiting(slots=self._slots)
        while (expected := self._next_expected(environment)) is not None:
            if (child := self._child_of(*expected)) is not None:
                return child
        for _ in range(_TRIES):
            forks = self.forks(environment)
            if (child := forks.fork().child()) is not None:
                return child
            self._lose(forks)
        raise OSError(f"a trial's process cannot be had: {_TRIES} nurseries in a row did not answer")

    def _next_expected(self, environment: Mapping[str, str]) -> tuple[Forks, Expected] | None:
        with self._guard:
            forks = self.forks(environment)
            mine = [each for each in self._expected if each[0] is forks]
            self._expected = [each for each in self._expected if each not in mine[:1]]
        return mine[0] if mine else None

    def _child_of(self, forks: Forks, expected: Expected) -> Child | None:
        """Return a process that was forked ahead; None where it died meanwhile, or there was no room for it then."""
        try:
            child = expected.child()
        except OSError:
            return None
        if child is None:
            self._lose(forks)
        elif child.is_alive():
            return child
        else:
            child.end()
        return None

    def keep(self, kind: _Kind, child: Child) -> None:
        """Take back a process that waits; where there are enough, it ends."""
        with self._guard:
            is_kept = not self._closed and self._used_count + len(self._waiting) <= self._slots
            if is_kept:
                self._waiting.append((kind, child))
        if not is_kept:
            _dismiss([child])

    def close(self) -> None:
        with self._guard:
            self._closed = True
            forks, self._forks = [*self._forks.values()], {}
            is_used = self._used_count > 0
        self.dismiss_waiting()
        self.forget_expected()
        for each in forks:
            each.let_go() if is_used else each.end()

    def dismiss_waiting(self, *, slots: int = 0) -> None:
        """End those that have waited longest, down to as many as there are slots."""
        with self._guard:
            surplus = max(0, self._used_count + len(self._waiting) - slots)
            leaving, self._waiting = self._waiting[:surplus], self._waiting[surplus:]
        _dismiss([child for _, child in leaving])

    def forget_expected(self) -> None:
        with self._guard:
            leaving, self._expected = self._expected, []
        for _, each in leaving:
            each.dismiss()
        deadline = Deadline.after(_GOODBYE)
        for _, each in leaving:
            each.end(timedelta(seconds=deadline.remaining_seconds))

    def _lose(self, forks: Forks) -> None:
        """Forget a nursery that has died, or is stopped; what it has forked does not need it."""
        with self._guard:
            self._forks = {start: each for start, each in self._forks.items() if each is not forks}
        forks.kill()


def _dismiss(children: list[Child]) -> None:
    """All at once: each may take its time to clean up."""
    for child in children:
        child.dismiss()
    deadline = Deadline.after(_GOODBYE)
    for child in children:
        child.end(timedelta(seconds=deadline.remaining_seconds))


class _Borrowed:
    """A process for the time of an attempt: what it prints goes to the attempt's log."""

    def __init__(self, child: Child, log: Log) -> None:
        self.child = child
        self._output = TrialOutput(log)
        self._became = ""

    def begin(self) -> None:
        self._output.start(self.child.output)

    def is_alive(self) -> bool:
        return self.child.is_alive()

    def end(self) -> str:
        if not self._became:
            code = self.child.end(_MOMENT)
            self._became = became(code, self._output.stop())
        return self._became

    def let_go(self) -> None:
        """Have it go on, and hear no more of it."""
        self._output.stop()


class _PooledChannel(TrialChannel):
    """An attempt in a process of the pool; one that has served before is replaced where it cannot serve this one."""

    def __init__(self, pool: _Pool, request: _Request, borrowed: _Borrowed, *, has_served: bool) -> None:
        super().__init__(borrowed.child.connection, borrowed)
        self._pool = pool
        self._request = request
        self._borrowed = borrowed
        self._is_on_trial = has_served  # until it has answered
        self._told: list[ToTrial] = []  # meanwhile: a process that takes over is told too
        self._changing = threading.RLock()
        self._closed = False
        self.keeps = False

    def begin(self) -> None:
        """Tell the process what it is to train, and where."""
        self._borrowed.begin()
        super().tell(_surroundings(self._borrowed.child, self._request.kind.environment))
        for message in (self._request.start, *self._told):
            super().tell(message)

    def tell(self, message: ToTrial) -> None:
        with self._changing:
            if self._is_on_trial:
                self._told.append(message)
            if not self._closed:  # what it serves next is none of the caller's
                super().tell(message)

    def receive(self, patience: timedelta) -> FromTrial | None:
        try:
            message = super().receive(patience)
        except EOFError:
            if not self._is_on_trial:
                raise
            self._replace()
            return None
        self._is_on_trial &= message is None
        self.keeps = isinstance(message, TrialEnded) and message.waits
        return message

    def end(self) -> str:
        if not self.keeps:
            return super().end()
        self._borrowed.let_go()
        return "waits for another trial"

    def close(self) -> None:
        """Give the process back, or end it."""
        self.end()
        with self._changing:
            self._closed = True
        if self.keeps:
            self._pool.keep(self._request.kind, self._borrowed.child)

    def _replace(self) -> None:
        """Nothing has begun yet: its trainable has declined, or it was killed as it waited."""
        ended = self._borrowed.end()
        if not ended.startswith("exited with code 0"):
            self._request.log.warning("a process that was kept from an earlier trial %s; a new one is started", ended)
        with self._changing:
            self._borrowed = _Borrowed(self._pool.new_child(dict(self._request.kind.environment)), self._request.log)
            self.go_over_to(self._borrowed.child.connection, self._borrowed)
            self._is_on_trial = False
            self.begin()


def _surroundings(child: Child, environment: frozenset[tuple[str, str]]) -> Surroundings:
    own = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(child.new_temporary_directory())}
    whole = {**os.environ, **dict(environment), **own}
    return Surroundings(
        environment={_latin(name): _latin(value) for name, value in whole.items()},
        working_directory=_latin(_here()),
    )


def _here() -> str:
    """Return the working directory; nothing where it has been removed: a fork is there as well."""
    try:
        return os.getcwd()  # noqa: PTH109 - as the kernel has it: a Path would say "." in place of nothing
    except FileNotFoundError:
        return ""


def _latin(text: str) -> str:
    """A byte each character: a variable or a path may be no UTF-8."""
    return os.fsencode(text).decode("latin-1")


def _read_at_start(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
