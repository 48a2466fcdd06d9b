"""The base class of the blocks: immutable, and strict about unknown fields."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import Any, ClassVar

from prefect.blocks.core import Block, schema_extra
from pydantic import BaseModel, ConfigDict, HttpUrl, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from prefect_tune.blocks.credentials import import_named_blocks
from prefect_tune.core.did_you_mean import did_you_mean_or_has
from prefect_tune.core.errors import InvalidInput


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
