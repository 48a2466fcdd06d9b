"""The expected end of a training, and the state that a target holds, without code of the flow."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter

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
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class ReferenceTraining:
    """An undisturbed training: digests of the state and of the files, by step."""

    state: dict[int, str] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)


@lru_cache
def reference_training(steps: int) -> ReferenceTraining:
    """Train in this process without the package, once a session."""
    model, reference = Mlp({}), ReferenceTraining()
    for step in range(1, steps + 1):
        reference.state[step] = str(model.train_step()["state"])
        with tempfile.TemporaryDirectory() as directory:
            model.save(directory)
            reference.files[step] = digest_of_directory(Path(directory))
    return reference


def experiment_at(target: StorageTarget, name: str) -> Experiment:
    """Load the experiment from its journal, without acquiring ownership."""
    with target.open(timeout=_TIMEOUT) as store:
        return load_experiment(store, first_generation(name))


def trial_at(target: StorageTarget, name: str) -> Trial:
    """Return the only trial of the experiment."""
    return experiment_at(target, name).trial(TRIAL)


def entries_at(target: StorageTarget, name: str) -> Sequence[Entry]:
    with target.open(timeout=_TIMEOUT) as store:
        return read_entries(store, first_generation(name))


def statuses(results: pt.Results) -> list[str]:
    return [str(trial.status) for trial in results.trials.values()]


def owners_at(target: StorageTarget, name: str) -> Mapping[int, Owner]:
    """Return all owners of the experiment so far, by process id."""
    events = [event for entry in entries_at(target, name) for event in entry.events]
    return {event.owner.pid: event.owner for event in events if isinstance(event, OwnerChanged)}


def objects_at(target: StorageTarget, folder: str) -> Mapping[str, int]:
    """Return the size of every object below `folder`, by path."""
    with target.open(timeout=_TIMEOUT) as store:
        return {item.path: item.size_bytes for item in store.list(folder)}


def state_of_flow_run(owner: Owner) -> tuple[str, str]:
    """Return the name and message of the state of the owner's flow run."""
    assert owner.flow_run is not None
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(owner.flow_run)).state
    assert state is not None
    return state.name or "", state.message or ""


def log_of_flow_run(owner: Owner) -> str:
    """Return the log of the owner's flow run on the server."""
    log_filter = LogFilter.model_validate({"flow_run_id": {"any_": [owner.flow_run]}})
    with get_client(sync_client=True) as client:
        return "\n".join(record.message for record in client.read_logs(log_filter, limit=200))


def digest_of_checkpoint(target: StorageTarget, name: str, step: int, sequence: int) -> str:
    """Restore a checkpoint, verify every byte, and return the SHA-256 of its files."""
    key = CheckpointKey(trial=TrialKey(experiment=name, generation=1, trial=TRIAL), step=step, sequence=sequence)
    with tempfile.TemporaryDirectory() as folder, target.open(timeout=_TIMEOUT) as store:
        manifest = read_manifest(store, key)
        with restoring_directory(manifest, Path(folder, "restored")) as sink:
            restore_files(store, manifest, sink)
        return digest_of_directory(Path(folder, "restored"))


def own_blobs(target: LocalTarget, name: str, step: int) -> Sequence[Path]:
    """Return the blobs that only the checkpoint of `step` refers to."""
    folder, root = TrialKey(experiment=name, generation=1, trial=TRIAL), Path(target.path)
    paths = {
        checkpoint.step: set(read_manifest(PosixStore(root), folder.checkpoint_key(checkpoint)).blob_paths())
        for checkpoint in trial_at(target, name).checkpoints
    }
    others = {path for other, blobs in paths.items() if other != step for path in blobs}
    return [root / path for path in sorted(paths[step] - others)]


def overwrite(path: Path, data: bytes) -> None:
    """Replace the bytes of a read-only file."""
    path.chmod(0o644)
    path.write_bytes(data)


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(path, bytes(data))


def find_violations(target: StorageTarget, name: str, reference: ReferenceTraining) -> Sequence[str]:
    """Compare the journal, the reports and the live checkpoints with an undisturbed training."""
    trial = experiment_at(target, name).trials.get(TRIAL)
    events = [event for entry in entries_at(target, name) for event in entry.events]
    errors = [
        f"step {report.step} was journaled with another state than the undisturbed training's"
        for report in (event.report for event in events if isinstance(event, StepReported))
        if report.metrics.get("state") != reference.state.get(report.step)
    ]
    for checkpoint in trial.checkpoints if trial else ():
        if digest_of_checkpoint(target, name, checkpoint.step, checkpoint.sequence) != reference.files[checkpoint.step]:
            errors.append(f"the checkpoint of step {checkpoint.step} has other bytes than the undisturbed training")
        if checkpoint.metrics.get("state") != reference.state[checkpoint.step]:
            errors.append(f"the checkpoint of step {checkpoint.step} is journaled with {checkpoint.metrics}")
    return errors


def require_trained_by_two_nodes(results: Results, target: LocalTarget, *, steps: int, attempts: int) -> None:
    """Require that two nodes of two ranks trained the only trial of experiment `nodes` and left no messages."""
    [trial] = results.trials.values()
    assert (trial.status, trial.step, trial.attempt) == ("completed", steps, attempts)
    assert trial.metrics["world_size"] == 4
    checkpoint = results.checkpoint(trial.id)
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        ranks = {path.name: json.loads(path.read_text())[0] for path in Path(directory).glob("rank-*.json")}
    assert ranks == {f"rank-{rank}.json": steps for rank in range(4)}
    assert not [path for path in Path(target.path).glob("nodes/1/trials/*/nodes/**/*") if path.is_file()]
