"""The base class of loggers that write files into a local folder for each trial."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.trial_transitions import Trial

DEFAULT_DIRECTORY = "~/prefect-tune-results"


class FolderLogger(Callback):
    """A logger that writes to `<directory>/<experiment>/<trial>/`.

    On a machine without these files, all events are delivered again from the first, so the files are rewritten.
    """

    def __init__(self, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        self._directory = Path(directory).expanduser()
        self._folder = self._directory
        self._mark = ""

    def setup(self, search: SearchInfo) -> None:
        self._folder = self._directory.absolute() / search.experiment  # the working directory may change later
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".{self.name}"
        if not path.exists():
            replace_file(path, uuid.uuid4().hex.encode())
            sync_to_disk(path)
        self._mark = path.read_text()

    def get_state(self) -> Mapping[str, object] | None:
        return {"files": self._mark}

    def set_state(self, state: Mapping[str, object]) -> bool | None:
        return state.get("files") == self._mark

    def write_config(self, trial: Trial) -> None:
        """Write the configuration of a trial into `params.json`."""
        replace_file(self.folder_of(trial.trial) / "params.json", json.dumps(dict(trial.config), indent=2).encode())

    def folder_of(self, trial: str) -> Path:
        """Return the folder of a trial, creating it if it is missing."""
        folder = self._folder / trial
        folder.mkdir(exist_ok=True)
        return folder


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data` atomically."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def sync_to_disk(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_package(module: str, extra: str, logger: str) -> None:
    """Check that a package is installed, without importing it.

    Raises:
        InvalidInput: it is not installed.
    """
    if find_spec(module) is None:
        raise InvalidInput(f"{logger} needs {module}, which is not installed: pip install 'prefect-tune[{extra}]'")
