"""`pt.Checkpoint`: a directory of files, local or on a storage target.

Trial processes import this module, so it imports little, and each method imports its dependencies when it is called.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from prefect_tune.core.errors import InvalidInput
from prefect_tune.stores.checkpoint_location import (
    LocalDirectory,
    StoreOpener,
    TargetFolder,
    locate_checkpoint,
    render_checkpoint_html,
)
from prefect_tune.stores.deadline import Deadline

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from prefect_tune.core.storage.layout import CheckpointKey

_DOWNLOAD_TIMEOUT = timedelta(minutes=30)
_METADATA_TIMEOUT = timedelta(minutes=1)
_DISPLAY_TIMEOUT = timedelta(seconds=10)


class _AttributeAdviceMeta(type):
    """Makes an unknown attribute of the class raise the same error as an unknown attribute of an instance."""

    if not TYPE_CHECKING:  # a type checker that saw this method would accept every attribute

        def __getattr__(cls, name: str) -> NoReturn:
            raise _attribute_error(name)


class Checkpoint(metaclass=_AttributeAdviceMeta):
    """A directory of files: on this machine, on a target, or at any other URI.

    If prefect-tune committed the checkpoint, every byte is verified when it is read. A plain directory (Ray's,
    Lightning's, your own) is read without verification. A copy of the checkpoint contains its metadata, if any is
    set, in the file `.metadata.json`. No file is read when the object is created, printed or pickled. To display the
    object, a notebook reads the manifest, for at most 10 s.

    Example:
        ```python
        checkpoint = pt.Checkpoint("s3://bucket/runs/digits/1/trials/best/checkpoints/0000000040-0000000012")
        with checkpoint.as_directory() as directory:
            weights = numpy.load(f"{directory}/weights.npz")
        ```
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: FileSystem | None = None) -> None:
        """Refer to the directory at `path`.

        Args:
            path: a path on this machine, or a URI; with `filesystem`, a path on that file system, without a scheme.
            filesystem: a file system of pyarrow or fsspec, if a URI is not enough.

        Raises:
            InvalidInput: `path` is not a valid path or URI.
        """
        self._location: LocalDirectory | TargetFolder = locate_checkpoint(path, filesystem)
        self._token = uuid.uuid4().hex  # names the temporary directories of this object and its pickled copies

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Refer to a directory on this machine.

        ```python
        checkpoint = pt.Checkpoint.from_directory("model")
        ```

        Raises:
            InvalidInput: `path` is a URI.
        """
        if "://" in os.fspath(path):
            raise InvalidInput(f"{os.fspath(path)!r}: expected a local directory; for a URI, use pt.Checkpoint(uri)")
        return cls(path)

    @classmethod
    def _from_target(cls, opener: StoreOpener, root_uri: str, key: CheckpointKey) -> Checkpoint:
        """Refer to the checkpoint `key` on a target. `opener` opens the target, and `root_uri` is the target's URI."""
        from prefect_tune.core.storage.layout import join_uri

        checkpoint = cls(key.folder)
        scheme, _, root = root_uri.partition("://")
        path = f"{root.partition('?')[0].rstrip('/')}/{key.folder}"
        checkpoint._location = TargetFolder(opener, key.folder, join_uri(root_uri, key.folder), path, scheme)
        return checkpoint

    @property
    def path(self) -> str:
        """The path on `filesystem`, without a scheme; in an object storage, it starts with the bucket."""
        return self._location.path

    @property
    def filesystem(self) -> FileSystem:
        """The pyarrow file system that contains `path`.

        For a committed checkpoint, the file system is read-only, verifies what is read, and adds `.metadata.json`.
        """
        return self._location.resolve().make_filesystem()

    def to_directory(
        self, path: str | os.PathLike[str] | None = None, *, timeout: timedelta = _DOWNLOAD_TIMEOUT
    ) -> str:
        """Copy the files to a local directory and return its path. The caller owns the directory; nothing removes it.

        Without `path`, the directory is temporary, and other users cannot write to it. This object and its pickled
        copies in other processes share that directory until a file in it is changed. If several processes request the
        same directory, only one downloads it. A directory appears complete or not at all, and is reused if it exists.

        ```python
        directory = checkpoint.to_directory("copy-of-model")
        ```

        Raises:
            InvalidInput: `path` exists with other content, which stays unchanged.
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: the copy was not complete after `timeout`.
        """
        from prefect_tune.stores.local.scratch import DestinationInUse, fill_directory, make_user_folder

        deadline = Deadline.after(timeout)
        if path is not None:
            destination = Path(os.fspath(path)).expanduser().resolve()
            with self._location.resolve().open_content(self._token, deadline) as content:
                fill_directory(destination, content, deadline)
            return str(destination)
        base = make_user_folder().resolve() / f"checkpoint_tmp_{self._token}"
        with self._location.resolve().open_content(self._token, deadline) as content:
            for destination in (base if number == 0 else Path(f"{base}-{number}") for number in count()):
                try:
                    fill_directory(destination, content, deadline)
                except DestinationInUse:
                    continue  # keep this directory, whose files the caller has changed, and use the next name
                return str(destination)
        raise AssertionError

    @contextmanager
    def as_directory(self, *, timeout: timedelta = _DOWNLOAD_TIMEOUT) -> Iterator[str]:
        """Yield, for a `with` block, a local directory with the files. The block must not write to the directory.

        A plain local directory is itself yielded, and is not removed. Any other checkpoint is downloaded once per
        machine. All processes and threads share the copy, which is removed when the last of them leaves the block. If
        they are killed, the copy is removed after its next use, or by a later download once it is unused for a week.

        ```python
        with checkpoint.as_directory() as directory:
            weights = numpy.load(f"{directory}/weights.npz")
        ```

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: the files were not downloaded within `timeout`.
        """
        with self._location.resolve().open_local_directory(self._token, Deadline.after(timeout)) as directory:
            yield directory

    def get_metadata(self) -> dict[str, object]:
        """Return the checkpoint's metadata; an empty dict if none was set. See `set_metadata`.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: the metadata cannot be read.
        """
        return self._location.resolve().read_metadata(Deadline.after(_METADATA_TIMEOUT))

    def set_metadata(self, metadata: Mapping[str, object]) -> None:
        """Replace the checkpoint's metadata.

        On a target, this adds a new version of the metadata; in a local directory, it replaces `.metadata.json`.

        ```python
        checkpoint.set_metadata({"classes": 10})
        checkpoint.update_metadata({"reviewed": True})
        classes = checkpoint.get_metadata()["classes"]
        ```

        Raises:
            InvalidInput: `metadata` cannot be stored as JSON.
            CheckpointNotFound: there is no checkpoint.
            CommitUnknown: the target did not confirm the write; read the metadata back.
        """
        from prefect_tune.core.checkpoints.manifest import normalize_metadata

        new = normalize_metadata(metadata)
        self._location.resolve().update_metadata(lambda _: new, Deadline.after(_METADATA_TIMEOUT))

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        """Add entries to the metadata; concurrent updates are not lost. See `set_metadata`."""
        from prefect_tune.core.checkpoints.manifest import normalize_metadata

        new = normalize_metadata(metadata)
        self._location.resolve().update_metadata(lambda current: {**current, **new}, Deadline.after(_METADATA_TIMEOUT))

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self._location.kind}, path={self._location.path})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: location, step, size, metrics, time, and how to open the checkpoint."""
        return render_checkpoint_html(self._location, _DISPLAY_TIMEOUT)

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint is not a path: its files may not be on this machine. For a temporary local directory, use\n\n"
            "    with checkpoint.as_directory() as directory:\n"
            "        ...\n\n"
            "and for a permanent one: directory = checkpoint.to_directory()"
        )

    if not TYPE_CHECKING:  # as in `_AttributeAdviceMeta`

        def __getattr__(self, name: str) -> NoReturn:
            raise _attribute_error(name)


# Hints for attributes of Ray's older checkpoint APIs. Each hint names the replacement, and has an example to copy.

_SAVE_EXAMPLE = """\
import json, tempfile
import prefect_tune as pt

with tempfile.TemporaryDirectory() as directory:
    with open(f"{directory}/state.json", "w") as file:
        json.dump({"epoch": 3}, file)
    pt.report({"loss": 0.1}, checkpoint=pt.Checkpoint.from_directory(directory))
"""
_READ_EXAMPLE = """\
import json
import prefect_tune as pt

if checkpoint := pt.get_checkpoint():
    with checkpoint.as_directory() as directory, open(f"{directory}/state.json") as file:
        state = json.load(file)
"""
_URI_EXAMPLE = """\
import prefect_tune as pt

checkpoint = pt.Checkpoint("s3://bucket/folder")
with checkpoint.as_directory() as directory:
    ...
"""
_LOCATION_EXAMPLE = """\
print(checkpoint)  # Checkpoint(filesystem=s3, path=bucket/folder)
checkpoint.path, checkpoint.filesystem
"""
_METADATA_EXAMPLE = """\
checkpoint.set_metadata({"preprocessor": {"mean": 0.13, "deviation": 0.31}})
preprocessor = checkpoint.get_metadata()["preprocessor"]
"""
_SAVE_HINT = ("a checkpoint is a directory: save its content as files in the directory", _SAVE_EXAMPLE)
_READ_HINT = ("a checkpoint is only a directory: read the files in it", _READ_EXAMPLE)
_METADATA_HINT = ("values that belong to a checkpoint but not to its files are metadata", _METADATA_EXAMPLE)

_HINTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("from_dict", "from_bytes"), _SAVE_HINT),
    **dict.fromkeys(("to_dict", "to_bytes", "get_internal_representation"), _READ_HINT),
    "from_uri": ("the constructor takes URIs", _URI_EXAMPLE),
    "to_uri": ("a reported checkpoint is committed on the trial's target", _SAVE_EXAMPLE),
    "uri": ("`path` and `filesystem` give the location", _LOCATION_EXAMPLE),
    **dict.fromkeys(("get_preprocessor", "set_preprocessor"), _METADATA_HINT),
}


def _attribute_error(name: str) -> AttributeError:
    """Return the error for an unknown attribute. For attributes of older Ray APIs, the error names the replacement."""
    if name not in _HINTS:
        return AttributeError(f"'Checkpoint' has no attribute {name!r}", name=name)
    reason, example = _HINTS[name]
    return AttributeError(f"pt.Checkpoint has no {name!r}: {reason}. Write instead:\n\n{example}", name=name)
