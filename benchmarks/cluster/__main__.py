"""Many concurrent trials on the workers of a cluster: prefect-tune on Dask with PostgreSQL, and Ray Tune.

    python -m benchmarks.cluster [--ray PYTHON] [--write] [--trials 2000] [--concurrent 64]

PYTHON is an interpreter with `ray[tune]` and nothing of ours; `--write` needs it. PostgreSQL is Debian's
(`apt-get install postgresql`), on an empty cluster of its own. Each trial has steps that sleep, checkpoints, and a
scheduler (ASHA) that decides at rungs and ends no trial early. The first search of each peer is measured; of the
second, a worker is killed after a quarter of the steps and the machine with the search and the cluster's scheduler
after a half, and the search is resumed. The control groups take root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.clusters import Cluster, dask_cluster, ray_cluster
from benchmarks.cluster.measure import Disturbed, Measured, disturbed, undisturbed
from benchmarks.cluster.work import Work
from benchmarks.measuring.cpu_group import CpuGroup, cpu_group
from benchmarks.measuring.tables import circumstances, table, version_in, write
from benchmarks.throughput import prefect_server, surroundings
from prefect_tune.prefect_api.flow_with_server import LIGHT_SERVER_SETTINGS
from tests.fakes.servers.postgres_server import postgres_server

_STEPS, _STEP_SECONDS, _SAVE_EVERY = 10, 0.5, 5
_PARTS = ("driver", "Dask scheduler", "workers", "Prefect server", "PostgreSQL")
_BATCHES = {name: value for name, value in LIGHT_SERVER_SETTINGS.items() if "TASK_RUN_RECORDER" in name}


@dataclass(frozen=True)
class Found:
    """Both searches of one peer."""

    work: Work
    whole: Measured
    lossy: Work
    killed: Disturbed


_Figure = tuple[str, Callable[[Found], str]]


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"{p50:.2f} / {p99:.2f}"


def _of(part: str, values: Mapping[str, float], form: str) -> str:
    return form.format(values[part]) if part in values else ""


def _cpu(part: str) -> _Figure:
    return f"CPU ms per trial: {part}", lambda it: _of(
        part, {name: 1000 * used / it.work.trials for name, used in it.whole.cpu_seconds.items()}, "{:.0f}"
    )


def _memory(part: str) -> _Figure:
    def shown(it: Found) -> str:
        if part not in it.whole.memory.mib:
            return ""
        return f"{max(it.whole.memory.mib[part]):,.0f} ({it.whole.memory.slope(part):+.1f})"

    return f"MiB of memory at most (its slope in the second half, MiB a minute): {part}", shown


_FIGURES: Sequence[_Figure] = (
    ("s from the first step's end to the last one's", lambda it: f"{it.whole.seconds:.0f}"),
    ("**reports/s**", lambda it: f"**{it.whole.reports / it.whole.seconds:.0f}**"),
    (
        "share of what the sleeping steps allow",
        lambda it: f"{it.whole.reports / it.whole.seconds * it.work.step_seconds / it.work.concurrent:.0%}",
    ),
    ("**s from a report to its decision**, p50 / p99", lambda it: f"**{_percentiles(it.whole.decision_lags)}**"),
    *(
        (f"s between two steps with {what}, p50 / p99", lambda it, what=what: _percentiles(it.whole.waits[what]))
        for what in ("a report", "a decision", "a checkpoint")
    ),
    *map(_cpu, _PARTS),
    *map(_memory, _PARTS),
    ("**after two kills**: trials that completed", lambda it: f"{it.killed.outcome.complete} of {it.lossy.trials}"),
    ("trials whose learning curve has each step once", lambda it: f"{it.killed.outcome.reported}"),
    ("checkpoints, unreadable ones", lambda it: f"{it.killed.outcome.checkpoints}, {it.killed.outcome.unreadable}"),
    ("steps that were trained again", lambda it: f"{it.killed.trained - it.lossy.trials * it.lossy.steps:,}"),
    ("a step was trained at most, times", lambda it: f"{it.killed.most_of_one}"),
    ("s from the search's new start to the next step's end", lambda it: f"{it.killed.seconds_to_resume:.0f}"),
)


@contextmanager
def _servers(environment: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], Mapping[str, CpuGroup]]]:
    """Yield the environment of a search with a Prefect server on PostgreSQL, and the groups of both."""
    with cpu_group() as database, postgres_server(database.inside) as url:
        settings = {**environment, **_BATCHES, "PREFECT_API_DATABASE_CONNECTION_URL": url}
        with prefect_server(sys.executable, settings) as served:
            assert served.server is not None
            yield served.environment, {"Prefect server": served.server, "PostgreSQL": database}


def _searched(cluster: Cluster, works: Sequence[Work], servers: Mapping[str, CpuGroup]) -> Found:
    undisturbed_work, lossy = works
    whole = undisturbed(cluster, undisturbed_work, servers)
    print(cluster.module, whole.seconds, whole.cpu_seconds, whole.outcome, file=sys.stderr, flush=True)
    cluster.end()
    found = Found(undisturbed_work, whole, lossy, disturbed(cluster, lossy))
    print(cluster.module, found.killed, file=sys.stderr, flush=True)
    return found


def _works(asked: argparse.Namespace, room: Path) -> Sequence[Work]:
    """Return the undisturbed search and the disturbed one."""
    made = []
    for name, trials in (("whole", asked.trials), ("killed", asked.killed_trials)):
        folder = room / name
        folder.mkdir(parents=True)
        made.append(Work(trials, asked.concurrent, _STEPS, _STEP_SECONDS, _SAVE_EVERY, str(folder)))
    return made


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter that has ray[tune]")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, default=2000, help="of the undisturbed search")
    parser.add_argument("--killed-trials", type=int, default=320, help="of the search that is killed and resumed")
    parser.add_argument("--concurrent", type=int, default=64, help="trials at a time")
    asked = parser.parse_args()
    if asked.write and not asked.ray:
        parser.error("--write needs --ray")
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        environment = surroundings(room / "prefect")
        with _servers(environment) as (served, servers), dask_cluster(served, room) as cluster:
            found["prefect-tune on Dask"] = _searched(cluster, _works(asked, room / "ours"), servers)
        if asked.ray:
            with ray_cluster(asked.ray, environment, room) as cluster:
                found["Ray Tune"] = _searched(cluster, _works(asked, room / "theirs"), {})
    text = f"{table(['', *found], [[name, *map(shown, found.values())] for name, shown in _FIGURES])}\n\n{_said(asked)}"
    print(text)
    if asked.write:
        write("cluster", text)


def _said(asked: argparse.Namespace) -> str:
    work = (
        f"{asked.concurrent} trials at a time, {asked.trials:,} in all ({asked.killed_trials} in the search that is "
        f"killed), {_STEPS} steps of {_STEP_SECONDS:g} s each, a checkpoint every {_SAVE_EVERY}"
    )
    said = f"{work}. {circumstances('prefect', 'distributed')[:-1]}"
    if not asked.ray:
        return f"{said}."
    return f"{said}, ray {version_in(asked.ray, 'ray')}."


if __name__ == "__main__":
    _main()
