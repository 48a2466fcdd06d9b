"""The block of a bucket in Google Cloud Storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import Field, HttpUrl, SecretStr, field_validator, model_validator

from prefect_tune.blocks.credentials import GcpBlock, gcp_key
from prefect_tune.blocks.storage_target import block_logo
from prefect_tune.blocks.targets.object_target import ObjectTarget, bare_name, one_at_most
from prefect_tune.stores.open_location import Client

# The client's skip_signature applies to reads only; a key file with disable_oauth applies to writes too.
_NO_KEY = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})


class GcsTarget(ObjectTarget):
    """A bucket of Google Cloud Storage.

    Without credentials it uses the application default credentials of the machine that it runs on.

    Example:
        ```python
        from prefect_tune.blocks import GcsTarget

        target = GcsTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "GCS Target"
    _block_type_slug: ClassVar[str | None] = "gcs-target"
    _logo_url: ClassVar[HttpUrl | None] = block_logo("googlecloud")
    _client: ClassVar[Client | None] = Client.GCS

    bucket: str = Field(description="The bucket's name, without 'gs://'.")
    service_account_json: SecretStr | None = Field(
        default=None, description="The content of a service account's key file."
    )
    credentials: GcpBlock = Field(
        default=None, description="A GcpCredentials block of prefect-gcp, instead of service_account_json."
    )

    @field_validator("bucket")
    @classmethod
    def _bucket_name(cls, bucket: str) -> str:
        return bare_name("bucket", bucket, r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")

    @field_validator("service_account_json")
    @classmethod
    def _key_file(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            _require_key(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _one_way_to_sign(self) -> Self:
        one_at_most(
            {
                "service_account_json": self.service_account_json,
                "credentials": self.credentials,
                "anonymous": self.anonymous,
            }
        )
        return self

    @property
    def uri(self) -> str:
        return self._uri(f"gs://{self.bucket}/{self._prefix_in_uri}", endpoint=self.endpoint_url)

    def _connector(self) -> Callable[..., Any]:
        from obstore.store import GCSStore

        given = {"service_account_key": self._key(), "base_url": self.endpoint_url}
        config: Any = {name: value for name, value in given.items() if value is not None}
        return partial(GCSStore, self.bucket, prefix=self.prefix or None, config=config)

    def _key(self) -> str | None:
        if self.anonymous:
            return _NO_KEY
        if self.credentials is not None:
            return gcp_key(self.credentials)
        return self.service_account_json.get_secret_value() if self.service_account_json else None


def _require_key(text: str) -> None:
    try:
        key = json.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, dict) or not {"client_email", "private_key"} <= key.keys():
        raise ValueError("expected the JSON of a service account's key, with client_email and private_key")
