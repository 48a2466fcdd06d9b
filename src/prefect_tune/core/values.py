"""The values of the core: their base class (frozen, rejects unknown fields), and their JSON, names and digests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, NewType, Self, TypeAlias, TypeVar

from blake3 import blake3
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticKnownError, SchemaSerializer, core_schema, from_json

from prefect_tune.core.display_text import make_storable
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.metrics import to_plain_scalar

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Metrics: TypeAlias = Mapping[str, object]
Digest = NewType("Digest", str)

MAX_LIVE_PERIOD_SECONDS = 24 * 3600.0
"""The maximum time between two live statuses."""
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_MAX_SAFE_BRACKETS = 100
"""JSON with at most this many opening brackets is never nested too deeply, since each bracket opens only one level."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
_Model = TypeVar("_Model", bound=BaseModel)


class Value(BaseModel):
    """A frozen value that rejects unknown fields."""

    # By default, pydantic writes a NaN as null. With this option, it writes a NaN, which `canonical_json` rejects.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def model_post_init(self, _context: object, /) -> None:
        # Pydantic stores the set of explicitly passed fields in each value. No code reads this set, which takes a
        # quarter of a value's memory: 60 MiB for ten thousand trials. So all values of a class share one set of all
        # fields, and `exclude_unset` excludes nothing.
        object.__setattr__(self, "__pydantic_fields_set__", _field_names(type(self)))

    def __dir__(self) -> Iterable[str]:
        """Return the class's own names, without pydantic's methods, for tab completion."""
        return [name for name in super().__dir__() if name.startswith("__") or not hasattr(BaseModel, name)]

    def __copy__(self) -> Self:
        """Copy for `model_copy`. Copies share the set of fields: it has all names, so `model_copy` adds none."""
        copied = object.__new__(type(self))
        object.__setattr__(copied, "__dict__", self.__dict__.copy())
        object.__setattr__(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__)
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied


@cache
def _field_names(value: type[Value]) -> set[str]:
    return set(value.model_fields)


def _require_number_or_text(value: object) -> object:
    plain = to_plain_scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float | str):
        raise PydanticKnownError("float_type")
    return plain


def _require_integer_or_text(value: object) -> object:
    plain = to_plain_scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, int | str):
        raise PydanticKnownError("int_type")
    return plain


NUMBER_VALIDATOR = BeforeValidator(_require_number_or_text)
INTEGER_VALIDATOR = BeforeValidator(_require_integer_or_text)
"""Put this after the bounds (`Annotated[int, Field(ge=1), INTEGER_VALIDATOR]`), since forms ignore later bounds."""
Number: TypeAlias = Annotated[float, AllowInfNan(allow_inf_nan=False), NUMBER_VALIDATOR]
"""A finite number of Python or NumPy, or the text of a number, as it comes from JSON or YAML; not a bool."""
WholeNumber: TypeAlias = Annotated[int, INTEGER_VALIDATOR]
"""An integer of Python or NumPy, or the text of an integer; neither a bool nor 3.0."""


class HasJsonForm:
    """An option that is an object in code, and has a JSON form for deployments, forms and the journal.

    Prefect's client sends parameters through pydantic, which would write a dataclass as a dict of its fields. Such a
    dict does not name the class, so a distribution would arrive as a constant. The serializer below prevents this.
    """

    __slots__ = ()

    def to_json_form(self) -> object:
        """Return the JSON from which `pt.tune` makes an equal object.

        Raises:
            InvalidInput: the object has no JSON form, for example because this package does not know its class.
        """
        raise InvalidInput(
            f"{self!r} has no JSON form, which deployments and journals need: pass it in code, to a flow that is "
            "called in this process"
        )

    __pydantic_serializer__ = SchemaSerializer(
        core_schema.any_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.to_json_form())
        )
    )


class WriteStamp(Value):
    """The id and the time of one write. The caller makes both, since the core uses neither randomness nor a clock."""

    write_id: str
    at: str


class StepReport(Value):
    """The metrics of a step, and the trial's training time up to that step (all attempts, without lost steps)."""

    step: int
    metrics: Mapping[str, Any]
    trained_seconds: float = 0.0


def validate_name(name: str) -> str:
    """Return `name` if it can be the name of a folder on every target.

    Raises:
        InvalidInput: `name` is empty or too long, begins with a symbol, or contains a character that is not allowed.
    """
    name = str.__str__(name)  # `str(name)` would be 'Kind.LINEAR' for a member of a text enum
    if _NAME_PATTERN.fullmatch(name) and ".." not in name:
        return name
    raise InvalidInput(
        f"name {name!r}: expected 1 to 128 letters, digits, '.', '_', '=' or '-', starting with a letter "
        "or digit and without '..': it becomes a folder on the target"
    )


ExperimentName: TypeAlias = Annotated[str, AfterValidator(validate_name)]
TrialId: TypeAlias = Annotated[str, AfterValidator(validate_name)]


def hash_bytes(data: bytes | bytearray | memoryview) -> Digest:
    """Return the BLAKE3 digest (256 bits, hexadecimal) by which the protocol names bytes."""
    return Digest(blake3(data).hexdigest())


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested `values` to one level with names like `model/depth`; a list becomes the text of its JSON."""
    return {
        name: json.dumps(value) if isinstance(value, list | tuple) else value
        for name, value in iter_leaves(values, prefix)
    }


def iter_leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the innermost values of `values`, with names such as `model/depth`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from iter_leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def get_metric(metrics: Metrics, name: str) -> object:
    """Return the metric `name`, such as `eval/loss` for a nested metric; None if it was not reported."""
    if name in metrics:
        return metrics[name]
    value: object = metrics
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def canonical_json(value: object) -> bytes:
    """Encode `value` so that equal values give equal bytes.

    Raises:
        ValueError: the value has a NaN, an infinity, a lone surrogate or more than about 200 levels; readers of JSON
            reject all of these.
        TypeError: the value contains something else that JSON cannot represent.
    """
    text = _ENCODER.encode(value)
    if "\\ud" in text or text.count("{") + text.count("[") > _MAX_SAFE_BRACKETS:
        from_json(text)
    return text.encode()


def parse_json(model: type[_Model], data: bytes | bytearray | memoryview, error: type[Exception], where: str) -> _Model:
    """Decode `data` as `model`; if `data` is invalid, raise `error` with `where`, the field and the problem."""
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "the document"
        raise error(f"{where}: {field}: {problem['msg']}") from invalid


def argument_error(invalid: ValidationError, within: str = "") -> Exception:
    """Return the `TuneError` that a validator raised; otherwise, an error with the first field's innermost problem.

    Args:
        invalid: the error of pydantic. The result does not show an invalid text, which may be a secret.
        within: the name of the parameter that contains the invalid value; empty if `invalid` names it.
    """
    errors = invalid.errors(include_url=False)
    error = max(errors, key=lambda item: (item["loc"][:1] == errors[0]["loc"][:1] or bool(within), len(item["loc"])))
    cause, value = error.get("ctx", {}).get("error"), error["input"]
    if isinstance(cause, TuneError):
        return cause
    suffix = f", found {value!r}" if value is None or isinstance(value, int | float) else ""
    where = [part for part in (within, *error["loc"]) if isinstance(part, int) or part.isidentifier()]  # no literals
    return InvalidInput(f"{'.'.join(map(str, where))}: {error['msg'].removeprefix('Value error, ')}{suffix}")


def parse_time(at: str) -> datetime | None:
    """Parse a time from the target, and return it in UTC; None if the text is not a time."""
    try:
        time = datetime.fromisoformat(at)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # not a time, or before year 1
        return None


Message: TypeAlias = Annotated[
    str, BeforeValidator(lambda value: make_storable(value) if isinstance(value, str) else value)
]
"""A text for display, which may come from the user's code. Any content and length is valid: see `make_storable`."""


def _decode_path(value: object, info: ValidationInfo) -> object:
    if info.mode == "json" and isinstance(value, str):
        return value.encode("latin-1").decode(errors="surrogateescape")
    return value


def _encode_path(path: str) -> str:
    return path.encode(errors="surrogateescape").decode("latin-1")


PathName: TypeAlias = Annotated[str, BeforeValidator(_decode_path), PlainSerializer(_encode_path, when_used="json")]
"""A path on this machine, which need not be UTF-8. In JSON, each character is one byte of the path (Latin-1)."""
