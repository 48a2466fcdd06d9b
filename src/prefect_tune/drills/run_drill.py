"""Run a drill: an undisturbed run, a run that is killed and resumed, and what differs between them.

In a terminal it is seen: a line per run, with its commits, kills and resumes, what the drill does now and how long that
usually takes, and then what was found. Without a terminal, such as in a pipe, what it does is a line when it begins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from prefect.logging import get_logger
from prefect.settings import get_current_settings
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefect_tune.attempt.processes.process_channel import interpreter_flags
from prefect_tune.blocks import StorageTarget, resolve_target, target_reference
from prefect_tune.core.errors import StoreRefused, TuneError
from prefect_tune.core.shown_text import visible_line
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.drills.evidence import (
    Difference,
    DrillRun,
    Place,
    changes_of,
    compare,
    first_of_places,
    kills_in,
    read_records,
    read_run,
    result_places,
    unseeded_generators,
)
from prefect_tune.drills.findings import DrillReport, Runs, report_of
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.probe import RunPlan, Victim
from prefect_tune.prefect_api.local_server import start_prefect_server
from prefect_tune.runtime.load_named import require_not_importing

_log = get_logger("prefect_tune")
_TAIL, _ERROR = 2000, "| ERROR "
_TIMES, _LEAST_LIMIT_SECONDS = 10, 600.0  # of an undisturbed run: a run that takes longer hangs
_RUN_START, _KILL_COST, _IMPORT_TIME, _SERVER_START = "5 to 30 s", "1 to 15 s", "1 to 15 s", "5 to 20 s"
"""Measured on two cores, idle and with eight programs beside: starts of a run and a server, kills, imports."""
# Sums are rounded in an order that depends on the number of threads: one, so that bits can be compared.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_IMPORT = """import os, sys
from pathlib import Path
from prefect_tune.core.errors import TuneError
from prefect_tune.runtime.load_named import load_trainable
from prefect_tune.runtime.trainable import Trainable
trainable, why = sys.argv[1:]
sys.argv[1:] = []
try:
    found = load_trainable(trainable)
    for name in ("save_checkpoint", "load_checkpoint"):
        if getattr(found, name, None) is getattr(Trainable, name):
            raise TuneError(f"trainable {trainable!r}: it has no {name}, so that nothing can be resumed")
except TuneError as error:
    Path(why).write_text(str(error), errors="replace")
    os._exit(1)
os._exit(0)"""
_IMPORT_WITHIN = 600.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Track:
    """What one run has done, as the picture shows it."""

    name: str
    steps: int
    step: int = 0
    committed: Collection[int] = ()
    kills: Sequence[int] = ()
    """After which steps it was killed."""
    resumes: Sequence[int] = ()
    """After which steps it resumed."""
    seconds: float = 0.0


def run_drill(
    plan: DrillPlan,
    target: StorageTarget,
    environment: Mapping[str, str],
    *,
    keep: bool = False,
    tracks: list[Callable[[], Track]] | None = None,
    on_activity: Callable[[str], object] = lambda _: None,
) -> DrillReport:
    """Train undisturbed, and again with kills, and compare; if need be, train a second time undisturbed.

    Args:
        plan: what is trained, and where it is killed.
        target: where the runs store their checkpoints and journals.
        environment: of the processes that train, with the address of a Prefect API.
        keep: whether what the runs have written to the target stays.
        tracks: gets for each run what returns its track so far, for a picture.
        on_activity: gets a line about what begins, and how long it usually takes.

    Raises:
        StoreRefused, StoreUnavailable: the target cannot be used.
        TuneError: a run failed (the message has its last output), or there was nothing to compare.
    """
    if not (checked := target.check()).ok:
        raise StoreRefused(checked.message)
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(temporary_folder()))
        store = at_end.enter_context(target.open(timeout=timedelta(days=1)))
        drill = Drill(plan, target, store, folder, environment, [] if tracks is None else tracks, on_activity)
        if not keep:
            at_end.callback(drill.remove)
        undisturbed, killed = drill.train("undisturbed"), drill.train("killed", plan.kills)
        require_resumed(undisturbed, killed)
        return report_of(plan, drill.name, drill.compared(undisturbed, killed))


def require_resumed(undisturbed: DrillRun, killed: DrillRun) -> None:
    """Raise `TuneError` if no run has resumed from a checkpoint: then the drill would show nothing."""
    if not undisturbed.manifests:
        raise TuneError(
            "the training saved no checkpoint: report one, or implement save_checkpoint and load_checkpoint"
        )
    if not any(each.resumed_from for each in killed.kills):
        steps = ", ".join(str(each.step) for each in killed.kills) or "none"
        raise TuneError(
            f"no resume from a checkpoint to compare: killed after these steps: {steps}; the first checkpoint is of "
            f"step {min(undisturbed.manifests)}. Kill after it (--at), train more --steps, or save more often "
            "(--save-every)"
        )


@dataclass
class Drill:
    """The runs of one drill."""

    plan: DrillPlan
    target: StorageTarget
    store: ObjectStore
    folder: Path
    environment: Mapping[str, str]
    tracks: list[Callable[[], Track]] = field(default_factory=list)
    on_activity: Callable[[str], object] = lambda _: None
    """Gets a line about what begins."""
    first_run_seconds: float | None = None
    """How long the first run took, an undisturbed one; None before its end."""
    most_seconds: float | None = None
    """The time of a run, once an undisturbed one has shown how long it takes."""

    def __post_init__(self) -> None:
        self.name = f"drill-{uuid4().hex[:6]}"
        self._trials: list[TrialKey] = []
        self._changes: Mapping[Place, Mapping[int, object]] | None = None

    def train(self, run: str, kills: tuple[tuple[int, Victim], ...] = ()) -> DrillRun:
        """Train in processes of their own until the last step, as a script that is started again after each kill."""
        slug = run.replace(" ", "-")
        trial = TrialKey(experiment=f"{self.name}-{slug}", generation=1, trial="trial")
        (folder := self.folder / slug).mkdir()
        plan = RunPlan(self.plan.trainable, str(folder), kills)
        self._trials.append(trial)
        self.on_activity(f"run {len(self._trials)}, {run}: {self.expectation_of(kills)}")
        began, code = time.monotonic(), 0
        self.tracks.append(lambda: self._track(run, trial, plan, time.monotonic() - began))
        try:
            for _ in range(1 + len(kills)):
                if (code := self._process(plan, trial, folder / "output.log")) != -signal.SIGKILL:
                    break
        finally:
            last = self.tracks[-1]()
            self.tracks[-1] = lambda: last
        if code:
            said = last_output(folder / "output.log")
            raise TuneError(f"run {run!r} of the drill ended with exit code {code}; its last output:\n{said}")
        self.first_run_seconds = self.first_run_seconds or time.monotonic() - began
        self.most_seconds = self.most_seconds or max(_LEAST_LIMIT_SECONDS, _TIMES * self.first_run_seconds)
        return read_run(self.store, trial, plan)

    def expectation_of(self, kills: Sequence[tuple[int, Victim]]) -> str:
        """Return what a run trains and how long it takes, by the first one as soon as that has ended."""
        if self.first_run_seconds is None:
            return f"{self.plan.steps} steps, usually {_RUN_START} besides the training"
        again = f"{self.plan.steps} steps again, which took {self.first_run_seconds:.0f} s in run 1"
        if not kills:
            return f"{again}; it shows what differs without a kill"
        steps = ", ".join(str(step) for step, _ in kills)
        return f"{again}; a kill after step {steps} usually adds {_KILL_COST} each"

    def compared(self, undisturbed: DrillRun, killed: DrillRun) -> Runs:
        """Return what differs, and what of it differs without a kill.

        Before its first kill the second run is undisturbed too. Only if that does not explain what differs, a third
        run is made.
        """
        self.on_activity("comparing both runs: all metrics, and all checkpoints, which are read from the target")
        differences = compare(self.store, undisturbed, killed)
        before_kills = killed.undisturbed_steps
        # What is absent may have been there before the kill.
        unstable: Sequence[Difference] = [
            each for each in differences if each.step <= before_kills and not each.is_absence
        ]
        runs = self._compared_runs(undisturbed, killed, None, differences, unstable)
        if len(unstable) == len(differences) or any(each.place in runs.changing for each in unstable):
            return runs
        again = self.train("undisturbed again")
        unstable = first_of_places([*compare(self.store, undisturbed, again), *unstable])
        return self._compared_runs(undisturbed, killed, again, differences, unstable)

    def _compared_runs(
        self,
        undisturbed: DrillRun,
        killed: DrillRun,
        again: DrillRun | None,
        differences: Sequence[Difference],
        unstable: Sequence[Difference],
    ) -> Runs:
        generators = unseeded_generators(undisturbed, (killed, again))
        changing: Collection[Place] = ()
        if unstable or generators:
            if self._changes is None:  # it reads every checkpoint once more
                self._changes = changes_of(self.store, undisturbed)
            changing = result_places(self._changes, unstable, undisturbed, generators)
        return Runs(undisturbed, killed, again, differences, unstable, changing, generators)

    def _process(self, plan: RunPlan, trial: TrialKey, log: Path) -> int:
        options = {
            "target": target_reference(self.target),
            "experiment": trial.experiment,
            "config": dict(self.plan.config),
            "steps": self.plan.steps,
            "save_every": self.plan.save_every,
            "processes": self.plan.processes,
        }
        with (
            log.open("ab") as output,
            subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-m", "prefect_tune.drills.training", json.dumps(options)],
                stdin=subprocess.PIPE,  # its end is the end of this process
                stdout=output,
                stderr=output,
                env={**self.environment, **_ONE_THREAD, **plan.in_environment()},
                start_new_session=True,
            ) as process,
        ):
            try:
                return process.wait(self.most_seconds)
            except subprocess.TimeoutExpired:
                raise TuneError(
                    f"{trial.experiment} did not end within {self.most_seconds:.0f} s, {_TIMES} times as long as the "
                    f"undisturbed run took; its last output:\n{last_output(log)}"
                ) from None
            finally:
                process.kill()

    def _track(self, run: str, trial: TrialKey, plan: RunPlan, seconds: float) -> Track:
        """Return what a run has done so far."""
        records = list(read_records(plan.records))
        kills, committed = list(kills_in(plan, records)), set[int]()
        with suppress(TuneError):
            keys = (CheckpointKey.from_manifest_path(trial, file.path) for file in self.store.list(trial.folder))
            committed = {key.step for key in keys if key}
        return Track(
            run,
            self.plan.steps,
            step=max((record.step for record in records), default=0),
            committed=committed,
            kills=[kill.step for kill in kills],
            resumes=[kill.resumed_from for kill in kills],
            seconds=seconds,
        )

    def remove(self) -> None:
        """Remove what the runs have written: nothing else has their names."""
        for trial in self._trials:
            try:
                self.store.delete([each.path for each in self.store.list(trial.experiment)])
            except TuneError as error:
                _log.warning("experiment %s of the drill is still on the target: %s", trial.experiment, error)


def last_output(log: Path) -> str:
    """Return the end of the output without the codes of colors; if it is long, from the first error in its end on."""
    said = _ESCAPES.sub("", log.read_text(errors="replace")).rstrip()
    if len(said) <= _TAIL:
        return said
    end = said[-_TAIL:]
    return end[end.rfind("\n", 0, place) + 1 :] if (place := end.find(_ERROR)) > 0 else f"…{end}"


def require_importable(trainable: str) -> None:
    """Import the trainable in a process of its own, before anything that takes longer is started for it.

    Raises:
        InvalidInput: the import of a trainable's module calls this.
        TuneError: it cannot be imported, is no trainable, or is a class that saves or loads nothing.
    """
    require_not_importing("drill")
    with temporary_folder() as folder:
        why, log = Path(folder, "why"), Path(folder, "output.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", _IMPORT, trainable, str(why)],
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(_IMPORT_WITHIN)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError, PermissionError):  # it has ended; the second: on macOS
                    os.killpg(process.pid, signal.SIGKILL)  # with it what the module has started
                process.wait()
        if code == 0:
            return
        if why.exists():
            raise TuneError(why.read_text())
        ended = f"did not end within {_IMPORT_WITHIN:.0f} s" if code is None else f"ended its process with {code}"
        raise TuneError(f"trainable {trainable!r}: its import {ended}; its last output:\n{last_output(log)}")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder of a drill, which is removed at its end, or at that of the process if a signal comes first."""
    return tempfile.TemporaryDirectory(prefix="prefect-tune-drill-", ignore_cleanup_errors=True)


def environment_with_api() -> dict[str, str]:
    """Return the environment of the runs of a drill within a flow run: with the address of its API."""
    url = get_current_settings().api.url
    return {**os.environ, **({"PREFECT_API_URL": url} if url else {})}


@contextmanager
def api_of_drill(on_activity: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, str]]:
    """Yield the environment of the runs of a drill: with the configured API, or a server that ends with the drill.

    Raises:
        TuneError: the server did not start.
    """
    if get_current_settings().api.url:
        yield environment_with_api()
        return
    spared = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    own = {name: each for name, each in os.environ.items() if not name.startswith("PREFECT_")}
    with temporary_folder() as folder:
        own |= {"PREFECT_HOME": folder, "DO_NOT_TRACK": "1", "NO_PROXY": spared, "no_proxy": spared}
        on_activity(f"starting a Prefect server for the drill: usually {_SERVER_START}")
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            server = start_prefect_server(own, output, "few")
        try:
            if not server.answers():
                raise TuneError(f"the drill's Prefect server did not start; its last output:\n{last_output(log)}")
            yield {**own, "PREFECT_API_URL": server.url}
        finally:
            server.end()


# A drill in a terminal.

_CELLS = 24
_LEGEND = {
    "●": "[green]●[/] committed",
    "✗": "[bold red]✗[/] SIGKILL",
    "↻": "[bold yellow]↻[/] resumed after this step",
}


def drill_in_terminal(plan: DrillPlan, place: str | None, console: Console, *, keep: bool) -> DrillReport:
    """Run a drill, show its runs as they go, and print what it found.

    Args:
        plan: what is trained, and where it is killed.
        place: of the target; None for a temporary folder.
        console: gets the picture and the lines.
        keep: whether what the runs have written stays.

    Raises as `run_drill`.
    """
    of_what = f" of {visible_line(plan.trainable)}, {plan.steps} steps\n"
    console.print(Text.assemble("\n  ", ("prefect-tune drill", "bold"), of_what), soft_wrap=True)
    progress = DrillProgress(console)
    with ExitStack() as at_end:
        try:
            with Live(get_renderable=progress.render, console=console):
                progress.begin(f"importing {visible_line(plan.trainable)}: usually {_IMPORT_TIME}")
                require_importable(plan.trainable)
                if place is None and keep:
                    place = tempfile.mkdtemp(prefix="prefect-tune-drill-")
                elif place is None:
                    place = at_end.enter_context(temporary_folder())
                environment, tracks = at_end.enter_context(api_of_drill(progress.begin)), progress.tracks
                target = resolve_target(place)
                report = run_drill(plan, target, environment, keep=keep, tracks=tracks, on_activity=progress.begin)
                progress.end()
        finally:
            console.print("" if console.is_terminal else "\n")
    console.print(f"  {legend_of([track() for track in progress.tracks])}\n")
    print_report(report, console)
    if keep:
        kept = f"  kept on {place}: experiments {report.name}-undisturbed and {report.name}-killed"
        console.print(Text(kept, "dim"), soft_wrap=True)
    return report


class DrillProgress:
    """What a drill does now: in a terminal the last line of its picture, elsewhere a line that is printed at once."""

    def __init__(self, console: Console) -> None:
        self.tracks: list[Callable[[], Track]] = []
        self._console = console
        self._activity, self._since = "", time.monotonic()

    def begin(self, activity: str) -> None:
        """Show what begins."""
        self._activity, self._since = activity, time.monotonic()
        if not self._console.is_terminal:
            self._console.print(Text(f"  {activity}"), soft_wrap=True)

    def end(self) -> None:
        """Show only the runs from now on."""
        self._activity = ""

    def render(self) -> RenderableType:
        """Return the runs, and in a terminal what the drill does, with the seconds that it has taken so far."""
        picture = picture_of([track() for track in self.tracks])
        if not self._activity or not self._console.is_terminal:
            return picture
        so_far = f"  {self._activity} ({time.monotonic() - self._since:.0f} s so far)"
        activity = Text(so_far, "dim")
        return Group(picture, "", activity) if self.tracks else activity


def print_report(report: DrillReport, console: Console) -> None:
    """Print the lines of the report."""
    mark = Text("  ✓ ", "bold green") if report.is_exact else Text("  ✗ ", "bold red")
    for number, line in enumerate(map(visible_line, report.lines())):
        console.print(Text(f"    {line.strip()}") if number else mark + Text(line), soft_wrap=True)


def picture_of(tracks: Sequence[Track]) -> Table:
    """Return the tracks, one below the other."""
    table = Table.grid(padding=(0, 2))
    for number, each in enumerate(tracks, 1):
        step, seconds = f"step {each.step}" if each.step else "", f"{each.seconds:.1f} s"
        table.add_row(f"  {number} {each.name}", cells_of(each, _CELLS), step, seconds)
    return table


def legend_of(tracks: Sequence[Track]) -> str:
    """Return what the marks in the picture mean; of a mark that it does not have, nothing."""
    drawn = "".join(cells_of(each, _CELLS).plain for each in tracks)
    return "   ".join(words for mark, words in _LEGEND.items() if mark in drawn)


def cells_of(track: Track, width: int) -> Text:
    """Return the run as `width` cells: steps trained, checkpoints committed, kills, resumes."""
    last = [max(0, -(-step * width // track.steps) - 1) for step in range(track.steps + 1)]
    marks = [("━", "cyan") if track.step and cell <= last[track.step] else ("·", "dim") for cell in range(width)]
    after = 1 if width >= 2 * track.steps else 0  # a kill is after its step, and hides no commit where there is room
    for steps, mark, offset in (
        (track.committed, ("●", "green"), 0),
        (track.resumes, ("↻", "bold yellow"), 0),
        (track.kills, ("✗", "bold red"), after),
    ):
        for step in steps:
            marks[min(last[min(step, track.steps)] + offset, width - 1)] = mark
    return Text.assemble(*marks)
