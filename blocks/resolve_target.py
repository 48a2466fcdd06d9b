"""Resolve a target that a user gave as a block, a 'block-type/name' slug, a URI or a path."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.blocks.core import Block, UnknownBlockType
from prefect.context import FlowRunContext
from prefect.settings import get_current_settings
from pydantic import ValidationError

from prefect_tune.blocks.storage_target import StorageTarget
from prefect_tune.blocks.targets import TARGET_TYPES, LocalTarget
from prefect_tune.core.errors import InvalidInput, StoreUnavailable
from prefect_tune.core.metrics import plain_scalar
from prefect_tune.stores.open_location import BLOCK_SLUG, read_uri

SET_UP = (
    "prefect server start, then prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api; or prefect cloud login"
)
"""Advice for errors when no Prefect server is configured."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_READ_ONLY = frozenset({"data", "git", "github", "http", "https"})
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""Begins a URI that lacks a slash, as `Path("s3://bucket")` has only one."""


def resolve_target(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget:
    """Return the target that `value` names. Only a slug needs the Prefect server; the target is not contacted.

    A string is a URI if it has a scheme, as in `s3://bucket/folder`; else a path if it starts with `/`, `./`, `../` or
    `~`, or does not have exactly one `/`; else a `block-type/name` slug, whose type must be a target block. So a
    relative path of two parts is written `./runs/first`. A `PathLike` is always a path. Relative paths are resolved
    against the current working directory; a run of a deployment refuses them, since its worker chooses that directory.

    Raises:
        InvalidInput: it is none of these, or nothing can be written to it (`https`), or the block is not saved on the
            server, or it is a relative path in a run of a deployment.
        StoreUnavailable: the Prefect server did not answer.
    """
    found = _read(value)
    return found if isinstance(found, StorageTarget) else _load(*found)


def resolve_existing(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget:
    """Return the target that `value` names, for read-only use: opening it does not create a missing local folder.

    Raises as `resolve_target`.
    """
    found = _read(value, is_read=True)
    target = found if isinstance(found, StorageTarget) else _load(*found)
    return target.model_copy(update={"must_exist": True}) if isinstance(target, LocalTarget) else target


def validate_target(value: StorageTarget | str | os.PathLike[str]) -> None:
    """Raise as `resolve_target` would, except for errors that need the Prefect server."""
    _read(value)


ABSOLUTE = r"(?:/|(?!(?:file|local)://(?!localhost/)[^/])[A-Za-z][A-Za-z0-9+.-]*://)"
"""How a path or a URI begins that is the same place in each process."""


def block_slug_pattern() -> str:
    """Return the pattern of `type/name` of the saved blocks that can be a target, for JSON schemas."""
    return rf"(?:{'|'.join(sorted(_target_types()))})/[^/\s]+"


def require_absolute(value: StorageTarget | str | os.PathLike[str], where: str = "target") -> None:
    """Check that a target is the same place on each machine: no path below a working directory or a home.

    Raises:
        InvalidInput: it is a relative path.
    """
    if isinstance(value, StorageTarget) or re.match(ABSOLUTE, text := os.fspath(value)):
        return
    if not isinstance(_read(text), tuple):
        raise InvalidInput(
            f"{where}: {text!r}: expected an absolute path or a URI, found a relative path: a run of a deployment has "
            "the working directory and the home of its worker. Pass /absolute/path, a URI such as s3://bucket/runs, "
            "or the type/name of a saved block"
        )


def target_reference(target: StorageTarget) -> str:
    """Return a string without secrets that `resolve_target` turns into an equal target in any process.

    Raises:
        InvalidInput: the target is not saved and has settings that its URI does not contain.
    """
    if target.saved_name is not None:
        return f"{target.get_block_type_slug()}/{target.saved_name}"
    if _read(target.uri) == target:
        return target.uri
    raise InvalidInput(
        f"{target.uri}: another process would need its credentials or settings too; save the block and pass "
        f"its slug: target.save('name'), then '{target.get_block_type_slug()}/name'"
    )


def target_from_fields(fields: Mapping[str, object]) -> StorageTarget:
    """Return the target with these fields of a saved block.

    Its type is given by `block_type_slug`. Prefect leaves that out of a block within a block; then the fields must fit
    exactly one type of target.

    Raises:
        InvalidInput: they fit no type of target, or several.
    """
    kinds = _target_types()
    slug = fields.get("block_type_slug")
    fitting = [slug] if slug else [name for name, kind in kinds.items() if fields.keys() <= kind.model_fields.keys()]
    if len(fitting) == 1 and fitting[0] in kinds:
        return kinds[str(fitting[0])](**fields)
    raise InvalidInput(f"expected the fields of a target, with a block_type_slug among {', '.join(sorted(kinds))}")


def _read(value: StorageTarget | str | os.PathLike[str], *, is_read: bool = False) -> StorageTarget | tuple[str, str]:
    """Return the target, or the type and name of a saved block; `is_read`: nothing will be written there."""
    value = cast("StorageTarget | str | os.PathLike[str]", plain_scalar(value))
    if isinstance(value, StorageTarget | str) and not is_read:
        _require_writable(value if isinstance(value, str) else value.uri)
    if isinstance(value, StorageTarget):
        return value
    if isinstance(value, os.PathLike):
        return _folder(os.fspath(value), is_read=is_read)
    if not isinstance(value, str):
        raise InvalidInput(
            f"target: expected a block, a 'block-type/name' slug, a URI or a path, found a {type(value).__name__}"
        )
    if not value.strip():
        raise InvalidInput("target: expected a block, a 'block-type/name' slug, a URI or a path, found an empty string")
    if _SCHEME.match(value):
        location = read_uri(value)
        kind = next(each for each in TARGET_TYPES if each._client is location.client)  # noqa: SLF001  of our own
        return kind._at(value, location)  # noqa: SLF001  as above
    if (slug := BLOCK_SLUG.fullmatch(value)) is None:
        return _folder(value, is_read=is_read)
    if slug[1] not in (known := _target_types()):
        raise InvalidInput(
            f"{value!r}: {slug[1]!r} is not a type of target block; write './{value}' for a folder, or one of "
            f"{', '.join(sorted(known))} for a block"
        )
    return slug[1], slug[2]


def _require_writable(uri: str) -> None:
    """Refuse a scheme by which nothing can be written; its text after `?` may be a signature, and is not shown."""
    scheme, _, rest = uri.partition("://")
    if scheme.lower() in _READ_ONLY:
        host = urlsplit(uri).hostname or rest[:40]
        raise InvalidInput(
            f"target: {scheme}://{host}/…: expected a place to write to, found {scheme}, by which files can only be "
            "read. Write s3://bucket/prefix, gs://bucket/prefix or az://container@account/prefix for a bucket, with "
            f"?endpoint_url=https://{host} for an S3 server of your own; webdav://… for a WebDAV server"
        )


def _folder(given: str, *, is_read: bool) -> LocalTarget:
    if _VARIABLE.match(given):
        raise InvalidInput(
            f"target: {given!r}: environment variables are not expanded; write os.path.expandvars({given!r}), or "
            f"{f'./{given}'!r} for a folder of this name"
        )
    if scheme := _ONE_SLASH.match(given):
        raise InvalidInput(
            f"target: {given!r}: expected two slashes after {scheme[1]}:, as in {scheme[1]}://{given[scheme.end() :]}, "
            f"in a string (a Path keeps one slash); or {f'./{given}'!r} for a folder of this name"
        )
    path = Path(given)
    is_relative = not path.is_absolute() and not given.startswith("~")
    if is_relative and not (is_read and path.is_dir()) and is_in_run_of_deployment():
        raise InvalidInput(
            f"target: {given!r}: expected an absolute path or a URI in a run of a deployment, found a relative path: "
            f"it would be below the working directory of this run, {Path.cwd()}, which may be temporary, and not that "
            "of the next run. Pass /absolute/path, a URI such as s3://bucket/runs, or the type/name of a saved block"
        )
    return LocalTarget(path=str(Path.cwd() / path if is_relative else path))


def is_in_run_of_deployment() -> bool:
    """Whether this code runs in a run of a deployment, or in a flow or task that such a run called."""
    # Workers and runners set the variable for the process of a run: a subflow's own run has no deployment.
    return deployment_of_run() is not None or "PREFECT__FLOW_RUN_ID" in os.environ


def deployment_of_run() -> UUID | None:
    """Return the deployment that this flow run is a run of; None outside a flow run, and in one of no deployment."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return run.deployment_id if run is not None else None


def _target_types(base: type[StorageTarget] = StorageTarget) -> dict[str, type[StorageTarget]]:
    """Return all target classes that this process has defined, including a user's own, by their slugs."""
    kinds: dict[str, type[StorageTarget]] = {}
    for kind in base.__subclasses__():
        if not inspect.isabstract(kind):
            kinds[kind.get_block_type_slug()] = kind
        kinds |= _target_types(kind)
    return kinds


def _load(block_type: str, name: str) -> StorageTarget:
    slug = f"{block_type}/{name}"
    try:
        block = Block.load(slug, _sync=True)  # type: ignore[call-arg]  # added by Prefect's async_dispatch
    except UnknownBlockType as error:
        raise InvalidInput(f"{slug!r}: {error}") from None
    except ValueError:
        url = get_current_settings().api.url
        missing = f"no such block is saved on the Prefect server at {url}"
        unset = f"no Prefect server is set up, and a saved block is stored on one: {SET_UP}"
        raise InvalidInput(f"{slug!r}: {missing if url else unset}") from None
    except RuntimeError as error:
        raise InvalidInput(f"{slug!r}: the saved block is not valid: {_complaints(error)}") from None
    except httpx.HTTPError as error:
        server = f"the Prefect server at {get_current_settings().api.url}, which stores the block, did not answer"
        raise StoreUnavailable(
            f"{slug!r}: {server}: {str(error) or type(error).__name__}; a URI, such as s3://bucket, needs none"
        ) from None
    if not isinstance(block, StorageTarget):
        raise InvalidInput(f"{slug!r} is a {type(block).__name__}, not a target")
    return block


def _complaints(error: RuntimeError) -> str:
    invalid = error.__cause__
    if not isinstance(invalid, ValidationError):
        return str(error)
    return "; ".join(detail["msg"].removeprefix("Value error, ") for detail in invalid.errors())
