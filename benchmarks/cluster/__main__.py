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
from benchmarks.cluster.measure import Measurement, Recovery, measure_recovery, measure_search
from benchmarks.cluster.work import Work
from benchmarks.measuring.cpu_group import CpuGroup, cpu_group
from benchmarks.measuring.tables import describe_setup, format_table, publish_section, version_in
from benchmarks.throughput import make_environment, prefect_server
from prefect_tune.prefect_api.flow_with_server import LIGHT_SERVER_SETTINGS
from tests.fakes.servers.postgres_server import postgres_server

_STEPS, _STEP_SECONDS, _SAVE_INTERVAL = 10, 0.5, 5
_PARTS = ("driver", "Dask scheduler", "workers", "Prefect server", "PostgreSQL")
_BATCHES = {name: value for name, value in LIGHT_SERVER_SETTINGS.items() if "TASK_RUN_RECORDER" in name}


@dataclass(frozen=True)
class PeerResult:
    """Both searches of one peer."""

    work: Work
    whole: Measurement
    lossy: Work
    killed: Recovery


_Figure = tuple[str, Callable[[PeerResult], str]]


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
    def show(it: PeerResult) -> str:
        if part not in it.whole.memory.mib:
            return ""
        return f"{max(it.whole.memory.mib[part]):,.0f} ({it.whole.memory.slope(part):+.1f})"

    return f"MiB of memory at most (its slope in the second half, MiB a minute): {part}", show


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
    ("a step was trained at most, times", lambda it: f"{it.killed.max_repeats}"),
    ("s from the search's new start to the next step's end", lambda it: f"{it.killed.seconds_to_resume:.0f}"),
)


@contextmanager
def _servers(environment: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], Mapping[str, CpuGroup]]]:
    """Yield the environment of a search with a Prefect server on PostgreSQL, and the groups of both."""
    with cpu_group() as database, postgres_server(database.inside) as url:
        settings = {**environment, **_BATCHES, "PREFECT_API_DATABASE_CONNECTION_URL": url}
        with prefect_server(sys.executable, settings) as server:
            assert server.server is not None
            yield server.environment, {"Prefect server": server.server, "PostgreSQL": database}


def _measure_peer(cluster: Cluster, works: Sequence[Work], servers: Mapping[str, CpuGroup]) -> PeerResult:
    work, lossy = works
    whole = measure_search(cluster, work, servers)
    print(cluster.module, whole.seconds, whole.cpu_seconds, whole.outcome, file=sys.stderr, flush=True)
    cluster.end()
    result = PeerResult(work, whole, lossy, measure_recovery(cluster, lossy))
    print(cluster.module, result.killed, file=sys.stderr, flush=True)
    return result


def _works(args: argparse.Namespace, parent: Path) -> Sequence[Work]:
    """Return the undisturbed search and the disturbed one."""
    works = []
    for name, trials in (("whole", args.trials), ("killed", args.killed_trials)):
        folder = parent / name
        folder.mkdir(parents=True)
        works.append(Work(trials, args.concurrent, _STEPS, _STEP_SECONDS, _SAVE_INTERVAL, str(folder)))
    return works


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter that has ray[tune]")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--trials", type=int, default=2000, help="of the undisturbed search")
    parser.add_argument("--killed-trials", type=int, default=320, help="of the search that is killed and resumed")
    parser.add_argument("--concurrent", type=int, default=64, help="trials at a time")
    args = parser.parse_args()
    if args.write and not args.ray:
        parser.error("--write needs --ray")
    results: dict[str, PeerResult] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        environment = make_environment(folder / "prefect")
        with _servers(environment) as (settings, servers), dask_cluster(settings, folder) as cluster:
            results["prefect-tune on Dask"] = _measure_peer(cluster, _works(args, folder / "ours"), servers)
        if args.ray:
            with ray_cluster(args.ray, environment, folder) as cluster:
                results["Ray Tune"] = _measure_peer(cluster, _works(args, folder / "theirs"), {})
    rows = [[name, *map(show, results.values())] for name, show in _FIGURES]
    text = f"{format_table(['', *results], rows)}\n\n{_describe_work(args)}"
    publish_section("cluster", text, write=args.write)


def _describe_work(args: argparse.Namespace) -> str:
    work = (
        f"{args.concurrent} trials at a time, {args.trials:,} in all ({args.killed_trials} in the search that is "
        f"killed), {_STEPS} steps of {_STEP_SECONDS:g} s each, a checkpoint every {_SAVE_INTERVAL}"
    )
    text = f"{work}. {describe_setup('prefect', 'distributed')[:-1]}"
    if not args.ray:
        return f"{text}."
    return f"{text}, ray {version_in(args.ray, 'ray')}."


if __name__ == "__main__":
    _main()
