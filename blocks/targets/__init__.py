"""The storage targets of this package, one module each: the one list of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from prefect_tune.blocks.storage_target import StorageTarget
from prefect_tune.blocks.targets.azure_target import AzureTarget
from prefect_tune.blocks.targets.fsspec_target import FsspecTarget
from prefect_tune.blocks.targets.gcs_target import GcsTarget
from prefect_tune.blocks.targets.local_target import LocalTarget
from prefect_tune.blocks.targets.s3_target import S3Target

__all__ = ["AzureTarget", "FsspecTarget", "GcsTarget", "LocalTarget", "S3Target"]

TARGET_TYPES: Sequence[type[StorageTarget]] = (LocalTarget, S3Target, GcsTarget, AzureTarget, FsspecTarget)
"""The order is that of the choices in the form of `SyncConfig`."""

if TYPE_CHECKING:
    AnyTarget: TypeAlias = StorageTarget
else:
    AnyTarget = reduce(operator.or_, TARGET_TYPES)  # Prefect's forms list the members of the union
