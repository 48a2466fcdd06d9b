"""S3 settings from environment variables and AWS profiles, for what neither a block nor a URI sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from prefect_tune.core.errors import StoreRefused

S3Keys: TypeAlias = Mapping[str, Any]
_COME_FIRST = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Credentials, region and endpoint of S3; None for what is not set, or what the client finds by itself."""

    keys: Callable[[], S3Keys] | None = None
    region: str | None = None
    endpoint_url: str | None = None


def ambient_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint URL from the environment; None for Amazon's own."""
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def ambient_http(environment: Mapping[str, str]) -> bool:
    """Whether the environment allows a server without TLS."""
    return environment.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")


def ambient_access(environment: Mapping[str, str], *, anonymous: bool = False) -> S3Access:
    """Return the environment's region, and a profile's credentials unless the environment has others.

    The client itself finds all other credentials (variables, web identity, container, instance).

    Args:
        environment: of this process, because boto3, which reads the profile, uses no other.
        anonymous: requests are not signed, so no profile is read.

    Raises:
        StoreRefused: the profile does not exist or cannot be read.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    others = anonymous or any(name in environment for name in _COME_FIRST)
    if others or not _has_profile(environment) or not find_spec("boto3"):
        return S3Access(region=region)
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        keys = session_keys(session) if session.get_credentials() else None  # a profile may set only a region
        return S3Access(keys, region or session.region_name)
    except BotoCoreError as error:
        raise StoreRefused(f"the AWS profile of this machine cannot be used: {error}") from error


def _has_profile(environment: Mapping[str, str]) -> bool:
    return "AWS_PROFILE" in environment or any(
        Path(environment.get(variable, usual)).expanduser().is_file() for variable, usual in _FILES.items()
    )


def session_keys(session: Any) -> Callable[[], S3Keys]:
    """Return a provider of a boto3 session's credentials, which boto3 renews (profiles, SSO, roles)."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(session)
    except ValueError as error:
        raise StoreRefused(f"no AWS credentials in the profile {session.profile_name!r}") from error
