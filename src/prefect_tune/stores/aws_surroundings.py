"""What the surroundings know of S3, where neither a block nor a URI says it: the one rule for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from prefect_tune.core.errors import StoreRefused

__all__ = ["S3Access", "S3Keys", "ambient_access", "ambient_endpoint", "ambient_http", "session_keys"]

S3Keys: TypeAlias = Mapping[str, Any]
_COME_FIRST = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Who asks, where the bucket lies, which server; None where nothing is said, or the client finds it by itself."""

    keys: Callable[[], S3Keys] | None = None
    region: str | None = None
    endpoint_url: str | None = None


def ambient_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the server that the environment names; None for Amazon's."""
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def ambient_http(environment: Mapping[str, str]) -> bool:
    """Whether the environment allows a server without TLS."""
    return environment.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")


def ambient_access(environment: Mapping[str, str], *, anonymous: bool = False) -> S3Access:
    """Return the region of the environment, and what a profile says where nothing there comes before it.

    All other credentials (variables, web identity, container, instance) the client finds by itself.

    Args:
        environment: that of this process: boto3, which reads the profile, knows no other.
        anonymous: nothing is signed, so that no profile is read.

    Raises:
        StoreRefused: there is no such profile, or it cannot be read.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    others = anonymous or any(name in environment for name in _COME_FIRST)
    if others or not _has_profile(environment) or not find_spec("boto3"):
        return S3Access(region=region)
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        keys = session_keys(session) if session.get_credentials() else None  # a profile may be a region alone
        return S3Access(keys, region or session.region_name)
    except BotoCoreError as error:
        raise StoreRefused(f"the AWS profile of this machine cannot be used: {error}") from error


def _has_profile(environment: Mapping[str, str]) -> bool:
    return "AWS_PROFILE" in environment or any(
        Path(environment.get(variable, usual)).expanduser().is_file() for variable, usual in _FILES.items()
    )


def session_keys(session: Any) -> Callable[[], S3Keys]:
    """Return a provider of a boto3 session's keys, which boto3 renews (profiles, SSO, roles)."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(session)
    except ValueError as error:
        raise StoreRefused(f"no AWS credentials in the profile {session.profile_name!r}") from error
