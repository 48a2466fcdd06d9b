"""`pt.Checkpoint`: a directory of files, local or on a storage target.

Trial processes import this module, so it imports little: each method imports its dependencies when it is called.
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
from prefect_tune.stores.checkpoint_location import LocalPlace, Opener, TargetPlace, checkpoint_html, place_of
from prefect_tune.stores.deadline import Deadline

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from prefect_tune.core.storage.layout import CheckpointKey

_DOWNLOAD_TIMEOUT = timedelta(minutes=30)
_METADATA_TIMEOUT = timedelta(minutes=1)
_DISPLAY_TIMEOUT = timedelta(seconds=10)


class _Advising(type):
    """Makes unknown class attributes raise an error that advises on names of older APIs, as instances do."""

    if not TYPE_CHECKING:  # else a type checker would accept every name

        def __getattr__(cls, name: str) -> NoReturn:
            raise _no_attribute(name)


class Checkpoint(metaclass=_Advising):
    """A directory of files that belong together: on this machine, on a target, or in any other bucket.

    A checkpoint that prefect-tune committed is verified, byte by byte, when it is read. A plain directory (Ray's,
    Lightning's, your own) is read without verification. A copy of either has its metadata, if any was set, in the file
    `.metadata.json`. Creating, printing and pickling the object reads nothing. A notebook that displays it reads its
    manifest, for at most 10 s.

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
            path: a path of this machine, or a URI; with `filesystem`, a path on it, without a scheme.
            filesystem: a file system of pyarrow or fsspec, if a URI is not enough.

        Raises:
            InvalidInput: `path` is not a valid path or URI.
        """
        self._place: LocalPlace | TargetPlace = place_of(path, filesystem)
        self._token = uuid.uuid4().hex  # names the temporary directories of this object and its pickled copies

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Refer to a directory of this machine.

        Raises:
            InvalidInput: it is a URI.
        """
        if "://" in os.fspath(path):
            raise InvalidInput(f"{os.fspath(path)!r}: expected a local directory; for a URI, use pt.Checkpoint(uri)")
        return cls(path)

    @classmethod
    def _of(cls, opener: Opener, root_uri: str, key: CheckpointKey) -> Checkpoint:
        """Refer to the checkpoint `key` on the target that `opener` opens, whose URI is `root_uri`."""
        from prefect_tune.core.storage.layout import below

        checkpoint = cls(key.folder)
        scheme, _, root = root_uri.partition("://")
        path = f"{root.partition('?')[0].rstrip('/')}/{key.folder}"
        place = TargetPlace(opener, key.folder, below(root_uri, key.folder), path, scheme)
        checkpoint._place = place
        return checkpoint

    @property
    def path(self) -> str:
        """The path on `filesystem`, without a scheme; it begins with the bucket."""
        return self._place.path

    @property
    def filesystem(self) -> FileSystem:
        """The pyarrow file system that contains `path`.

        For a committed checkpoint it contains the committed files and `.metadata.json`, read-only; every read is
        verified.
        """
        return self._place.now().filesystem()

    # -------------------------------------------------------------------------------------------- the files

    def to_directory(
        self, path: str | os.PathLike[str] | None = None, *, timeout: timedelta = _DOWNLOAD_TIMEOUT
    ) -> str:
        """Copy the files to a local directory and return its path. The caller owns it; it is not removed.

        Without `path` it is a temporary directory that other users cannot write to. It is the same one for each call
        on this object and its copies in other processes, until its files are changed. If several processes request one
        directory, one downloads and the others wait. A directory appears complete or not at all. Files that are there
        already are not downloaded again.

        Raises:
            InvalidInput: `path` exists with other content, which is not touched.
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: not done within `timeout`.
        """
        from prefect_tune.stores.local.scratch import fill_directory

        deadline = Deadline.after(timeout)
        if path is None:
            return self._to_temporary_directory(deadline)
        destination = Path(os.fspath(path)).expanduser().resolve()
        with self._place.now().open_content(self._token, deadline) as content:
            fill_directory(destination, content, deadline)
        return str(destination)

    def _to_temporary_directory(self, deadline: Deadline) -> str:
        from prefect_tune.stores.local.scratch import DestinationInUse, fill_directory, user_folder

        base = user_folder().resolve() / f"checkpoint_tmp_{self._token}"
        with self._place.now().open_content(self._token, deadline) as content:
            for destination in (base if number == 0 else Path(f"{base}-{number}") for number in count()):
                try:
                    fill_directory(destination, content, deadline)
                except DestinationInUse:
                    continue  # the caller has changed its files: leave it, and use the next name
                return str(destination)
        raise AssertionError

    @contextmanager
    def as_directory(self, *, timeout: timedelta = _DOWNLOAD_TIMEOUT) -> Iterator[str]:
        """Yield a local directory of the files for a `with` block; do not write to it.

        A local directory is yielded itself, and is not removed. Any other checkpoint is downloaded once per machine,
        however many processes and threads use it, and removed when the last of them has left the block. What a killed
        process left is removed after a later reader of the checkpoint, or once it was not used for a week.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: not downloaded within `timeout`.
        """
        with self._place.now().local_directory(self._token, Deadline.after(timeout)) as directory:
            yield directory

    # ----------------------------------------------------------------------------------------- the metadata

    def get_metadata(self) -> dict[str, object]:
        """Return the checkpoint's metadata; an empty dict if none was set.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: the metadata cannot be read.
        """
        return self._place.now().metadata(Deadline.after(_METADATA_TIMEOUT))

    def set_metadata(self, metadata: Mapping[str, object]) -> None:
        """Replace the checkpoint's metadata.

        On a target this writes a new version beside the commit, and overwrites no object; in a local directory it
        replaces the file `.metadata.json`.

        Raises:
            InvalidInput: `metadata` cannot be stored as JSON.
            CheckpointNotFound: there is no checkpoint.
            CommitUnknown: the target did not confirm the write: read the metadata back.
        """
        from prefect_tune.core.checkpoints.manifest import plain_metadata

        wanted = plain_metadata(metadata)
        self._place.now().revise_metadata(lambda _: wanted, Deadline.after(_METADATA_TIMEOUT))

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        """Add these entries to the metadata, as `set_metadata` writes it; concurrent updates are not lost."""
        from prefect_tune.core.checkpoints.manifest import plain_metadata

        more = plain_metadata(metadata)
        self._place.now().revise_metadata(lambda said: {**said, **more}, Deadline.after(_METADATA_TIMEOUT))

    # ---------------------------------------------------------------------------------------------- the rest

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self._place.kind}, path={self._place.path})"

    def _repr_html_(self) -> str:
        """Return its location, step, size, metrics and time for a notebook, and how to open it."""
        return checkpoint_html(self._place, _DISPLAY_TIMEOUT)

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint is not a path: its files may not be on this machine. For a temporary local directory, use\n\n"
            "    with checkpoint.as_directory() as directory:\n"
            "        ...\n\n"
            "and for one that stays: directory = checkpoint.to_directory()"
        )

    if not TYPE_CHECKING:  # as above

        def __getattr__(self, name: str) -> NoReturn:
            raise _no_attribute(name)


# Hints for attributes of Ray's older checkpoint APIs: what replaces each, with an example to copy.

_SAVE = """\
import json, tempfile
import prefect_tune as pt

with tempfile.TemporaryDirectory() as directory:
    with open(f"{directory}/state.json", "w") as file:
        json.dump({"epoch": 3}, file)
    pt.report({"loss": 0.1}, checkpoint=pt.Checkpoint.from_directory(directory))
"""
_READ = """\
import json
import prefect_tune as pt

if checkpoint := pt.get_checkpoint():
    with checkpoint.as_directory() as directory, open(f"{directory}/state.json") as file:
        state = json.load(file)
"""
_OPEN_A_URI = """\
import prefect_tune as pt

checkpoint = pt.Checkpoint("s3://bucket/folder")
with checkpoint.as_directory() as directory:
    ...
"""
_SHOW_WHERE = """\
print(checkpoint)  # Checkpoint(filesystem=s3, path=bucket/folder)
checkpoint.path, checkpoint.filesystem
"""
_KEEP_A_PREPROCESSOR = """\
checkpoint.set_metadata({"preprocessor": {"mean": 0.13, "deviation": 0.31}})
preprocessor = checkpoint.get_metadata()["preprocessor"]
"""
_IS_SAVED = ("a checkpoint is a directory: save what belongs to it as files in it", _SAVE)
_IS_READ = ("a checkpoint is a directory, and nothing else: read files in it", _READ)
_IS_METADATA = ("values that belong to a checkpoint beside its files are metadata", _KEEP_A_PREPROCESSOR)

_INSTEAD: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("from_dict", "from_bytes"), _IS_SAVED),
    **dict.fromkeys(("to_dict", "to_bytes", "get_internal_representation"), _IS_READ),
    "from_uri": ("the constructor takes URIs", _OPEN_A_URI),
    "to_uri": ("a reported checkpoint is committed on the trial's target", _SAVE),
    "uri": ("its path and its file system name the location", _SHOW_WHERE),
    **dict.fromkeys(("get_preprocessor", "set_preprocessor"), _IS_METADATA),
}


def _no_attribute(name: str) -> AttributeError:
    """Return the error for `checkpoint.<name>`; for a name of an older API, with what to write instead."""
    if name not in _INSTEAD:
        return AttributeError(f"'Checkpoint' has no attribute {name!r}", name=name)
    why, example = _INSTEAD[name]
    return AttributeError(f"pt.Checkpoint has no {name!r}: {why}. Write instead:\n\n{example}", name=name)
