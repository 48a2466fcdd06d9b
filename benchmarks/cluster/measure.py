"""One search on a cluster: undisturbed and measured, or with its worker and its machine killed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from benchmarks.cluster.clusters import Cluster
from benchmarks.cluster.work import NAME, Outcome, Step, Work, steps_of
from benchmarks.measuring.cpu_group import CpuGroup, sampling
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import DecisionMade
from prefect_tune.core.storage.layout import JournalKey

__all__ = ["Measurement", "Memory", "Recovery", "measure_recovery", "measure_search"]

_TIMEOUT_SECONDS = 3600
_SAMPLE_SECONDS = 5.0


# ------------------------------------------------------------------------------------------------------- the memory


@dataclass
class Memory:
    """The memory of the processes of each part in MiB, every few seconds; a page that several share counts once."""

    times: list[float] = field(default_factory=list)
    """Seconds of the monotonic clock."""
    mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, parts: Mapping[str, CpuGroup]) -> None:
        self.times.append(time.monotonic())
        for name, group in parts.items():
            self.mib[name].append(group.memory_mib())

    def slope(self, part: str) -> float:
        """MiB a minute in the second half of the search."""
        half = len(self.times) // 2
        if len(self.times) - half < 3:
            return float("nan")
        return 60 * statistics.linear_regression(self.times[half:], self.mib[part][half:]).slope


# ---------------------------------------------------------------------------------------------------- undisturbed


@dataclass(frozen=True)
class Measurement:
    """An undisturbed search."""

    seconds: float
    """From the first step's end to the last one's."""
    reports: int
    decision_lags: Sequence[float]
    """Seconds from a report to the decision on it, of each decision at a rung."""
    waits: Mapping[str, Sequence[float]]
    """Seconds between two steps of a trial, by what happens between them."""
    cpu_seconds: Mapping[str, float]
    memory: Memory
    outcome: Outcome


def measure_search(cluster: Cluster, work: Work, servers: Mapping[str, CpuGroup]) -> Measurement:
    """Run the search to its end, and measure it.

    Args:
        servers: what else works for the search, counted from the search's start.
    """
    cluster.start(work)
    parts = {**cluster.groups, **servers}
    before = {name: group.cpu_seconds() for name, group in parts.items()}
    memory = Memory()
    with sampling(lambda: memory.sample(parts), every_seconds=_SAMPLE_SECONDS):
        process = cluster.search(work, "new")
        _wait_for_steps(cluster, process, work, work.trials * work.steps)
    cpu = {name: group.cpu_seconds() - before[name] for name, group in parts.items()}
    _wait_for_end(cluster, process, work)
    steps = list(steps_of(work.record))
    ends = [step.at for step in steps]
    lags = _lags_in_journal(work) if cluster.module == "ours" else _lags_in_record(work)
    return Measurement(max(ends) - min(ends), len(steps), lags, _waits(steps, work), cpu, memory, Outcome.read(work))


def _waits(steps: Sequence[Step], work: Work) -> Mapping[str, Sequence[float]]:
    waits: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        if step.waited is not None:
            waits[_between(step.step - 1, work)].append(step.waited)
    return waits


def _between(step: int, work: Work) -> str:
    """Return what the trial does after `step`."""
    if step % work.save_every == 0:
        return "a checkpoint"
    return "a decision" if step in work.rungs else "a report"


def _lags_in_journal(work: Work) -> Sequence[float]:
    """From a report to the journal's entry with the decision, which is written before the trial receives it."""
    with LocalTarget(path=work.target).open(timeout=timedelta(minutes=5)) as store:
        entries = read_entries(store, JournalKey(experiment=NAME, generation=1))
    return [
        datetime.fromisoformat(entry.at).timestamp() - float(str(event.report.metrics["at"]))
        for entry in entries
        for event in entry.events
        if isinstance(event, DecisionMade)
    ]


def _lags_in_record(work: Work) -> Sequence[float]:
    """From a report to Ray's decision. It decides at every report: those at the rungs are compared."""
    lines = map(json.loads, work.decisions.read_text().splitlines())
    return [line["lag"] for line in lines if line["step"] in work.rungs]


# ------------------------------------------------------------------------------------------------------ disturbed


@dataclass(frozen=True)
class Recovery:
    """A search whose worker was killed after a quarter of its steps, and whose machine after a half."""

    outcome: Outcome
    trained: int
    """Steps, those that were trained again included."""
    max_repeats: int
    """How often one step of one trial was trained at most."""
    seconds_to_resume: float
    """From the new start of the search to the end of the next step, of a new process."""


def measure_recovery(cluster: Cluster, work: Work) -> Recovery:
    """Run the search, kill a worker, kill the machine, resume, and return the result."""
    cluster.start(work)
    process, all_steps = cluster.search(work, "new"), work.trials * work.steps
    _wait_for_steps(cluster, process, work, all_steps // 4)
    cluster.kill_worker(work)
    _wait_for_steps(cluster, process, work, all_steps // 2)
    cluster.kill_machine()
    process.wait()
    print(f"{cluster.module}: killed after {_count(work)} steps", file=sys.stderr, flush=True)
    cluster.start(work)
    restarted_at = time.time()
    _wait_for_end(cluster, cluster.search(work, "resume"), work)
    steps = list(steps_of(work.record))
    earlier = {step.pid for step in steps if step.at < restarted_at}
    resumed = next(step.at for step in steps if step.at > restarted_at and step.pid not in earlier)
    counts = Counter((step.x, step.step) for step in steps)
    return Recovery(Outcome.read(work), len(steps), max(counts.values()), resumed - restarted_at)


# ------------------------------------------------------------------------------------------------------ the process


def _wait_for_steps(cluster: Cluster, process: subprocess.Popen[bytes], work: Work, count: int) -> None:
    """Wait until so many steps are trained."""
    end = time.monotonic() + _TIMEOUT_SECONDS
    while _count(work) < count:
        if time.monotonic() > end or (process.poll() is not None and _count(work) < count):
            raise RuntimeError(f"{cluster.module}: {_count(work)} steps of {count} when it ended: {_tail(cluster)}")
        time.sleep(0.5)


def _count(work: Work) -> int:
    return work.record.read_bytes().count(b"\n") if work.record.exists() else 0


def _wait_for_end(cluster: Cluster, process: subprocess.Popen[bytes], work: Work) -> None:
    """Wait for the end of the search."""
    if process.wait(_TIMEOUT_SECONDS) or not work.outcome.exists():
        raise RuntimeError(f"{cluster.module}: exited with {process.returncode}: {_tail(cluster)}")


def _tail(cluster: Cluster) -> str:
    return cluster.log.read_text(errors="replace")[-3000:]
