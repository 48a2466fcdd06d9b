"""Run the demo: an undisturbed run, a run that is killed in the middle of an upload, and its resume."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from rich.console import Console
from rich.text import Text

from prefect_tune.core.errors import InvalidInput, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.models import shown_size
from prefect_tune.demo.claims import Findings, Killed, claims
from prefect_tune.demo.screen import DemoScreen, Track, verdict
from prefect_tune.demo.server import temporary_server
from prefect_tune.demo.training_process import TrainingParameters, TrainingProcess, training_process

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget
    from prefect_tune.demo.target_probe import TargetProbe, TrialListing

_TRIES = 3
# Sums are rounded in an order that depends on the number of threads: one, so that bits can be compared.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class DemoOptions:
    """The options of the demo."""

    target: str | None = None
    """A URI, a path or a `block-type/name` slug; by default a temporary folder."""
    steps: int = 24
    keep: bool = False
    width: int = 2560
    """Units in each hidden layer: the checkpoint has to be large enough to be hit in its middle."""


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Perform the demo on `console`, and return whether everything that it claims held.

    Raises:
        InvalidInput: scikit-learn is not installed, or the target means nothing.
        StoreRefused: the target cannot be used.
        TuneError: a run failed, or no kill hit an upload in its middle.
    """
    if not find_spec("sklearn"):
        raise InvalidInput("the demo trains on scikit-learn's digits: pip install 'prefect-tune[demo]'")
    began = time.monotonic()
    console.print("\n  [bold]prefect-tune demo[/]  three runs of one training, on scikit-learn's digits")
    with _directory(options) as directory, ExitStack() as at_end:
        with DemoScreen(console, options.steps) as screen:
            stage = _set_up(options, directory, screen, at_end)
            ready_after = time.monotonic() - began
            found = _perform(stage)
        shown = claims(found)
        console.print()
        console.print(verdict(shown))
        took = f"{time.monotonic() - began:.0f} s in all, {ready_after:.0f} s of them to start {stage.server}"
        look = f"prefect-tune checkpoints {stage.place} {stage.name}-undisturbed"
        kept = f"\n  kept; to list the checkpoints: {look}" if options.keep else ""
        console.print(Text(f"\n  {took}{kept}", "dim"))
    return all(claim.held for claim in shown)


@contextmanager
def _directory(options: DemoOptions) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="prefect-tune-demo-"))
    try:
        yield directory
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class _Stage:
    """What the runs of the demo share."""

    options: DemoOptions
    screen: DemoScreen
    target: StorageTarget
    place: str
    """The target as it was named."""
    name: str
    processes: Iterator[TrainingProcess]
    server: str
    at_end: ExitStack

    @property
    def save_every(self) -> int:
        return self.options.steps // 4

    @property
    def interrupted_step(self) -> int:
        """The step of the last checkpoint but one, during whose upload the run is killed."""
        return (self.options.steps - 1) // self.save_every * self.save_every

    def begin(self, probe: TargetProbe) -> TrainingProcess:
        """Run the flow on an experiment, in a process of its own."""
        process = next(self.processes)
        process.begin(
            TrainingParameters(
                target=self.place,
                experiment=probe.trial.experiment,
                steps=self.options.steps,
                save_every=self.save_every,
                width=self.options.width,
            )
        )
        return process

    def probe(self, experiment: str) -> TargetProbe:
        """Open an experiment of the demo for reading, and remove it at the end."""
        from prefect_tune.demo.target_probe import watch

        found = self.at_end.enter_context(watch(self.target, f"{self.name}-{experiment}"))
        if not self.options.keep:
            self.at_end.callback(found.remove)
        return found

    def follow(self, track: Track, probe: TargetProbe, process: TrainingProcess) -> Iterator[TrialListing]:
        """Show what is on the target, and yield it, for as long as the process runs."""
        while process.is_running:
            with suppress(StoreUnavailable):  # try again at the next look
                listing = probe.look()
                track.trained(process.step, listing.newest_step)
                self.screen.status = _status(process, listing)
                yield listing


def _status(process: TrainingProcess, listing: TrialListing) -> str:
    if listing.in_flight:
        return f"uploading a checkpoint: {shown_size(listing.in_flight_bytes)} have arrived"
    return f"training, accuracy {process.accuracy:.1%}" if process.step else "the run is starting"


# -------------------------------------------------------------------------------------------------- set-up


def _set_up(options: DemoOptions, directory: Path, screen: DemoScreen, at_end: ExitStack) -> _Stage:
    """Start a server unless the user has one, and check meanwhile that the target can be used."""
    place = options.target or (directory / "target").as_uri()
    screen.status = f"reading {place}"
    own, environment, server = None, dict(os.environ), "with the Prefect server of PREFECT_API_URL"
    if "PREFECT_API_URL" not in os.environ:
        screen.status = "a Prefect server is starting, with an empty database"
        own = at_end.enter_context(temporary_server(directory / "prefect"))
        environment, server = dict(own.environment), "a Prefect server of its own"
    processes = _processes({**environment, **_ONE_THREAD}, at_end)
    target = _usable(place)
    if own is not None:
        own.wait_until_ready()
    return _Stage(options, screen, target, place, f"demo-{uuid4().hex[:6]}", processes, server, at_end)


def _processes(environment: Mapping[str, str], at_end: ExitStack) -> Iterator[TrainingProcess]:
    """Start three processes now, so that each has imported everything when its turn comes; more on demand."""
    ready = [at_end.enter_context(training_process(environment)) for _ in range(3)]

    def endless() -> Iterator[TrainingProcess]:
        yield from ready
        while True:
            yield at_end.enter_context(training_process(environment))

    return endless()


def _usable(place: str) -> StorageTarget:
    from prefect_tune.blocks import resolve_target

    target = resolve_target(place)
    checked = target.check()
    if not checked.ok:
        raise StoreRefused(checked.message)
    return target


# ---------------------------------------------------------------------------------------------------- runs


def _perform(stage: _Stage) -> Findings:
    undisturbed_track, killed_track, resumed_track = stage.screen.tracks
    undisturbed = stage.probe("undisturbed")
    _train_to_the_end(stage, undisturbed_track, undisturbed)
    probe, killed = _be_killed(stage, killed_track)
    resumed_track.resumed_at = killed.newest_step
    _train_to_the_end(stage, resumed_track, probe)
    stage.screen.status = "reading the last checkpoints back, and comparing"
    return _compare(undisturbed, probe, killed)


def _train_to_the_end(stage: _Stage, track: Track, probe: TargetProbe) -> None:
    with track.timed():
        process = stage.begin(probe)
        for _ in stage.follow(track, probe, process):
            time.sleep(0.05)
        process.require_success()
        track.trained(process.step, probe.look().newest_step)
        track.outcome = f"accuracy {process.accuracy:.1%}"


def _be_killed(stage: _Stage, track: Track) -> tuple[TargetProbe, Killed]:
    """Run until a kill hits the middle of an upload; after a kill that came too late, try a new experiment."""
    for attempt in range(_TRIES):
        probe = stage.probe(f"killed-{attempt + 1}")
        with track.timed():
            killed = _train_until_killed(stage, track, probe)
        if killed.newest_step < killed.step and killed.arrived:
            return probe, killed
        track.forget("too late: trying again")
    raise TuneError(
        f"{_TRIES} kills came too late: the upload of a checkpoint was over before the first of its blobs was seen "
        f"at {stage.place}. Try again on a less busy machine"
    )


def _train_until_killed(stage: _Stage, track: Track, probe: TargetProbe) -> Killed:
    step = stage.interrupted_step
    process = stage.begin(probe)
    for listing in stage.follow(track, probe, process):
        if listing.newest_step >= step - stage.save_every and _quarter_there(probe, listing):
            process.kill()
            break
        time.sleep(0.05 if process.step < step - 1 else 0.001)
    code = process.wait()
    listing = probe.look()
    track.trained(process.step, listing.newest_step)
    track.killed_at, track.outcome = process.step, "SIGKILL mid-upload"
    return Killed(
        exit_code=code,
        step=step,
        trained_until=process.step,
        newest_step=listing.newest_step,
        arrived={blob.path: blob.size_bytes for blob in listing.in_flight},
        torn_files=probe.torn_files(),
    )


def _quarter_there(probe: TargetProbe, listing: TrialListing) -> bool:
    """Return whether a quarter of a checkpoint as large as the one before has arrived."""
    return bool(listing.in_flight) and 4 * listing.in_flight_bytes >= probe.manifest(listing.committed[-1]).size_bytes


def _compare(undisturbed: TargetProbe, resumed: TargetProbe, killed: Killed) -> Findings:
    there = resumed.look().committed
    whole = resumed.manifest(next(key for key in there if key.step == killed.step))
    return Findings(
        killed=killed,
        resumed_at=resumed.starts()[-1],
        whole_bytes=whole.size_bytes,
        whole_blobs={whole.blob_path(index): blob.size_bytes for index, blob in enumerate(whole.blobs)},
        undisturbed=undisturbed.digests(undisturbed.look().committed[-1]),
        resumed=resumed.digests(there[-1]),
    )
