"""Credential blocks of prefect-aws, prefect-gcp and prefect-azure as fields, where those are installed.

Importing them costs over a second of CPU each, which only who installed them pays. Without them the field
exists, takes nothing, and says what to install.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from prefect.blocks.core import Block
from pydantic import BeforeValidator

from prefect_tune.core.errors import StoreRefused
from prefect_tune.stores.aws_surroundings import S3Access, S3Keys, session_keys

__all__ = [
    "AwsBlock",
    "AzureBlock",
    "GcpBlock",
    "account_in",
    "azure_access",
    "connection_options",
    "endpoint_in",
    "gcp_key",
    "s3_access",
    "static_keys",
]


def _refusal(package: str) -> Callable[[object], None]:
    def refuse(value: object) -> None:
        if value is not None:
            raise ValueError(f"a credentials block needs {package}, which is not installed: pip install {package}")

    return refuse


def _blocks(package: str, *names: str) -> Any:
    """Return the type of an optional field that takes these blocks, if `package` is installed."""
    module = package.replace("-", "_")
    if find_spec(module) is None:
        return Annotated[None, BeforeValidator(_refusal(package))]
    annotation: Any = None
    for name in names:
        annotation = annotation | getattr(import_module(module), name)
    return annotation


if TYPE_CHECKING:
    AwsBlock: TypeAlias = Block | None
    GcpBlock: TypeAlias = Block | None
    AzureBlock: TypeAlias = Block | None
else:
    AwsBlock = _blocks("prefect-aws", "AwsCredentials", "MinIOCredentials")
    GcpBlock = _blocks("prefect-gcp", "GcpCredentials")
    AzureBlock = _blocks("prefect-azure", "AzureBlobStorageCredentials")


def s3_access(block: Any) -> S3Access:
    """Read a `AwsCredentials` or `MinIOCredentials` block."""
    endpoint = block.aws_client_parameters.endpoint_url
    user = getattr(block, "minio_root_user", None) or getattr(block, "aws_access_key_id", None)
    secret = getattr(block, "minio_root_password", None) or getattr(block, "aws_secret_access_key", None)
    if user and secret:
        keys = static_keys(user, secret.get_secret_value(), getattr(block, "aws_session_token", None))
        return S3Access(keys, block.region_name, endpoint)
    return S3Access(session_keys(block.get_boto3_session()), block.region_name, endpoint)


def endpoint_in(block: Any) -> str | None:
    """Return the address of the server that an AWS or MinIO credentials block names, if nothing else is in it."""
    url = getattr(getattr(block, "aws_client_parameters", None), "endpoint_url", None)
    return url if url and not set(url) & set("@?#") else None


def static_keys(access_key_id: str, secret_access_key: str, session_token: str | None) -> Callable[[], S3Keys]:
    """Return a provider of these keys alone: without one, obstore mixes in the environment's token."""
    keys = {
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "token": session_token,
        "expires_at": None,
    }
    return lambda: keys


def gcp_key(block: Any) -> str | None:
    """Return the service account key of a `GcpCredentials` block as JSON; None means the machine's own."""
    if block.service_account_info is not None:
        return json.dumps(block.service_account_info.get_secret_value())
    if block.service_account_file is not None:
        try:
            return str(block.service_account_file.expanduser().read_text())
        except OSError as error:
            raise StoreRefused(f"service_account_file {block.service_account_file}: {error.strerror}") from error
    return None


def azure_access(block: Any) -> Mapping[str, str]:
    """Read an `AzureBlobStorageCredentials` block into options of the client."""
    if block.connection_string is not None:
        return connection_options(block.connection_string.get_secret_value())
    found = {"endpoint": block.account_url.rstrip("/"), "account_name": account_in(block.account_url)}
    if block.client_id is not None:
        found |= {"client_id": block.client_id, "tenant_id": block.tenant_id}
        found |= {"client_secret": block.client_secret.get_secret_value()}
    return found


def account_in(url: str) -> str:
    """Return the account in 'https://account.blob.core.windows.net'."""
    return url.partition("://")[2].partition(".")[0]


def connection_options(text: str) -> Mapping[str, str]:
    """Read an Azure connection string into options of the client.

    Raises:
        ValueError: it is not one; its text is not repeated, for it is a secret.
    """
    parts = dict(part.partition("=")[::2] for part in text.strip().split(";") if part)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return {"use_emulator": "true"}
    account = parts.get("AccountName", "")
    endpoint = parts.get("BlobEndpoint") or _default_endpoint(parts, account)
    names = {"account_key": "AccountKey", "sas_key": "SharedAccessSignature"}
    secrets = {option: parts[name] for option, name in names.items() if parts.get(name)}
    if not endpoint or not secrets:
        raise ValueError("expected AccountName or BlobEndpoint, and AccountKey or SharedAccessSignature")
    return {"account_name": account or account_in(endpoint), "endpoint": endpoint.rstrip("/"), **secrets}


def _default_endpoint(parts: Mapping[str, str], account: str) -> str:
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    scheme = parts.get("DefaultEndpointsProtocol", "https")
    return f"{scheme}://{account}.blob.{suffix}" if account else ""
