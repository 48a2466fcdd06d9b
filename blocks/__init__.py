"""The Prefect blocks: storage targets with their credentials, and the sync configuration.

The import registers every block with Prefect. The client for S3, GCS and Azure is imported when a target is opened.
"""

from __future__ import annotations

from prefect_tune.blocks import targets
from prefect_tune.blocks.resolve_target import resolve_existing, resolve_target, target_reference
from prefect_tune.blocks.storage_target import StorageTarget, TargetCheck
from prefect_tune.blocks.sync_config import SyncConfig, SyncerLike
from prefect_tune.blocks.targets import *  # noqa: F403  each target in `targets.__all__` is public here too

__all__ = [
    "StorageTarget",
    "SyncConfig",
    "SyncerLike",
    "TargetCheck",
    "resolve_existing",
    "resolve_target",
    "target_reference",
]
__all__ += targets.__all__
