"""One rule for what people write where a target is asked for."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
from prefect.blocks.core import Block, UnknownBlockType

from prefect_tune.blocks.azure_target import AzureTarget
from prefect_tune.blocks.fsspec_target import FsspecTarget, known_schemes, require_implementation
from prefect_tune.blocks.gcs_target import GcsTarget
from prefect_tune.blocks.local_target import LocalTarget
from prefect_tune.blocks.s3_target import S3Target
from prefect_tune.blocks.target import StorageTarget
from prefect_tune.core.errors import InvalidInput, StoreUnavailable

__all__ = ["resolve_target", "target_from_fields", "target_reference", "validate_target"]

_SLUG = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)/([^/\s]+)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def resolve_target(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget:
    """Return the target that `value` means; only a slug asks the server, and nothing asks the target.

    A string is read as the first of these that it looks like:
    a URI when it has a scheme (`s3://bucket/prefix`); a path when it starts with `/`, `./`, `../` or `~`, or has
    not exactly one `/`; else a `block-type/name` slug, whose type must be one of a target. A relative path of two
    parts is therefore written `./runs/first`. A `PathLike` is always a path. Relative paths start here and now.

    Raises:
        InvalidInput: it is none of these, or the block is not saved on the server.
        StoreUnavailable: the Prefect server did not answer.
    """
    match _read(value):
        case StorageTarget() as target:
            return target
        case (str(block_type), str(name)):
            return _load(block_type, name)


def validate_target(value: StorageTarget | str | os.PathLike[str]) -> None:
    """Raise what `resolve_target` would, as far as can be said without asking the server."""
    _read(value)


def target_reference(target: StorageTarget) -> str:
    """Return a string without secrets that `resolve_target` turns into an equal target in any process.

    Raises:
        InvalidInput: the target is not saved and says more than its URI.
    """
    if target._block_document_name is not None:
        return f"{target.get_block_type_slug()}/{target._block_document_name}"
    if _read(target.uri) == target:
        return target.uri
    raise InvalidInput(
        f"{target.uri}: another process would need its credentials or settings too; save the block and pass its "
        f"slug: target.save('name'), then '{target.get_block_type_slug()}/name'"
    )


def target_from_fields(fields: Mapping[str, object]) -> StorageTarget:
    """Return the target that these fields of a saved block mean; `block_type_slug` among them says which kind."""
    kinds = _target_types()
    kind = kinds.get(str(fields.get("block_type_slug")))
    if kind is None:
        raise InvalidInput(f"expected the fields of a target with a block_type_slug among {', '.join(sorted(kinds))}")
    return kind(**fields)


def _read(value: StorageTarget | str | os.PathLike[str]) -> StorageTarget | tuple[str, str]:
    if isinstance(value, StorageTarget):
        return value
    if isinstance(value, os.PathLike):
        return LocalTarget(path=os.path.abspath(Path(value).expanduser()))
    if not isinstance(value, str):
        raise InvalidInput(f"a target is a block, a 'block-type/name' slug or a URI, not a {type(value).__name__}")
    if not value.strip():
        raise InvalidInput("a target is a block, a 'block-type/name' slug or a URI; found an empty string")
    if scheme := _SCHEME.match(value):
        return _from_uri(scheme[1].lower(), value)
    slug = None if value.startswith(("./", "../", "~")) else _SLUG.fullmatch(value)
    return (slug[1], slug[2]) if slug and _is_target_type(slug[1], value) else _read(Path(value))


def _is_target_type(block_type: str, value: str) -> bool:
    known = _target_types()
    if block_type in known:
        return True
    nearest = difflib.get_close_matches(block_type, known, n=1)
    meant = f"the block {nearest[0] + value[len(block_type) :]!r}" if nearest else f"one of {', '.join(sorted(known))}"
    raise InvalidInput(
        f"{value!r}: {block_type!r} is no type of target block; write './{value}' for a folder, or {meant}"
    )


def _target_types(base: type[StorageTarget] = StorageTarget) -> dict[str, type[StorageTarget]]:
    """Return all kinds of target that this process has defined, a user's own included, by their slugs."""
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
        raise InvalidInput(f"{slug!r}: {error}") from error
    except ValueError as error:
        raise InvalidInput(f"{slug!r}: no such block is saved on the Prefect server: {error}") from error
    except RuntimeError as error:
        raise InvalidInput(f"{slug!r}: what is saved does not fit: {error.__cause__ or error}") from error
    except httpx.HTTPError as error:
        raise StoreUnavailable(f"{slug!r}: the Prefect server did not answer: {error}") from error
    if not isinstance(block, StorageTarget):
        raise InvalidInput(f"{slug!r} is a {type(block).__name__}, not a target")
    return block


# ------------------------------------------------------------------------------------------------------ URIs


def _from_uri(scheme: str, uri: str) -> StorageTarget:
    if reader := _READERS.get(scheme):
        return reader(uri)
    known = known_schemes()
    if scheme in known:
        require_implementation(scheme)
        return FsspecTarget(location=uri)
    nearest = difflib.get_close_matches(scheme, [*_READERS, *known], n=1)
    meant = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise InvalidInput(
        f"{_without_secrets(uri)!r}: unknown scheme {scheme!r}; {meant}known are {', '.join(_READERS)}, hdfs, memory "
        f"and what fsspec lists (sftp, ftp, webdav, ...); a package that registers {scheme!r} with fsspec would add it"
    )


def _without_secrets(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", uri.partition("?")[0])


def _bucket_and_prefix(uri: str, options: Mapping[str, str] | None = None) -> tuple[str, str, dict[str, str]]:
    """Split `uri`; the options in its query must be among `options`, which also says what each is called here."""
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise InvalidInput(f"{_without_secrets(uri)!r}: credentials do not belong into a URI: use a block or the environment")
    if not parts.netloc:
        raise InvalidInput(f"{uri!r}: it names no bucket")
    if parts.fragment:
        raise InvalidInput(f"{uri!r}: a '#' has no meaning here")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = given.keys() - (options or {}).keys()
    if unknown:
        raise InvalidInput(f"{_without_secrets(uri)!r}: unknown option {sorted(unknown)[0]!r}: known are {sorted(options or {})}")
    return parts.netloc, unquote(parts.path), {(options or {})[name]: value for name, value in given.items()}


def _s3(uri: str) -> StorageTarget:
    names = ("endpoint_url", "region", "allow_http", "addressing_style")
    options = {**{name: name for name in names}, "endpoint_override": "endpoint_url", "scheme": "scheme"}
    bucket, prefix, given = _bucket_and_prefix(uri, options)
    scheme = given.pop("scheme", None)
    if scheme and "://" not in given.get("endpoint_url", "://"):  # as pyarrow writes it: host:port and a scheme
        given |= {"endpoint_url": f"{scheme}://{given['endpoint_url']}", "allow_http": str(scheme == "http")}
    return S3Target(**{"bucket": bucket, "prefix": prefix, **given})


def _gcs(uri: str) -> StorageTarget:
    bucket, prefix, given = _bucket_and_prefix(uri, {"endpoint_url": "endpoint_url", "anonymous": "anonymous"})
    return GcsTarget(bucket=bucket, prefix=prefix, **given)


def _azure(uri: str) -> StorageTarget:
    container, at, host = urlsplit(uri).netloc.partition("@")
    rest = uri.replace(f"@{host}", "", 1) if at else uri
    container, prefix, _ = _bucket_and_prefix(rest)
    account = host.partition(".")[0]
    return AzureTarget(container=container, prefix=prefix, **({"account_name": account} if account else {}))


def _file(uri: str) -> StorageTarget:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise InvalidInput(f"{uri!r}: a file URI names no host: file:///{parts.netloc}{parts.path}?")
    return LocalTarget(path=unquote(parts.path))


_READERS: Mapping[str, Callable[[str], StorageTarget]] = {
    **dict.fromkeys(("s3", "s3a", "s3n"), _s3),
    **dict.fromkeys(("gs", "gcs"), _gcs),
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "wasb", "wasbs"), _azure),
    "file": _file,
}
