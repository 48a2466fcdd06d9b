"""The block of a bucket in Amazon S3 or a compatible server."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, HttpUrl, SecretStr, field_validator, model_validator

from prefect_tune.blocks.credentials import AwsBlock, endpoint_in, s3_access, static_keys
from prefect_tune.blocks.storage_target import block_logo
from prefect_tune.blocks.targets.object_target import ObjectTarget, bare_name, one_at_most
from prefect_tune.core.errors import InvalidInput
from prefect_tune.stores.open_location import Client, S3Access, ambient_access, ambient_endpoint, ambient_http


class S3Target(ObjectTarget):
    """A bucket of Amazon S3, MinIO, Ceph, R2 or another S3-compatible server.

    Without credentials it uses those of the machine that it runs on: from the environment, a profile in ~/.aws (with
    boto3 installed), a web identity, the container or the instance.

    Example:
        ```python
        from prefect_tune.blocks import S3Target

        target = S3Target.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "S3 Target"
    _block_type_slug: ClassVar[str | None] = "s3-target"
    _logo_url: ClassVar[HttpUrl | None] = block_logo("aws")
    _client: ClassVar[Client | None] = Client.S3

    bucket: str = Field(description="The bucket's name, without 's3://'.")
    region: str | None = Field(
        default=None, description="The bucket's region. Empty: from the environment, else us-east-1."
    )
    access_key_id: str | None = Field(default=None, description="The access key id; needs secret_access_key.")
    secret_access_key: SecretStr | None = Field(default=None, description="The secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="The session token of temporary credentials.")
    credentials: AwsBlock = Field(
        default=None,
        description="An AwsCredentials or MinIOCredentials block of prefect-aws, instead of the keys above.",
    )
    addressing_style: Literal["path", "virtual-hosted"] = Field(
        default="path", description="Whether the bucket's name is in the URL's path or in the host name."
    )
    payload_signing: Literal["without-tls", "always", "never"] = Field(
        default="without-tls",
        description="When signatures include the payload: that takes more CPU than the upload itself, and "
        "TLS protects the payload already.",
    )

    @field_validator("bucket")
    @classmethod
    def _bucket_name(cls, bucket: str) -> str:
        return bare_name("bucket", bucket, r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")

    @model_validator(mode="after")
    def _one_way_to_sign(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key require each other: set both, or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token belongs to an access_key_id and a secret_access_key")
        one_at_most({"keys": self.access_key_id, "credentials": self.credentials, "anonymous": self.anonymous})
        return self

    @property
    def uri(self) -> str:
        endpoint = self.endpoint_url or endpoint_in(self.credentials)
        region = self.region or getattr(self.credentials, "region_name", None)
        return self._uri(f"s3://{self.bucket}/{self._prefix_in_uri}", endpoint=endpoint, region=region)

    def _connector(self) -> Callable[..., Any]:
        from obstore.store import S3Store

        access = self._access()
        endpoint = self.endpoint_url or access.endpoint_url or ambient_endpoint(os.environ)
        if (endpoint or "").startswith("http:") and not self._may_use_http():
            raise InvalidInput(
                f"{self.uri}: its endpoint {endpoint!r} has no TLS: set allow_http=True if that is intended"
            )
        config = {
            "region": self.region or access.region,
            "endpoint": endpoint,
            "virtual_hosted_style_request": self.addressing_style == "virtual-hosted",
            "skip_signature": self.anonymous,
            "unsigned_payload": not self._signs_payload(endpoint),
        }
        given: Any = {name: value for name, value in config.items() if value is not None}
        keys: Any = access.keys
        return partial(S3Store, self.bucket, prefix=self.prefix or None, config=given, credential_provider=keys)

    def _transport(self) -> dict[str, Any]:
        return {**super()._transport(), "allow_http": self._may_use_http()}

    def _may_use_http(self) -> bool:
        return self.allow_http or ambient_http(os.environ)

    def _signs_payload(self, endpoint: str | None) -> bool:
        has_tls = not (endpoint or "").startswith("http:")
        return self.payload_signing == "always" or (self.payload_signing == "without-tls" and not has_tls)

    def _access(self) -> S3Access:
        if self.credentials is not None:
            return s3_access(self.credentials)
        if self.access_key_id is not None and self.secret_access_key is not None:
            token = self.session_token.get_secret_value() if self.session_token else None
            keys = static_keys(self.access_key_id, self.secret_access_key.get_secret_value(), token)
            return S3Access(keys)
        return ambient_access(os.environ, anonymous=self.anonymous)
