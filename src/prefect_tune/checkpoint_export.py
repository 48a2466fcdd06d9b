"""Export a checkpoint: its files, as the trainable saved them, with the configuration and the metrics of its trial."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain, count
from pathlib import Path

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import config_at
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import history
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.stores.local.staging import transfer_pool

_TIMEOUT = timedelta(minutes=10)
CONFIG, METRICS = "config.json", "metrics.json"


def export_checkpoint(
    target: StorageTarget,
    experiment: Experiment,
    trial: Trial,
    key: CheckpointKey,
    directory: str | os.PathLike[str],
    *,
    plain: bool = False,
) -> Mapping[str, str]:
    """Write a checkpoint to `directory`, and beside its files its trial's configuration and its metrics, as JSON.

    An export that was interrupted is completed by another one. `plain` leaves the two JSON files out.

    Returns:
        The names of the two files by what is in them, `config.json` and `metrics.json`. Where the checkpoint has a
        file of that name, that one stays, and the other one is called `trial-config.json` or `trial-metrics.json`.

    Raises:
        InvalidInput: the directory has other content, which is not touched.
        CheckpointNotFound, CheckpointCorrupt: as `Checkpoint.to_directory`.
    """
    folder = experiment.trial_key(trial.trial)
    ref = next(ref for ref in reversed(trial.checkpoints) if folder.checkpoint_key(ref) == key)
    config: Mapping[str, object] = trial.config
    with target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        manifest = read_manifest(store, key)
        paths = [*(file.path for file in manifest.files), *manifest.empty_directories]
        taken = {path.partition("/")[0] for path in paths}
        if trial.cloned is not None:  # an exploit has changed its configuration
            entries = history(store, experiment.key, side_by_side=transfers)
            config = config_at(entries, trial.trial, ref.sequence)
    names = {name: _free_name(name, taken) for name in (CONFIG, METRICS)}
    contents = {names[CONFIG]: _json_bytes(config), names[METRICS]: _json_bytes(ref.metrics)}
    place = Path(directory).expanduser()
    for name, content in contents.items():
        _remove_earlier(place / name, content)
    target.checkpoint(key).to_directory(place)
    for name, content in {} if plain else contents.items():
        (place / name).write_bytes(content)
    return {} if plain else names


def _free_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"trial-{number}-{name}" for number in count(2))
    return next(each for each in chain((name, f"trial-{name}"), numbered) if each not in taken)


def _json_bytes(value: object) -> bytes:
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode(errors="backslashreplace")


def _remove_earlier(file: Path, content: bytes) -> None:
    """Remove what an earlier export, also one that was interrupted, has written; anything else stays."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not file.is_symlink() and file.is_file() and content.startswith(file.read_bytes()):
            file.unlink()
