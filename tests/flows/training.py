"""The expected end of a training, and the state that a target holds; shares no code with the flow."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from uuid import UUID

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load_experiment, read_entries
from prefect_tune.core.journal_events import Entry, Owner, OwnerChanged, StepReported
from prefect_tune.core.restore import read_manifest, restore_files
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.results import Results
from prefect_tune.stores.local.staging import restoring_directory
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import first_generation
from tests.trainables.numpy_mlp import Mlp, digest_of_directory

TRIAL = "trial"
_PATIENCE = timedelta(seconds=60)


class Undisturbed:
    """The same training in this process, without the package: the state's digest after each step, and the files."""

    def __init__(self, steps: int) -> None:
        model = Mlp({})
        self.steps = steps
        self.state: dict[int, str] = {}
        self.files: dict[int, str] = {}
        for step in range(1, steps + 1):
            self.state[step] = str(model.train_step()["state"])
            self.files[step] = _digest_of_saved(model)


def _digest_of_saved(model: Mlp) -> str:
    with tempfile.TemporaryDirectory() as directory:
        model.save(directory)
        return digest_of_directory(Path(directory))


@lru_cache
def undisturbed(steps: int) -> Undisturbed:
    """Return the undisturbed training of so many steps; trained once a session."""
    return Undisturbed(steps)


def experiment_at(target: StorageTarget, name: str) -> Experiment:
    """Return the current state of the experiment by its journal, without opening it as an owner."""
    with target.open(timeout=_PATIENCE) as store:
        return load_experiment(store, first_generation(name))


def trial_at(target: StorageTarget, name: str) -> Trial:
    """Return its only trial."""
    return experiment_at(target, name).trial(TRIAL)


def entries_at(target: StorageTarget, name: str) -> Sequence[Entry]:
    """Return the whole journal."""
    with target.open(timeout=_PATIENCE) as store:
        return read_entries(store, first_generation(name))


def statuses(results: pt.Results) -> list[str]:
    """Return the statuses of a search's trials."""
    return [str(each.status) for each in results.trials.values()]


def owners_at(target: StorageTarget, name: str) -> Mapping[int, Owner]:
    """Return the owners that opened the experiment, by process id."""
    events = [event for entry in entries_at(target, name) for event in entry.events]
    return {event.owner.pid: event.owner for event in events if isinstance(event, OwnerChanged)}


def objects_at(target: StorageTarget, folder: str) -> Mapping[str, int]:
    """Return every object below `folder`, with its size."""
    with target.open(timeout=_PATIENCE) as store:
        return {each.path: each.size_bytes for each in store.list(folder)}


def state_of_flow_run(owner: Owner) -> tuple[str, str]:
    """Return the state of the owner's flow run on the server: its name and message."""
    from prefect.client.orchestration import get_client

    assert owner.flow_run is not None
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(owner.flow_run)).state
    assert state is not None
    return state.name or "", state.message or ""


def log_of_flow_run(owner: Owner) -> str:
    """Return the lines of the page *Logs* of the owner's flow run."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter

    only = LogFilter.model_validate({"flow_run_id": {"any_": [owner.flow_run]}})
    with get_client(sync_client=True) as client:
        return "\n".join(each.message for each in client.read_logs(only, limit=200))


def bytes_of_checkpoint(target: StorageTarget, name: str, step: int, sequence: int) -> str:
    """Restore a checkpoint, every byte verified, and return the sha256 over its files."""
    key = CheckpointKey(trial=TrialKey(experiment=name, generation=1, trial=TRIAL), step=step, sequence=sequence)
    folder = Path(tempfile.mkdtemp())
    try:
        with target.open(timeout=_PATIENCE) as store:
            manifest = read_manifest(store, key)
            with restoring_directory(manifest, folder / "restored") as sink:
                restore_files(store, manifest, sink)
        return digest_of_directory(folder / "restored")
    finally:
        shutil.rmtree(folder)


def own_blobs(target: LocalTarget, name: str, step: int) -> Sequence[Path]:
    """Return the blobs that only the checkpoint of `step` refers to."""
    folder, root = TrialKey(experiment=name, generation=1, trial=TRIAL), Path(target.path)
    paths = {
        each.step: set(read_manifest(PosixStore(root), folder.checkpoint_key(each)).blob_paths())
        for each in trial_at(target, name).checkpoints
    }
    others = {path for other, found in paths.items() if other != step for path in found}
    return [root / path for path in sorted(paths[step] - others)]


def overwrite(path: Path, data: bytes) -> None:
    """Replace the bytes of a file that is read-only."""
    path.chmod(0o644)
    path.write_bytes(data)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(path, bytes(data))


def violations(target: StorageTarget, name: str, truth: Undisturbed) -> Sequence[str]:
    """Return what is wrong on the target after a kill: in the journal, any report, any live checkpoint."""
    experiment = experiment_at(target, name)
    found = list(_of_reports(target, name, truth.state))
    trial = experiment.trials.get(TRIAL)
    for each in trial.checkpoints if trial else ():
        if bytes_of_checkpoint(target, name, each.step, each.sequence) != truth.files[each.step]:
            found.append(f"the checkpoint of step {each.step} holds other bytes than the undisturbed training")
        if each.metrics.get("state") != truth.state[each.step]:
            found.append(f"the checkpoint of step {each.step} is said to have state {each.metrics}")
    return found


def _of_reports(target: StorageTarget, name: str, state: Mapping[int, str]) -> Sequence[str]:
    events = [event for entry in entries_at(target, name) for event in entry.events]
    reports = [event.report for event in events if isinstance(event, StepReported)]
    return [
        f"step {report.step} was journaled with another state than the undisturbed training's"
        for report in reports
        if report.metrics.get("state") != state.get(report.step)
    ]


def require_trained_by_two_nodes(results: Results, target: LocalTarget, *, steps: int, attempts: int) -> None:
    """Require that two nodes of two ranks have trained the one trial of experiment `nodes`, and left no messages."""
    [trial] = results.trials.values()
    assert (trial.status, trial.step, trial.attempt) == ("completed", steps, attempts)
    assert trial.metrics["world_size"] == 4
    checkpoint = results.checkpoint(trial.id)
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        ranks = {each.name: json.loads(each.read_text())[0] for each in Path(directory).glob("rank-*.json")}
    assert ranks == {f"rank-{rank}.json": steps for rank in range(4)}
    assert not [each for each in Path(target.path).glob("nodes/1/trials/*/nodes/**/*") if each.is_file()]
