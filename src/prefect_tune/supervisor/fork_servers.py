"""The fork servers of a pool of trial processes, one for each kind of trial."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Self

from prefect_tune.core.messages.process_messages import Preload
from prefect_tune.supervisor.fork_client import ForkServer
from prefect_tune.supervisor.process_output import Log
from prefect_tune.supervisor.trial_spec import Reuse

__all__ = ["ForkServers", "TrialKind"]

# The interpreter and the C library read these at start, so a fork has the values of its fork server.
_READ_AT_START = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON")
# Libraries read these once: when they are imported, or when they first compute.
_READ_ONCE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
_LOOK_AGAIN = timedelta(seconds=0.2)


@dataclass(frozen=True, slots=True)
class TrialKind:
    """The properties that a trial and a kept process must share, for the process to serve the trial."""

    trainable: str
    import_path: tuple[str, ...]
    environment: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, trainable: str, import_path: tuple[str, ...], environment: Mapping[str, str]) -> Self:
        """Return the kind of a trial with this environment; a worker's scheduler may change devices between trials."""
        devices = {name: os.environ[name] for name in _READ_ONCE if name in os.environ}
        return cls(trainable, import_path, frozenset({**devices, **environment}.items()))

    @property
    def whole_environment(self) -> Mapping[str, str]:
        """The variables of this process, and those of the trial added to them or replacing them."""
        return {**os.environ, **dict(self.environment)}

    @property
    def read_at_start(self) -> Mapping[str, str]:
        """Those of them that a process reads at its start."""
        return {name: value for name, value in self.whole_environment.items() if name.startswith(_READ_AT_START)}

    def __str__(self) -> str:
        return f"trainable {self.trainable!r}" if ":" in self.trainable else "the trainable"


class ForkServers:
    """The fork servers that run: those that have imported a trainable, and plain ones. Safe for threads.

    Trials with other values of variables that a process reads at its start get a fork server of their own; so do
    those with another trainable or environment, if it is imported first.

    Args:
        reuse: whether they import the trainable.
    """

    def __init__(self, reuse: Reuse) -> None:
        self._imports = reuse in ("fork", "auto")
        self._reuse = reuse
        self._guard = threading.RLock()
        self._running: dict[TrialKind | frozenset[tuple[str, str]], ForkServer] = {}
        self._plain: set[TrialKind] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def end_surplus(self, slots: int) -> None:
        """End those that were used longest ago, beyond the number that trials in `slots` slots may need."""
        most = 1 + slots * (2 if self._imports else 1)  # a plain one beside each that imports
        with self._guard:
            surplus = [self._running.pop(key) for key in list(self._running)[:-most]]
        for each in surplus:
            each.let_go()

    def of(self, kind: TrialKind, log: Log) -> ForkServer:
        """Return the fork server for trials of this kind; start it if it does not run, and do not wait for it.

        Raises:
            RuntimeError: `close` was called.
        """
        if not self._imports or (kind in self._plain and kind not in self._running):
            return self._plain_one(kind)
        preload = Preload(trainable=kind.trainable, import_path=kind.import_path)
        return self._found(kind, lambda: ForkServer.start(kind.whole_environment, preload, log))

    def ready(self, kind: TrialKind, log: Log, stop: threading.Event) -> ForkServer:
        """Return it after its import; if `stop` is set before, one that imports nothing.

        Why an import cannot be shared is logged once.
        """
        forks = self.of(kind, log)
        while not forks.is_ready(_LOOK_AGAIN):
            if stop.is_set():
                return self._plain_one(kind)
        if forks.why_plain:
            self._note(kind, forks.why_plain, log)
        if not forks.has_died:
            return forks
        self.lose(forks)
        return self._plain_one(kind)

    def kept(self, kind: TrialKind) -> Literal["never", "after-imports", "always"]:
        """Return when the process of a trial of this kind serves the next one, as in `Start`."""
        if self._reuse == "keep" or (self._reuse == "auto" and kind in self._plain):
            return "always"
        return "after-imports" if self._reuse == "auto" else "never"

    def lose(self, forks: ForkServer) -> None:
        """Kill and forget a fork server that has died or is stopped; its processes do not need it."""
        with self._guard:
            self._running = {key: each for key, each in self._running.items() if each is not forks}
        forks.kill()

    def close(self, *, is_used: bool) -> None:
        """End all; do not wait for them if processes that they forked are in use."""
        with self._guard:
            self._closed = True
            running, self._running = [*self._running.values()], {}
        for each in running:
            each.let_go() if is_used else each.end()

    def _plain_one(self, kind: TrialKind) -> ForkServer:
        own = kind.read_at_start
        return self._found(frozenset(own.items()), lambda: ForkServer.start({**os.environ, **own}))

    def _found(self, key: TrialKind | frozenset[tuple[str, str]], start: Callable[[], ForkServer]) -> ForkServer:
        with self._guard:
            if self._closed:
                raise RuntimeError("the pool of trial processes is closed")
            found = self._running.pop(key, None) or start()
            self._running[key] = found  # ordered by last use
            return found

    def _note(self, kind: TrialKind, why: str, log: Log) -> None:
        with self._guard:
            is_news = kind not in self._plain
            self._plain.add(kind)
        if is_news:
            how = (
                "a process that has imported it serves one trial after the other"
                if self.kept(kind) == "always"
                else "each trial imports it"
            )
            log.info("%s: trials cannot be forked after its import; %s: %s", kind, how, why)
