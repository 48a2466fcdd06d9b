"""The block that configures when experiment state and artifacts are synced, and the timeout of a sync."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from pydantic import ConfigDict, Field, HttpUrl, field_serializer, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticSerializationError

from prefect_tune.blocks.resolve_target import resolve_target, target_from_fields, target_reference, validate_target
from prefect_tune.blocks.storage_target import FILES_LOGO, StorageTarget, StrictBlock
from prefect_tune.blocks.targets import AnyTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.page_elements import Table, Text, render_notebook_cell
from prefect_tune.core.values import MAX_LIVE_PERIOD_SECONDS, NUMBER_VALIDATOR, Number, WholeNumber

_LivePeriod = Annotated[float, Field(ge=1, le=MAX_LIVE_PERIOD_SECONDS, allow_inf_nan=False), NUMBER_VALIDATOR]


@runtime_checkable
class SyncerLike(Protocol):
    """The methods that a user's own syncer of the artifact directory must have."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool: ...
    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool: ...
    def delete(self, remote_dir: str) -> bool: ...


_MIN_REQUEST_PERIOD, _MAX_REQUEST_PERIOD = timedelta(seconds=0.5), timedelta(seconds=5)


class SyncConfig(StrictBlock):
    """Sets when experiment state and artifacts are synced, the timeout of a sync, and the excluded files.

    Checkpoints do not wait for `sync_period_seconds`: each is uploaded and committed when it is saved.

    Example:
        ```python
        from prefect_tune.blocks import SyncConfig

        sync_config = SyncConfig.load("BLOCK_NAME")
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)  # a user's syncer may be any object
    _block_type_name: ClassVar[str | None] = "Sync Config"
    _block_type_slug: ClassVar[str | None] = "sync-config"
    _logo_url: ClassVar[HttpUrl | None] = FILES_LOGO

    upload_dir: AnyTarget | SkipJsonSchema[StorageTarget] | str | None = Field(
        default=None,
        title="Upload target",
        description="The target of artifacts: a target block, a 'block-type/name' slug or a URI. "
        "Empty: the flow's own target.",
    )
    syncer: SkipJsonSchema[SyncerLike] | str | None = Field(
        default="auto",
        description="The syncer of artifacts: 'auto', the 'package.module:Name' of your own syncer, or none.",
    )
    sync_period_seconds: Number = Field(
        default=300,
        ge=0,
        description="Minimum time in seconds between two periodic syncs. Also the maximum time for which a report is "
        "queued before it is written to the journal; training does not wait for this.",
    )
    live_period_seconds: _LivePeriod | None = Field(
        default=5,
        description="Time in seconds between two writes of the live status: one small object with the newest steps of "
        "all running trials, for `show`, `ls` and `report`. Empty: no writes.",
    )
    sync_timeout_seconds: Number = Field(
        default=1800, gt=0, description="Timeout in seconds of one sync, checkpoint upload or download."
    )
    sync_artifacts: bool = Field(
        default=True,
        description="Whether files in the trial directory that are not part of a checkpoint are uploaded too.",
    )
    sync_on_checkpoint: bool = Field(
        default=True, description="Whether artifacts are synced at each checkpoint, in addition to the periodic syncs."
    )
    artifact_excludes: tuple[str, ...] = Field(
        default=(),
        description="Shell patterns of files and folders that are not uploaded: '*.tmp' matches at any depth, "
        "'logs/*' and './rank_*' only at the top of the trial directory.",
    )
    commit: Literal["sync", "async"] = Field(
        default="sync",
        description="'sync': a report returns when its checkpoint is committed. "
        "'async': a report returns before its checkpoint is uploaded, with at most one upload in flight.",
    )

    verify_reused_every: WholeNumber = Field(
        default=16,
        ge=1,
        description="Data that several checkpoints share is uploaded once. Each commit reads back some of this data, "
        "so that this number of commits verifies all; damaged data is uploaded again. 1: each commit verifies all.",
    )

    @field_validator("upload_dir", mode="before")
    @classmethod
    def _parse_upload_dir(cls, value: object) -> object:
        if isinstance(value, Mapping):  # a saved block's fields; pydantic alone would report an error per target type
            return target_from_fields(value)
        if isinstance(value, os.PathLike):
            return resolve_target(value)
        if value is None or isinstance(value, StorageTarget | str):
            return value
        raise ValueError(f"expected a target block, a 'block-type/name' slug or a URI, found a {type(value).__name__}")

    @field_validator("syncer", mode="before")
    @classmethod
    def _validate_syncer(cls, syncer: object) -> object:
        if syncer is None or syncer == "auto" or isinstance(syncer, SyncerLike) or _is_import_string(syncer):
            return syncer
        description = repr(syncer) if isinstance(syncer, str) else f"a {type(syncer).__name__}"
        raise ValueError(f"expected 'auto', 'package.module:Name' or a Syncer, found {description}")

    @field_validator("artifact_excludes")
    @classmethod
    def _validate_excludes(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if not pattern or pattern.startswith("/"):
                raise ValueError(f"expected patterns of paths relative to the trial directory, found {pattern!r}")
        return patterns

    @model_validator(mode="after")
    def _require_syncer_and_target(self) -> Self:
        if self.upload_dir is not None and self.syncer is None:
            raise ValueError("upload_dir needs a syncer, but syncer is None: set a syncer, or remove upload_dir")
        if self.upload_dir is None and self.syncer not in (None, "auto"):
            raise ValueError("a syncer of your own needs an upload_dir: set the target of its syncs")
        return self

    def parameters(self) -> dict[str, Any]:
        """Return JSON fields without secrets, from which another process can create an equal `SyncConfig`.

        Raises:
            InvalidInput: the syncer is an object, or the upload target is not saved and its URI lacks some settings.
        """
        try:
            fields = self.model_dump(mode="json")
        except PydanticSerializationError as error:
            raise InvalidInput(f"sync: {error}") from error
        target = self.upload_dir
        return {**fields, "upload_dir": target_reference(target) if isinstance(target, StorageTarget) else target}

    @field_serializer("syncer")
    def _serialize_syncer(self, syncer: object) -> str | None:
        if syncer is None or isinstance(syncer, str):
            return syncer
        raise InvalidInput(
            f"a {type(syncer).__name__} object cannot be stored: pass syncer='package.module:Name' instead"
        )

    @property
    def sync_period(self) -> timedelta:
        return timedelta(seconds=self.sync_period_seconds)

    @property
    def request_period(self) -> timedelta:
        """The interval at which a run polls for stop requests and for its cancellation."""
        return min(_MAX_REQUEST_PERIOD, max(_MIN_REQUEST_PERIOD, self.sync_period))

    @property
    def live_period(self) -> timedelta | None:
        return None if self.live_period_seconds is None else timedelta(seconds=self.live_period_seconds)

    @property
    def sync_timeout(self) -> timedelta:
        return timedelta(seconds=self.sync_timeout_seconds)

    @property
    def excludes(self) -> tuple[str, ...]:
        """The patterns of files that are not uploaded: the user's patterns, and `NON_ARTIFACT_PATTERNS`."""
        from prefect_tune.core.storage.layout import NON_ARTIFACT_PATTERNS

        return (*self.artifact_excludes, *NON_ARTIFACT_PATTERNS)

    def target(self) -> StorageTarget | None:
        """Return the target of `upload_dir`; None if unset. A slug is loaded from the Prefect server."""
        return None if self.upload_dir is None else resolve_target(self.upload_dir)

    def validate_upload_dir(self) -> bool:
        """Return True if `upload_dir` is a valid target, without connecting to it.

        If `upload_dir` is a string, and the user's syncer has a method `validate_upload_dir`, that method decides.

        Raises:
            InvalidInput: `upload_dir` is not valid.
        """
        validate: Any = getattr(self.syncer, "validate_upload_dir", None)
        if validate is not None and isinstance(self.upload_dir, str):
            return bool(validate(self.upload_dir))
        if self.upload_dir is not None:
            validate_target(self.upload_dir)
        return True

    def _repr_html_(self) -> str:
        target = self.upload_dir.uri if isinstance(self.upload_dir, StorageTarget) else self.upload_dir
        rows = (
            ("Upload target", "the flow's target" if target is None else target),
            ("Sync on checkpoint", str(self.sync_on_checkpoint)),
            ("Sync period", f"{self.sync_period_seconds:g} s"),
        )
        return render_notebook_cell(Text(["SyncConfig"], kind="strong"), Table((), rows))


def _is_import_string(value: object) -> bool:
    if not isinstance(value, str):
        return False
    module, _, name = value.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))
