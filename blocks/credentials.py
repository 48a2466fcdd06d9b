"""Optional fields for the credential blocks of prefect-aws, prefect-gcp and prefect-azure.

Each of these packages takes over a second of CPU to import, so it is imported only if it is installed. If it is not,
the field accepts no value, and its error names the package to install.
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
from prefect_tune.stores.aws_environment import S3Access, S3Keys, session_keys


def _refusal(package: str) -> Callable[[object], None]:
    def refuse(value: object) -> None:
        if value is not None:
            raise ValueError(f"a credentials block needs {package}, which is not installed: pip install {package}")

    return refuse


def _blocks(package: str, *names: str) -> Any:
    """Return the type of an optional field for these blocks; a type that refuses all values without `package`."""
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
    """Return the keys, region and endpoint of an `AwsCredentials` or `MinIOCredentials` block."""
    endpoint = block.aws_client_parameters.endpoint_url
    user = getattr(block, "minio_root_user", None) or getattr(block, "aws_access_key_id", None)
    secret = getattr(block, "minio_root_password", None) or getattr(block, "aws_secret_access_key", None)
    if user and secret:
        keys = static_keys(user, secret.get_secret_value(), getattr(block, "aws_session_token", None))
        return S3Access(keys, block.region_name, endpoint)
    return S3Access(session_keys(block.get_boto3_session()), block.region_name, endpoint)


def endpoint_in(block: Any) -> str | None:
    """Return the endpoint of an AWS or MinIO credentials block; None if it has none, or one with '@', '?' or '#'."""
    url = getattr(getattr(block, "aws_client_parameters", None), "endpoint_url", None)
    return url if url and not set(url) & set("@?#") else None


def static_keys(access_key_id: str, secret_access_key: str, session_token: str | None) -> Callable[[], S3Keys]:
    """Return a provider of exactly these keys: without one, obstore adds a session token from the environment."""
    keys = {
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "token": session_token,
        "expires_at": None,
    }
    return lambda: keys


def gcp_key(block: Any) -> str | None:
    """Return the service account key of a `GcpCredentials` block as JSON; None for the machine's own credentials."""
    if block.service_account_info is not None:
        return json.dumps(block.service_account_info.get_secret_value())
    if block.service_account_file is not None:
        try:
            return str(block.service_account_file.expanduser().read_text())
        except OSError as error:
            raise StoreRefused(f"service_account_file {block.service_account_file}: {error.strerror}") from error
    return None


def azure_access(block: Any) -> Mapping[str, str]:
    """Return the client options of an `AzureBlobStorageCredentials` block."""
    if block.connection_string is not None:
        return connection_options(block.connection_string.get_secret_value())
    found = {"endpoint": block.account_url.rstrip("/"), "account_name": account_in(block.account_url)}
    if block.client_id is not None:
        found |= {"client_id": block.client_id, "tenant_id": block.tenant_id}
        found |= {"client_secret": block.client_secret.get_secret_value()}
    return found


def account_in(url: str) -> str:
    """Return the account name of a URL such as 'https://account.blob.core.windows.net'."""
    return url.partition("://")[2].partition(".")[0]


def connection_options(text: str) -> Mapping[str, str]:
    """Return the client options of an Azure connection string.

    Raises:
        ValueError: it is not a connection string; the error does not repeat its text, which is secret.
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
