"""The block of a container in Azure Blob Storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import Field, HttpUrl, SecretStr, field_validator, model_validator

from prefect_tune.blocks.credentials import AzureBlock, azure_access, connection_options
from prefect_tune.blocks.storage_target import block_logo
from prefect_tune.blocks.targets.object_target import ObjectTarget, bare_name, one_at_most
from prefect_tune.stores.open_location import Client, Location


class AzureTarget(ObjectTarget):
    """A container of Azure Blob Storage, or of its emulator.

    Without credentials it uses those of the environment where it runs: variables, a workload or managed identity.

    Example:
        ```python
        from prefect_tune.blocks import AzureTarget

        target = AzureTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "Azure Target"
    _block_type_slug: ClassVar[str | None] = "azure-target"
    _logo_url: ClassVar[HttpUrl | None] = block_logo("microsoft-azure")
    _client: ClassVar[Client | None] = Client.AZURE

    container: str = Field(description="The container's name.")
    account_name: str | None = Field(
        default=None,
        description="The storage account. Empty: from the connection string or the environment.",
    )
    account_key: SecretStr | None = Field(default=None, description="An access key of the storage account.")
    sas_token: SecretStr | None = Field(default=None, description="A shared access signature.")
    connection_string: SecretStr | None = Field(
        default=None, description="A connection string, which includes the account's name."
    )
    credentials: AzureBlock = Field(
        default=None, description="An AzureBlobStorageCredentials block of prefect-azure, instead of the fields above."
    )

    @field_validator("container")
    @classmethod
    def _container_name(cls, container: str) -> str:
        return bare_name("container", container, r"\$web|(?=.{3,63}$)[a-z0-9](-?[a-z0-9])*")

    @field_validator("connection_string")
    @classmethod
    def _readable(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            connection_options(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _one_way_to_sign(self) -> Self:
        one_at_most(
            {
                "account_key": self.account_key,
                "sas_token": self.sas_token,
                "connection_string": self.connection_string,
                "credentials": self.credentials,
                "anonymous": self.anonymous,
            }
        )
        return self

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  of use to others
        account = location.account.partition(".")[0] or None
        return cls(container=location.container, prefix=location.path, account_name=account)

    @property
    def uri(self) -> str:
        account = self.account_name or self._secrets().get("account_name")
        if account is None:
            return f"az://{self.container}/{self._prefix_in_uri}".rstrip("/")
        return f"abfss://{self.container}@{account}.dfs.core.windows.net/{self._prefix_in_uri}".rstrip("/")

    def _connector(self) -> Callable[..., Any]:
        from obstore.store import AzureStore

        named = {"account_name": self.account_name, "endpoint": self.endpoint_url}
        config: Any = {
            **self._secrets(),
            **{name: value for name, value in named.items() if value},
        }
        config |= {"skip_signature": True} if self.anonymous else {}
        return partial(AzureStore, self.container, prefix=self.prefix or None, config=config)

    def _secrets(self) -> Mapping[str, str]:
        if self.credentials is not None:
            return azure_access(self.credentials)
        if self.connection_string is not None:
            return connection_options(self.connection_string.get_secret_value())
        given = {"account_key": self.account_key, "sas_key": self.sas_token}
        return {option: secret.get_secret_value() for option, secret in given.items() if secret is not None}
