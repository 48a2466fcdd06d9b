"""The location of a checkpoint's files (a local directory, or a folder of a target) and how to read them."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput, ObjectNotFound, TuneError
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import Client, Location, arrow_filesystem, open_arrow, open_location, parse_uri

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from prefect_tune.core.checkpoints.manifest import Manifest
    from prefect_tune.core.page_elements import Cell, PageElement
    from prefect_tune.core.storage.layout import CheckpointKey
    from prefect_tune.core.storage.object_store import ObjectStore
    from prefect_tune.stores.local.scratch import DirectoryContent

CheckpointLocation: TypeAlias = "LocalDirectory | TargetFolder"
MetadataChange: TypeAlias = "Callable[[Mapping[str, object]], Mapping[str, object]]"

_CHECKPOINT_PATH = re.compile(
    r"(?:(?P<root>.*)/)?(?P<folder>(?P<experiment>[^/]+)/(?P<generation>[1-9]\d*)/trials/(?P<trial>[^/]+)"
    r"/checkpoints/(?P<step>\d{10,})-(?P<sequence>\d{10,}))"
)


class StoreOpener(Protocol):
    """A picklable function that opens a target's root, like `StorageTarget.open`."""

    def __call__(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]: ...


def locate_checkpoint(path: str | os.PathLike[str], filesystem: FileSystem | None = None) -> CheckpointLocation:
    """Return the location of `path` (a path on `filesystem` if given, else a local path or a URI), without any request.

    Raises:
        InvalidInput: `path` is not valid, or has a scheme although `filesystem` is given.
    """
    text = os.fspath(path)
    if filesystem is None:
        location = parse_uri(text)
        return LocalDirectory(location.path) if location.client is Client.FILES else _locate_on_target(location)
    if "://" in text:
        raise InvalidInput(f"{text!r}: with a filesystem, expected a path on it, without a scheme")
    if not hasattr(filesystem, "type_name"):
        import pyarrow.fs as arrow

        filesystem = arrow.PyFileSystem(arrow.FSSpecHandler(filesystem))
    if filesystem.type_name == "local":
        return LocalDirectory(os.path.abspath(text))  # noqa: PTH100  keep links as written
    normalized = text.rstrip("/")
    root, folder = _split_root(normalized)
    factory = partial(_identity, filesystem)
    return TargetFolder(
        open=partial(open_arrow, factory, root, filesystem.type_name),
        folder=folder,
        name=f"{filesystem.type_name}:{normalized}",
        path=normalized,
        kind=filesystem.type_name,
        plain_filesystem_factory=factory,
    )


def _locate_on_target(location: Location) -> TargetFolder:
    root, folder = _split_root(location.path)
    return TargetFolder(
        open=partial(open_location, location.with_path(root)),
        folder=folder,
        name=location.uri,
        path=location.arrow_path,
        kind=location.scheme,
        plain_filesystem_factory=partial(arrow_filesystem, location),
    )


def _split_root(path: str) -> tuple[str, str]:
    """Split `path` into a target's root and a folder. In a checkpoint's path, the folder starts with the experiment.

    In any other path, the folder is the last name, so that a missing folder and a missing root raise different errors.
    """
    if match := _CHECKPOINT_PATH.fullmatch(path):
        return match["root"] or "", match["folder"]
    parent, slash, name = path.rpartition("/")
    return (parent or slash, name) if slash else (path, "")


def _identity(filesystem: FileSystem) -> FileSystem:
    return filesystem


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory of this machine."""

    path: str
    kind: str = "local"

    @property
    def name(self) -> str:
        return self.path

    def resolve(self) -> CheckpointLocation:
        """Return a `TargetFolder` if this is a committed checkpoint's folder on a local target; otherwise `self`."""
        match = _CHECKPOINT_PATH.fullmatch(self.path)
        if not match or not Path(self.path, "manifest.json").is_file():
            return self
        return _locate_on_target(Location(Client.FILES, "file", "", self.path))

    def make_filesystem(self) -> FileSystem:
        import pyarrow.fs as arrow

        return arrow.LocalFileSystem()

    @contextmanager
    def open_local_directory(self, token: str, deadline: Deadline) -> Iterator[str]:  # noqa: ARG002  it waits for nothing
        self.require_directory()
        yield self.path

    @contextmanager
    def open_content(self, token: str, deadline: Deadline) -> Iterator[DirectoryContent]:  # noqa: ARG002  as above
        from prefect_tune.stores.local.scratch import DirectoryContent
        from prefect_tune.stores.local.staging import compute_stat_digest, copy_directory

        self.require_directory()
        source = Path(self.path)
        content_id = f"{self.path} as {compute_stat_digest(source)}"
        yield DirectoryContent(content_id, content_id, lambda copy, _: copy_directory(source, copy), lambda _: False)

    def read_metadata(self, deadline: Deadline) -> dict[str, object]:  # noqa: ARG002  as above
        from prefect_tune.stores.local.staging import METADATA_FILE, parse_metadata

        self.require_directory()
        file = Path(self.path, METADATA_FILE)
        return parse_metadata(file.read_bytes(), str(file)) if file.exists() else {}

    def update_metadata(self, change: MetadataChange, deadline: Deadline) -> None:
        import json

        from prefect_tune.core.checkpoints.manifest import normalize_metadata
        from prefect_tune.stores.local.scratch import locked_folder
        from prefect_tune.stores.local.staging import METADATA_FILE, replace_file

        self.require_directory()
        with locked_folder(f"the metadata of {os.path.realpath(self.path)}", deadline):
            metadata = normalize_metadata(change(self.read_metadata(deadline)))
            replace_file(Path(self.path, METADATA_FILE), json.dumps(metadata).encode())

    def require_directory(self) -> None:
        """Raise `CheckpointNotFound` if there is no such directory."""
        if not Path(self.path).is_dir():
            raise CheckpointNotFound(f"{self.path}: expected a checkpoint's directory, found none")


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A folder of a store: how to open the store, the folder's path below the store's root, and names for messages."""

    open: StoreOpener
    folder: str
    name: str
    path: str
    kind: str
    plain_filesystem_factory: Callable[[], FileSystem] | None = None

    def resolve(self) -> TargetFolder:
        return self

    def make_filesystem(self) -> FileSystem:
        if self.plain_filesystem_factory is None or self._parse_checkpoint_key() is not None:
            from prefect_tune.stores.checkpoint_filesystem import make_checkpoint_filesystem

            return make_checkpoint_filesystem(self)
        return self.plain_filesystem_factory()

    @contextmanager
    def open_local_directory(self, token: str, deadline: Deadline) -> Iterator[str]:
        from prefect_tune.stores.local.scratch import shared_copy

        with ExitStack() as stack:
            with self.open_content(token, deadline) as content:
                directory = stack.enter_context(shared_copy(content, deadline))
            yield str(directory)

    @contextmanager
    def open_content(self, token: str, deadline: Deadline) -> Iterator[DirectoryContent]:
        from prefect_tune.core.storage.documents import seal
        from prefect_tune.stores.local.scratch import DirectoryContent
        from prefect_tune.stores.local.staging import (
            add_metadata_file,
            fetch_checkpoint,
            fetch_plain_directory,
            matches_manifest,
            read_copy_metadata,
        )

        with self._open_store_and_manifest(deadline) as (store, manifest):
            versions = self._metadata_folder(manifest)
            metadata = read_copy_metadata(store, versions, manifest)

            def fetch(destination: Path, metadata: bytes | None) -> None:
                if manifest:
                    fetch_checkpoint(store, manifest, destination, metadata=metadata)
                else:
                    fetch_plain_directory(store, self.folder, destination, excluded_folder=versions, metadata=metadata)

            yield DirectoryContent(
                # A plain directory may change, so only calls with the same `token` share a copy of it.
                hashlib.blake2b(seal(manifest), digest_size=16).hexdigest() if manifest else token,
                self.name,
                fetch,
                lambda directory: (
                    manifest is not None and matches_manifest(add_metadata_file(manifest, metadata), directory)
                ),
                metadata,
            )

    def read_metadata(self, deadline: Deadline) -> dict[str, object]:
        from prefect_tune.core.checkpoints.manifest import read_newest_metadata

        with self._open_store_and_manifest(deadline) as (store, manifest):
            newest = read_newest_metadata(store, self._metadata_folder(manifest))
            return self._read_initial_metadata(store, manifest) if newest is None else newest

    def update_metadata(self, change: MetadataChange, deadline: Deadline) -> None:
        from prefect_tune.core.checkpoints.manifest import update_metadata

        with self._open_store_and_manifest(deadline) as (store, manifest):
            folder, initial = self._metadata_folder(manifest), self._read_initial_metadata(store, manifest)
            update_metadata(store, folder, change, initial=initial, write_id=uuid.uuid4().hex)

    def read_manifest(self, store: ObjectStore) -> Manifest | None:
        """Return the manifest of this checkpoint; None for a plain directory.

        Raises:
            CheckpointNotFound: there is neither a checkpoint nor a plain directory.
            CheckpointCorrupt: the manifest is truncated or altered, or belongs to another checkpoint.
        """
        from prefect_tune.core.restore import read_manifest

        key = self._parse_checkpoint_key()
        if key is None:
            return None
        try:
            return read_manifest(store, key)
        except CheckpointNotFound:
            if store.list(self.folder):
                return None  # a plain directory whose path looks like a checkpoint's
            raise

    @contextmanager
    def _open_store_and_manifest(self, deadline: Deadline) -> Iterator[tuple[ObjectStore, Manifest | None]]:
        deadline.check(f"opening {self.name}")
        with self.open(timeout=timedelta(seconds=deadline.remaining_seconds)) as store:
            yield store, self.read_manifest(store)

    def _parse_checkpoint_key(self) -> CheckpointKey | None:
        from prefect_tune.core.storage.layout import CheckpointKey, TrialKey

        match = _CHECKPOINT_PATH.fullmatch(self.folder)
        if not match:
            return None
        trial = TrialKey(experiment=match["experiment"], generation=int(match["generation"]), trial=match["trial"])
        return CheckpointKey(trial=trial, step=int(match["step"]), sequence=int(match["sequence"]))

    def _metadata_folder(self, manifest: Manifest | None) -> str:
        """Return the folder with the versions of the metadata; in a plain directory, this is a hidden subfolder."""
        key = self._parse_checkpoint_key() if manifest else None
        return key.metadata_folder if key else f"{self.folder}/.metadata".lstrip("/")

    def _read_initial_metadata(self, store: ObjectStore, manifest: Manifest | None) -> dict[str, object]:
        from prefect_tune.core.storage.documents import read_document
        from prefect_tune.stores.local.staging import METADATA_FILE, parse_metadata, read_committed_metadata

        if manifest:
            return read_committed_metadata(store, manifest)
        path = f"{self.folder}/{METADATA_FILE}" if self.folder else METADATA_FILE
        try:
            return parse_metadata(bytes(read_document(store, path, CheckpointCorrupt)), path)
        except ObjectNotFound:
            return {}


# A checkpoint in a notebook: its location, facts from its manifest, and how to open it.

_OPEN_EXAMPLE = "with checkpoint.as_directory() as directory: ..."


def render_checkpoint_html(location: CheckpointLocation, timeout: timedelta) -> str:
    """Return HTML with the facts in the manifest at `location`; show an error of the target instead of raising it."""
    from prefect_tune.core.display_text import format_size, pluralize, shorten
    from prefect_tune.core.page_elements import Table, Text, Verbatim, make_values_table, render_notebook_cell
    from prefect_tune.core.values import flatten

    title = "Checkpoint"
    metrics: list[PageElement] = []
    problem: list[PageElement] = []
    rows: list[tuple[str, Cell]] = [("location", Verbatim(shorten(location.name, 1000)))]
    try:
        resolved = location.resolve()
        if isinstance(resolved, LocalDirectory):
            resolved.require_directory()
        else:
            with resolved.open(timeout=timeout) as store:
                manifest = resolved.read_manifest(store)
            if manifest:
                title = f"Checkpoint of step {manifest.step}, trial {manifest.trial} of {manifest.experiment}"
                about, size = manifest.metadata, format_size(sum(file.size_bytes for file in manifest.files))
                rows += [
                    ("step", f"{manifest.step:,}"),
                    ("size", f"{size} in {pluralize(len(manifest.files), 'file', 'files')}"),
                    ("saved", f"{about.created_at.replace('T', ' ')[:19]} UTC, attempt {about.attempt}"),
                ]
                metrics = [make_values_table("metric", flatten(about.metrics))]
    except TuneError as error:
        problem = [Text([shorten(f"{type(error).__name__}: {error}", 300)], kind="bad")]
    rows.append(("open", Verbatim(_OPEN_EXAMPLE)))
    return render_notebook_cell(Text([title], kind="strong"), *metrics, Table((), rows), *problem)
