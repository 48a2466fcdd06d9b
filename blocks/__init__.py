"""The Prefect blocks: storage targets with their credentials, and the sync configuration.

Importing this package registers every block, so that they appear in the Prefect UI (`prefect.collections`). No storage
client is imported before a target is opened.
"""

from __future__ import annotations

from prefect_tune.blocks.azure_target import AzureTarget
from prefect_tune.blocks.fsspec_target import FsspecTarget
from prefect_tune.blocks.gcs_target import GcsTarget
from prefect_tune.blocks.local_target import LocalTarget
from prefect_tune.blocks.resolve_target import resolve_existing, resolve_target, target_reference
from prefect_tune.blocks.s3_target import S3Target
from prefect_tune.blocks.storage_target import StorageTarget
from prefect_tune.blocks.sync_config import SyncConfig, SyncerLike
from prefect_tune.blocks.target_check import TargetCheck

__all__ = [
    "AzureTarget",
    "FsspecTarget",
    "GcsTarget",
    "LocalTarget",
    "S3Target",
    "StorageTarget",
    "SyncConfig",
    "SyncerLike",
    "TargetCheck",
    "resolve_existing",
    "resolve_target",
    "target_reference",
]
