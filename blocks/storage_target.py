"""The base class of the storage target blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self

from prefect.blocks.core import Block, schema_extra
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from prefect_tune.blocks.credentials import import_named_blocks
from prefect_tune.blocks.target_check import TargetCheck, check_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.stores.open_location import Client, Location

# The base class of the blocks: immutable, and strict about unknown fields.


def block_logo(name: str) -> HttpUrl:
    """Return the address of a logo that Prefect's own blocks refer to."""
    revision = "420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9"
    return HttpUrl(f"https://raw.githubusercontent.com/PrefectHQ/prefect/{revision}/assets/block-logos/{name}.png")


FILES_LOGO = block_logo("filesystem")
"""As the other blocks' logos one that the Prefect UI shows for the same service."""

# Prefect adds these keys to the fields, in block documents and in dumps.
_BOOKKEEPING = frozenset({"block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous"})


def _required_first(schema: dict[str, Any], model: type[Block]) -> None:
    import_named_blocks(model)
    schema_extra(schema, model)
    required = schema.get("required", ())
    last = getattr(model, "_shown_last", ())
    # sorted() is stable, and the UI shows the fields in this order
    place = {name: (name not in required, name in last) for name in schema["properties"]}
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: place[item[0]]))


class StrictBlock(Block, ABC):
    """A frozen Prefect block that refuses unknown fields.

    Invalid fields raise one `InvalidInput` of one line. It contains no values of fields, since they may be secrets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, json_schema_extra=_required_first)
    _documentation_url: ClassVar[HttpUrl | None] = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # from None: the cause would print the input, secrets included
            raise InvalidInput(_in_one_line(type(self).__name__, error)) from None

    @classmethod
    def __dispatch_key__(cls) -> str:
        """Return what Prefect computes from the whole schema, which would import every block that a field names."""
        return cls.get_block_type_slug()

    @classmethod
    def register_type_and_schema(cls, *args: Any, **options: Any) -> Any:
        import_named_blocks(cls)  # Prefect registers them first
        return super().register_type_and_schema(*args, **options)

    @classmethod
    async def aregister_type_and_schema(cls, *args: Any, **options: Any) -> None:
        import_named_blocks(cls)
        await super().aregister_type_and_schema(*args, **options)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        slug = values.get("block_type_slug")
        if slug not in (None, cls.get_block_type_slug()):
            raise ValueError(f"expected a block of type {cls.get_block_type_slug()!r}, found {slug!r}")
        fields = {name: value for name, value in values.items() if name not in _BOOKKEEPING}
        for name in fields:
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "{message}", {"message": unknown_field(cls, name)})
        return {name: value for name, value in fields.items() if not cls._left_empty(name, value)}

    @classmethod
    def _left_empty(cls, name: str, value: object) -> bool:
        """Whether an optional text field was left empty in a form: Prefect then sends "", which here means None."""
        return isinstance(value, str) and not value and cls.model_fields[name].default is None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return list(BaseModel.__repr_args__(self))  # Prefect draws the block's form here, to leave out unknown fields

    @property
    def saved_name(self) -> str | None:
        """The name under which this block is saved on the Prefect server; None if it is not."""
        return self._block_document_name

    def secret_values(self) -> Iterator[str]:
        """Yield every secret value in this block's own fields, so that messages can mask it."""
        for name in type(self).model_fields:
            yield from _secrets_in(getattr(self, name))


def _secrets_in(value: object) -> Iterator[str]:
    match value:
        case SecretStr():
            yield value.get_secret_value()
        case StrictBlock():
            yield from value.secret_values()
        case _ if hasattr(value, "get_secret_value"):  # SecretDict
            yield from (str(secret) for secret in value.get_secret_value().values())


def unknown_field(cls: type[StrictBlock], name: str) -> str:
    """Return the error for an unknown field name, with the nearest field or the list of fields."""
    fields = sorted(cls.model_fields, key=lambda field: field in getattr(cls, "_shown_last", ()))
    return f"no field {name!r}: {did_you_mean_or_has(name, fields)}"


def _in_one_line(block: str, error: ValidationError) -> str:
    return f"{block}: " + "; ".join(_complaint(detail) for detail in error.errors(include_url=False))


def _complaint(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where}: {message}" if where else message


_LEAST_KEY = 16


def _opened(target: StorageTarget, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
    return target.open(timeout=timeout)


class StorageTarget(StrictBlock, ABC):
    """A place where experiments and checkpoints are stored: a configuration without open connections.

    Creating, loading and printing one does not connect to the storage; only `open` and `check` do.
    """

    _client: ClassVar[Client | None] = None
    """The client of the URIs that `_at` takes."""
    _shown_last: ClassVar[frozenset[str]] = frozenset({"signing_key"})

    signing_key: SecretStr | None = Field(
        default=None,
        description="Signs the settings of searches on this target. A resume by name then accepts only settings signed "
        "with this key, so write access to the target is not enough to run other code. At least 16 characters.",
    )

    @field_validator("signing_key")
    @classmethod
    def _hard_to_guess(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < _LEAST_KEY:
            raise ValueError(f"expected at least {_LEAST_KEY} characters, such as those of `openssl rand -hex 32`")
        return key

    @property
    @abstractmethod
    def uri(self) -> str:
        """The location as a URI without secrets, for messages and for `resolve_target`."""

    @property
    def signing_secret(self) -> bytes | None:
        """The signing key as bytes; None if the target has none."""
        return None if self.signing_key is None else self.signing_key.get_secret_value().encode()

    @abstractmethod
    def open(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
        """Return the store as a context manager; all its operations together end within `timeout`.

        Raises:
            InvalidInput: the configuration is invalid, independent of the target's answers.
            StoreRefused: the credentials cannot be read.
        """

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:
        """Return the target at `location`, which is the parsed `uri`."""
        raise NotImplementedError

    def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """Return the committed checkpoint `key` as `pt.Checkpoint`, read with this target's credentials."""
        return Checkpoint._of(partial(_opened, self), self.uri, key)  # noqa: SLF001 - the constructor made for this

    def check(self, *, timeout: timedelta = timedelta(seconds=30)) -> TargetCheck:
        """Write, read back, list and delete a probe, and test create-if-absent by a small race.

        Errors of the target do not raise: the returned `message` describes them in one line.
        """
        return check_target(self, timeout=timeout)
