"""Run the demo: an undisturbed run, a run that is killed in the middle of an upload, and its resume.

What it claims is measured on the target alone: listings, journals, manifests, and the bytes of the last checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefect_tune.core.errors import InvalidInput, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events import Started
from prefect_tune.core.models import shown_size
from prefect_tune.core.recovery import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.prefect_api.local_server import start_prefect_server
from prefect_tune.stores.local.download import fetch_committed

_KILLS, _CELLS = 3, 24
_LEGEND = "[green]●[/] committed   [bold red]✗[/] SIGKILL   [bold yellow]↻[/] resumed here"
_STEP = re.compile(r"\bstep (\d+): accuracy (\S+)")
# Sums are rounded in an order that depends on the number of threads: one, so that bits can be compared.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class Track:
    """What one run has done, as the picture shows it."""

    name: str
    steps: int
    step: int = 0
    committed: frozenset[int] = frozenset()
    resumed_at: int = 0
    killed_at: int | None = None
    seconds: float = 0.0
    outcome: str = ""

    def cells(self, width: int) -> Text:
        """Return the run as `width` cells: steps trained, checkpoints committed, the kill, the way back."""
        last = {step: -(-step * width // self.steps) - 1 for step in range(self.steps + 1)}
        start, end = last[self.resumed_at], last[self.step]
        marks = [("━", "cyan") if start < cell <= end else ("·", "dim") for cell in range(width)]
        for step in (each for each in self.committed if each > self.resumed_at):
            marks[last[step]] = ("●", "green")
        if self.resumed_at:
            marks[: start + 1] = [(" ", "")] * start + [("↻", "bold yellow")]
        if self.killed_at is not None:
            marks[last[self.killed_at] :] = [("✗", "bold red")] + [(" ", "")] * (width - last[self.killed_at] - 1)
        return Text.assemble(*marks)


class Findings(NamedTuple):
    """What was measured after SIGKILL, and after the runs: steps, blobs with sizes, files with their SHA-256."""

    hit_step: int  # whose checkpoint was being uploaded
    trained_until: int
    newest_step: int  # committed by then
    arrived: Mapping[str, int]  # of that upload
    whole: Mapping[str, int]  # that checkpoint, once the resumed run had committed it
    resumed_at: int
    undisturbed: Mapping[str, str]
    resumed: Mapping[str, str]

    def claims(self) -> Iterator[tuple[bool, str, str]]:
        """Yield each claim: whether it holds, its text, and the evidence."""
        hashes = (f"run {run}  {files.get('weights.npy')}" for run, files in ((1, self.undisturbed), (3, self.resumed)))
        same = bool(self.undisturbed) and self.undisturbed == self.resumed
        yield same, "The last checkpoints of runs 1 and 3 are the same, bit for bit", "\n    ".join(hashes)
        arrived, whole = (shown_size(sum(blobs.values())) for blobs in (self.arrived, self.whole))
        there = f"on the target: {len(self.arrived)} of {len(self.whole)} blobs ({arrived} of {whole}), no manifest"
        is_hit = bool(self.arrived) and self.newest_step < self.hit_step
        yield is_hit, f"SIGKILL hit the upload of step {self.hit_step}", there
        again = f"steps {self.resumed_at + 1} to {self.trained_until} were trained again"
        is_back = self.resumed_at == self.newest_step > 0
        yield is_back, f"Run 3 resumed from the newest committed step, {self.newest_step}", again
        is_kept = self.arrived.items() <= self.whole.items()
        yield is_kept, f"{arrived} of that upload were not sent again", "run 3 found them on the target"


def _with_server(environment: Mapping[str, str], directory: Path, at_end: ExitStack) -> dict[str, str]:
    """Start a Prefect server that writes below `directory`; return the environment of its clients."""
    spared = ",".join(filter(None, (environment.get("NO_PROXY"), "127.0.0.1,localhost")))
    own = {name: each for name, each in environment.items() if not name.startswith("PREFECT_")}
    own |= {"PREFECT_HOME": str(directory / "prefect"), "DO_NOT_TRACK": "1", "NO_PROXY": spared, "no_proxy": spared}
    log = directory / "server.log"
    with log.open("wb") as output:
        server = start_prefect_server(own, output, "few")
    at_end.callback(server.end)
    if not server.answers():
        raise TuneError(f"the demo's Prefect server did not start; its last output:\n{log.read_text()[-2000:]}")
    return {**own, "PREFECT_API_URL": server.url}


@dataclass
class Demo:
    """Three runs of one training on a target, by default a temporary folder; `keep` keeps what they wrote."""

    target: str | None = None
    steps: int = 24
    keep: bool = False
    width: int = 120_000  # of the network: its checkpoint has to be large enough to be hit in its middle

    def __post_init__(self) -> None:
        self.tracks = [Track(name, self.steps) for name in ("undisturbed", "killed", "resumed")]
        self.save_every = self.steps // 4
        self.hit_step = (self.steps - 1) // self.save_every * self.save_every  # of the last checkpoint but one
        self.name = f"demo-{uuid4().hex[:6]}"

    def run(self, console: Console) -> bool:
        """Show the runs on `console`, and return whether everything that the demo claims holds.

        Raises:
            InvalidInput: scikit-learn is not installed, or the target means nothing.
            StoreRefused: the target cannot be used.
            TuneError: a run failed, or no kill hit an upload in its middle.
        """
        from prefect_tune.blocks import resolve_target

        if not find_spec("sklearn"):
            raise InvalidInput("the demo trains on scikit-learn's digits: pip install 'prefect-tune[demo]'")
        began = time.monotonic()
        console.print("\n  [bold]prefect-tune demo[/]  three runs of one training, on scikit-learn's digits\n")
        with ExitStack() as at_end:
            self.directory = Path(tempfile.mkdtemp(prefix="prefect-tune-demo-"))
            self.place = self.target or (self.directory / "target").as_uri()
            if not self.keep:
                at_end.callback(shutil.rmtree, self.directory, ignore_errors=True)
            target = resolve_target(self.place)
            if not (checked := target.check()).ok:
                raise StoreRefused(checked.message)
            self.store = at_end.enter_context(target.open(timeout=timedelta(hours=1)))
            if not self.keep:
                at_end.callback(self.remove)
            self.environment = {**os.environ, **_ONE_THREAD}
            if "PREFECT_API_URL" not in os.environ:
                self.environment = _with_server(self.environment, self.directory, at_end)
            with Live(get_renderable=self.picture, console=console):
                found = self.perform()
            console.print("" if console.is_terminal else "\n", f"  {_LEGEND}\n", sep="\n")
            for held, claim, evidence in found.claims():
                console.print(f"  [bold green]✓[/] {claim}" if held else f"  [bold red]✗[/] {claim}")
                console.print(Text(f"    {evidence}", "dim"))
        look = f"\n  kept; to list the checkpoints: prefect-tune checkpoints {self.place} {self.name}-undisturbed"
        console.print(Text(f"\n  {time.monotonic() - began:.0f} s in all{look if self.keep else ''}", "dim"))
        return all(held for held, _, _ in found.claims())

    def picture(self) -> Table:
        """Return the three tracks."""
        table = Table.grid(padding=(0, 2))
        for number, each in enumerate(self.tracks, 1):
            words = (f"step {each.step}" if each.step else "", each.outcome, f"{each.seconds:.1f} s")
            table.add_row(f"  {number} {each.name}", each.cells(_CELLS), *words)
        return table

    def perform(self) -> Findings:
        """Run the three runs, and compare what they left."""
        undisturbed, killed, resumed = self.tracks
        first = self.train(undisturbed, "undisturbed")
        for number in range(_KILLS):
            killed.step, killed.committed = 0, frozenset()
            trial = self.train(killed, f"killed-{number}", is_killed=True)
            committed, arrived = self.look(trial)
            newest = max(committed, default=0)
            if arrived and newest < self.hit_step:
                break
        else:
            raise TuneError(f"{_KILLS} kills came too late: the upload was over. Try again on a less busy machine")
        killed.killed_at, killed.outcome, resumed.resumed_at = killed.step, "SIGKILL mid-upload", newest
        self.train(resumed, f"killed-{number}")
        hit = read_manifest(self.store, self.look(trial)[0][self.hit_step])
        whole = {hit.blob_path(index): blob.size_bytes for index, blob in enumerate(hit.blobs)}
        starts = (
            event.from_step
            for entry in history(self.store, trial.of_experiment, side_by_side=map)
            for event in entry.events
            if isinstance(event, Started)
        )
        files = [self.digests(self.look(each)[0][self.steps]) for each in (first, trial)]
        return Findings(self.hit_step, killed.step, newest, arrived, whole, max(starts), *files)

    def train(self, track: Track, run: str, *, is_killed: bool = False) -> TrialKey:
        """Run the flow in a process of its own, as a script would; return its one trial."""
        began, trial = time.monotonic(), TrialKey(experiment=f"{self.name}-{run}", generation=1, trial="trial")
        log, values = self.directory / f"{run}.log", (trial.experiment, self.steps, self.save_every, self.width)
        command = [sys.executable, "-P", "-m", "prefect_tune.demo.model", self.place, *map(str, values)]
        with (
            log.open("ab") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            ) as process,
        ):
            try:
                while process.poll() is None:
                    with suppress(StoreUnavailable):  # try again at the next look
                        if self.follow(track, trial, log) and is_killed:
                            process.kill()
                    time.sleep(0.05 if track.step < self.hit_step - 1 else 0.001)
            finally:
                process.kill()
        self.follow(track, trial, log)
        track.seconds = time.monotonic() - began
        if process.returncode not in {0, -signal.SIGKILL if is_killed else 0}:
            raise TuneError(
                f"a run of the demo ended with exit code {process.returncode}; its last output:\n"
                f"{log.read_text(errors='replace')[-2000:]}"
            )
        return trial

    def follow(self, track: Track, trial: TrialKey, log: Path) -> bool:
        """Show how far the run is; return whether a blob of the checkpoint to be hit has arrived."""
        committed, arrived = self.look(trial)
        track.committed = frozenset(committed) | track.committed
        for step, accuracy in _STEP.findall(log.read_text(errors="replace"))[-1:]:
            track.step, track.outcome = int(step), f"accuracy {float(accuracy):.1%}"
        return bool(arrived) and max(committed, default=0) >= max(1, self.hit_step - self.save_every)

    def look(self, trial: TrialKey) -> tuple[Mapping[int, CheckpointKey], Mapping[str, int]]:
        """List the trial: its checkpoints by step, and the blobs of a save without a manifest, with sizes."""
        sizes = {each.path: each.size_bytes for each in self.store.list(trial.folder)}
        keys = [key for key in (CheckpointKey.from_manifest_path(trial, path) for path in sizes) if key]
        newest = max((key.sequence for key in keys), default=-1)  # the name of a blob has the number of its save
        blobs = (path for path in sizes if path.startswith(f"{trial.blobs}/") and blob_sequence(path) > newest)
        return {key.step: key for key in keys}, {path: sizes[path] for path in blobs}

    def digests(self, key: CheckpointKey) -> dict[str, str]:
        """Read the checkpoint back, and return the SHA-256 of each of its files."""
        copy = self.directory / uuid4().hex
        fetch_committed(self.store, read_manifest(self.store, key), copy)
        return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in copy.iterdir()}

    def remove(self) -> None:
        """Delete the experiments of the demo."""
        self.store.delete([each.path for each in self.store.list("") if each.path.startswith(f"{self.name}-")])
