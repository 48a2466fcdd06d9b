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
from prefect_tune.demo.assertions import Findings, Killed, claims
from prefect_tune.demo.process import ActProcess, act_process
from prefect_tune.demo.render import verdict
from prefect_tune.demo.screen import DemoScreen
from prefect_tune.demo.server import temporary_server, without_prefect
from prefect_tune.demo.worker import ActRequest

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget
    from prefect_tune.demo.target_probe import TargetProbe, TrialListing

__all__ = ["DemoOptions", "run_demo"]

_UNDISTURBED, _KILLED, _RESUMED = range(3)
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
        kept = f"\n  kept; to look at it: {look}" if options.keep else ""
        console.print(Text(f"\n  {took}{kept}", "dim"))
    return all(claim.held for claim in shown)


@dataclass(frozen=True)
class _Stage:
    """What the runs of the demo share."""

    options: DemoOptions
    screen: DemoScreen
    target: StorageTarget
    place: str
    name: str
    processes: Iterator[ActProcess]
    server: str
    at_end: ExitStack

    @property
    def save_every(self) -> int:
        return self.options.steps // 4

    @property
    def doomed_step(self) -> int:
        """The step of the last checkpoint but one, during whose upload the run is killed."""
        return (self.options.steps - 1) // self.save_every * self.save_every

    def request(self, experiment: str) -> ActRequest:
        return ActRequest(
            target=self.place,
            experiment=experiment,
            steps=self.options.steps,
            save_every=self.save_every,
            width=self.options.width,
        )

    def begin(self, watch: TargetProbe) -> ActProcess:
        """Run the flow on the experiment that is watched, in a process of its own."""
        process = next(self.processes)
        process.begin(self.request(watch.trial.experiment))
        return process

    def watch(self, experiment: str) -> TargetProbe:
        """Watch an experiment of the demo, and remove it at the end."""
        from prefect_tune.demo.target_probe import watch

        found = self.at_end.enter_context(watch(self.target, f"{self.name}-{experiment}"))
        if not self.options.keep:
            self.at_end.callback(found.remove)
        return found


@contextmanager
def _directory(options: DemoOptions) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="prefect-tune-demo-"))
    try:
        yield directory
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


# -------------------------------------------------------------------------------------------------- set-up


def _set_up(options: DemoOptions, directory: Path, screen: DemoScreen, at_end: ExitStack) -> _Stage:
    """Start a server unless the user has one, and check meanwhile that the target can be used."""
    place = options.target or (directory / "target").as_uri()
    name = f"demo-{uuid4().hex[:6]}"
    screen.say(f"looking at {place}")
    if "PREFECT_API_URL" in os.environ:
        environment, server = {**os.environ, **_ONE_THREAD}, "with the Prefect server of PREFECT_API_URL"
        processes = _processes(environment, at_end)
        target = _usable(place)
    else:
        screen.say("a Prefect server is starting, with an empty database")
        own = at_end.enter_context(temporary_server(directory / "prefect"))
        environment = {**without_prefect(os.environ), **own.environment, **_ONE_THREAD}
        server = "a Prefect server of its own"
        processes = _processes(environment, at_end)
        target = _usable(place)
        own.wait_until_ready()
    return _Stage(options, screen, target, place, name, processes, server, at_end)


def _processes(environment: Mapping[str, str], at_end: ExitStack) -> Iterator[ActProcess]:
    """Start three processes now, so that each has imported everything when its turn comes; more on demand."""
    ready = [at_end.enter_context(act_process(environment)) for _ in range(3)]

    def endless() -> Iterator[ActProcess]:
        yield from ready
        while True:
            yield at_end.enter_context(act_process(environment))

    return endless()


def _usable(place: str) -> StorageTarget:
    from prefect_tune.blocks import resolve_target

    target = resolve_target(place)
    checked = target.check()
    if not checked.ok:
        raise StoreRefused(checked.message)
    return target


# ---------------------------------------------------------------------------------------------------- acts


def _perform(stage: _Stage) -> Findings:
    undisturbed = stage.watch("undisturbed")
    with stage.screen.act(_UNDISTURBED):
        _train_to_the_end(stage, _UNDISTURBED, undisturbed)
    watch, killed = _be_killed(stage)
    with stage.screen.act(_RESUMED):
        stage.screen.change(_RESUMED, came_back_at=killed.newest_step)
        _train_to_the_end(stage, _RESUMED, watch)
    stage.screen.say("reading the last checkpoints back, and comparing")
    return _compare(undisturbed, watch, killed)


def _train_to_the_end(stage: _Stage, act: int, watch: TargetProbe) -> None:
    process = stage.begin(watch)
    for _ in _follow(stage, act, watch, process):
        time.sleep(0.05)
    process.require_success()
    sight = watch.look()
    stage.screen.trained(act, process.step, sight.newest_step)
    stage.screen.change(act, outcome=f"accuracy {process.accuracy:.1%}")


def _be_killed(stage: _Stage) -> tuple[TargetProbe, Killed]:
    """Run until a kill hits the middle of an upload; after a kill that came too late, try a new experiment."""
    for attempt in range(_TRIES):
        watch = stage.watch(f"killed-{attempt + 1}")
        with stage.screen.act(_KILLED):
            killed = _train_until_killed(stage, watch)
        if killed.newest_step < killed.step and killed.arrived:
            return watch, killed
        stage.screen.change(_KILLED, step=0, committed=frozenset(), killed_at=None, outcome="too late: once more")
    raise TuneError(
        f"{_TRIES} kills came too late: the upload of a checkpoint was over before the first of its blobs was seen "
        f"at {stage.place}. Try again on a quieter machine"
    )


def _train_until_killed(stage: _Stage, watch: TargetProbe) -> Killed:
    step = stage.doomed_step
    process = stage.begin(watch)
    for sight in _follow(stage, _KILLED, watch, process):
        if sight.newest_step >= step - stage.save_every and _quarter_there(watch, sight):
            process.kill()
            break
        time.sleep(0.05 if process.step < step - 1 else 0.001)
    code = process.wait()
    sight = watch.look()
    stage.screen.trained(_KILLED, process.step, sight.newest_step)
    stage.screen.change(_KILLED, killed_at=process.step, outcome="SIGKILL mid-upload")
    return Killed(
        exit_code=code,
        step=step,
        trained_until=process.step,
        newest_step=sight.newest_step,
        arrived={blob.path: blob.size_bytes for blob in sight.in_flight},
        torn_files=watch.torn_files(),
    )


def _quarter_there(watch: TargetProbe, sight: TrialListing) -> bool:
    """Say whether a quarter of a checkpoint as large as the one before has arrived."""
    return bool(sight.in_flight) and 4 * sight.in_flight_bytes >= watch.manifest(sight.committed[-1]).size_bytes


def _follow(stage: _Stage, act: int, watch: TargetProbe, process: ActProcess) -> Iterator[TrialListing]:
    """Yield what is on the target, for as long as the process runs."""
    while process.is_running:
        with suppress(StoreUnavailable):  # try again at the next look
            sight = watch.look()
            stage.screen.trained(act, process.step, sight.newest_step)
            stage.screen.say(_status(process, sight))
            yield sight


def _status(process: ActProcess, sight: TrialListing) -> str:
    if sight.in_flight:
        return f"uploading a checkpoint: {shown_size(sight.in_flight_bytes)} have arrived"
    return f"training, accuracy {process.accuracy:.1%}" if process.step else "the run is starting"


def _compare(undisturbed: TargetProbe, resumed: TargetProbe, killed: Killed) -> Findings:
    there = resumed.look().committed
    whole = resumed.manifest(next(key for key in there if key.step == killed.step))
    return Findings(
        killed=killed,
        came_back_at=resumed.starts()[-1],
        whole_bytes=whole.size_bytes,
        whole_blobs={whole.blob_path(index): blob.size_bytes for index, blob in enumerate(whole.blobs)},
        undisturbed=undisturbed.digests(undisturbed.look().committed[-1]),
        resumed=resumed.digests(there[-1]),
    )
