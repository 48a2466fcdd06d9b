"""Run a drill: an undisturbed run, a run with kills and resumes, and their comparison.

A terminal shows one line per run, with its commits, kills and resumes, and one line with the current activity and its
usual duration. The report follows. If the output is not a terminal, a line is printed when each activity begins.
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

from prefect_tune.attempt.processes.process_channel import get_interpreter_flags
from prefect_tune.blocks import StorageTarget, resolve_target, target_reference
from prefect_tune.core.display_text import make_visible_line
from prefect_tune.core.errors import StoreRefused, TuneError
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.drills.evidence import (
    Difference,
    DrillRun,
    ValueLocation,
    compare_runs,
    find_changing_values,
    find_kills,
    find_result_locations,
    find_unseeded_generators,
    read_records,
    read_run,
    select_first_differences,
)
from prefect_tune.drills.findings import DrillReport, RunComparison, make_drill_report
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.probe import RunPlan, Victim
from prefect_tune.prefect_api.local_server import start_prefect_server
from prefect_tune.runtime.load_named import require_not_importing

_log = get_logger("prefect_tune")
_MAX_OUTPUT_CHARACTERS, _ERROR_MARK = 2000, "| ERROR "
_TIMEOUT_FACTOR, _MIN_TIMEOUT_SECONDS = 10, 600.0  # a run that takes 10 times as long as run 1 counts as hung
_RUN_START_TIME, _KILL_TIME, _IMPORT_TIME, _SERVER_START_TIME = "5 to 30 s", "1 to 15 s", "1 to 15 s", "5 to 20 s"
"""The usual durations on two cores: the shortest if no other program runs, the longest if eight other programs run."""
# The number of threads changes the order of additions, and so the rounding. With one thread, results match bit by bit.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_IMPORT_SCRIPT = """import os, sys
from pathlib import Path
from prefect_tune.core.errors import TuneError
from prefect_tune.runtime.load_named import load_trainable
from prefect_tune.runtime.trainable import Trainable
trainable, error_file = sys.argv[1:]
sys.argv[1:] = []
try:
    loaded = load_trainable(trainable)
    for name in ("save_checkpoint", "load_checkpoint"):
        if getattr(loaded, name, None) is getattr(Trainable, name):
            raise TuneError(f"trainable {trainable!r}: it has no {name}, so it cannot resume")
except TuneError as error:
    Path(error_file).write_text(str(error), errors="replace")
    os._exit(1)
os._exit(0)"""
_IMPORT_TIMEOUT = 600.0
_COLOR_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class RunProgress:
    """The progress of one run, for display."""

    name: str
    steps: int
    step: int = 0
    committed: Collection[int] = ()
    """The steps with a committed checkpoint."""
    kills: Sequence[int] = ()
    """The steps after which the run was killed."""
    resumes: Sequence[int] = ()
    """The steps from which the run resumed."""
    seconds: float = 0.0


def run_drill(
    plan: DrillPlan,
    target: StorageTarget,
    environment: Mapping[str, str],
    *,
    keep: bool = False,
    progress_readers: list[Callable[[], RunProgress]] | None = None,
    on_activity: Callable[[str], object] = lambda _: None,
) -> DrillReport:
    """Train undisturbed, then again with kills, and compare; if needed, train undisturbed a second time.

    Args:
        plan: the trainable, and the kills.
        target: where the runs store their checkpoints and journals.
        environment: the environment of the training processes, with the address of a Prefect API.
        keep: whether to keep the experiments of the runs.
        progress_readers: the drill appends one function per run, which returns the progress of that run.
        on_activity: called when an activity begins, with a line that describes the activity and its usual duration.

    Raises:
        StoreRefused, StoreUnavailable: the target cannot be used.
        TuneError: a run failed (the message has its last output), or there was nothing to compare.
    """
    if not (checked := target.check()).ok:
        raise StoreRefused(checked.message)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(temporary_folder()))
        store = stack.enter_context(target.open(timeout=timedelta(days=1)))
        readers = [] if progress_readers is None else progress_readers
        drill = Drill(plan, target, store, folder, environment, readers, on_activity)
        if not keep:
            stack.callback(drill.delete_experiments)
        undisturbed, killed = drill.train_run("undisturbed"), drill.train_run("killed", plan.kills)
        require_resume_from_checkpoint(undisturbed, killed)
        return make_drill_report(plan, drill.name, drill.compare(undisturbed, killed))


def require_resume_from_checkpoint(undisturbed: DrillRun, killed: DrillRun) -> None:
    """Raise `TuneError` if the killed run never resumed from a checkpoint, since the drill then proves nothing."""
    if not undisturbed.manifests:
        raise TuneError("no saved checkpoint: report a checkpoint, or implement save_checkpoint and load_checkpoint")
    if not any(kill.resumed_from for kill in killed.kills):
        steps = ", ".join(str(kill.step) for kill in killed.kills) or "none"
        raise TuneError(
            f"no attempt resumed from a checkpoint: killed after steps {steps}; the first checkpoint is at step "
            f"{min(undisturbed.manifests)}. Kill later (--at), train more --steps, or save more often (--save-every)"
        )


@dataclass
class Drill:
    """The runs of one drill; see `run_drill`."""

    plan: DrillPlan
    target: StorageTarget
    store: ObjectStore
    folder: Path
    environment: Mapping[str, str]
    progress_readers: list[Callable[[], RunProgress]] = field(default_factory=list)
    on_activity: Callable[[str], object] = lambda _: None
    first_run_seconds: float | None = None
    """The duration of the first run; None before its end."""
    run_timeout_seconds: float | None = None
    """The timeout of later runs; None before the end of the first run."""

    def __post_init__(self) -> None:
        self.name = f"drill-{uuid4().hex[:6]}"
        self._trials: list[TrialKey] = []
        self._changes: Mapping[ValueLocation, Mapping[int, object]] | None = None

    def train_run(self, run: str, kills: tuple[tuple[int, Victim], ...] = ()) -> DrillRun:
        """Train until the last step; after each kill, start a new process."""
        slug = run.replace(" ", "-")
        trial = TrialKey(experiment=f"{self.name}-{slug}", generation=1, trial="trial")
        (run_folder := self.folder / slug).mkdir()
        plan = RunPlan(self.plan.trainable, str(run_folder), kills)
        self._trials.append(trial)
        self.on_activity(f"run {len(self._trials)}, {run}: {self.describe_run(kills)}")
        began, code = time.monotonic(), 0
        self.progress_readers.append(lambda: self._read_progress(run, trial, plan, time.monotonic() - began))
        try:
            for _ in range(1 + len(kills)):
                if (code := self._run_process(plan, trial, run_folder / "output.log")) != -signal.SIGKILL:
                    break
        finally:
            final_progress = self.progress_readers[-1]()
            self.progress_readers[-1] = lambda: final_progress
        if code:
            output = read_output_tail(run_folder / "output.log")
            raise TuneError(f"run {run!r} of the drill ended with exit code {code}; its last output:\n{output}")
        self.first_run_seconds = self.first_run_seconds or time.monotonic() - began
        timeout = max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_FACTOR * self.first_run_seconds)
        self.run_timeout_seconds = self.run_timeout_seconds or timeout
        return read_run(self.store, trial, plan)

    def describe_run(self, kills: Sequence[tuple[int, Victim]]) -> str:
        """Describe a run: its steps, and its usual duration or, once run 1 has ended, the duration of run 1."""
        if self.first_run_seconds is None:
            return f"{self.plan.steps} steps, usually {_RUN_START_TIME} besides the training"
        summary = f"{self.plan.steps} steps again, which took {self.first_run_seconds:.0f} s in run 1"
        if not kills:
            return f"{summary}; this run shows which values differ without a kill"
        steps = ", ".join(str(step) for step, _ in kills)
        return f"{summary}; each kill (after step {steps}) usually adds {_KILL_TIME}"

    def compare(self, undisturbed: DrillRun, killed: DrillRun) -> RunComparison:
        """Return the differences between the runs, and the differences that occur even without a kill.

        The killed run, too, is undisturbed before its first kill. If the differences in that part do not explain the
        later differences, this method trains a third run, which is undisturbed.
        """
        self.on_activity("comparing both runs: reading all metrics, and all checkpoints from the target")
        differences = compare_runs(self.store, undisturbed, killed)
        early = [diff for diff in differences if diff.step <= killed.undisturbed_steps]
        # A missing value is no difference that occurs without a kill: the run may have had the value until the kill.
        unstable: Sequence[Difference] = [diff for diff in early if not diff.is_missing_in_one_run]
        runs = self._make_comparison(undisturbed, killed, None, differences, unstable)
        if len(unstable) == len(differences) or any(diff.location in runs.result_locations for diff in unstable):
            return runs
        again = self.train_run("undisturbed again")
        unstable = select_first_differences([*compare_runs(self.store, undisturbed, again), *unstable])
        return self._make_comparison(undisturbed, killed, again, differences, unstable)

    def _make_comparison(
        self,
        undisturbed: DrillRun,
        killed: DrillRun,
        again: DrillRun | None,
        differences: Sequence[Difference],
        unstable: Sequence[Difference],
    ) -> RunComparison:
        generators = find_unseeded_generators(undisturbed, (killed, again))
        changing: Collection[ValueLocation] = ()
        if unstable or generators:
            if self._changes is None:  # compute this once, since it reads all checkpoints
                self._changes = find_changing_values(self.store, undisturbed)
            changing = find_result_locations(self._changes, unstable, undisturbed, generators)
        return RunComparison(undisturbed, killed, again, differences, unstable, changing, generators)

    def _run_process(self, plan: RunPlan, trial: TrialKey, log: Path) -> int:
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
                [sys.executable, *get_interpreter_flags(), "-m", "prefect_tune.drills.training", json.dumps(options)],
                stdin=subprocess.PIPE,  # at the end of this process, the run reads EOF and ends, too
                stdout=output,
                stderr=output,
                env={**self.environment, **_ONE_THREAD, **plan.to_environment()},
                start_new_session=True,
            ) as process,
        ):
            try:
                return process.wait(self.run_timeout_seconds)
            except subprocess.TimeoutExpired:
                raise TuneError(
                    f"{trial.experiment} did not end within {self.run_timeout_seconds:.0f} s, at least "
                    f"{_TIMEOUT_FACTOR} times the undisturbed run's time; its last output:\n{read_output_tail(log)}"
                ) from None
            finally:
                process.kill()

    def _read_progress(self, run: str, trial: TrialKey, plan: RunPlan, seconds: float) -> RunProgress:
        records = list(read_records(plan.records_path))
        kills, committed = list(find_kills(plan, records)), set[int]()
        with suppress(TuneError):
            keys = (CheckpointKey.from_manifest_path(trial, file.path) for file in self.store.list(trial.folder))
            committed = {key.step for key in keys if key}
        return RunProgress(
            run,
            self.plan.steps,
            step=max((record.step for record in records), default=0),
            committed=committed,
            kills=[kill.step for kill in kills],
            resumes=[kill.resumed_from for kill in kills],
            seconds=seconds,
        )

    def delete_experiments(self) -> None:
        """Delete all objects whose paths begin with a run's experiment name; only this drill has such objects."""
        for trial in self._trials:
            try:
                self.store.delete([listed.path for listed in self.store.list(trial.experiment)])
            except TuneError as error:
                _log.warning("experiment %s of the drill is still on the target: %s", trial.experiment, error)


def read_output_tail(log: Path) -> str:
    """Return the output without color codes; if it is long, return only its end, from the first error in that end."""
    output = _COLOR_CODES.sub("", log.read_text(errors="replace")).rstrip()
    if len(output) <= _MAX_OUTPUT_CHARACTERS:
        return output
    tail = output[-_MAX_OUTPUT_CHARACTERS:]
    return tail[tail.rfind("\n", 0, position) + 1 :] if (position := tail.find(_ERROR_MARK)) > 0 else f"…{tail}"


def require_drillable(trainable: str) -> None:
    """Check a trainable by an import in a separate process, before anything slower starts.

    Raises:
        InvalidInput: this function was called during the import of a trainable's module.
        TuneError: the object cannot be imported, is not a trainable, or is a class that cannot save and load.
    """
    require_not_importing("drill")
    with temporary_folder() as folder:
        error_file, log = Path(folder, "error"), Path(folder, "output.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *get_interpreter_flags(), "-c", _IMPORT_SCRIPT, trainable, str(error_file)],
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(_IMPORT_TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter if the group has ended
                    os.killpg(process.pid, signal.SIGKILL)  # this also kills processes that the module started
                process.wait()
        if code == 0:
            return
        if error_file.exists():
            raise TuneError(error_file.read_text())
        problem = f"did not end within {_IMPORT_TIMEOUT:.0f} s" if code is None else f"exited with code {code}"
        raise TuneError(f"trainable {trainable!r}: its import {problem}; its last output:\n{read_output_tail(log)}")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder, which is removed at the end of its `with` block, also if Ctrl-C ends the block."""
    return tempfile.TemporaryDirectory(prefix="prefect-tune-drill-", ignore_cleanup_errors=True)


def make_run_environment() -> dict[str, str]:
    """Return the environment for a drill's runs in a flow run, with the address of the flow run's Prefect API."""
    url = get_current_settings().api.url
    return {**os.environ, **({"PREFECT_API_URL": url} if url else {})}


@contextmanager
def prefect_api_environment(on_activity: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, str]]:
    """Yield the environment for a drill's runs, with the address of the configured API or of a temporary server.

    Raises:
        TuneError: the server did not start.
    """
    if get_current_settings().api.url:
        yield make_run_environment()
        return
    no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with temporary_folder() as folder:
        environment |= {"PREFECT_HOME": folder, "DO_NOT_TRACK": "1", "NO_PROXY": no_proxy, "no_proxy": no_proxy}
        on_activity(f"starting a Prefect server for the drill: usually {_SERVER_START_TIME}")
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            server = start_prefect_server(environment, output, "few")
        try:
            if not server.wait_until_healthy():
                raise TuneError(f"the drill's Prefect server did not start; its last output:\n{read_output_tail(log)}")
            yield {**environment, "PREFECT_API_URL": server.url}
        finally:
            server.terminate()


# A drill in a terminal.

_CELL_COUNT = 24
_LEGEND = {
    "●": "[green]●[/] committed",
    "✗": "[bold red]✗[/] SIGKILL",
    "↻": "[bold yellow]↻[/] resumed after this step",
}


def run_drill_in_terminal(plan: DrillPlan, location: str | None, console: Console, *, keep: bool) -> DrillReport:
    """Run a drill, show the progress of its runs, and print the report; see `run_drill`.

    `location` is the location of the target; None for a temporary folder.
    """
    title = f" of {make_visible_line(plan.trainable)}, {plan.steps} steps\n"
    console.print(Text.assemble("\n  ", ("prefect-tune drill", "bold"), title), soft_wrap=True)
    progress = DrillProgress(console)
    with ExitStack() as stack:
        try:
            with Live(get_renderable=progress.render, console=console):
                show = progress.show_activity
                show(f"importing {make_visible_line(plan.trainable)}: usually {_IMPORT_TIME}")
                require_drillable(plan.trainable)
                if location is None and keep:
                    location = tempfile.mkdtemp(prefix="prefect-tune-drill-")
                elif location is None:
                    location = stack.enter_context(temporary_folder())
                environment = stack.enter_context(prefect_api_environment(show))
                target, readers = resolve_target(location), progress.readers
                report = run_drill(plan, target, environment, keep=keep, progress_readers=readers, on_activity=show)
                progress.clear_activity()
        finally:
            console.print("" if console.is_terminal else "\n")
    console.print(f"  {format_legend([read() for read in progress.readers])}\n")
    print_report(report, console)
    if keep:
        message = f"  kept on {location}: experiments {report.name}-undisturbed and {report.name}-killed"
        console.print(Text(message, "dim"), soft_wrap=True)
    return report


class DrillProgress:
    """Shows the activity of a drill: in a terminal as the last line of the display, otherwise as a printed line."""

    def __init__(self, console: Console) -> None:
        self.readers: list[Callable[[], RunProgress]] = []
        self._console = console
        self._activity, self._since = "", time.monotonic()

    def show_activity(self, activity: str) -> None:
        self._activity, self._since = activity, time.monotonic()
        if not self._console.is_terminal:
            self._console.print(Text(f"  {activity}"), soft_wrap=True)

    def clear_activity(self) -> None:
        self._activity = ""

    def render(self) -> RenderableType:
        """Return the runs; in a terminal, also the current activity with its elapsed seconds."""
        picture = render_runs([read() for read in self.readers])
        if not self._activity or not self._console.is_terminal:
            return picture
        activity = Text(f"  {self._activity} ({time.monotonic() - self._since:.0f} s so far)", "dim")
        return Group(picture, "", activity) if self.readers else activity


def print_report(report: DrillReport, console: Console) -> None:
    """Print the report. A mark before its first line shows the verdict."""
    mark = Text("  ✓ ", "bold green") if report.is_exact else Text("  ✗ ", "bold red")
    for number, line in enumerate(map(make_visible_line, report.lines())):
        console.print(Text(f"    {line.strip()}") if number else mark + Text(line), soft_wrap=True)


def render_runs(runs: Sequence[RunProgress]) -> Table:
    """Return a table with one row per run, which shows the progress of the run."""
    table = Table.grid(padding=(0, 2))
    for number, run in enumerate(runs, 1):
        step, seconds = f"step {run.step}" if run.step else "", f"{run.seconds:.1f} s"
        table.add_row(f"  {number} {run.name}", render_cells(run, _CELL_COUNT), step, seconds)
    return table


def format_legend(runs: Sequence[RunProgress]) -> str:
    """Return the meaning of the marks that occur in these runs."""
    drawn = "".join(render_cells(run, _CELL_COUNT).plain for run in runs)
    return "   ".join(meaning for mark, meaning in _LEGEND.items() if mark in drawn)


def render_cells(run: RunProgress, width: int) -> Text:
    """Return a bar of `width` cells, which marks trained steps, committed checkpoints, kills and resumes."""
    last = [max(0, -(-step * width // run.steps) - 1) for step in range(run.steps + 1)]
    marks = [("━", "cyan") if run.step and cell <= last[run.step] else ("·", "dim") for cell in range(width)]
    after = 1 if width >= 2 * run.steps else 0  # so that the mark of a kill does not hide the commit
    for steps, mark, offset in (
        (run.committed, ("●", "green"), 0),
        (run.resumes, ("↻", "bold yellow"), 0),
        (run.kills, ("✗", "bold red"), after),
    ):
        for step in steps:
            marks[min(last[min(step, run.steps)] + offset, width - 1)] = mark
    return Text.assemble(*marks)
