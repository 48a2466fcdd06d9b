"""Optional fields for the credential blocks of prefect-aws, prefect-gcp and prefect-azure.

The import of each of these packages takes seconds of CPU time, so a field stores only the names of its block types. The
package is imported when the field gets a block, or when Prefect shows the target's form. If the package is not
installed, the field rejects every block with an error that names the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from prefect.blocks.core import Block
from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from prefect_tune.core.errors import StoreRefused
from prefect_tune.stores.open_location import S3Access, S3Keys, make_key_provider


@dataclass(frozen=True)
class LazyBlockTypes:
    """Annotates a field that accepts None or a block of a type in `names`; imports `package` only when needed."""

    package: str
    names: tuple[str, ...]

    @cache  # noqa: B019  there are three instances
    def import_type(self) -> Any:
        """Import the package and return the union of the types in `names`; None if the package is not installed."""
        module = self.package.replace("-", "_")
        annotation: Any = None
        for name in self.names if find_spec(module) else ():
            annotation = annotation | getattr(import_module(module), name)
        return annotation

    def _validate_block(self, value: object) -> object:
        if value is None:
            return None
        if (annotation := self.import_type()) is None:
            install = f"pip install 'prefect-tune[{self.package.removeprefix('prefect-')}]'"
            raise ValueError(f"a credentials block needs {self.package}, which is not installed: {install}")
        return TypeAdapter(annotation).validate_python(value)

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate_block)

    def __get_pydantic_json_schema__(self, _schema: object, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.import_type()).core_schema)


if TYPE_CHECKING:
    AwsBlock: TypeAlias = Block | None
    GcpBlock: TypeAlias = Block | None
    AzureBlock: TypeAlias = Block | None
else:
    AwsBlock = Annotated[Any, LazyBlockTypes("prefect-aws", ("AwsCredentials", "MinIOCredentials"))]
    GcpBlock = Annotated[Any, LazyBlockTypes("prefect-gcp", ("GcpCredentials",))]
    AzureBlock = Annotated[Any, LazyBlockTypes("prefect-azure", ("AzureBlobStorageCredentials",))]


def import_lazy_block_types(model: type[Block]) -> None:
    """Import the block types that the fields of `model` accept, and set them as annotations, which Prefect reads."""
    for field in model.model_fields.values():
        for annotation in field.metadata:
            if isinstance(annotation, LazyBlockTypes):
                field.annotation = annotation.import_type()


def make_s3_access(block: Any) -> S3Access:
    """Return the keys, region and endpoint of an `AwsCredentials` or `MinIOCredentials` block."""
    endpoint = block.aws_client_parameters.endpoint_url
    user = getattr(block, "minio_root_user", None) or getattr(block, "aws_access_key_id", None)
    secret = getattr(block, "minio_root_password", None) or getattr(block, "aws_secret_access_key", None)
    if user and secret:
        keys = make_static_key_provider(user, secret.get_secret_value(), getattr(block, "aws_session_token", None))
        return S3Access(keys, block.region_name, endpoint)
    return S3Access(make_key_provider(block.get_boto3_session()), block.region_name, endpoint)


def get_block_endpoint(block: Any) -> str | None:
    """Return the endpoint of an AWS or MinIO credentials block; None if it is unset or contains '@', '?' or '#'."""
    url = getattr(getattr(block, "aws_client_parameters", None), "endpoint_url", None)
    return url if url and not set(url) & set("@?#") else None


def make_static_key_provider(
    access_key_id: str, secret_access_key: str, session_token: str | None
) -> Callable[[], S3Keys]:
    """Return a provider of only these keys. Without a provider, obstore would add the environment's session token."""
    keys = {
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
        "token": session_token,
        "expires_at": None,
    }
    return lambda: keys


def read_gcp_key(block: Any) -> str | None:
    """Return the service account key of a `GcpCredentials` block as JSON; None if the block contains no key."""
    if block.service_account_info is not None:
        return json.dumps(block.service_account_info.get_secret_value())
    if block.service_account_file is not None:
        try:
            return str(block.service_account_file.expanduser().read_text())
        except OSError as error:
            raise StoreRefused(f"service_account_file {block.service_account_file}: {error.strerror}") from error
    return None


def make_azure_options(block: Any) -> Mapping[str, str]:
    """Return the client options of an `AzureBlobStorageCredentials` block."""
    if block.connection_string is not None:
        return parse_connection_string(block.connection_string.get_secret_value())
    options = {"endpoint": block.account_url.rstrip("/"), "account_name": _azure_account_name(block.account_url)}
    if block.client_id is not None:
        options |= {"client_id": block.client_id, "tenant_id": block.tenant_id}
        options |= {"client_secret": block.client_secret.get_secret_value()}
    return options


def _azure_account_name(url: str) -> str:
    """Return the account name of a URL such as 'https://account.blob.core.windows.net'."""
    return url.partition("://")[2].partition(".")[0]


def parse_connection_string(text: str) -> Mapping[str, str]:
    """Return the client options of an Azure connection string.

    Raises:
        ValueError: `text` is not a connection string. The error does not contain `text`, which is secret.
    """
    parts = dict(part.partition("=")[::2] for part in text.strip().split(";") if part)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return {"use_emulator": "true"}
    account = parts.get("AccountName", "")
    endpoint = parts.get("BlobEndpoint", "")
    if account and not endpoint:
        scheme, suffix = parts.get("DefaultEndpointsProtocol", "https"), parts.get("EndpointSuffix", "core.windows.net")
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    names = {"account_key": "AccountKey", "sas_key": "SharedAccessSignature"}
    secrets = {option: parts[name] for option, name in names.items() if parts.get(name)}
    if not endpoint or not secrets:
        raise ValueError("expected AccountName or BlobEndpoint, and AccountKey or SharedAccessSignature")
    return {"account_name": account or _azure_account_name(endpoint), "endpoint": endpoint.rstrip("/"), **secrets}
