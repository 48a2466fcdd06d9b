"""Resolve a user's target: a block, a 'block-type/name' slug, a URI or a path."""

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
from prefect_tune.core.metrics import to_plain_scalar
from prefect_tune.stores.open_location import BLOCK_SLUG, parse_uri

SERVER_SETUP_ADVICE = (
    "prefect server start, then prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api; or prefect cloud login"
)
"""Advice for errors when no Prefect server is configured."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_READ_ONLY_SCHEMES = frozenset({"data", "git", "github", "http", "https"})
_ENVIRONMENT_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_SINGLE_SLASH_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""Matches the beginning of a URI with one slash instead of two, as in the text of `Path("s3://bucket")`."""


def resolve_target(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget:
    """Return the target that `value` describes, without contacting it. Only a slug needs the Prefect server.

    A string with a scheme, as in `s3://bucket/folder`, is a URI. Any other string is the `block-type/name` slug of a
    target block if it contains no space and exactly one `/`, with only lower-case letters, digits and hyphens before
    the `/`; so write a relative path of two parts as `./runs/first`. All other strings, and each `PathLike`, are paths.
    Relative paths start at the working directory; in a run of a deployment, whose worker chooses it, they are an error.

    Raises:
        InvalidInput: `value` does not name a target, its scheme is read-only (`https`), the block is not saved on the
            server, or the path is relative in a run of a deployment.
        StoreUnavailable: the Prefect server did not answer.
    """
    parsed = _parse_target(value)
    return parsed if isinstance(parsed, StorageTarget) else _load_block(*parsed)


def resolve_existing(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget:
    """Resolve a target to read from: its scheme may be read-only, and opening it does not create a missing folder."""
    parsed = _parse_target(value, for_reading=True)
    target = parsed if isinstance(parsed, StorageTarget) else _load_block(*parsed)
    return target.model_copy(update={"must_exist": True}) if isinstance(target, LocalTarget) else target


def validate_target(value: StorageTarget | str | os.PathLike[str]) -> None:
    """Raise those errors of `resolve_target` that can be found without the Prefect server."""
    _parse_target(value)


ABSOLUTE_PATTERN = r"(?:/|(?!(?:file|local)://(?!localhost/)[^/])[A-Za-z][A-Za-z0-9+.-]*://)"
"""Matches the beginning of a path or URI that names the same location in each process."""


def make_block_slug_pattern() -> str:
    """Return a regular expression that matches the reference `type/name` of a saved target block, for JSON schemas."""
    return rf"(?:{'|'.join(sorted(_target_types_by_slug()))})/[^/\s]+"


def require_absolute_target(value: StorageTarget | str | os.PathLike[str], where: str = "target") -> None:
    """Check that a target is the same location in each process, whatever the process's working directory and home are.

    Raises:
        InvalidInput: `value` is a relative path, or starts with `~`.
    """
    if isinstance(value, StorageTarget) or re.match(ABSOLUTE_PATTERN, text := os.fspath(value)):
        return
    if not isinstance(_parse_target(text), tuple):
        raise InvalidInput(
            f"{where}: {text!r}: expected an absolute path or a URI, found a relative path, which would depend on the "
            "working directory and the home of the deployment's worker. Pass /absolute/path, a URI such as "
            "s3://bucket/runs, or the type/name of a saved block"
        )


def target_reference(target: StorageTarget) -> str:
    """Return a string without secrets that `resolve_target` turns into an equal target in any process.

    Raises:
        InvalidInput: the target is not saved and has settings that its URI does not contain.
    """
    if target.saved_name is not None:
        return f"{target.get_block_type_slug()}/{target.saved_name}"
    if _parse_target(target.uri) == target:
        return target.uri
    raise InvalidInput(
        f"{target.uri}: another process would also need the target's credentials or settings. Save the block with "
        f"target.save('name'), and pass its slug, '{target.get_block_type_slug()}/name'"
    )


def target_from_fields(fields: Mapping[str, object]) -> StorageTarget:
    """Create a target from the fields of a saved block.

    The field `block_type_slug` names the target's type. Prefect omits this field in a nested block; the other fields
    must then fit exactly one target type.

    Raises:
        InvalidInput: the fields fit no target type, or several.
    """
    kinds = _target_types_by_slug()
    slug = fields.get("block_type_slug")
    slugs = [slug] if slug else [name for name, kind in kinds.items() if fields.keys() <= kind.model_fields.keys()]
    if len(slugs) == 1 and slugs[0] in kinds:
        return kinds[str(slugs[0])](**fields)
    raise InvalidInput(f"expected the fields of a target, with a block_type_slug among {', '.join(sorted(kinds))}")


def _parse_target(
    value: StorageTarget | str | os.PathLike[str], *, for_reading: bool = False
) -> StorageTarget | tuple[str, str]:
    """Return the target, or a saved block's type and name; with `for_reading`, also accept a read-only target."""
    value = cast("StorageTarget | str | os.PathLike[str]", to_plain_scalar(value))
    if isinstance(value, StorageTarget | str) and not for_reading:
        _reject_read_only_scheme(value if isinstance(value, str) else value.uri)
    if isinstance(value, StorageTarget):
        return value
    if isinstance(value, os.PathLike):
        return _parse_folder(os.fspath(value), for_reading=for_reading)
    if not isinstance(value, str):
        raise InvalidInput(
            f"target: expected a block, a 'block-type/name' slug, a URI or a path, found a {type(value).__name__}"
        )
    if not value.strip():
        raise InvalidInput("target: expected a block, a 'block-type/name' slug, a URI or a path, found an empty string")
    if _SCHEME.match(value):
        location = parse_uri(value)
        kind = next(cls for cls in TARGET_TYPES if cls._client is location.client)
        return kind._from_location(value, location)  # noqa: SLF001  for this function
    if (slug := BLOCK_SLUG.fullmatch(value)) is None:
        return _parse_folder(value, for_reading=for_reading)
    if slug[1] not in (types := _target_types_by_slug()):
        raise InvalidInput(
            f"{value!r}: {slug[1]!r} is not a type of target block; write './{value}' for a folder; for a block, write "
            f"type/name with one of the types {', '.join(sorted(types))}"
        )
    return slug[1], slug[2]


def _reject_read_only_scheme(uri: str) -> None:
    """Reject a read-only scheme. The error omits the URI's text after `?`, which may contain a signature."""
    scheme, _, rest = uri.partition("://")
    if scheme.lower() in _READ_ONLY_SCHEMES:
        host = urlsplit(uri).hostname or rest[:40]
        raise InvalidInput(
            f"target: {scheme}://{host}/…: expected a location to write to, found the read-only scheme "
            f"{scheme}. Use s3://bucket/prefix, gs://bucket/prefix or az://container@account/prefix for a bucket, with "
            f"?endpoint_url=https://{host} for an S3 server of your own; webdav://… for a WebDAV server"
        )


def _parse_folder(text: str, *, for_reading: bool) -> LocalTarget:
    if _ENVIRONMENT_VARIABLE.match(text):
        raise InvalidInput(
            f"target: {text!r}: environment variables are not expanded; write os.path.expandvars({text!r}), or "
            f"{f'./{text}'!r} for a folder of this name"
        )
    if scheme := _SINGLE_SLASH_URI.match(text):
        raise InvalidInput(
            f"target: {text!r}: expected two slashes after {scheme[1]}:, as in {scheme[1]}://{text[scheme.end() :]}; "
            f"pass a string (a Path keeps only one slash), or {f'./{text}'!r} for a folder of this name"
        )
    path = Path(text)
    is_relative = not path.is_absolute() and not text.startswith("~")
    if is_relative and not (for_reading and path.is_dir()) and is_deployment_run():
        raise InvalidInput(
            f"target: {text!r}: expected an absolute path or a URI in a run of a deployment, found a relative path: "
            f"it would be below the working directory of this run, {Path.cwd()}, which may be temporary and may differ "
            "in the next run. Pass /absolute/path, a URI such as s3://bucket/runs, or the type/name of a saved block"
        )
    return LocalTarget(path=str(Path.cwd() / path if is_relative else path))


def is_deployment_run() -> bool:
    """Return whether this code runs in a run of a deployment, or in a flow or task that such a run called."""
    # A subflow's run has no deployment, so also check the variable that workers and runners set for a run's process.
    return current_deployment_id() is not None or "PREFECT__FLOW_RUN_ID" in os.environ


def current_deployment_id() -> UUID | None:
    """Return the id of the current flow run's deployment; None if there is no flow run, or if it has no deployment."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return run.deployment_id if run is not None else None


def _target_types_by_slug(base: type[StorageTarget] = StorageTarget) -> dict[str, type[StorageTarget]]:
    """Return all target classes that this process has imported, by slug, including the user's own classes."""
    kinds: dict[str, type[StorageTarget]] = {}
    for kind in base.__subclasses__():
        if not inspect.isabstract(kind):
            kinds[kind.get_block_type_slug()] = kind
        kinds |= _target_types_by_slug(kind)
    return kinds


def _load_block(block_type: str, name: str) -> StorageTarget:
    slug = f"{block_type}/{name}"
    try:
        block = Block.load(slug, _sync=True)  # type: ignore[call-arg]  # added by Prefect's async_dispatch
    except UnknownBlockType as error:
        raise InvalidInput(f"{slug!r}: {error}") from None
    except ValueError:
        url = get_current_settings().api.url
        missing = f"no such block is saved on the Prefect server at {url}"
        unset = f"no Prefect server is set up, but saved blocks are stored on a server: {SERVER_SETUP_ADVICE}"
        raise InvalidInput(f"{slug!r}: {missing if url else unset}") from None
    except RuntimeError as error:
        details = error.__cause__.errors() if isinstance(error.__cause__, ValidationError) else ()
        problems = "; ".join(detail["msg"].removeprefix("Value error, ") for detail in details)
        raise InvalidInput(f"{slug!r}: the saved block is not valid: {problems or error}") from None
    except httpx.HTTPError as error:
        server = f"the Prefect server at {get_current_settings().api.url}, which stores the block, did not answer"
        raise StoreUnavailable(
            f"{slug!r}: {server}: {str(error) or type(error).__name__}; a URI, such as s3://bucket, needs no server"
        ) from None
    if not isinstance(block, StorageTarget):
        raise InvalidInput(f"{slug!r} is a {type(block).__name__}, not a target")
    return block
