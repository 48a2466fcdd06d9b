"""`pt.Checkpoint`: a directory of files, wherever it lies.

Imported where training happens, and therefore light: what a method needs is imported when it is called.
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
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.places import LocalPlace, Opener, TargetPlace, place_of

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from prefect_tune.core.layout import CheckpointKey

__all__ = ["Checkpoint"]

_DOWNLOAD_TIMEOUT = timedelta(minutes=30)
_METADATA_TIMEOUT = timedelta(minutes=1)


class _Advising(type):
    """Says on the class, as its instances do, what became of the names that older APIs had."""

    if not TYPE_CHECKING:  # a type checker would take every name for known

        def __getattr__(cls, name: str) -> NoReturn:
            raise _no_attribute(name)


class Checkpoint(metaclass=_Advising):
    """A directory of files that belong together: on this machine, on a target, or in anybody's bucket.

    What prefect-tune committed is verified, byte by byte, when it is read. A plain directory (Ray's,
    Lightning's, anybody's) is read as it is. Making one, printing it and pickling it opens and reads nothing.

    Example:
        ```python
        checkpoint = pt.Checkpoint("s3://bucket/runs/digits/trials/best/checkpoints/0000000040-0000000012")
        with checkpoint.as_directory() as directory:
            weights = numpy.load(f"{directory}/weights.npz")
        ```
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: FileSystem | None = None) -> None:
        """Refer to the directory at `path`.

        Args:
            path: a path of this machine, or a URI; with `filesystem`, a path on it, without a scheme.
            filesystem: one of pyarrow's, or of fsspec's, for what a URI cannot say.

        Raises:
            InvalidInput: it names nothing that could be opened.
        """
        self._place: LocalPlace | TargetPlace = place_of(path, filesystem)
        self._token = uuid.uuid4().hex  # names what this object, and its copies elsewhere, make on a machine

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
        from prefect_tune.core.layout import below

        checkpoint = cls(key.folder)
        scheme, _, root = root_uri.partition("://")
        path = f"{root.partition('?')[0].rstrip('/')}/{key.folder}"
        place = TargetPlace(opener, key.folder, below(root_uri, key.folder), path, scheme)
        checkpoint._place = place
        return checkpoint

    @property
    def path(self) -> str:
        """The path on `filesystem`: without a scheme; the bucket stands in front."""
        return self._place.path

    @property
    def filesystem(self) -> FileSystem:
        """The file system of pyarrow on which `path` lies.

        For a committed checkpoint it shows the committed files, read-only; every read is verified.
        """
        return self._place.now().filesystem()

    # -------------------------------------------------------------------------------------------- the files

    def to_directory(
        self, path: str | os.PathLike[str] | None = None, *, timeout: timedelta = _DOWNLOAD_TIMEOUT
    ) -> str:
        """Make a local directory of the files and return its path. It is the caller's, and stays.

        Without `path` it is a temporary one, which no other user can write to, and the same one each time for this
        object and its copies in other processes, until somebody writes to it. Of several processes that ask for one
        directory one downloads and the others wait. A directory appears whole or not at all. What lies there already
        is not downloaded again.

        Raises:
            InvalidInput: something else lies at `path`; it is left alone.
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: not done within `timeout`.
        """
        from prefect_tune.stores.destinations import fill

        deadline = Deadline.after(timeout)
        if path is None:
            return self._to_temporary_directory(deadline)
        destination = Path(os.fspath(path)).expanduser().resolve()
        fill(destination, self._place.now().filling(self._token, deadline, shared=False), deadline)
        return str(destination)

    def _to_temporary_directory(self, deadline: Deadline) -> str:
        from prefect_tune.stores.destinations import Occupied, fill
        from prefect_tune.stores.user_folder import user_folder

        filling = self._place.now().filling(self._token, deadline, shared=True)
        base = user_folder().resolve() / f"checkpoint_tmp_{self._token}"
        for destination in (base if number == 0 else Path(f"{base}-{number}") for number in count()):
            try:
                fill(destination, filling, deadline)
            except Occupied:
                continue  # its owner has written to it: it is theirs, and this is another
            return str(destination)
        raise AssertionError

    @contextmanager
    def as_directory(self, *, timeout: timedelta = _DOWNLOAD_TIMEOUT) -> Iterator[str]:
        """Lend a local directory of the files, to be read only, for the time of a `with` block.

        A local directory is lent as it is, and stays. Anything else is downloaded once per machine, however
        many processes and threads ask, and removed when the last of them has left, or has died.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: committed bytes are missing or altered.
            DeadlineExceeded: not there within `timeout`.
        """
        with self._place.now().lent(self._token, Deadline.after(timeout)) as directory:
            yield directory

    # ----------------------------------------------------------------------------------------- the metadata

    def get_metadata(self) -> dict[str, object]:
        """Return what is said of the checkpoint; an empty dict where nothing was.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointCorrupt: what was said cannot be read.
        """
        return self._place.now().metadata(Deadline.after(_METADATA_TIMEOUT))

    def set_metadata(self, metadata: Mapping[str, object]) -> None:
        """Say this of the checkpoint, and nothing else any more.

        On a target it is a new version beside the commit, and no object is written over; in a local
        directory it is the file `.metadata.json`, replaced whole.

        Raises:
            InvalidInput: JSON cannot say it.
            CheckpointNotFound: there is no checkpoint.
            CommitUnknown: the target did not tell whether it wrote: read it back.
        """
        from prefect_tune.core.metadata import plain_metadata

        wanted = plain_metadata(metadata)
        self._place.now().revise_metadata(lambda _: wanted, Deadline.after(_METADATA_TIMEOUT))

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        """Say this too, as `set_metadata` says it; of updates at the same time none is lost."""
        from prefect_tune.core.metadata import plain_metadata

        more = plain_metadata(metadata)
        self._place.now().revise_metadata(lambda said: {**said, **more}, Deadline.after(_METADATA_TIMEOUT))

    # ---------------------------------------------------------------------------------------------- the rest

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self._place.kind}, path={self._place.path})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint is not a path, since its files may lie elsewhere. Borrow a local directory of them:\n\n"
            "    with checkpoint.as_directory() as directory:\n"
            "        ...\n\n"
            "or have one that stays: directory = checkpoint.to_directory()"
        )

    if not TYPE_CHECKING:  # as above

        def __getattr__(self, name: str) -> NoReturn:
            raise _no_attribute(name)


def _no_attribute(name: str) -> AttributeError:
    from prefect_tune.stores.advice import former_attribute

    return AttributeError(former_attribute(name) or f"'Checkpoint' has no attribute {name!r}", name=name)
